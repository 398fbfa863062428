"""What the protocol did in a run: which update of which client went into which version, and when.

The servers never look into an update to decide whom to select, assign, abort or count (an update
that is not finite or over the clip is the one exception, and ends a replay). So one run of the
machines, recorded, serves every learning rate: `papaya.study.replay` learns along a trace, and
trains only the clients that were counted.

A trace is a function of (configuration, seed). It is kept as one .npz file without pickles.
"""

from __future__ import annotations

import io
import math
import zipfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from papaya.client.work import Finish, Train
from papaya.config import TaskConfig
from papaya.errors import InvariantError, OperatorError
from papaya.messages.base import SessionId
from papaya.messages.storage import ConsumedRow, Row, Transaction
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.counted_updates import behaviour_without_model
from papaya.sim.devices import SimulatedDevice
from papaya.sim.draws import Floats, Ints
from papaya.sim.engine import rare_garbage_collection
from papaya.sim.observer import Observer
from papaya.sim.population import Population, Visit
from papaya.sim.report import RunReport, RunWatch
from papaya.sim.storage import Writer
from papaya.study.workloads.base import Clients

_STEP_S = 60.0
_FORMAT = 1
_MAX_SAMPLES = 1200
_COPY_SHIFT = 40  # of the number of a device: more than a population has
MOST_HOURS = 10_000.0  # more than any run has
UNBOUNDED = 10**12  # updates: more than any run has
_SAMPLED_VISITS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Columns. Version v was made at `created_s[v]` of members `first[v] : first[v + 1]`.

    `trips[v]` is how many complete uploads the server had counted or discarded by then.
    `start` is the version from which a member trained, `assigned_s` when its device was selected.
    `clients.examples` are all that a device holds; what counts of them is at most the task's
    `max_examples`.
    """

    config: ClusterConfig
    seed: int
    created_s: Floats
    trips: Ints
    first: Ints
    clients: Clients
    start: Ints
    staleness: Ints
    assigned_s: Floats
    execution_s: Floats

    @property
    def task(self) -> TaskConfig:
        return self.config.tasks[0]

    @property
    def versions(self) -> int:
        """How many were made after version 0."""
        return len(self.created_s) - 1

    def until(self, version: int) -> Trace:
        """The trace with at least this version: all of it is here."""
        return self

    def members(self, version: int) -> slice:
        return slice(int(self.first[version]), int(self.first[version + 1]))

    def repeated(self, copies: int) -> Trace:
        """The trace of a fleet that is so many times as large: each participation stands for as
        many devices with the same volume and the same speed, which have data of their own.
        """
        shift = np.tile(np.arange(copies, dtype=np.int64) << _COPY_SHIFT, len(self.start))
        columns: Any = {
            name: np.repeat(getattr(self, name), copies)
            for name in ("start", "staleness", "assigned_s", "execution_s")
        }
        clients = Clients(
            np.repeat(self.clients.device, copies) + shift,
            np.repeat(self.clients.participation, copies),
            np.repeat(self.clients.examples, copies),
        )
        return replace(
            self,
            first=copies * self.first,
            trips=copies * self.trips,
            clients=clients,
            **columns,
        )

    def save(self, path: Path) -> None:
        about = {"format": _FORMAT, "seed": self.seed, "config": self.config}
        columns = {name: getattr(self, name) for name in _COLUMNS}
        columns |= {name: getattr(self.clients, name) for name in _CLIENT_COLUMNS}
        with path.open("wb") as file:
            np.savez(file, about=np.frombuffer(msgspec.json.encode(about), np.uint8), **columns)

    @classmethod
    def load(cls, path: Path) -> Trace:
        try:
            with zipfile.ZipFile(path) as file:
                about = msgspec.json.decode(_column(file, "about").tobytes(), type=_About)
                clients = Clients(*(_column(file, name) for name in _CLIENT_COLUMNS))
                columns = {name: _column(file, name) for name in _COLUMNS}
        except _UNREADABLE as error:
            is_there = not isinstance(error, FileNotFoundError)
            hint = "delete it" if is_there else "run the command that records it"
            raise OperatorError(f"cannot read trace {path}: {error}", hint=hint) from error
        if about.format != _FORMAT:
            problem = f"trace {path} has format {about.format}, this Papaya reads {_FORMAT}"
            raise OperatorError(problem, hint="delete it")
        return cls(config=about.config, seed=about.seed, clients=clients, **columns)


class _About(msgspec.Struct):
    format: int
    seed: int
    config: ClusterConfig


_CLIENT_COLUMNS = ("device", "participation", "examples")
_COLUMNS = ("created_s", "trips", "first", "start", "staleness", "assigned_s", "execution_s")
_UNREADABLE = (
    OSError, EOFError, KeyError, ValueError, NotImplementedError, RuntimeError,
    zipfile.BadZipFile, msgspec.DecodeError,
)  # fmt: skip


def _column(file: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    whole = io.BytesIO(file.read(f"{name}.npy"))  # its checksum comes before its content
    column: npt.NDArray[Any] = np.lib.format.read_array(whole, allow_pickle=False)
    return column


VERSION_KINDS = ("d", "q", "q")
"""The columns of a recording's versions: created_s, trips, end of members."""
MEMBER_KINDS = ("q", "q", "q", "q", "q", "d", "d")
"""The columns of its members: device to examples, start, staleness, assigned_s, execution_s."""


def trace_of(
    config: ClusterConfig,
    seed: int,
    versions: list[npt.NDArray[Any]],
    members: list[npt.NDArray[Any]],
) -> Trace:
    """Of the columns of a recording."""
    created_s, trips, end = versions
    device, participation, examples, start, staleness, assigned_s, execution_s = members
    return Trace(
        config=config,
        seed=seed,
        created_s=np.concatenate([[0.0], created_s]),
        trips=np.concatenate([np.zeros(1, np.int64), trips]),
        first=np.concatenate([np.zeros(2, np.int64), end]),
        clients=Clients(device, participation, examples),
        start=start,
        staleness=staleness,
        assigned_s=assigned_s,
        execution_s=execution_s,
    )


class Recorder(Observer):
    """Writes down the counted updates of a cluster with one task."""

    def __init__(self) -> None:
        self._trained: dict[SessionId, tuple[Visit, float]] = {}  # and when it was assigned
        self._discarded = 0
        self._acknowledged: set[SessionId] = set()  # as counted, and in no version yet
        self._versions = _Columns(*VERSION_KINDS)
        self._members = _Columns(*MEMBER_KINDS)

    def attach(self, cluster: Cluster) -> None:
        super().attach(cluster)
        self.engine = cluster.engine
        if len(cluster.config.tasks) != 1:
            raise InvariantError(f"a trace is of one task, not of {len(cluster.config.tasks)}")

    @property
    def counted(self) -> int:
        """Updates in versions so far."""
        return len(self._members)

    @property
    def version(self) -> int:
        return len(self._versions)

    @property
    def trips(self) -> int:
        """Complete uploads that were counted or discarded so far, whether in a version or not."""
        return self.counted + self._discarded + len(self._acknowledged)

    def may_be_counted(self, session: SessionId) -> bool:
        """Whether its client has trained, and is neither discarded nor in a version yet."""
        return session in self._trained

    def on_trained(self, device: SimulatedDevice, work: Train) -> None:
        assert device.assigned_s is not None
        self._trained[work.session] = (device.visit, device.assigned_s)

    def on_departed(self, device: SimulatedDevice, finish: Finish | None) -> None:
        joined, ending = device.machine.joined, None if finish is None else finish.ending
        if joined is None:
            return
        if ending == "discarded":
            self._discarded += 1
        elif ending == "counted" and self.may_be_counted(joined.session):
            self._acknowledged.add(joined.session)
        if ending not in ("counted", "gave_up"):  # who gave up may be counted all the same
            self._trained.pop(joined.session, None)

    def trace(self) -> Trace:
        cluster = self.cluster
        return trace_of(
            cluster.config, cluster.seed, self._versions.arrays(), self._members.arrays()
        )

    def since(self, versions: int, members: int) -> tuple[list[bytes], list[bytes]]:
        """The columns of versions and of members from these rows on."""
        return self._versions.tail(versions), self._members.tail(members)

    def on_transaction(
        self, writer: Writer, transaction: Transaction, before: dict[str, Row]
    ) -> None:
        for key, row in transaction.put:
            if isinstance(row, ConsumedRow) and key not in before:
                self._on_version(row)

    def _on_version(self, row: ConsumedRow) -> None:
        if row.version != self.version + 1:
            raise InvariantError(f"version {row.version} follows version {self.version}")
        for member in row.members:
            visit, assigned_s = self._trained.pop(member.session)
            self._acknowledged.discard(member.session)
            self._members.append(
                visit.device,
                visit.participation,
                visit.examples,
                member.version,
                member.staleness,
                assigned_s,
                visit.execution_s,
            )
        self._versions.append(self.engine.now, self.trips, len(self._members))


class _Columns:
    """Rows of numbers that grow, a typed column each."""

    def __init__(self, *codes: str) -> None:
        self._columns: list[array[Any]] = [array(code) for code in codes]

    def __len__(self) -> int:
        return len(self._columns[0])

    def append(self, *row: float) -> None:
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def arrays(self) -> list[npt.NDArray[Any]]:
        return [np.array(column) for column in self._columns]

    def tail(self, start: int) -> list[bytes]:
        return [column[start:].tobytes() for column in self._columns]


def record(
    config: ClusterConfig,
    seed: int,
    *,
    updates: float = math.inf,
    hours: float = MOST_HOURS,
    drain_s: float = 0.0,
    warm_up_s: float = 600.0,
    sample_s: float | None = None,
    progress: Callable[[Recorder], None] | None = None,
) -> tuple[Trace, RunReport]:
    """Run the machines until `updates` are counted, for at most `hours`.

    Then run for `drain_s` more, so that clients assigned before can finish. `sample_s` is the
    distance between samples of the report: by default a second, or more in a long run.
    """
    if sample_s is None:
        expected_s = min(least_s(config, updates), 3600 * hours)
        sample_s = float(max(1, math.ceil(expected_s / _MAX_SAMPLES)))
    watch, recorder = RunWatch(warm_up_s=warm_up_s, sample_s=sample_s), Recorder()
    behaviour = behaviour_without_model(config.tasks)
    cluster = Cluster(config, seed, observers=[watch, recorder], behaviour=behaviour)
    with rare_garbage_collection():  # between the steps as well
        while cluster.engine.now < 3600 * hours and recorder.counted < updates:
            cluster.run(min(cluster.engine.now + _STEP_S, 3600 * hours))
            if progress is not None:
                progress(recorder)
        if drain_s:
            cluster.run(cluster.engine.now + drain_s)
    return recorder.trace(), watch.report()


def least_s(config: ClusterConfig, updates: float) -> float:
    """How long this many updates take if every slot is busy all the time."""
    task = config.tasks[0]
    block = Population(config.population, 0).visitors(np.arange(_SAMPLED_VISITS))
    busy_s = np.minimum(block.latency_s + block.execution_s, task.training_timeout_s).mean()
    return updates * float(busy_s) / task.concurrency
