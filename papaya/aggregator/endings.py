"""How the sessions of a task end: what the client is told, what is counted, what is freed.

A session ends as counted, discarded (the update is here, but does not count) or aborted. See
`papaya/messages/reasons.py` for the reasons. Every ending frees the slot, the memory for the upload
and the place in a buffer. Its answer is kept for later requests of the client.
"""

from __future__ import annotations

from collections import Counter

from papaya.aggregator.ledger import Ledger
from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.revisions import Revisions
from papaya.aggregator.sessions import Session, Sessions, keep_until
from papaya.aggregator.slots import Slots
from papaya.aggregator.upload import UploadMemory
from papaya.aggregator.work import Drop
from papaya.config import ServerConfig
from papaya.machine import Effects, Reply
from papaya.messages.participation import (
    Aborted,
    AbortReason,
    Completed,
    DiscardReason,
    Incomplete,
    Retry,
)
from papaya.messages.reasons import CANDIDATE_COUNTED, CANDIDATE_FAILED, is_failure


class Endings:
    """Ends sessions: single ones, and all that a rule applies to."""

    def __init__(
        self,
        sessions: Sessions,
        slots: Slots,
        memory: UploadMemory,
        server: ServerConfig,
        counters: Counter[str],
    ) -> None:
        self._sessions = sessions
        self._slots = slots
        self._memory = memory
        self._server = server
        # How often sessions ended in which way, and the staleness of counted updates.
        self._counters = counters
        self.staleness: Counter[int] = Counter()
        # Set by each load.
        self._pipeline: Pipeline
        self._ledger: Ledger
        self._revisions: Revisions

    def load(self, pipeline: Pipeline, revisions: Revisions) -> None:
        self._pipeline = pipeline
        self._ledger = pipeline.ledger
        self._revisions = revisions

    # -- one session ------------------------------------------------------------------------

    def abort(self, session: Session, reason: AbortReason) -> Effects:
        return self._end(session, Aborted(reason), f"aborted_{reason}")

    def discard(self, session: Session, reason: DiscardReason) -> Effects:
        return self._end(session, Completed(reason), f"discarded_{reason}")

    def acknowledge(self, session: Session) -> Effects:
        """The update is counted."""
        assert session.upload_ticket is not None
        self.staleness[session.upload_ticket.staleness] += 1
        return self._end(session, Completed(), "counted")

    def _end(self, session: Session, answer: Completed | Aborted, counter: str) -> Effects:
        self.count(session, counter)
        self._slots.may_want_more = True
        effects = self.answer(session, answer)
        self._pipeline.give_place_up(session.id)
        self._sessions.end(session, answer, self.keep_until(session))
        if self._memory.holds(session.claim):
            self._memory.release(session.claim)
            effects.append(Drop(self._ledger.task, self._ledger.fence.seq, session.id))
        return effects

    def count(self, session: Session, ending: str) -> None:
        """Count an ending; in a rollout also whether it speaks for or against the candidate."""
        self._counters[ending] += 1
        if session.manifest == self._ledger.judged:
            if ending == "counted":
                self._counters[CANDIDATE_COUNTED] += 1
            elif is_failure(ending):
                self._counters[CANDIDATE_FAILED] += 1

    def keep_until(self, session: Session) -> float:
        """Until then the client may ask for its answer: no later ticket of it is valid."""
        terms = self._revisions.terms(session.manifest)
        until = keep_until(session.ticket.expires, terms, self._server)
        return max(until, session.kept_until + self._server.heartbeat_s)

    def answer(self, session: Session, answer: Completed | Aborted | Incomplete | Retry) -> Effects:
        """Answer the requests that wait for the outcome of the update."""
        effects: Effects = [Reply(handle, answer) for handle in session.answer_to]
        session.answer_to = []
        return effects

    # -- uploads that do not end their sessions ---------------------------------------------

    def drop_upload(self, session: Session) -> Effects:
        """Drop what was received of the upload; the client sends the chunks again later."""
        session.upload = None
        self._sessions.refile(session)
        self._memory.release(session.claim)
        return [Drop(self._ledger.task, self._ledger.fence.seq, session.id)]

    def request_again(self, session: Session) -> Effects:
        """Drop the upload and tell the client to send all of its chunks again."""
        assert session.upload is not None
        missing = Incomplete(tuple(range(session.upload.chunks)))
        return self.answer(session, missing) + self.drop_upload(session)

    def request_all_again(self) -> Effects:
        uploading = [s for s in self._sessions.active.values() if s.upload is not None]
        return [effect for session in uploading for effect in self.request_again(session)]

    # -- many sessions ----------------------------------------------------------------------

    def settle(self) -> Effects:
        """Acknowledge what the rows count; ask for every other upload again.

        An update that was folded but not durable is gone: the sums are restored from the rows.
        """
        effects: Effects = []
        for member in self._ledger.members():
            session = self._sessions.active.get(member.session)
            if session is not None:
                effects += self.acknowledge(session)
        return effects + self.request_all_again()

    def abort_expired(self, now: float) -> Effects:
        effects: Effects = []
        for session in self._sessions.expired(now):
            is_silent = session.seen_at + self._server.dead_after_s <= now
            effects += self.abort(session, "silent" if is_silent else "timed_out")
        return effects

    def abort_outdated(self) -> Effects:
        """Paper: "After every server model update, the aggregator aborts clients whose staleness
        is larger than a configurable parameter, maximum staleness."
        """
        oldest = self._ledger.oldest_allowed(self._pipeline.max_staleness)
        effects: Effects = []
        for session in list(self._sessions.active.values()) if self._pipeline.is_over else ():
            effects += self.abort(session, "task_over")
        for session in self._sessions.training_from(range(oldest)):
            effects += self.abort(session, self._revisions.why_outdated(session.ticket) or "stale")
        return effects

    def end_round(self) -> Effects:
        """SyncFL: "users that are still training are aborted"."""
        effects: Effects = []
        is_in = self._pipeline.current.has
        for session in [s for s in self._sessions.active.values() if not is_in(s.id)]:
            end = self.discard if session.is_complete else self.abort
            effects += end(session, "round_over")
        return effects
