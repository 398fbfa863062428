"""One task at its holder: clients in, versions out.

Paper, "Aggregator": it "aggregates client model updates to produce new versions of the server
model [...] drives participating clients to run the client execution protocol [...] tracks whether
or not a task needs more clients".

    requests ─▶ sessions ─▶ Fold ─▶ pipeline ─▶ acknowledged sessions, new versions

`participation.py` answers requests, `pipeline.py` makes things durable; this file connects them
and keeps count. A holder whose fence is gone stops; one that lost track of a write loads again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from papaya.aggregator import regime
from papaya.aggregator.confirmations import Confirmations
from papaya.aggregator.ledger import Ledger
from papaya.aggregator.offers import Offers
from papaya.aggregator.phase import TaskPhase
from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.promises import Promises
from papaya.aggregator.sessions import Session, Sessions, keep_until, ticket_life_s
from papaya.aggregator.upload import Slots, why_not_served
from papaya.aggregator.work import Drop, Folded, Lost, Snapshotted, StepFailed, Stepped
from papaya.config import ServerConfig
from papaya.machine import Effects, Read, Reply
from papaya.messages.base import SessionId, TaskId
from papaya.messages.participation import (
    Aborted,
    AbortReason,
    Completed,
    DiscardReason,
    Incomplete,
    Retry,
)
from papaya.messages.storage import FenceRow, Rows, Transacted, holder_prefixes


class HeldTask:
    """Invariants: active + promised <= C in AsyncFL; versions only grow."""

    def __init__(
        self,
        task: TaskId,
        fence: FenceRow,
        leases: Sequence[SessionId],
        server: ServerConfig,
        slots: Slots,
        tokens: Iterator[int],
    ) -> None:
        self.task = task
        self.fence = fence
        self.phase = TaskPhase.LOADING
        self.counters: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.sessions = Sessions(server.dead_after_s)
        self.offers: Offers | None = None
        self.pipeline: Pipeline  # there from the first load on; nothing is served before
        self.promises = Promises(fence.seq, leases)
        self.turned_away = 0
        self.may_want_more = False
        self.adopts_until = float("inf")
        self.halted_because = ""
        self._server = server
        self._slots = slots
        self._tokens = tokens
        self._read_token = 0
        self._swept_at = 0.0
        self._lost_at: int | None = None
        self._sweep_s = server.heartbeat_s / 20
        self._overflow: deque[SessionId] = deque()
        self.confirmations = Confirmations()

    @property
    def ledger(self) -> Ledger:
        return self.pipeline.ledger

    # -- taking over ------------------------------------------------------------------------

    def load(self) -> Effects:
        """Read all that is durable, in one snapshot."""
        self.phase = TaskPhase.LOADING
        self._read_token = next(self._tokens)
        return [Read(self._read_token, holder_prefixes(self.task))]

    def awaits(self, token: int) -> bool:
        if self.phase is TaskPhase.LOADING:
            return token == self._read_token
        return self.phase is TaskPhase.SERVING and token == self.pipeline.token

    def on_rows(self, rows: Rows) -> Effects:
        if self.phase is TaskPhase.SERVING:
            return self.pipeline.on_rows(dict(rows.rows)) or self.load()
        ledger = Ledger.read(self.task, self.fence, dict(rows.rows))
        if ledger is None:
            return self.stop()
        problem = why_not_served(ledger.config, self._server.chunk_bytes, self._slots.buffers)
        if problem:
            return self._halt(problem)
        self.pipeline = Pipeline(ledger, self._tokens)
        if ledger.config.secure_aggregation is not None:
            self.offers = self.offers or Offers(ledger.config, self.fence.seq)
            self.offers.mark_lost(0.0, self.pipeline)
        self._overflow.clear()
        return [*self._settle_sessions(), self.pipeline.restore()]

    def _settle_sessions(self) -> Effects:
        """Counted is counted; what was folded but not durable has to be sent again."""
        effects: Effects = []
        for member in self.ledger.members():
            session = self.sessions.active.get(member.session)
            if session is not None:
                effects += self._acknowledge(session)
            elif member.session not in self.sessions.ended:
                self.sessions.remember(member.session, Completed(), member.keep_until)
        return effects + self._send_all_again()

    def _send_all_again(self) -> Effects:
        uploading = [s for s in self.sessions.active.values() if s.upload is not None]
        return [effect for session in uploading for effect in self._send_again(session)]

    def _send_again(self, session: Session) -> Effects:
        assert session.upload is not None
        missing = Incomplete(tuple(range(session.upload.chunks)))
        session.in_buffer = False
        return self._answer(session, missing) + self.reclaim_slot(session)

    def on_restored(self, now: float) -> Effects:
        self.phase = TaskPhase.SERVING
        self.halted_because = ""
        self.may_want_more = True
        for session in self.sessions.active.values():
            session.seen_at = now  # while rows were read it was we who were silent
            self.sessions.refile(session)
        if not self.has_served:
            # The first holder of a task has no predecessor whose clients could come.
            is_first = self.fence.seq == 1
            self.adopts_until = now if is_first else now + self._server.heartbeat_s
        return [*self._abort_outdated(), *self.refill(now), *self.pipeline.restored(now)]

    def stop(self) -> Effects:
        """Deposed: clients find the new holder through any selector."""
        self.phase = TaskPhase.STOPPED
        effects: Effects = [Drop(self.task, self.fence.seq)]
        for session in self.sessions.active.values():
            effects += self._answer(session, Retry("the task has moved", 0.0))
            self._slots.release((self.task, session.id))
        return effects

    # -- demand -----------------------------------------------------------------------------

    @property
    def config_demand(self) -> int:
        """Client demand by the regime's rule, whether or not it is reported yet."""
        if self.is_over:
            return 0
        pipeline, active = self.pipeline, len(self.sessions.active)
        return regime.client_demand(
            pipeline.config, active, pipeline.completed, pipeline.current.is_full
        )

    @property
    def is_over(self) -> bool:
        """The last version that the owner asked for is there."""
        return self.ledger.version >= (self.pipeline.config.stop.versions or float("inf"))

    @property
    def room(self) -> int:
        """Slots that no lease can be on its way to: what an adopted client may take."""
        return self.config_demand - self.promises.count

    @property
    def has_served(self) -> bool:
        """From then on every report names the task: one that did not would lose confirmations."""
        return self.adopts_until != float("inf")

    def demand(self, now: float) -> int:
        """None is reported while running clients may still come to be adopted."""
        if self.phase is not TaskPhase.SERVING or now < self.adopts_until:
            return 0
        return self.config_demand

    # -- sessions ---------------------------------------------------------------------------

    def admit(self, session: Session, *, is_leased: bool) -> None:
        """A joined client takes a promised slot; an adopted one a slot that was not promised."""
        self.sessions.admit(session)
        self.confirmations.add(session.id)
        if is_leased:
            self.promises.keep(session.id)
        self.counters["joined" if is_leased else "adopted"] += 1

    def end(self, session: Session, reason: AbortReason) -> Effects:
        return self._end(session, Aborted(reason), f"aborted_{reason}")

    def expire(self, now: float) -> Effects:
        effects: Effects = []
        for session in self.sessions.expired(now):
            is_silent = session.seen_at + self._server.dead_after_s <= now
            effects += self.end(session, "silent" if is_silent else "timed_out")
        return effects

    def _end(self, session: Session, answer: Completed | Aborted, counter: str) -> Effects:
        self.counters[counter] += 1
        self.may_want_more = True
        effects = self._answer(session, answer)
        self.sessions.end(
            session, answer, keep_until(session.ticket.expires, self.pipeline.config, self._server)
        )
        owner = (self.task, session.id)
        if self._slots.is_held_by(owner):
            self._slots.release(owner)
            effects.append(Drop(self.task, self.fence.seq, session.id))
        return effects

    def reclaim_slot(self, session: Session) -> Effects:
        """What is here of its upload is forgotten: its client sends the chunks again later."""
        session.upload = None
        self.sessions.refile(session)
        self._slots.release((self.task, session.id))
        return [Drop(self.task, self.fence.seq, session.id)]

    def _answer(
        self, session: Session, answer: Completed | Aborted | Incomplete | Retry
    ) -> Effects:
        effects: Effects = [Reply(handle, answer) for handle in session.answer_to]
        session.answer_to = []
        return effects

    # -- updates ----------------------------------------------------------------------------

    def complete(self, session: Session) -> Effects:
        """A complete upload is here: a trip, counted or discarded."""
        assert session.upload is not None
        session.upload.is_folding = True
        self.counters["trips"] += 1
        return self._place(session)

    def _place(self, session: Session) -> Effects:
        if not regime.accepts(self.pipeline.config, session.version, self.ledger.version + 1):
            return self._discard(session, "round_over")
        if self.pipeline.is_past(session.seed_group):
            return self._discard(session, "seed_refused")
        until = keep_until(session.ticket.expires, self.pipeline.config, self._server)
        seed = session.sealed_seed, session.seed_group
        fold = self.pipeline.place(session.as_member(until), *seed)
        if fold is not None:
            return [fold]
        self._overflow.append(session.id)
        return []

    def on_folded(self, now: float, message: Folded) -> Effects:
        session = self.sessions.active.get(message.session)
        if session is None or not self.pipeline.knows(message):
            return []
        self._slots.release((self.task, session.id))
        if message.refused is not None:
            return self._on_refused(session, message, message.refused) + self.pipeline.pump(now)
        buffer = self.pipeline.fold(now, message)
        session.in_buffer = True
        effects: Effects = []
        if self.pipeline.acknowledges_folded:
            effects += self._acknowledge(session)
        if buffer.is_full and regime.ends_round_when_full(self.pipeline.config):
            effects += self._end_round()
        return effects + self.pipeline.pump(now)

    def _on_refused(self, session: Session, message: Folded, reason: DiscardReason) -> Effects:
        group = self.pipeline.refuse(message)
        if group is not None and session.seed_group is None:
            session.seed_group = group
            return self._send_again(session) + self._place_overflow()
        if self.offers is not None:
            self.offers.on_refused(reason, session.offer)
        session.upload = None
        return self._discard(session, reason) + self._place_overflow()

    def _discard(self, session: Session, reason: DiscardReason) -> Effects:
        return self._end(session, Completed(reason), f"discarded_{reason}")

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
        is_in = self.pipeline.current.has
        for session in [s for s in self.sessions.active.values() if not is_in(s.id)]:
            end = self._discard if session.is_complete else self.end
            effects += end(session, "round_over")
        return effects

    # -- storage ----------------------------------------------------------------------------

    def on_snapshotted(self, message: Snapshotted) -> Effects:
        """A cut may hold updates whose `Folded` is still on its way here."""
        effects = self.pipeline.on_snapshotted(message)
        for session_id in (session for found in message.sums for session in found.sessions):
            session = self.sessions.active.get(session_id)
            if session is not None:
                session.in_buffer = True
                self._slots.release((self.task, session_id))
        if self.pipeline.current.is_full and regime.ends_round_when_full(self.pipeline.config):
            effects += self._end_round()
        return effects

    def on_stepped(self, now: float, message: Stepped) -> Effects:
        life_s = ticket_life_s(self.pipeline.config, self._server)
        effects = self.pipeline.on_stepped(now, message, life_s)
        if message.dropped:
            what = f"buffers_dropped_{message.dropped}" if effects else "steps_postponed"
            self.counters[what] += 1
        return effects

    def on_step_failed(self, message: StepFailed) -> Effects:
        """Nothing is published and nothing is lost: the record waits for the task's owner."""
        self.counters["steps_failed"] += 1
        return self._halt(message.reason)

    def on_lost(self, message: Lost) -> Effects:
        """The rows decide whether we are deposed; what is missing from fresh rows stays missing."""
        head = None if self.phase is TaskPhase.LOADING else self.ledger.version
        if head is None or head == self._lost_at:
            return self._halt(message.reason)
        self._lost_at = head
        return self.load()

    def _halt(self, reason: str) -> Effects:
        """Until its rows change. Its clients keep their sessions, not their places in memory."""
        self.phase = TaskPhase.HALTED
        self.halted_because = reason
        return self._send_all_again()

    def on_transacted(self, now: float, message: Transacted) -> Effects:
        if message.outcome == "refused":
            return self.pipeline.on_refused() or self.load()
        if message.outcome != "committed":
            return self.load()
        durable, has_advanced, effects = self.pipeline.on_committed(now)
        for session_id in durable:
            session = self.sessions.active.get(session_id)
            if session is not None:
                effects += self._acknowledge(session)
        if has_advanced:
            effects += self._on_version()
        return effects + self.pipeline.pump(now)

    def _acknowledge(self, session: Session) -> Effects:
        assert session.upload_ticket is not None
        self.staleness[session.upload_ticket.staleness] += 1
        return self._end(session, Completed(), "counted")

    def _on_version(self) -> Effects:
        self.counters["versions"] += 1
        self.may_want_more = True
        return [*self._abort_outdated(), *self._place_overflow()]

    def _abort_outdated(self) -> Effects:
        """Paper: "After every server model update, the aggregator aborts clients whose staleness
        is larger than a configurable parameter, maximum staleness."
        """
        oldest = self.ledger.oldest_allowed(self.pipeline.max_staleness)
        effects: Effects = []
        for session in list(self.sessions.active.values()) if self.is_over else ():
            effects += self.end(session, "task_over")
        for session in self.sessions.training_from(range(oldest)):
            effects += self.end(session, "stale")
        return effects

    # -- time -------------------------------------------------------------------------------

    def wake(self, now: float) -> Effects:
        self._swept_at = now
        return [*self.expire(now), *self.refill(now), *self.pipeline.pump(now)]

    def refill(self, now: float) -> Effects:
        offers = None if self.is_over else self.offers
        return [] if offers is None else offers.refill(now, self.pipeline)

    def next_wake(self) -> float:
        if self.phase is not TaskPhase.SERVING:
            return float("inf")
        # Deadlines are swept together: most have moved or become pointless when they come.
        sweep = max(self.sessions.next_deadline(), self._swept_at + self._sweep_s)
        due = min(sweep, self.pipeline.next_wake())
        return due if self.offers is None or self.is_over else min(due, self.offers.next_wake())

    def check(self) -> None:
        if self.phase is TaskPhase.SERVING:
            self.sessions.check(self.pipeline.config.concurrency)
            self.pipeline.check()
