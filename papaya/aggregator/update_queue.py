"""Complete updates on their way into a buffer (paper: the aggregator's "in-memory queue").

    Complete ─▶ place ─▶ Fold ─▶ Folded ─▶ in the sum, or refused
                  └▶ waits for a buffer with room, or for the TSA

An update is discarded if no buffer can take it: its round is over, its device has an update in
every open buffer, or its client joined under a manifest that is no longer served.

Secure aggregation: while the TSA does not answer, updates wait for it, and their sessions are kept.
What the TSA may have taken is not lost: only a member of the same buffer can use the seed, so the
place in that buffer is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from msgspec.structs import replace

from papaya.aggregator import regime
from papaya.aggregator.endings import Endings
from papaya.aggregator.ledger import Ledger
from papaya.aggregator.offers import Offers, Stocks
from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.revisions import Revisions
from papaya.aggregator.sessions import Session, Sessions
from papaya.aggregator.slots import Slots
from papaya.aggregator.upload import UploadMemory
from papaya.aggregator.work import REVISED, Folded
from papaya.config import ServerConfig
from papaya.machine import Effects
from papaya.messages.base import SessionId
from papaya.messages.participation import DiscardReason, Retry
from papaya.messages.tickets import Keyring

BUSY_RETRY_S = 0.5
"""When a client should ask again for something that is usually possible at once."""


class UpdateQueue:
    """The complete updates of a task until they are in a sum, in order of arrival."""

    def __init__(
        self,
        sessions: Sessions,
        slots: Slots,
        endings: Endings,
        memory: UploadMemory,
        keyring: Keyring,
        server: ServerConfig,
    ) -> None:
        self._sessions = sessions
        self._slots = slots
        self._endings = endings
        self._memory = memory
        self._keyring = keyring
        self._server = server
        # Sessions whose complete uploads wait for a buffer with room, in order of arrival.
        self.waiting: deque[SessionId] = deque()
        # Set by each load. The offers of the TSA are None unless the task is secure.
        self._pipeline: Pipeline
        self._ledger: Ledger
        self._revisions: Revisions
        self._offers: Stocks | None

    def load(self, pipeline: Pipeline, revisions: Revisions, offers: Stocks | None) -> None:
        self.waiting.clear()
        self._pipeline = pipeline
        self._ledger = pipeline.ledger
        self._revisions = revisions
        self._offers = offers

    def keep_places(self) -> None:
        """For updates whose seeds may be in a group: no other buffer can use them."""
        for session in self._sessions.active.values():
            if session.seed_group is not None:
                self._pipeline.keep_place(session.id, session.manifest, session.seed_group)

    # -- into a buffer ----------------------------------------------------------------------

    def place(self, session: Session) -> Effects:
        """Fold a complete upload into a buffer, or queue it until one has room."""
        manifest = session.manifest
        if not self._revisions.may_go_on(manifest):
            return self._endings.discard(session, "revised")
        if not regime.accepts(self._pipeline.config, session.version, self._ledger.version + 1):
            return self._endings.discard(
                session, self._revisions.unless_revised(session.ticket, "round_over")
            )
        if self._pipeline.is_past(session.seed_group):
            return self._endings.discard(
                session, self._revisions.unless_revised(session.ticket, "seed_refused")
            )
        if self._pipeline.is_counted(session.pseudonym, manifest, session.seed_group):
            return self._endings.discard(session, "already_counted")
        fold = self._pipeline.place(
            session.as_member(self._endings.keep_until(session)),
            manifest,
            session.sealed_seed,
            session.seed_group,
            may_open=self._may_open(manifest),
        )
        if fold is not None:
            return [fold]
        self.waiting.append(session.id)
        return []

    def place_waiting(self) -> Effects:
        effects: Effects = []
        if not self.waiting:
            return effects
        for session in self._take_waiting():
            effects += self.place(session)
        return effects

    def _take_waiting(self) -> Iterator[Session]:
        """Empty the queue, and yield the sessions that are still active."""
        waiting, self.waiting = self.waiting, deque()
        for session_id in waiting:
            session = self._sessions.active.get(session_id)
            if session is not None:
                yield session

    def drop_unfinished(self) -> Effects:
        """Ask for every upload again, except those that are being folded."""
        waiting, self.waiting = self.waiting, deque()
        unfinished = [
            session
            for session in self._sessions.active.values()
            if session.upload and (not session.is_complete or session.id in waiting)
        ]
        return [effect for session in unfinished for effect in self._endings.request_again(session)]

    def on_folded(self, now: float, message: Folded) -> Effects:
        session = self._sessions.active.get(message.session)
        pipeline = self._pipeline
        if session is None or not pipeline.knows(message):
            return []
        # An update that is kept for its rule stays in memory until it is durable.
        if message.refused is not None or not pipeline.keeps_members:
            self._memory.release(session.claim)
        if message.is_unanswered:
            return self._on_unanswered(now, session, message)
        if message.refused is not None:
            effects = self._on_refused(session, message, message.refused)
            return effects + pipeline.pump(now) + self.refill_offers(now)
        buffer = pipeline.fold(now, message)
        effects = []
        if pipeline.acknowledges_folded:
            effects += self._endings.acknowledge(session)
        if buffer.is_full and regime.ends_round_when_full(pipeline.config):
            effects += self._endings.end_round()
        return effects + pipeline.pump(now)

    def _on_refused(self, session: Session, message: Folded, reason: DiscardReason) -> Effects:
        group = self._pipeline.refuse(message)
        if group is not None and group != session.seed_group:
            session.seed_group = group
            return self._endings.request_again(session) + self.place_waiting()
        if (offers := self.offers_for(session)) is not None:
            offers.on_refused(reason, session.offer)
            if reason in ("seed_refused", "trusted_party_lost"):
                reason = self._revisions.unless_revised(session.ticket, reason)
        session.upload = None
        return self._endings.discard(session, reason) + self.place_waiting()

    # -- earlier manifests ------------------------------------------------------------------

    def _may_open(self, manifest: bytes) -> bool:
        """May an update be the first in a buffer? Under an earlier manifest of a secure or private
        task, only if there are enough clients to fill the buffer.
        """
        if not self._pipeline.is_bound or manifest == self._pipeline.manifest:
            return True
        return len(self._in_flight(manifest)) >= self._ledger.terms[manifest].aggregation_goal

    def _in_flight(self, manifest: bytes) -> list[Session]:
        """Clients under this manifest whose updates have no place in a buffer yet."""
        return [
            session
            for session in self._sessions.active.values()
            if session.manifest == manifest and not self._pipeline.holds(session.id)
        ]

    def end_revised(self, now: float) -> Effects:
        """In a secure or private task, give up the buffers of earlier manifests that can no longer
        be filled, and end the sessions of clients whose updates fit into no buffer.
        """
        if not self._pipeline.is_bound:
            return []
        if now < self._slots.adopts_until and self._slots.expected > 0:
            return []  # clients of the previous holder may still come
        effects: Effects = []
        for manifest, ends in list(self._revisions.served.items()):
            effects += self._end_manifest(now, manifest, is_over=now >= ends)
        return effects + self._pipeline.pump(now)

    def _end_manifest(self, now: float, manifest: bytes, *, is_over: bool) -> Effects:
        waiting = self._in_flight(manifest)
        left = 0 if is_over else len(waiting)
        unfilled = self._pipeline.unfilled(manifest)
        for buffer in unfilled:
            missing = buffer.goal - buffer.taken
            if missing > left:
                self._pipeline.give_up(now, [buffer], REVISED)
            else:
                left -= missing
        goal = self._ledger.terms[manifest].aggregation_goal
        if self._pipeline.unfilled(manifest) or left >= goal:
            return []
        del self._revisions.served[manifest]
        if self._offers is not None:
            self._offers.forget(manifest)
        effects: Effects = []
        for session in waiting:
            end = self._endings.discard if session.is_complete else self._endings.abort
            effects += end(session, "revised")
        return effects

    # -- the TSA ----------------------------------------------------------------------------

    @property
    def waits_for_tsa(self) -> bool:
        """The TSA is away or fails. What it holds is not lost, so updates wait for it."""
        offers = self._offers
        return offers is not None and (offers.current.is_away or self._pipeline.is_failing)

    def wait_for_tsa(self, now: float, session: Session) -> Retry:
        """The client is not at fault: keep its session long enough for a whole upload."""
        keep_s = session.keep(now, self._pipeline.config.upload_timeout_s)
        after_s = self._server.heartbeat_s / 4 if self.waits_for_tsa else BUSY_RETRY_S
        # With this ticket, a successor keeps the session until the same time.
        ticket = replace(session.upload_ticket or session.ticket, kept_until=session.kept_until)
        return Retry("waiting for the TSA", after_s, keep_s, self._keyring.seal(ticket))

    def free_waiting(self, now: float) -> Effects:
        """While the TSA does not answer, complete uploads that wait for a buffer hold no memory."""
        effects: Effects = []
        if self.waits_for_tsa:
            for session in self._take_waiting():
                effects += self._send_back(now, session)
        return effects

    def _send_back(self, now: float, session: Session) -> Effects:
        """Drop the upload; the client sends it again when it has waited."""
        retry = self.wait_for_tsa(now, session)
        return self._endings.answer(session, retry) + self._endings.drop_upload(session)

    def _on_unanswered(self, now: float, session: Session, message: Folded) -> Effects:
        """The TSA did not answer. It may have taken the seed into this group, where only a member
        of this buffer can use it: keep its place, and ask the client for the bytes again later.
        """
        assert self._offers is not None
        self._offers.current.on_unanswered()
        self._pipeline.postpone(message)
        session.seed_group = message.target
        session.seen_at = now  # the server kept the client waiting
        return self._send_back(now, session) + self.refill_offers(now)

    def offers_for(self, session: Session) -> Offers | None:
        """Offers under the public parameters that the client has agreed to."""
        if self._offers is None:
            return None
        return self._offers.under(self._revisions.terms(session.manifest))

    def refill_offers(self, now: float) -> Effects:
        if self._offers is None or self._pipeline.is_over:
            return []
        return self._offers.refill(now, self._pipeline)
