"""Data of a user's own: clients with examples, which the devices of a population hold.

A population has up to ten billion devices, a source as many clients as there are data for: device
i holds the data of client i modulo their number. Each example lies on one side of the split by the
rule of the devices' example store (`papaya/device/example_store.py`), with the shares that a
collection has by default: what a simulated device trains on, a real one would.

The validation side is held out for judging. Nothing here reads the test side.

Sources are read from texts (texts.py), LEAF's JSON format (leaf.py), or tables that a partition
shares out (tables.py, partition.py). Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, Protocol, Self, TypeAlias

import numpy as np
from msgspec import structs

from papaya.config.checks import require
from papaya.device.example_store import MAX_EXAMPLE_BYTES, Split, split_of
from papaya.device.use_policy import UsePolicy
from papaya.errors import OperatorError
from papaya.progress import plural
from papaya.sim.draws import Ints
from papaya.sim.population import DEFAULT, Population, PopulationConfig

_SHARES: Final = UsePolicy()
_MAX_CLIENTS: Final = 1_000_000
_MAX_BYTES: Final = 4 << 30
_REFERENCE_VISITS: Final = 1 << 16


LeftOut: TypeAlias = Literal["no_examples", "no_training_examples"]
_WHY: Final[dict[LeftOut, str]] = {
    "no_examples": "without examples",
    "no_training_examples": "without training examples (all of their examples are held out)",
}


class Source(Protocol):
    """Clients, counted from 0, each with at least one example to train on."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def names(self) -> Sequence[str]:
        """Of the clients: users, files, values of a column."""

    @property
    def digest(self) -> str:
        """Of all examples and whose they are: other data, another digest."""

    @property
    def volumes(self) -> Ints:
        """How many examples each client has to train on. As long as there are clients."""

    @property
    def left_out(self) -> Mapping[LeftOut, int]:
        """How many clients of the data are not in the source, by reason."""

    def training(self, client: int) -> list[bytes]:
        """What this client trains on, as the task's `batch` takes it, in the source's order."""

    def held_out(self, client: int) -> list[bytes]:
        """What a model is judged by on this client; may be empty."""


class Memory:
    """A source whose examples are given, a list for each client, and stay in memory.

    Clients with nothing to train on are left out, and `left_out` counts them.
    """

    def __init__(self, name: str, clients: Iterable[Sequence[bytes]]) -> None:
        self._read(name, ((str(number), examples) for number, examples in enumerate(clients)))

    @classmethod
    def named(cls, name: str, clients: Iterable[tuple[str, Sequence[bytes]]]) -> Self:
        """Of clients with names."""
        self = cls.__new__(cls)
        self._read(name, clients)
        return self

    def _read(self, name: str, clients: Iterable[tuple[str, Sequence[bytes]]]) -> None:
        self.name = name
        self.names: list[str] = []
        self.left_out: dict[LeftOut, int] = {}
        self._examples: list[Sequence[bytes]] = []
        self._training: list[list[bytes]] = []
        self._held_out: list[list[bytes]] = []
        hasher, size = hashlib.sha256(), 0
        for client, examples in clients:
            size += _checked(name, examples)
            _within(name, len(self._training) + 1, size)
            sides: dict[Split, list[bytes]] = {"train": [], "validation": [], "test": []}
            for example in examples:
                sides[split_of(example, _SHARES)].append(example)
            if not sides["train"]:
                why: LeftOut = "no_training_examples" if examples else "no_examples"
                self.left_out[why] = self.left_out.get(why, 0) + 1
                continue
            self.names.append(client)
            self._examples.append(examples)
            self._training.append(sides["train"])
            self._held_out.append(sides["validation"])
            hasher.update(_fingerprint(examples))
        if not self._training:
            raise _nothing_to_train_on(name, self.left_out.get("no_training_examples", 0))
        self.digest = hasher.hexdigest()[:32]
        self.volumes: Ints = np.array([len(examples) for examples in self._training], np.int64)

    def clients(self) -> list[tuple[str, Sequence[bytes]]]:
        """Names and all examples, the test side included, in the order in which they came."""
        return list(zip(self.names, self._examples, strict=True))

    def training(self, client: int) -> list[bytes]:
        return self._training[client]

    def held_out(self, client: int) -> list[bytes]:
        return self._held_out[client]


def _nothing_to_train_on(name: str, held_out: int) -> OperatorError:
    """`held_out`: how many clients have examples, all of which are held out."""
    if not held_out:
        return OperatorError(f"{name} contains no examples", hint="use data that is not empty")
    return OperatorError(
        f"{name}: all examples of the {plural(held_out, 'client')} are held out, so none is left "
        "to train on",
        hint="a hash of its content decides whether an example is held out, as a fifth of them "
        "are, and equal examples have the same hash: use more and different examples",
    )


def described(source: Source) -> str:
    """How many clients and examples there are, and which clients were left out."""
    volumes = source.volumes
    text = f"{source.name}: {len(volumes):,} clients, {int(volumes.sum()):,} examples, "
    text += f"median {int(np.median(volumes)):,}"
    if source.left_out:
        reasons = ", ".join(f"{count:,} {_WHY[why]}" for why, count in source.left_out.items())
        total = len(volumes) + sum(source.left_out.values())
        text += f"; left out of {total:,} clients: {reasons}"
    return text


def population_of(
    source: Source,
    max_examples: int,
    config: PopulationConfig = DEFAULT,
    seconds_per_example: float | None = None,
) -> PopulationConfig:
    """A population whose devices have as many examples as the source's clients, as far as a task
    trains on them.

    How long an example takes on a phone, no data says: unless given or measured (a trace),
    execution takes as long in the mean as in `config`.
    """
    volumes = np.minimum(source.volumes, max_examples)
    if seconds_per_example is None and config.capacity_trace is not None:
        seconds_per_example = config.execution_per_example_s
    if seconds_per_example is None:
        own = structs.replace(config, volumes=tuple(volumes.tolist()))
        ratio = _mean_execution_s(config) / _mean_execution_s(own)
        seconds_per_example = float(f"{config.execution_per_example_s * ratio:.3g}")
    return structs.replace(
        config, volumes=tuple(volumes.tolist()), execution_per_example_s=seconds_per_example
    )


def _mean_execution_s(config: PopulationConfig) -> float:
    visits = Population(config, seed=0).visitors(np.arange(_REFERENCE_VISITS))
    return float(visits.execution_s.mean())


def _checked(name: str, examples: Sequence[bytes]) -> int:
    """Their size in bytes."""
    largest = max(map(len, examples), default=0)
    remedy = "cut it into smaller examples: devices take no larger ones"
    problem = f"is above the limit of {MAX_EXAMPLE_BYTES}"
    require(largest <= MAX_EXAMPLE_BYTES, f"an example of {name}", largest, problem, remedy)
    return sum(map(len, examples))


def _within(name: str, clients: int, size: int) -> None:
    if clients > _MAX_CLIENTS or size > _MAX_BYTES:
        raise OperatorError(
            f"{name} has more than {_MAX_CLIENTS:,} clients or {_MAX_BYTES >> 30} GiB of examples",
            hint="take a sample of its clients",
        )


def _fingerprint(examples: Sequence[bytes]) -> bytes:
    hasher = hashlib.sha256()
    for example in examples:
        hasher.update(len(example).to_bytes(8, "big"))
        hasher.update(example)
    return hasher.digest()
