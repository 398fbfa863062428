"""What a workload is: a model, the data of every device, training of many clients, and a judge.

A simulated client is one participation of one device: it trains from the version that it
downloaded, on the data of its device, and its update is a pure function of (workload, version,
client, ClientSGD). So updates can be computed late, early, in any batch and in any process, and
updates that are not counted need not be computed at all.

Paper, "Sampling bias and fairness": a model is judged for all clients and for those whose data
volume is at or above the 75th and the 99th percentile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from papaya.errors import ConfigError, InvariantError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import Vector
from papaya.sim.draws import Floats, Ints

Matrix: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Clients:
    """Participations, as columns of equal length."""

    device: Ints
    participation: Ints
    examples: Ints

    def __len__(self) -> int:
        return len(self.device)

    def take(self, rows: Ints | slice) -> Clients:
        return Clients(self.device[rows], self.participation[rows], self.examples[rows])


class MeansByVolume(Struct, frozen=True):
    """Means over held-out data, for all clients and for those with much data.

    By examples, as Table 1 of the paper is read here; `all_by_clients` weighs each client alike,
    which can turn a ranking around.
    """

    all: float
    p75: float
    p99: float
    all_by_clients: float

    @property
    def is_finite(self) -> bool:
        means = (self.all, self.p75, self.p99, self.all_by_clients)
        return all(map(math.isfinite, means))


class Quality(MeansByVolume, frozen=True, kw_only=True):
    """Mean losses (natural logarithm), and the means of the task's own metrics, by name."""

    metrics: dict[str, MeansByVolume] = {}


class Workload(Protocol):
    """A model and what every device would train it on."""

    @property
    def name(self) -> str: ...

    @property
    def length(self) -> int:
        """How many parameters."""

    def initial(self, seed: int) -> Vector:
        """Version 0."""

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        """Client i trains from models[start[i]] on its own data: row i is its update."""

    def evaluate(self, parameters: Vector) -> Quality:
        """How good a model is for the whole population."""


class BegunTraining(Protocol):
    """Clients that other processes train."""

    def updates(self) -> Matrix:
        """Row i is the update of client i. Waits for them, and raises what training raised."""

    def cancel(self) -> None:
        """Leave out what was not sent to a process yet."""


@runtime_checkable
class BeginsTraining(Protocol):
    """A workload that other processes may train, while this one does something else."""

    @property
    def length(self) -> int: ...

    @property
    def workers(self) -> int:
        """How many such processes there are. Without any, only `train` can be used."""

    def begin(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD, together: int
    ) -> BegunTraining:
        """As `train`, without waiting. `together`: how many clients, with these, are begun now."""


@runtime_checkable
class KeepsDeviceStates(Protocol):
    """A workload whose clients keep personal tensors: their states, by client."""

    device_states: dict[int, bytes]


def require_plain_sgd(sgd: ClientSGD) -> None:
    """Refuse what the loops of the built-in models do not have."""
    for field, value in sgd.beyond_plain.items():
        remedy = f"leave it out, or simulate a task file, whose engine has {field}"
        raise ConfigError.of(f"client.{field}", value, "is not for built-in models", remedy)


def quality(losses: Floats, volumes: Ints) -> Quality:
    """The quality of a model: client i has the mean loss `losses[i]`, and `volumes[i]` examples."""
    if len(losses) == 0 or len(losses) != len(volumes) or volumes.min() < 1:
        raise InvariantError(f"{len(losses)} losses for {len(volumes)} clients with examples")

    def mean(level: float) -> float:
        chosen = at_or_above(volumes, level)
        return float(np.average(losses[chosen], weights=volumes[chosen]))

    return Quality(mean(0), mean(0.75), mean(0.99), float(losses.mean()))


def at_or_above(volumes: Ints, level: float) -> npt.NDArray[np.bool_]:
    """Which clients are at or above this percentile of data volume, from 0 to below 1.

    Clients of equal volume at the edge all belong to it.
    """
    chosen: npt.NDArray[np.bool_] = volumes >= np.sort(volumes)[int(level * len(volumes))]
    return chosen
