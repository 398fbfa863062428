"""The durable rows of one task at its holder, and the transactions that change them.

An acknowledged update is counted exactly once. The key of a buffer's record is the version that the
buffer will become; the transaction that inserts version v deletes record v, if there is one, and
stores its members as consumed. Every transaction requires the holder's fence, the newest version
and exactly the rows that it replaces. So a write that arrives after another aggregator took over,
or after it was repeated, changes nothing.

Consumed rows are deleted in order, a ticket life after the next version. The same transaction
raises `settled`, below which every ticket is refused. So clocks only decide when rows are deleted;
a wrong clock can cost a client its training, but counts nothing twice (docs/adr/0034).

Rows are deleted first. The blobs that no other row names are returned, to be deleted afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from papaya.aggregator import regime
from papaya.aggregator.work import Stepped
from papaya.config import TaskConfig
from papaya.messages.base import BlobKey, SessionId
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
    blobs_of,
    consumed_key,
    fence_key,
    optimizer_key,
    record_key,
    task_key,
    version_key,
)


class Ledger:
    """The rows as last read or written. At most one transaction is on its way."""

    def __init__(self, fence: FenceRow, task: TaskRow, rows: Mapping[str, Row]) -> None:
        self.fence = fence
        self.config: TaskConfig = task.config
        self.task = task.config.task
        self.run = task.run
        self.pseudonym_key = task.pseudonym_key
        # The settings by the digest of the manifest that clients have agreed to, the current ones
        # included, and when earlier ones were replaced.
        self.terms = {e.config.manifest: e.config for e in reversed(task.earlier)}
        self.terms[self.config.manifest] = self.config
        # The digest of the revision that a share of the devices gets during a rollout, else that
        # of the current one.
        self.candidate = self.config.manifest
        if task.candidate is not None:
            self.candidate = task.candidate.config.manifest
            self.terms[self.candidate] = task.candidate.config
        # The digest of the revision that a rollout judges. With all devices, the number of its
        # fallback is signed and not used.
        is_rolled_out = task.candidate is not None or task.signed > task.revision
        self.judged = self.candidate if is_rolled_out else None
        self.replaced_at = {e.config.manifest: e.replaced for e in reversed(task.earlier)}
        # Blobs of what the owner has signed.
        self._bundles = blobs_of(task)
        optimizer = rows[optimizer_key(self.task)]
        assert isinstance(optimizer, OptimizerRow)
        self.optimizer = optimizer
        self.versions = {r.version: r for r in rows.values() if isinstance(r, VersionRow)}
        self.records = {r.target: r for r in rows.values() if isinstance(r, RecordRow)}
        self.consumed = {r.version: r for r in rows.values() if isinstance(r, ConsumedRow)}
        # The sessions in `consumed`, to look one up.
        self._counted = dict.fromkeys(m.session for r in self.consumed.values() for m in r.members)
        self.version = max(self.versions)
        self._find_restart()

    @classmethod
    def read(cls, task: str, fence: FenceRow, rows: Mapping[str, Row]) -> Ledger | None:
        """None if the task is gone or the fence row does not name this holder."""
        row = rows.get(task_key(task))
        if rows.get(fence_key(task)) != fence or not isinstance(row, TaskRow):
            return None
        return cls(fence, row, rows)

    @property
    def newest(self) -> VersionRow:
        return self.versions[self.version]

    @property
    def follows_rollback(self) -> bool:
        """Whether the owner's rollback took the task from its last holder: it raised the fence, and
        so did the placement of this one.
        """
        return self.newest.restarts and self.newest.seq + 1 == self.fence.seq

    @property
    def void_below(self) -> int:
        """Tickets of versions below this are refused.

        Their updates belong to an abandoned branch, or may be counted already: below `settled` no
        row tells any more.
        """
        return max(self.restarted_at, self.optimizer.settled)

    def oldest_allowed(self, max_staleness: int) -> int:
        """Initial versions below this are too stale, or void."""
        return max(regime.oldest_allowed(max_staleness, self.version), self.void_below)

    def has_consumed(self, session: SessionId) -> bool:
        """Is the session's update in a version above `settled`?"""
        return session in self._counted

    def members(self) -> Iterable[Member]:
        """All counted updates that the rows still name."""
        for consumed in self.consumed.values():
            yield from consumed.members
        for record in self.records.values():
            yield from record.members

    def blobs(self) -> tuple[BlobKey, ...]:
        """Every blob that a row names."""
        return (
            self.optimizer.state,
            *self._bundles,
            *(row.parameters for row in self.versions.values()),
            *(blob for row in self.records.values() for blob in blobs_of(row)),
        )

    def replaced_by(self, later: Ledger) -> tuple[BlobKey, ...]:
        """Blobs of records that rows read later do not name: a commit whose outcome was unknown has
        replaced them, and no earlier transaction can be applied after it.
        """
        named = frozenset(later.blobs())
        ours = (blob for row in self.records.values() for blob in blobs_of(row))
        return tuple(blob for blob in ours if blob not in named)

    def take_owners_changes(self, rows: Mapping[str, Row]) -> bool:
        """Adopt version rows that the owner marked, or an evaluation pinned, in the meantime.

        True only if nothing else has changed. Then the refused transaction changed nothing, no
        earlier write arrived late, and the transaction can be made again from the new rows.
        """
        found = Ledger.read(self.task, self.fence, rows)
        if found is None or found.versions == self.versions or found.config != self.config:
            return False
        ours = (self.optimizer, self.records, self.consumed)
        if (found.optimizer, found.records, found.consumed) != ours:
            return False
        self.versions = found.versions
        self._find_restart()
        return True

    # -- a group commit ---------------------------------------------------------------------

    def record(self, records: Iterable[RecordRow]) -> Transaction:
        """Write the records of one or both open buffers.

        Requires both rows, even if only one is written: see `_open_records`.
        """
        return Transaction(
            require=(self._fenced(), self._at_head(), *self._open_records()),
            put=tuple((record_key(self.task, r.target), r) for r in records),
        )

    def recorded(self, transaction: Transaction) -> tuple[BlobKey, ...]:
        """The transaction was committed. Returns the blobs that are no longer named."""
        garbage: list[BlobKey] = []
        for _, row in transaction.put:
            assert isinstance(row, RecordRow)
            before = self.records.get(row.target)
            named = frozenset(blobs_of(row))
            garbage += [] if before is None else [b for b in blobs_of(before) if b not in named]
            self.records[row.target] = row
        return tuple(garbage)

    # -- a new version ----------------------------------------------------------------------

    def advance(
        self,
        now: float,
        stepped: Stepped,
        ticket_life_s: float,
        oldest_kept: float,
        members: tuple[Member, ...],
    ) -> Transaction:
        """`oldest_kept`: the oldest version of a client that may continue past its ticket.

        `members`: those of the version. If they are not in a record yet, this makes them durable.
        """
        target = stepped.version
        record = self.records.get(target)
        version = VersionRow(target, stepped.parameters, self.fence.seq, created=now)
        settled = self._next_settled(now, ticket_life_s, oldest_kept)
        optimizer = OptimizerRow(target, stepped.optimizer, settled)
        old = self._outlived_versions(now, settled)
        return Transaction(
            require=(
                self._fenced(),
                self._at_head(),
                *self._open_records(),
                # The owner may have marked one in the meantime: then it must not be deleted.
                *((version_key(self.task, v), self.versions[v]) for v in old),
            ),
            put=(
                (version_key(self.task, target), version),
                (optimizer_key(self.task), optimizer),
                (consumed_key(self.task, target), ConsumedRow(target, members)),
            ),
            delete=(
                *(() if record is None else (record_key(self.task, target),)),
                *(version_key(self.task, v) for v in old),
                *(consumed_key(self.task, v) for v in self.consumed if v <= settled),
            ),
        )

    def advanced(self, transaction: Transaction) -> tuple[BlobKey, ...]:
        """The transaction was committed. Returns the blobs that are no longer named."""
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
                    self._counted.update(dict.fromkeys(m.session for m in row.members))
        deleted = frozenset(transaction.delete)
        self.records = {
            t: r for t, r in self.records.items() if record_key(self.task, t) not in deleted
        }
        self.versions = {
            v: r for v, r in self.versions.items() if version_key(self.task, v) not in deleted
        }
        self._find_restart()
        for version in [v for v in self.consumed if v <= self.optimizer.settled]:
            for member in self.consumed.pop(version).members:
                self._counted.pop(member.session, None)
        named = frozenset(self.blobs())
        return tuple(blob for blob in before if blob not in named)

    def _find_restart(self) -> None:
        """The version at which the owner last rolled back; updates from before it are void."""
        restarts = (version for version, row in self.versions.items() if row.restarts)
        self.restarted_at = max(restarts, default=0)

    def _fenced(self) -> tuple[str, Row]:
        return fence_key(self.task), self.fence

    def _at_head(self) -> tuple[str, Row]:
        """The optimizer row: every version changes it, and it never returns to an old value.

        The record of a version is absent before it and again after it. Without this requirement, a
        late transaction could write a record for a version that already exists.
        """
        return optimizer_key(self.task), self.optimizer

    def _open_records(self) -> Iterable[tuple[str, Row | None]]:
        """The records of both open buffers.

        After an unknown outcome a session may move from one buffer to the other. If the earlier
        transaction was applied late, the later one must not count the session a second time.
        """
        for target in (self.version + 1, self.version + 2):
            yield record_key(self.task, target), self.records.get(target)

    def _next_settled(self, now: float, ticket_life_s: float, oldest_kept: float) -> int:
        """The newest version up to which no client should still have a valid ticket.

        An update in version v started below v. Clients may join v - 1 until v is known to be
        committed, which is before v + 1 exists.
        """
        settled = self.optimizer.settled
        for version in self.consumed:
            later = self.versions.get(version + 1)
            is_recent = later is not None and later.created + ticket_life_s > now
            if version == self.version or is_recent or version > oldest_kept:
                break
            settled = version
        return settled

    def _outlived_versions(self, now: float, settled: int) -> list[int]:
        """Versions to delete: not named by a valid ticket, not the last N, not marked or pinned."""
        last = self.version + 1 - self.config.keep_versions
        return [
            version
            for version, row in self.versions.items()
            if version < settled and version <= last and not row.marked and row.kept_until <= now
        ]
