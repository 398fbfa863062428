"""The storage side of one task: folded updates become records, full records become versions.

    folded ─▶ Snapshot ─▶ record (group commit) ─▶ acknowledge
       │        full and durable ─▶ Step ─▶ version
       └▶ full at its first commit ─▶ Step ─▶ version ─▶ acknowledge

A buffer holds exactly K updates; the next upload opens the next buffer. If all of them are folded
before any is durable, the version itself makes them durable, and no sum is written. A secure task
always writes a record first: the TSA releases masks only for members that cannot change. So does a
task whose rule needs single updates: their blobs are what the step reads.

One storage operation runs at a time. If its outcome is not `committed`, the rows are read again. If
the only change is a mark or a pin on a version that was to be deleted, the same step is written
again; otherwise the task is loaded again. This file knows nothing about clients or tickets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import UNSET

from papaya.aggregator import regime
from papaya.aggregator.ledger import Ledger
from papaya.aggregator.work import (
    FAILED,
    UNREACHABLE,
    DeleteBlobs,
    Fold,
    Folded,
    Restore,
    Snapshot,
    Snapshotted,
    Step,
    Stepped,
)
from papaya.errors import InvariantError
from papaya.learning.aggregation_rules import takes_members
from papaya.machine import Effects, Read, Transact
from papaya.messages.base import SessionId
from papaya.messages.storage import (
    Member,
    RecordRow,
    Row,
    Transaction,
    VersionRow,
    holder_prefixes,
)

_NEVER = float("inf")
_RETRY_S = 1.0


class Buffer:
    """The members of one version to come (paper, "the aggregation goal"): K of them when full.

    A member is first folding (its place is reserved), then folded (it is in the sum), then durable
    (it is in the committed record; only then is it acknowledged).

    A place is kept for a client whose seed the TSA may have taken, although it did not answer.

    A lost buffer has seeds at a TSA that no longer exists, or too few clients that have agreed to
    the same manifest. It takes no new members, and is dropped when its members are durable.

    In a secure or private task, all members have agreed to the same signed manifest: a sum can be
    unmasked only under one set of public parameters, and has the noise of one.

    Invariants: durable <= folded; folded + folding + kept <= goal; each device is a member once.
    """

    def __init__(self, target: int, goal: int, manifest: bytes = b"") -> None:
        self.target = target
        self.goal = goal
        # What the members of a secure or private task have agreed to. Changes only while the
        # buffer is empty.
        self.manifest = manifest
        # Members by their state, and sessions whose places are kept.
        self.folding: dict[SessionId, Member] = {}
        self.kept: dict[SessionId, None] = {}
        self.folded: dict[SessionId, Member] = {}
        self.durable = 0
        # Whether it is lost; why it is dropped without asking the TSA (empty: the TSA is asked).
        self.is_lost = False
        self.given_up = ""
        # The pseudonyms of all members, folding and folded, that have one.
        self._devices: set[bytes] = set()

    @classmethod
    def of_record(cls, record: RecordRow, goal: int) -> Buffer:
        buffer = cls(record.target, goal, record.manifest)
        buffer.folded = {member.session: member for member in record.members}
        buffer.durable = len(record.members)
        buffer._devices = {member.pseudonym for member in record.members if member.pseudonym}
        return buffer

    @property
    def has_room(self) -> bool:
        return not self.is_lost and self.taken < self.goal

    @property
    def taken(self) -> int:
        return len(self.folded) + len(self.folding) + len(self.kept)

    @property
    def is_full(self) -> bool:
        """Takes no new members."""
        return self.is_lost or len(self.folded) >= self.goal

    @property
    def is_closed(self) -> bool:
        """Full and durable: ready to become a version."""
        if self.durable >= self.goal:
            return True
        return self.is_lost and not self.folding and not self.is_dirty

    @property
    def is_dirty(self) -> bool:
        return len(self.folded) > self.durable

    def belongs_to(self, manifest: bytes) -> bool:
        """Is there a member, or a place kept for one, that has agreed to this manifest?"""
        return self.taken > 0 and self.manifest == manifest

    def has(self, session: SessionId) -> bool:
        return session in self.folding or session in self.folded

    def has_device(self, pseudonym: bytes) -> bool:
        return pseudonym in self._devices

    def reserve(self, member: Member) -> None:
        """Take a place, for the update and for its device."""
        self.folding[member.session] = member
        if member.pseudonym:
            self._devices.add(member.pseudonym)

    def free(self, session: SessionId) -> None:
        """Give a reserved place back."""
        self._devices.discard(self.folding.pop(session).pseudonym)

    def fold(self, session: SessionId) -> Member:
        """The update is in the sum. No-op if a snapshot has already shown that."""
        if session in self.folding:
            self.folded[session] = self.folding.pop(session)
        return self.folded[session]

    def fold_all(self, sessions: Iterable[SessionId]) -> tuple[Member, ...]:
        """Fold those sessions of a sum that are not folded yet."""
        if self.folding:
            for session in sessions:
                self.fold(session)
        return tuple(map(self.folded.__getitem__, sessions))

    def check(self) -> None:
        if self.durable > len(self.folded) or self.taken > self.goal:
            raise InvariantError(
                f"buffer {self.target}: {self.durable} durable, {len(self.folded)} folded, "
                f"{len(self.folding)} folding, {len(self.kept)} kept, goal {self.goal}"
            )
        members = (*self.folded.values(), *self.folding.values())
        named = sum(bool(member.pseudonym) for member in members)
        if named != len(self._devices):
            raise InvariantError(
                f"buffer {self.target}: {named} members of {len(self._devices)} devices"
            )


class Pipeline:
    """The buffers of the versions to come. Invariant: at most one storage operation is pending."""

    def __init__(self, ledger: Ledger, tokens: Iterator[int]) -> None:
        self.ledger = ledger
        self.config = ledger.config
        # Properties of the configuration that are computed; used for every request.
        self.manifest = self.config.manifest
        self.max_staleness = self.config.max_staleness
        self.is_bound = self.config.is_bound
        self._goal = self.config.aggregation_goal
        # `durability: step` is the paper's behaviour: a crash loses the open buffer.
        self.acknowledges_folded = self.config.durability == "step"
        # Does the rule of the task need single updates?
        self.keeps_members = takes_members(self.config)
        # Buffers by the version that they will become.
        self._buffers = {
            t: Buffer.of_record(r, self._goal_of(r)) for t, r in ledger.records.items()
        }

        # The token of the storage request whose answer is awaited.
        self.token = 0
        self._tokens = tokens
        # The transaction on its way, and the arguments of `Ledger.advance` that made it, if any.
        self._transaction: Transaction | None = None
        self._step: tuple[float, Stepped, float, float, tuple[Member, ...]] | None = None
        # An operation is pending. The first one restores the sums.
        self._is_busy = True

        # When the next group commit is due, and when the last one started.
        self._commit_due = _NEVER
        self._last_commit = -_NEVER
        # When a step may be tried, and how often the TSA has failed at this step.
        self._step_due = -_NEVER
        self._failures = 0

    def restore(self) -> Restore:
        records = tuple(self.ledger.records.values())
        return Restore(self.config, self.ledger.fence.seq, records, self.ledger.blobs())

    def restored(self, now: float) -> Effects:
        self._is_busy = False
        return self.pump(now)

    # -- the buffers ------------------------------------------------------------------------

    @property
    def current(self) -> Buffer:
        """The buffer that becomes the next version."""
        return self._buffer(self.ledger.version + 1)

    @property
    def completed(self) -> int:
        """Acknowledged updates of the next version: their clients are no longer active."""
        current = self.current
        return len(current.folded) if self.acknowledges_folded else current.durable

    @property
    def _open_targets(self) -> range:
        first = self.ledger.version + 1
        end = first + regime.open_buffers(self.config)
        # No buffer is opened beyond the last version that the owner wants.
        last = self.config.stop.versions or end
        return range(first, min(end, last + 1))

    @property
    def is_over(self) -> bool:
        """The last version that the owner asked for exists."""
        return self.ledger.version >= (self.config.stop.versions or _NEVER)

    @property
    def has_all_updates(self) -> bool:
        """The last version that the owner asked for exists, or needs no further client."""
        versions = self.config.stop.versions
        if versions is None:
            return False
        left = versions - self.ledger.version
        if left != 1:
            return left < 1
        last = self.current
        return last.is_full and not last.is_lost

    @property
    def is_failing(self) -> bool:
        """The TSA has an internal error at the step that is due."""
        return self._failures > 0

    def is_past(self, target: int | None) -> bool:
        """Does the buffer of this version take no more updates? False without a target."""
        if target is None:
            return False
        return target not in self._open_targets or self._buffer(target).is_full

    def is_counted(self, pseudonym: bytes, manifest: bytes, group: int | None) -> bool:
        """Has the device an update in every buffer in which it could be placed?"""
        targets = self._open_targets if group is None else (group,)
        takers = [found for found in map(self._buffer, targets) if self._takes(found, manifest)]
        return (
            bool(pseudonym) and bool(takers) and all(each.has_device(pseudonym) for each in takers)
        )

    def _takes(self, buffer: Buffer, manifest: bytes) -> bool:
        """May an update under this manifest be a member? Updates under different manifests can be
        added, except in secure and private tasks.
        """
        return not self.is_bound or buffer.taken == 0 or buffer.manifest == manifest

    def place(
        self, member: Member, manifest: bytes, sealed: bytes, group: int | None, *, may_open: bool
    ) -> Fold | None:
        """Reserve a place in the first buffer with room, for members under the same manifest and
        without an update of the same device; None if there is none for now.

        With a `group`, only in that buffer: the TSA has the seed in its group, or may have it.
        `may_open`: also as the first member of a buffer.
        """
        if any(buffer.has(member.session) for buffer in self._buffers.values()):
            raise InvariantError(f"session {member.session} is in a buffer already")
        for target in self._open_targets if group is None else (group,):
            buffer = self._buffer(target)
            has_place = buffer.has_room or member.session in buffer.kept
            if buffer.has_device(member.pseudonym) or not has_place:
                continue
            if not self._takes(buffer, manifest) or not (may_open or buffer.taken):
                continue
            if regime.accepts(self.config, member.version, target):
                self._open(buffer, manifest)
                buffer.kept.pop(member.session, None)
                buffer.reserve(member)
                return Fold(
                    self.ledger.terms[manifest],
                    self.ledger.fence.seq,
                    target,
                    member.session,
                    member.examples,
                    member.staleness,
                    member.offer,
                    sealed,
                )
        return None

    def _open(self, buffer: Buffer, manifest: bytes) -> None:
        """The first member of a secure or private buffer decides what all have agreed to."""
        if self.is_bound and buffer.taken == 0:
            buffer.manifest = manifest
            buffer.goal = self.ledger.terms[manifest].aggregation_goal

    def counts(self, session: SessionId) -> bool:
        """Is the session's update in a version or in the sum of one to come?"""
        is_folded = any(session in buffer.folded for buffer in self._buffers.values())
        return is_folded or self.ledger.has_consumed(session)

    def knows(self, message: Folded) -> bool:
        """False for work that started before the task was loaded again."""
        buffer = self._buffers.get(message.target)
        return buffer is not None and buffer.has(message.session)

    def refuse(self, message: Folded) -> int | None:
        """Free the place. Returns the open buffer whose group has the seed, if there is one: an
        earlier holder placed the update there and crashed before it was recorded.
        """
        self._buffers[message.target].free(message.session)
        return None if self.is_past(message.seed_group) else message.seed_group

    def postpone(self, message: Folded) -> None:
        """The TSA did not answer, and may have the seed in this group: keep the place."""
        buffer = self._buffers[message.target]
        buffer.free(message.session)
        buffer.kept[message.session] = None

    def keep_place(self, session: SessionId, manifest: bytes, group: int) -> None:
        """Keep a place for an update whose seed may be in this group, if there is room."""
        if group not in self._open_targets or manifest not in self.ledger.terms:
            return
        buffer = self._buffer(group)
        if buffer.has_room and self._takes(buffer, manifest):
            self._open(buffer, manifest)
            buffer.kept[session] = None

    @property
    def kept_places(self) -> list[SessionId]:
        """The sessions whose places are kept."""
        return [session for buffer in self._buffers.values() for session in buffer.kept]

    def give_place_up(self, session: SessionId) -> None:
        """The session has ended: free the place that was kept for its update, if any."""
        for buffer in self._buffers.values():
            buffer.kept.pop(session, None)

    def fold(self, now: float, message: Folded) -> Buffer:
        buffer = self._buffers[message.target]
        buffer.fold(message.session)
        self._schedule_commit(now, buffer)
        return buffer

    def newest_seeds(self, manifest: bytes) -> dict[int, int]:
        """Secure aggregation: the largest index of an accepted seed, for each open buffer whose
        members have agreed to this manifest. Other manifests may have other TSAs.
        """
        return {
            target: max(member.offer for member in buffer.folded.values())
            for target, buffer in self._buffers.items()
            if buffer.folded and not buffer.is_full and buffer.manifest == manifest
        }

    @property
    def is_current_earlier(self) -> bool:
        """Does the buffer of the next version have bound members under an earlier manifest?"""
        current = self.current
        return self.is_bound and current.taken > 0 and current.manifest != self.manifest

    def holds(self, session: SessionId) -> bool:
        """Does the session have a place in a buffer, or is one kept for it?"""
        return any(b.has(session) or session in b.kept for b in self._buffers.values())

    def buffers_of(self, manifest: bytes) -> list[Buffer]:
        """The buffers of a secure task whose members have agreed to this manifest."""
        return [buffer for buffer in self._buffers.values() if buffer.belongs_to(manifest)]

    def unfilled(self, manifest: bytes) -> list[Buffer]:
        """The buffers under this manifest that have room, in the order of their versions."""
        found = [buffer for buffer in self.buffers_of(manifest) if not buffer.is_full]
        return sorted(found, key=lambda buffer: buffer.target)

    def give_up(self, now: float, buffers: Iterable[Buffer], reason: str) -> None:
        """Close these buffers, and drop them without asking the TSA."""
        for buffer in buffers:
            if buffer.folded and not buffer.is_lost:
                buffer.is_lost, buffer.given_up = True, reason
                self._schedule_commit(now, buffer)

    def lose(self, now: float, targets: Iterable[int]) -> None:
        """The seeds of these buffers are gone: close them, so that no more updates are lost."""
        for target in targets:
            buffer = self._buffers.get(target)
            if buffer is not None and buffer.folded:
                buffer.is_lost = True
                self._schedule_commit(now, buffer)

    def _buffer(self, target: int) -> Buffer:
        found = self._buffers.get(target)
        if found is None:
            found = self._buffers[target] = Buffer(target, self._goal, self.manifest)
        return found

    def _goal_of(self, record: RecordRow) -> int:
        """A secure buffer keeps the goal that its members have agreed to. Other buffers have the
        current goal, which may be below the number of members that they already have.
        """
        agreed = self.ledger.terms.get(record.manifest)
        if self.is_bound and agreed is not None:
            return agreed.aggregation_goal
        return max(self._goal, len(record.members))

    # -- one operation at a time ------------------------------------------------------------

    def next_wake(self) -> float:
        if self._is_busy:
            return _NEVER
        current = self._buffers.get(self.ledger.version + 1)
        is_closed = current is not None and current.is_closed
        return min(self._commit_due, self._step_due) if is_closed else self._commit_due

    def pump(self, now: float) -> Effects:
        """Start the next storage operation if one is due and none is pending."""
        if self._is_busy:
            return []
        current = self.current
        record = self.ledger.records.get(current.target)
        if record is not None and current.is_closed and now >= self._step_due:
            return [self._step_from(record)]
        if now < self._commit_due:
            return []
        if record is None and current.is_full and self._may_step_unrecorded:
            members = tuple(current.folded.values())
            weight = float(sum(member.examples for member in members))
            return [self._step_from(RecordRow(current.target, "", members, weight))]
        self._commit_due = _NEVER
        dirty = tuple(target for target, buffer in self._buffers.items() if buffer.is_dirty)
        if not dirty:
            return []
        self._is_busy = True
        self._last_commit = now
        return [Snapshot(self.ledger.task, self.ledger.fence.seq, dirty)]

    @property
    def _may_step_unrecorded(self) -> bool:
        """With `durability: step` members are acknowledged already: they must be durable soon."""
        is_sum = not self.keeps_members
        return is_sum and not self.is_bound and not self.acknowledges_folded

    def _step_from(self, record: RecordRow) -> Step:
        self._is_busy = True
        ledger = self.ledger
        return Step(
            self.config,
            ledger.fence.seq,
            ledger.newest,
            ledger.optimizer.state,
            record,
            ledger.terms.get(record.manifest) if self.is_bound else None,
            self.current.given_up,
        )

    def flush(self, now: float) -> Effects:
        """Commit everything that is folded now, whatever `durability` says."""
        if any(buffer.is_dirty for buffer in self._buffers.values()):
            self._commit_due = min(self._commit_due, now)
        return self.pump(now)

    @property
    def is_settled(self) -> bool:
        """Everything that was folded is durable, and no storage operation is pending."""
        return not self._is_busy and not any(
            buffer.is_dirty or buffer.folding for buffer in self._buffers.values()
        )

    def on_snapshotted(self, message: Snapshotted) -> Effects:
        records = []
        for found in message.sums:
            buffer = self._buffers[found.target]
            members = buffer.fold_all(found.sessions)
            manifest = buffer.manifest if self.is_bound else b""
            updates = found.updates or UNSET
            row = RecordRow(found.target, found.blob, members, found.weight, manifest, updates)
            records.append(row)
        return self._transact(self.ledger.record(records))

    def on_stepped(
        self, now: float, message: Stepped, ticket_life_s: float, oldest_kept: float
    ) -> Effects:
        """Write the new version. If the TSA did not answer or failed, try the step again later.

        The TSA still has the seeds, so nothing is lost by a retry. To give the buffer up, the
        operator restarts the TSA.
        """
        self._failures += message.dropped == FAILED
        if message.dropped in (UNREACHABLE, FAILED):
            self._is_busy = False
            self._step_due = now + _RETRY_S * 2 ** min(self._failures, 6)
            return []
        record = self.ledger.records.get(message.version)
        members = record.members if record else tuple(self.current.folded.values())
        self._step = (now, message, ticket_life_s, oldest_kept, members)
        return self._transact(self.ledger.advance(*self._step))

    def on_refused(self) -> Effects:
        """Read the rows if the owner may have changed them; no effects otherwise."""
        if self._step is None:
            return []
        self.token = next(self._tokens)
        return [Read(self.token, holder_prefixes(self.ledger.task))]

    def on_rows(self, rows: Mapping[str, Row]) -> Effects:
        """The rows after a refused step: repeat it, or no effects if more than marks changed."""
        assert self._step is not None
        if not self.ledger.take_owners_changes(rows):
            return []
        return self._transact(self.ledger.advance(*self._step))

    def on_committed(self, now: float) -> tuple[list[SessionId], bool, Effects]:
        """Sessions that became durable, whether there is a new version, and blobs to delete."""
        transaction, self._transaction = self._transaction, None
        assert transaction is not None
        self._is_busy = False
        self._step = None
        if isinstance(transaction.put[0][1], VersionRow):
            self._failures = 0
            garbage = self.ledger.advanced(transaction)
            buffer = self._buffers.pop(self.ledger.version)
            return list(buffer.folded)[buffer.durable :], True, [DeleteBlobs(garbage)]
        durable = self._make_durable(now, transaction)
        return durable, False, [DeleteBlobs(self.ledger.recorded(transaction))]

    def _make_durable(self, now: float, transaction: Transaction) -> list[SessionId]:
        newly: list[SessionId] = []
        for _, row in transaction.put:
            assert isinstance(row, RecordRow)
            buffer = self._buffers[row.target]
            newly += [member.session for member in row.members[buffer.durable :]]
            buffer.durable = len(row.members)
            if buffer.is_dirty:
                self._schedule_commit(now, buffer)
        return newly

    def _schedule_commit(self, now: float, buffer: Buffer) -> None:
        if buffer.is_full:
            due = now
        elif self.acknowledges_folded:
            return
        else:
            due = max(now, self._last_commit + self.config.commit_interval_s)
        self._commit_due = min(self._commit_due, due)

    def _transact(self, transaction: Transaction) -> Effects:
        self.token = next(self._tokens)
        self._transaction = transaction
        return [Transact(self.token, transaction)]

    def check(self) -> None:
        for buffer in self._buffers.values():
            buffer.check()
        if len(self._buffers) > regime.open_buffers(self.config) + 1:
            raise InvariantError(f"{self.ledger.task} has {len(self._buffers)} open buffers")
