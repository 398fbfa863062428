"""A cluster whose auditor knows what an owner may do beside the machines."""

from __future__ import annotations

import numpy as np

from papaya.client.work import Train
from papaya.config import TaskConfig
from papaya.errors import InvariantError
from papaya.learning.evaluation import evaluation_vector
from papaya.learning.weighting import WeightedSum
from papaya.messages.base import SessionId, TaskId
from papaya.messages.owner import TaskRows
from papaya.messages.storage import (
    ConsumedRow,
    FenceRow,
    Member,
    RecordRow,
    Row,
    TaskRow,
    Transaction,
    VersionRow,
    holder_prefixes,
)
from papaya.sim.behaviour import EncodedMessages
from papaya.sim.checkers import Auditor, TaskBooks
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.devices import SimulatedDevice
from papaya.sim.storage import Writer

OWNER: Writer = ("owner", 0.0)
AN_EVALUATION = evaluation_vector(volume=8, loss_sum=24.0, examples=8)


def demand(holds: bool, promise: str) -> None:
    if not holds:
        raise InvariantError(promise)


class OwnedAuditor(Auditor):
    """An auditor that knows what an owner may do."""

    def __init__(self) -> None:
        self.restarted: dict[TaskId, int] = {}
        self.given_up = 0
        super().__init__()

    def config_of(self, session: SessionId) -> TaskConfig:
        [books] = [books for books in self.books.values() if session in books.assigned]
        return books.config

    def _check_sum(self, config: TaskConfig, row: RecordRow) -> None:
        if config.evaluates is None:
            super()._check_sum(config, row)
            return
        found = WeightedSum.decode(self.blobs.get(row.sum), config.model_length)
        same = np.array_equal(found.vector, len(row.members) * AN_EVALUATION)
        demand(same, f"the sum of {config.task} is not that of its members")

    def rows_of(self, task: TaskId) -> TaskRows:
        return TaskRows(task, self.state.snapshot(holder_prefixes(task)))

    def _check_put(self, writer: Writer, key: str, row: Row, before: dict[str, Row]) -> None:
        if writer != OWNER:
            super()._check_put(writer, key, row, before)
            return
        task = key.split("/")[1]
        match row:
            case TaskRow():
                self.books.setdefault(task, TaskBooks(row.config))
                self._secure.watch(row.config)
            case FenceRow():
                self._check_fence(key, row, before.get(key))
            case VersionRow() if row.restarts and key not in before:
                self._check_restart(task, row)
            case ConsumedRow():
                books = self.books[task]
                for member in row.members:
                    self._check_member(task, member, row.version)
                    books.counted[member.session] = row.version
                self.given_up += len(row.members)

    def _check_restart(self, task: TaskId, row: VersionRow) -> None:
        books = self.books[task]
        demand(row.version == books.version + 1, f"{task} restarts at {row.version}")
        books.version = self.restarted[task] = row.version

    def _check_delete(self, key: str, row: Row, change: Transaction) -> None:
        restarts = any(isinstance(r, VersionRow) and r.restarts for _, r in change.put)
        if isinstance(row, RecordRow) and restarts:
            kept = [m for _, r in change.put if isinstance(r, ConsumedRow) for m in r.members]
            demand(all(m in kept for m in row.members), f"{key} was forgotten with its members")
            return
        super()._check_delete(key, row, change)

    def _check_member(self, task: TaskId, member: Member, target: int) -> None:
        super()._check_member(task, member, target)
        restarted = self.restarted.get(task, 0)
        demand(
            target <= restarted or member.version >= restarted,
            f"{member.session} trained from {member.version}, given up at {restarted}",
        )


class OwnedBehaviour(EncodedMessages):
    """Devices of an evaluation upload `AN_EVALUATION`."""

    def __init__(self, auditor: OwnedAuditor) -> None:
        self._auditor = auditor

    def train(self, device: SimulatedDevice, work: Train) -> bytes:
        """What is masked, no aggregator can judge: there, devices upload their names as ever."""
        config = self._auditor.config_of(work.session)
        if config.evaluates is not None and config.secure_aggregation is None:
            return AN_EVALUATION.tobytes()
        return super().train(device, work)


def owned_cluster(config: ClusterConfig, seed: int) -> OwnedAuditor:
    """The auditor of a new cluster."""
    auditor = OwnedAuditor()
    Cluster(config, seed, observers=[auditor], behaviour=OwnedBehaviour(auditor))
    return auditor
