"""A cluster whose auditor knows what an owner may do beside the machines."""

from __future__ import annotations

from papaya.config import TaskConfig
from papaya.errors import InvariantError
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
from papaya.sim.checkers import Auditor
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.storage import OWNER, Writer


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

    def rows_of(self, task: TaskId) -> TaskRows:
        return TaskRows(task, self.state.snapshot(holder_prefixes(task)))

    def _check_put(self, writer: Writer, key: str, row: Row, before: dict[str, Row]) -> None:
        if writer != OWNER:
            super()._check_put(writer, key, row, before)
            return
        task = key.split("/")[1]
        match row:
            case TaskRow() | FenceRow():
                super()._check_put(writer, key, row, before)
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


def owned_cluster(config: ClusterConfig, seed: int) -> OwnedAuditor:
    """The auditor of a new cluster."""
    auditor = OwnedAuditor()
    Cluster(config, seed, observers=[auditor], behaviour=EncodedMessages())
    return auditor
