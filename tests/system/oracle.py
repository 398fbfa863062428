"""What the stores say in the end, against what devices were told: counted exactly once, by name.

Devices upload small integers that encode their session (papaya.sim.protocol_updates.py). So a sum
names its members: one that is missing, doubled or foreign changes some coordinate by far more than
rounding. It reads rows and blobs from the data folder itself, and believes no server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from papaya.config import OptimizerConfig, TaskConfig
from papaya.learning import parameters
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import WeightedSum
from papaya.messages.base import SessionId
from papaya.messages.storage import (
    CLUSTER_KEY,
    ConsumedRow,
    Member,
    OptimizerRow,
    RecordRow,
    Row,
    TaskRow,
    VersionRow,
    holder_prefixes,
    optimizer_key,
    task_key,
)
from papaya.secagg.words import RING_16
from papaya.sim.protocol_updates import protocol_vector
from papaya.store.blobs import Blobs, FolderBlobs
from papaya.store.state import SqliteState

Exact: TypeAlias = NDArray[np.float64]
_ROUNDING = 1e-3  # a member weighs at least 1 / sqrt(51) in some coordinate


class Books:
    """One snapshot of all rows of a task, and the blobs that they name."""

    def __init__(self, data: Path, task: str, blobs: Blobs | None = None) -> None:
        """`blobs`: None means those in the data folder."""
        state = SqliteState(data / "state.db")
        try:
            rows: dict[str, Row] = state.read((*holder_prefixes(task), CLUSTER_KEY))
        finally:
            state.close()
        row, optimizer = rows[task_key(task)], rows[optimizer_key(task)]
        assert isinstance(row, TaskRow)
        assert isinstance(optimizer, OptimizerRow)
        self.row = row
        self.config: TaskConfig = row.config
        self.optimizer = optimizer
        self.versions = {r.version: r for r in rows.values() if isinstance(r, VersionRow)}
        self.consumed = {r.version: r for r in rows.values() if isinstance(r, ConsumedRow)}
        self.records = {r.target: r for r in rows.values() if isinstance(r, RecordRow)}
        self.rows = rows
        self.blobs = blobs or FolderBlobs(data / "blobs")

    @property
    def newest(self) -> int:
        return max(self.versions)

    @property
    def in_open_buffers(self) -> frozenset[SessionId]:
        return frozenset(m.session for record in self.records.values() for m in record.members)

    def counted(self) -> Counter[SessionId]:
        """How often each session is counted, in versions and in open records."""
        rows: list[ConsumedRow | RecordRow] = [*self.consumed.values(), *self.records.values()]
        return Counter(member.session for row in rows for member in row.members)

    def parameters(self, version: int) -> Exact:
        data = self.blobs.get(self.versions[version].parameters)
        return parameters.decode(data, self.config.model_length).astype(np.float64)

    # -- checks -----------------------------------------------------------------------------

    def check(self, acknowledged: Iterable[SessionId]) -> None:
        """Acknowledged is counted, nothing is counted twice, and every sum is that of its names."""
        counted = self.counted()
        assert not [s for s, times in counted.items() if times > 1], "counted twice"
        lost = set(acknowledged) - set(counted)
        assert not lost, f"acknowledged and lost: {sorted(lost)}"
        assert sorted(self.versions) == list(range(self.newest + 1)), "a version is missing"
        for version in range(1, self.newest + 1):
            if not self.versions[version].restarts:
                self._check_version(version)
        for record in self.records.values():
            assert record.target > self.newest, "the record of a version that was made"
            assert len(record.members) <= self.config.aggregation_goal
            self._check_sum(record)

    def _check_version(self, version: int) -> None:
        members = self.consumed[version].members
        assert len(members) == self.config.aggregation_goal, f"version {version}: {len(members)}"
        if self.config.optimizer == OptimizerConfig(kind="fedavg", rate=1.0):
            step = self.parameters(version) - self.parameters(version - 1)
            if self.config.aggregation.kind == "median":
                updates = [exact_update(member, self.config.model_length) for member in members]
                worst = float(np.abs(step - np.median(updates, axis=0)).max())
                assert worst <= _ROUNDING, f"version {version} is no median: off by {worst}"
                return
            found = step * sum(member.examples for member in members)
            self._compare(found, members, f"version {version}")

    def _check_sum(self, record: RecordRow) -> None:
        if not self.config.aggregation.is_mean:
            self._check_updates(record)
            return
        total = WeightedSum.decode(self.blobs.get(record.sum), self.config.model_length)
        assert total.weight == record.weight == sum(m.examples for m in record.members)
        self._compare(total.vector.astype(np.float64), record.members, f"record {record.target}")

    def _check_updates(self, record: RecordRow) -> None:
        keys = record.updates or ()
        assert len(keys) == len(record.members) == len(set(keys)), "one blob for each member"
        for member, key in zip(record.members, keys, strict=True):
            found = np.frombuffer(self.blobs.get(key), np.float32)
            worst = float(np.abs(found - exact_update(member, self.config.model_length)).max())
            assert worst <= _ROUNDING, f"{key} is not the update of {member.session}"

    def _compare(self, found: Exact, members: tuple[Member, ...], what: str) -> None:
        expected = exact_sum(members, self.config.model_length)
        # Never damped and divided by a power of two: then not even rounding is allowed.
        goal, is_sync = self.config.aggregation_goal, self.config.max_staleness == 0
        tolerance = 0.0 if is_sync and goal & (goal - 1) == 0 else _ROUNDING
        agreed = self.config.public_parameters
        if agreed is not None and agreed.ring == RING_16:
            tolerance = goal * agreed.step
        worst = float(np.abs(found - expected).max())
        assert worst <= tolerance, f"{what} is not the sum of its members: off by {worst}"

    def check_replayed(self) -> None:
        """The same updates in one run that nobody interrupts: the same bits, optimizer and all."""
        optimizer = server_optimizer(self.config.optimizer)
        length = self.config.model_length
        state = optimizer.initial_state(length)
        model = np.zeros(length, np.float32)
        for version in range(1, self.newest + 1):
            members = self.consumed[version].members
            assert all(member.staleness == 0 for member in members), "only exact sums replay"
            total = exact_sum(members, length).astype(np.float32)
            mean = WeightedSum(total, float(len(members))).mean()
            model, state = optimizer.step(model, mean, state)
            stored = parameters.decode(self.blobs.get(self.versions[version].parameters), length)
            assert np.array_equal(model, stored), f"version {version} differs"
        assert self.optimizer.version == self.newest
        assert optimizer.encode_state(state) == self.blobs.get(self.optimizer.state)


def exact_sum(members: Iterable[Member], length: int) -> Exact:
    """n * w(s) * delta, summed in float64: the slow reference."""
    total = np.zeros(length)
    for member in members:
        total += member.examples * exact_update(member, length)
    return total


def exact_update(member: Member, length: int) -> Exact:
    """w(s) * delta."""
    damping = 1 / math.sqrt(1 + member.staleness)
    return damping * np.array(protocol_vector(member.session, length), np.float64)
