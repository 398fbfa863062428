"""One task at its holder: clients in, versions out.

Paper, "Aggregator": it "aggregates client model updates to produce new versions of the server
model [...] drives participating clients to run the client execution protocol [...] tracks whether
or not a task needs more clients".

    requests ─▶ sessions ─▶ Fold ─▶ buffer ─▶ Snapshot ─▶ record ─▶ acknowledge
                                        full ─▶ Step ─▶ version ─▶ abort the stale

One storage operation is on its way at a time. Whenever its outcome is not `committed`, the rows
are read again and decide: a deposed holder stops, any other starts again from what is durable.
Which regime the task is in is `regime.py`'s concern alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum

from papaya.aggregator import regime
from papaya.aggregator.buffer import Buffer
from papaya.aggregator.ledger import Ledger
from papaya.aggregator.sessions import Session, Sessions
from papaya.aggregator.upload import Slots
from papaya.aggregator.work import (
    DeleteBlobs,
    Drop,
    Fold,
    Folded,
    Restore,
    Snapshot,
    Snapshotted,
    Step,
    Stepped,
)
from papaya.config import ServerConfig
from papaya.errors import InvariantError
from papaya.machine import Effects, Read, Reply, Transact
from papaya.messages.base import SessionId, TaskId
from papaya.messages.control import TaskReport
from papaya.messages.participation import Aborted, AbortReason, Completed, Incomplete, Retry
from papaya.messages.storage import (
    FenceRow,
    Member,
    RecordRow,
    Rows,
    Transacted,
    Transaction,
    VersionRow,
    holder_prefixes,
)


class Phase(Enum):
    LOADING = "reading what is durable"
    SERVING = "serving clients"
    STOPPED = "held by another aggregator"


class HeldTask:
    """Invariants: active <= C; folded updates are in exactly one buffer; versions only grow."""

    def __init__(
        self,
        task: TaskId,
        fence: FenceRow,
        leases: int,
        server: ServerConfig,
        slots: Slots,
        tokens: Iterator[int],
    ) -> None:
        self.task = task
        self.fence = fence
        self.phase = Phase.LOADING
        self.counters: dict[str, int] = {}
        self.staleness: dict[int, int] = {}
        self.sessions = Sessions(server.dead_after_s)
        self.ledger: Ledger  # there from the first load on; nothing is served before
        self.promised = leases
        self.turned_away = 0
        self.may_want_more = False
        self.token = 0
        self.adopts_until = float("inf")
        self._server = server
        self._slots = slots
        self._buffers: dict[int, Buffer] = {}
        self._overflow: deque[SessionId] = deque()
        self._joined: dict[SessionId, int | None] = {}
        self._tokens = tokens
        self._transaction: Transaction | None = None
        self._is_busy = False
        self._commit_due = float("inf")
        self._last_commit = -float("inf")

    # -- taking over ------------------------------------------------------------------------

    def load(self) -> Effects:
        """Read all that is durable, in one snapshot."""
        self.phase = Phase.LOADING
        self._is_busy = True
        self._transaction = None
        self.token = next(self._tokens)
        return [Read(self.token, holder_prefixes(self.task))]

    def on_rows(self, rows: Rows) -> Effects:
        ledger = Ledger.read(self.task, self.fence, dict(rows.rows))
        if ledger is None:
            return self.stop()
        self.ledger = ledger
        goal = ledger.config.aggregation_goal
        self._buffers = {t: Buffer.of_record(r, goal) for t, r in ledger.records.items()}
        self._overflow.clear()
        effects = self._settle_sessions()
        records = tuple(ledger.records.values())
        return [*effects, Restore(ledger.config, self.fence.seq, records, ledger.blobs())]

    def _settle_sessions(self) -> Effects:
        """Counted is counted; what was folded but not durable has to be sent again."""
        effects: Effects = []
        for member in self.ledger.members():
            session = self.sessions.active.get(member.session)
            if session is not None:
                effects += self._acknowledge(session)
            elif member.session not in self.sessions.ended:
                self.sessions.remember(member.session, Completed(), member.keep_until)
        for session in list(self.sessions.active.values()):
            if session.upload is not None:
                effects += self._send_again(session)
        return effects

    def _send_again(self, session: Session) -> Effects:
        assert session.upload is not None
        missing = Incomplete(tuple(range(session.upload.chunks)))
        effects = self._answer(session, missing)
        session.upload, session.in_buffer = None, False
        self._slots.release((self.task, session.id))
        self.sessions.refile(session)
        return effects

    def on_restored(self, now: float) -> Effects:
        self.phase = Phase.SERVING
        self.may_want_more = True
        self._is_busy = False
        if self.adopts_until == float("inf"):
            self.adopts_until = now + self._server.heartbeat_s
        return self.pump(now)

    def stop(self) -> Effects:
        """Deposed: clients find the new holder through any selector."""
        self.phase = Phase.STOPPED
        effects: Effects = [Drop(self.task, self.fence.seq)]
        for session in self.sessions.active.values():
            effects += self._answer(session, Retry("the task has moved", 0.0))
            self._slots.release((self.task, session.id))
        return effects

    # -- demand -----------------------------------------------------------------------------

    @property
    def config_demand(self) -> int:
        """Client demand by the regime's rule, whether or not it is reported yet."""
        return regime.client_demand(
            self.ledger.config, len(self.sessions.active), self._completed, self.is_closing
        )

    @property
    def room(self) -> int:
        """Slots that no lease can be on its way to: what an adopted client may take."""
        return self.config_demand - self.promised

    @property
    def is_closing(self) -> bool:
        """The current buffer has all its updates; the version is being made."""
        buffer = self._buffers.get(self.ledger.version + 1)
        return buffer is not None and buffer.is_full

    @property
    def _completed(self) -> int:
        """Acknowledged updates of the version to come: their clients are no longer active."""
        buffer = self._buffers.get(self.ledger.version + 1)
        if buffer is None:
            return 0
        return len(buffer.folded) if self._acknowledges_folded else buffer.durable

    @property
    def _acknowledges_folded(self) -> bool:
        """`durability: step` is the paper's behaviour: an open buffer dies with its aggregator."""
        return self.ledger.config.durability == "step"

    def demand(self, now: float) -> int:
        """None is reported while running clients may still come to be adopted."""
        if self.phase is not Phase.SERVING or now < self.adopts_until:
            return 0
        return self.config_demand

    def report(self, now: float, number: int) -> TaskReport:
        demand = self.demand(now)
        self.promised = max(self.promised, demand)
        for session, first_reported in self._joined.items():
            if first_reported is None:
                self._joined[session] = number
        return TaskReport(
            task=self.task,
            seq=self.fence.seq,
            active=len(self.sessions.active),
            demand=demand,
            ended=self.sessions.ended_count,
            joined=tuple(self._joined),
        )

    def acknowledge_report(self, number: int) -> None:
        """Joins are repeated until a report that names them is known to have arrived."""
        self._joined = {
            session: first_reported
            for session, first_reported in self._joined.items()
            if first_reported is None or first_reported > number
        }

    # -- sessions ---------------------------------------------------------------------------

    def admit(self, session: Session, *, is_leased: bool) -> None:
        """A joined client takes a promised slot; an adopted one a slot that was not promised."""
        self.sessions.admit(session)
        self._joined[session.id] = None
        if is_leased:
            self.promised = max(0, self.promised - 1)
        self._count("joined" if is_leased else "adopted")

    def end(self, session: Session, reason: AbortReason) -> Effects:
        return self._end(session, Aborted(reason), f"aborted_{reason}")

    def keep_until(self, session: Session) -> float:
        """After this no ticket of the session is valid."""
        return session.ticket.expires + self.ledger.config.upload_timeout_s

    def expire(self, now: float) -> Effects:
        effects: Effects = []
        for session in self.sessions.expired(now):
            is_silent = session.seen_at + self._server.dead_after_s <= now
            effects += self.end(session, "silent" if is_silent else "timed_out")
        return effects

    def _end(self, session: Session, answer: Completed | Aborted, counter: str) -> Effects:
        self._count(counter)
        self.may_want_more = True
        effects = self._answer(session, answer)
        self.sessions.end(session, answer, self.keep_until(session))
        if session.upload is not None and not session.in_buffer:
            self._slots.release((self.task, session.id))
            effects.append(Drop(self.task, self.fence.seq, session.id))
        return effects

    def reclaim_slot(self, session: Session) -> Effects:
        """No progress for a heartbeat: its client sends the chunks again later."""
        session.upload = None
        self._slots.release((self.task, session.id))
        return [Drop(self.task, self.fence.seq, session.id)]

    def _answer(
        self, session: Session, answer: Completed | Aborted | Incomplete | Retry
    ) -> Effects:
        effects: Effects = [Reply(handle, answer) for handle in session.answer_to]
        session.answer_to = []
        return effects

    def _count(self, counter: str) -> None:
        self.counters[counter] = self.counters.get(counter, 0) + 1

    # -- folding ----------------------------------------------------------------------------

    def complete(self, session: Session) -> Effects:
        """A complete upload is here: a trip, counted or discarded."""
        assert session.upload is not None
        session.upload.is_folding = True
        self._count("trips")
        return self._place(session)

    def _place(self, session: Session) -> Effects:
        ticket = session.upload_ticket
        assert ticket is not None
        config, version = self.ledger.config, self.ledger.version
        for target in range(version + 1, version + 1 + regime.open_buffers(config)):
            if not regime.accepts(config, session.version, target):
                break
            buffer = self._buffers.setdefault(target, Buffer(target, config.aggregation_goal))
            if buffer.has_room:
                buffer.folding[session.id] = Member(
                    session.id,
                    session.version,
                    ticket.staleness,
                    ticket.examples,
                    self.keep_until(session),
                )
                return [
                    Fold(
                        config,
                        self.fence.seq,
                        target,
                        session.id,
                        ticket.examples,
                        ticket.staleness,
                    )
                ]
        if not regime.accepts(config, session.version, version + 1):
            return self._discard_late(session)
        self._overflow.append(session.id)
        return []

    def on_folded(self, now: float, message: Folded) -> Effects:
        session = self.sessions.active.get(message.session)
        buffer = self._buffers.get(message.target)
        if session is None or buffer is None or not buffer.has(message.session):
            return []  # the buffer was loaded again meanwhile, without it
        self._slots.release((self.task, session.id))
        if message.refused is not None:
            del buffer.folding[session.id]
            session.upload = None
            answer = Completed(message.refused)
            return [
                *self._end(session, answer, f"discarded_{message.refused}"),
                *self._place_overflow(),
            ]
        buffer.fold(session.id)
        session.in_buffer = True
        effects: Effects = []
        if self._acknowledges_folded:
            effects += self._acknowledge(session)
        if buffer.is_full and regime.ends_round_when_full(self.ledger.config):
            effects += self._end_round()
        self._commit_due = min(self._commit_due, self._next_commit(now, buffer))
        return effects + self.pump(now)

    def _place_overflow(self) -> Effects:
        effects: Effects = []
        waiting, self._overflow = self._overflow, deque()
        for session_id in waiting:
            session = self.sessions.active.get(session_id)
            if session is not None:
                effects += self._place(session)
        return effects

    def _end_round(self) -> Effects:
        """SyncFL: "users that are still training are aborted"."""
        effects: Effects = []
        for session in list(self.sessions.active.values()):
            if not session.in_buffer:
                late = session.upload is not None and session.upload.is_folding
                effects += self._discard_late(session) if late else self.end(session, "round_over")
        return effects

    def _discard_late(self, session: Session) -> Effects:
        return self._end(session, Completed("round_over"), "discarded_round_over")

    # -- committing -------------------------------------------------------------------------

    def _next_commit(self, now: float, buffer: Buffer) -> float:
        if buffer.is_full:
            return now
        if self._acknowledges_folded:
            return float("inf")
        return max(now, self._last_commit + self.ledger.config.commit_interval_s)

    def pump(self, now: float) -> Effects:
        """Start the next storage operation, if one is due and none is on its way."""
        if self._is_busy or self.phase is not Phase.SERVING:
            return []
        closed = self._buffers.get(self.ledger.version + 1)
        if closed is not None and closed.is_closed:
            self._is_busy = True
            ledger = self.ledger
            record = ledger.records[closed.target]
            return [
                Step(ledger.config, self.fence.seq, ledger.newest, ledger.optimizer.state, record)
            ]
        if now < self._commit_due:
            return []
        self._commit_due = float("inf")
        dirty = tuple(target for target, buffer in self._buffers.items() if buffer.is_dirty)
        if not dirty:
            return []
        self._is_busy = True
        self._last_commit = now
        return [Snapshot(self.task, self.fence.seq, dirty)]

    def on_snapshotted(self, message: Snapshotted) -> Effects:
        records = []
        for found in message.sums:
            buffer = self._buffers[found.target]
            members = tuple(buffer.fold(session) for session in found.sessions)
            records.append(RecordRow(found.target, found.blob, members, found.weight))
        return self._transact(self.ledger.record(records))

    def on_stepped(self, now: float, message: Stepped) -> Effects:
        return self._transact(self.ledger.advance(now, message, self._ticket_life_s))

    @property
    def _ticket_life_s(self) -> float:
        config = self.ledger.config
        return config.training_timeout_s + self._server.heartbeat_s + config.upload_timeout_s

    def _transact(self, transaction: Transaction) -> Effects:
        self.token = next(self._tokens)
        self._transaction = transaction
        return [Transact(self.token, transaction)]

    def on_transacted(self, now: float, message: Transacted) -> Effects:
        transaction = self._transaction
        assert transaction is not None
        if message.outcome != "committed":
            return self.load()
        self._transaction = None
        self._is_busy = False
        if isinstance(transaction.put[0][1], VersionRow):
            return self._on_version(now, transaction)
        return self._on_record(now, transaction)

    def _on_record(self, now: float, transaction: Transaction) -> Effects:
        effects: Effects = []
        for _, row in transaction.put:
            assert isinstance(row, RecordRow)
            buffer = self._buffers[row.target]
            newly = row.members[buffer.durable :]
            buffer.durable = len(row.members)
            for member in newly:
                session = self.sessions.active.get(member.session)
                if session is not None:
                    effects += self._acknowledge(session)
            if buffer.is_dirty:
                self._commit_due = min(self._commit_due, self._next_commit(now, buffer))
        effects.append(DeleteBlobs(self.ledger.recorded(transaction)))
        return effects + self.pump(now)

    def _acknowledge(self, session: Session) -> Effects:
        assert session.upload_ticket is not None
        staleness = session.upload_ticket.staleness
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
        return self._end(session, Completed(), "counted")

    def _on_version(self, now: float, transaction: Transaction) -> Effects:
        garbage = self.ledger.advanced(transaction)
        self._buffers.pop(self.ledger.version, None)
        self._count("versions")
        self.may_want_more = True
        effects: Effects = [DeleteBlobs(garbage)]
        effects += self._abort_stale()
        effects += self._place_overflow()
        return effects + self.pump(now)

    def _abort_stale(self) -> Effects:
        """ "After every server model update, the aggregator aborts clients whose staleness is
        larger than a configurable parameter, maximum staleness."
        """
        version, config = self.ledger.version, self.ledger.config
        oldest_allowed = max(0, version - config.max_staleness)
        effects: Effects = []
        for session in self.sessions.training_from(range(oldest_allowed)):
            effects += self.end(session, "stale")
        return effects

    # -- time -------------------------------------------------------------------------------

    def next_wake(self) -> float:
        if self.phase is not Phase.SERVING:
            return float("inf")
        due = self.sessions.next_deadline()
        return due if self._is_busy else min(due, self._commit_due)

    def check(self) -> None:
        if self.phase is not Phase.SERVING:
            return
        self.sessions.check(self.ledger.config.concurrency)
        for buffer in self._buffers.values():
            buffer.check()
        if len(self._buffers) > regime.open_buffers(self.ledger.config) + 1:
            raise InvariantError(f"task {self.task} has {len(self._buffers)} buffers open")
