"""The durable rows of one task at its holder, and the transactions that change them.

Acknowledged means counted exactly once. A buffer's record is keyed by the version it will become;
the transaction that inserts version v deletes record v and keeps its members as consumed. Every
transaction requires the holder's fence, the newest version and the very row that it replaces, so a
write that was delayed past a take-over, or past its own repetition, changes nothing.

Rows are deleted first; the blobs that only they named are returned for deletion after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from papaya.aggregator import regime
from papaya.aggregator.work import Stepped
from papaya.config import TaskConfig
from papaya.messages.base import BlobKey
from papaya.messages.storage import (
    ConsumedRow,
    FenceRow,
    Member,
    OptimizerRow,
    RecordRow,
    Row,
    TaskRow,
    Transaction,
    VersionRow,
    consumed_key,
    fence_key,
    optimizer_key,
    record_key,
    task_key,
    version_key,
)


class Ledger:
    """What the store is known to hold, plus at most one change on its way."""

    def __init__(self, fence: FenceRow, task: TaskRow, rows: Mapping[str, Row]) -> None:
        self.fence = fence
        self.config: TaskConfig = task.config
        self.task = task.config.task
        optimizer = rows[optimizer_key(self.task)]
        assert isinstance(optimizer, OptimizerRow)
        self.optimizer = optimizer
        self.versions = {r.version: r for r in rows.values() if isinstance(r, VersionRow)}
        self.records = {r.target: r for r in rows.values() if isinstance(r, RecordRow)}
        self.consumed = {r.version: r for r in rows.values() if isinstance(r, ConsumedRow)}
        self.version = max(self.versions)

    @classmethod
    def read(cls, task: str, fence: FenceRow, rows: Mapping[str, Row]) -> Ledger | None:
        """None when the row does not name this holder: then nothing else may be believed."""
        row = rows.get(task_key(task))
        if rows.get(fence_key(task)) != fence or not isinstance(row, TaskRow):
            return None
        return cls(fence, row, rows)

    @property
    def newest(self) -> VersionRow:
        return self.versions[self.version]

    @property
    def restarted_at(self) -> int:
        """The version at which the owner last rolled back; what was trained before it is void."""
        return max((v for v, row in self.versions.items() if row.restarts), default=0)

    def oldest_allowed(self, max_staleness: int) -> int:
        """Initial versions below it are too stale, or of a branch that was given up."""
        return max(regime.oldest_allowed(max_staleness, self.version), self.restarted_at)

    def members(self) -> Iterable[Member]:
        """Everything counted whose tickets may still be valid."""
        for consumed in self.consumed.values():
            yield from consumed.members
        for record in self.records.values():
            yield from record.members

    def blobs(self) -> tuple[BlobKey, ...]:
        """Every blob that a row names."""
        return (
            self.optimizer.state,
            *(row.parameters for row in self.versions.values()),
            *(row.sum for row in self.records.values()),
        )

    def take_owners_changes(self, rows: Mapping[str, Row]) -> bool:
        """Adopt version rows that the task's owner marked or an evaluation pinned meanwhile.

        True only if they are all that has changed: then a refused transaction changed nothing,
        nothing of ours came late, and it may be made again from the new rows.
        """
        found = Ledger.read(self.task, self.fence, rows)
        if found is None or found.versions == self.versions or found.config != self.config:
            return False
        ours = (self.optimizer, self.records, self.consumed)
        if (found.optimizer, found.records, found.consumed) != ours:
            return False
        self.versions = found.versions
        return True

    # -- a group commit ---------------------------------------------------------------------

    def record(self, records: Iterable[RecordRow]) -> Transaction:
        """Requires both open records, written or not: a session that moved from one buffer to the
        other must not be written into the first by a transaction that comes late.
        """
        open_targets = (self.version + 1, self.version + 2)
        return Transaction(
            require=(
                self._fenced(),
                self._at_head(),
                *((record_key(self.task, t), self.records.get(t)) for t in open_targets),
            ),
            put=tuple((record_key(self.task, r.target), r) for r in records),
        )

    def recorded(self, transaction: Transaction) -> tuple[BlobKey, ...]:
        """Committed: adopt the rows; the sums that they replace are garbage."""
        garbage = []
        for _, row in transaction.put:
            assert isinstance(row, RecordRow)
            if row.target in self.records:
                garbage.append(self.records[row.target].sum)
            self.records[row.target] = row
        return tuple(garbage)

    # -- a new version ----------------------------------------------------------------------

    def advance(self, now: float, stepped: Stepped, ticket_life_s: float) -> Transaction:
        target = stepped.version
        record = self.records[target]
        version = VersionRow(target, stepped.parameters, self.fence.seq, created=now)
        old = self._outlived_versions(now, ticket_life_s)
        settled = self._settled_consumed(now)
        return Transaction(
            require=(
                self._fenced(),
                self._at_head(),
                (record_key(self.task, target), record),
                # The owner may have marked one meanwhile: then it is not ours to delete.
                *((version_key(self.task, v), self.versions[v]) for v in old),
            ),
            put=(
                (version_key(self.task, target), version),
                (optimizer_key(self.task), OptimizerRow(target, stepped.optimizer)),
                (consumed_key(self.task, target), ConsumedRow(target, record.members)),
            ),
            delete=(
                record_key(self.task, target),
                *(version_key(self.task, v) for v in old),
                *(consumed_key(self.task, v) for v in settled),
            ),
        )

    def advanced(self, transaction: Transaction) -> tuple[BlobKey, ...]:
        """Committed: adopt the rows; what only deleted rows named is garbage."""
        before = self.blobs()
        for _, row in transaction.put:
            match row:
                case VersionRow():
                    self.versions[row.version] = row
                    self.version = row.version
                case OptimizerRow():
                    self.optimizer = row
                case ConsumedRow():
                    self.consumed[row.version] = row
        deleted = frozenset(transaction.delete)
        self.records = {
            t: r for t, r in self.records.items() if record_key(self.task, t) not in deleted
        }
        self.versions = {
            v: r for v, r in self.versions.items() if version_key(self.task, v) not in deleted
        }
        self.consumed = {
            v: r for v, r in self.consumed.items() if consumed_key(self.task, v) not in deleted
        }
        named = frozenset(self.blobs())
        return tuple(blob for blob in before if blob not in named)

    def _fenced(self) -> tuple[str, Row]:
        return fence_key(self.task), self.fence

    def _at_head(self) -> tuple[str, Row]:
        """The one row that every version changes and none restores.

        A record is absent before its version and again after it: without this, a record written
        late would be taken for the first one.
        """
        return optimizer_key(self.task), self.optimizer

    def _outlived_versions(self, now: float, ticket_life_s: float) -> list[int]:
        """Kept: every version a live ticket may name, the last N, the marked and the pinned."""
        last = self.version + 1 - self.config.keep_versions
        outlived = []
        for version, row in self.versions.items():
            # Until version v + 1 was seen to be committed clients joined v; v + 2 came after that.
            later = [r.created for v, r in self.versions.items() if v >= version + 2]
            if version > last or not later or later[0] + ticket_life_s > now:
                break
            if not row.marked and row.kept_until <= now:
                outlived.append(version)
        return outlived

    def _settled_consumed(self, now: float) -> list[int]:
        return [
            version
            for version, row in self.consumed.items()
            if all(member.keep_until <= now for member in row.members)
        ]
