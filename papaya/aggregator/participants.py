"""Which client a request is from: its ticket leads to its session (paper, "Client Independence").

    "transient client failures do not cause clients to dropout because the client protocol is based
    on virtual sessions"

A client with an assignment joins if there is a slot for it. A session that is unknown here but
shows a valid ticket belonged to an earlier holder and is adopted if there is room. A session that
has ended gets the same final answer again. A device has one session at a time: a new one replaces
the earlier one, unless the update of that one is complete. Revoked devices may not take part.
"""

from __future__ import annotations

from collections import Counter
from hmac import compare_digest

from papaya.aggregator import regime
from papaya.aggregator.endings import Endings
from papaya.aggregator.ledger import Ledger
from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.revisions import Revisions
from papaya.aggregator.sessions import Session, Sessions, session_life_s
from papaya.aggregator.slots import Slots
from papaya.aggregator.update_queue import BUSY_RETRY_S, UpdateQueue
from papaya.config import ServerConfig
from papaya.errors import InvariantError, TicketError
from papaya.machine import Effects
from papaya.messages.base import Message, SessionId
from papaya.messages.participation import Aborted, Completed, Retry
from papaya.messages.tickets import (
    AnyTicket,
    AssignmentTicket,
    Keyring,
    SessionTicket,
    UploadTicket,
    pseudonym_of,
)

_REPLACED = Aborted("replaced")


class SessionEnded(Exception):
    """Not an error: the session is over or cannot start, and `answer` tells the client so."""

    def __init__(self, answer: Message) -> None:
        super().__init__(answer)
        self.answer = answer


class Participants:
    """Finds, admits and adopts the clients of a task.

    Invariant: a revoked device uploads nothing.
    """

    def __init__(
        self,
        sessions: Sessions,
        slots: Slots,
        endings: Endings,
        queue: UpdateQueue,
        keyring: Keyring,
        server: ServerConfig,
        counters: Counter[str],
    ) -> None:
        self._sessions = sessions
        self._slots = slots
        self._endings = endings
        self._queue = queue
        self._keyring = keyring
        self._server = server
        self._counters = counters
        # Devices that may not take part, by identity and by their pseudonyms in this task.
        self.revoked_devices: tuple[str, ...] = ()
        self.revoked: frozenset[bytes] = frozenset()
        # Effects of ending other sessions before the current request is answered.
        self.replaced: Effects = []
        # Set by each load.
        self._pipeline: Pipeline
        self._ledger: Ledger
        self._revisions: Revisions

    def load(self, pipeline: Pipeline, revisions: Revisions) -> None:
        self._pipeline = pipeline
        self._ledger = pipeline.ledger
        self._revisions = revisions

    # -- known clients ----------------------------------------------------------------------

    def touch(self, now: float, sealed: bytes, claim: AnyTicket) -> bool:
        """Note that a client is alive, if it shows the ticket that its session has here."""
        session = self._sessions.active.get(claim.session)
        if session is None or self.revoked or not _is_known(sealed, session):
            return False
        session.seen_at = now
        return True

    def participant(self, now: float, sealed: bytes, claim: AnyTicket) -> Session:
        """The session of a heartbeat, report or leave, which carry a session or upload ticket."""
        session = self._sessions.active.get(claim.session)
        if session is not None and _is_known(sealed, session):
            session.seen_at = now
            return session
        if isinstance(claim, UploadTicket):
            return self.uploader(now, sealed, claim)
        ticket = self._keyring.open(sealed, SessionTicket)
        self._raise_if_ended(ticket)
        if now >= max(ticket.expires, _kept_until(ticket, session)):
            raise TicketError("the session has expired")
        if session is None:
            if (reason := self._revisions.why_outdated(ticket)) is not None:
                raise SessionEnded(Aborted(reason))
            session = self._adopt(now, ticket, sealed)
        elif session.is_training:
            self._sessions.rebase(session, ticket, sealed)
        session.seen_at = now
        return session

    def uploader(self, now: float, sealed: bytes, claim: AnyTicket) -> Session:
        """The session of a chunk or a completion."""
        session = self._sessions.active.get(claim.session)
        if session is None or not compare_digest(sealed, session.upload_sealed):
            ticket = self._keyring.open(sealed, UploadTicket)
            self._raise_if_ended(ticket)
            if now >= max(ticket.upload_by, _kept_until(ticket, session)):
                raise TicketError("the upload deadline has passed")
            if session is None and not self._revisions.may_go_on(ticket.manifest):
                raise SessionEnded(Aborted("revised"))
            if not regime.accepts(self._pipeline.config, ticket.version, self._ledger.version + 1):
                raise SessionEnded(Aborted(self._revisions.unless_revised(ticket, "round_over")))
            if ticket.version < self._ledger.void_below:
                raise SessionEnded(Aborted("stale"))
            if session is None:
                session = self._adopt(now, ticket, b"")
            if not session.is_complete:
                # A duplicate of the report may have been granted a second ticket here, with
                # another offer. The client works with the ticket that it shows.
                known = session.upload_ticket
                if known is None or known.offer != ticket.offer:
                    session.offer = None
                self._sessions.rebase(session, ticket, b"")
                self._sessions.reported(session, ticket, sealed)
        session.seen_at = now
        return session

    def _raise_if_ended(self, ticket: AnyTicket) -> None:
        ended = self._sessions.ended.get(ticket.session)
        if ended is not None:
            raise SessionEnded(ended[0])
        # The rows decide, not the answers above: those are dropped when this clock says so.
        if ticket.session not in self._sessions.active and self._pipeline.counts(ticket.session):
            raise SessionEnded(Completed())

    # -- new clients ------------------------------------------------------------------------

    def join(self, now: float, sealed: bytes) -> Session:
        """The session of a client that was assigned to the task."""
        ticket = self._keyring.open(sealed, AssignmentTicket)
        self._raise_if_ended(ticket)
        session = self._sessions.active.get(ticket.session)
        if session is None:
            session = self._admit(now, ticket)
        elif not session.sealed:
            session.sealed = self._keyring.seal(session.as_session_ticket())
        return session

    def _admit(self, now: float, assignment: AssignmentTicket) -> Session:
        if assignment.version < self._ledger.optimizer.settled:
            raise SessionEnded(Aborted("stale"))
        if now > assignment.confirm_by:
            raise TicketError("the assignment was not confirmed in time")
        if self._pipeline.is_over:
            raise SessionEnded(Aborted("task_over"))
        is_leased = self._slots.promises.cover(assignment)
        if not self._revisions.is_current(assignment.manifest):
            # The device has a bundle of another revision: it fetches this one after a check-in.
            self._use_up(assignment, Aborted("revised"), is_leased=is_leased)
            raise SessionEnded(Aborted("revised"))
        if not self._slots.admits_joins:
            raise SessionEnded(Retry("the round is closing", BUSY_RETRY_S))
        earlier = self._earlier_session(assignment)
        if earlier is not None and earlier.is_complete:
            # Its update cannot be withdrawn, so this session ends as it begins.
            self._use_up(assignment, _REPLACED, is_leased=is_leased)
            raise SessionEnded(_REPLACED)
        self._raise_if_full(earlier, is_leased=is_leased)
        newest, pinned = self._ledger.newest, self._pipeline.config.evaluates
        ticket = SessionTicket(
            self._ledger.task,
            assignment.session,
            self._ledger.fence.seq,
            newest.version,
            newest.parameters if pinned is None else pinned.parameters,
            expires=now + session_life_s(self._ledger.terms[assignment.manifest], self._server),
            pseudonym=assignment.pseudonym,
            manifest=assignment.manifest,
        )
        session = Session(ticket, self._keyring.seal(ticket), now)
        self._add(session, earlier, is_leased=is_leased)
        return session

    def _adopt(self, now: float, ticket: SessionTicket | UploadTicket, sealed: bytes) -> Session:
        """Continue a session of an earlier holder, so that the client's training is not lost."""
        earlier = self._earlier_session(ticket)
        if earlier is not None and earlier.is_complete:
            reason = "the last update of this device is being processed"
            raise SessionEnded(Retry(reason, BUSY_RETRY_S))
        if earlier is not None and earlier.ticket.expires >= ticket.expires:
            raise SessionEnded(_REPLACED)  # it joined later than this one
        is_leased = self._slots.promises.inherits(ticket.session)
        self._raise_if_full(earlier, is_leased=is_leased)
        session = Session(ticket, sealed, now)
        self._add(session, earlier, is_leased=is_leased)
        return session

    def give_up(self, now: float, sealed: bytes) -> Session | None:
        """A client that has not joined, because it has to fetch the task's bundle first, gives its
        assignment back. This is no participation, so it is not counted.

        Returns the session of a client that has joined: it has not ended.
        """
        ticket = self._keyring.open(sealed, AssignmentTicket)
        self._raise_if_ended(ticket)
        session = self._sessions.active.get(ticket.session)
        if session is None:
            if now > ticket.confirm_by:
                raise TicketError("the assignment was not confirmed in time")
            is_leased = self._slots.promises.cover(ticket)
            self._use_up(ticket, Aborted("left"), is_leased=is_leased)
        return session

    def _earlier_session(self, ticket: AnyTicket) -> Session | None:
        """The session of the same device that a new one replaces, unless its update is complete.
        Raises if the device is revoked.
        """
        if ticket.pseudonym in self.revoked:
            raise SessionEnded(Aborted("revoked"))
        return self._sessions.of_device(ticket.pseudonym)

    def _raise_if_full(self, earlier: Session | None, *, is_leased: bool) -> None:
        """A new session may also have the slot of the `earlier` one, which it replaces."""
        free = self._slots.client_demand if is_leased else self._slots.room
        if free + (earlier is not None) < 1:
            # While the last version is made, no slot comes free.
            raise SessionEnded(Aborted("task_over" if self._pipeline.has_all_updates else "full"))

    def _add(self, session: Session, earlier: Session | None, *, is_leased: bool) -> None:
        """The client takes a slot. Its device's `earlier` session ends."""
        if earlier is not None:
            self.replaced += self._endings.abort(earlier, "replaced") + self._queue.place_waiting()
        self._sessions.admit(session)
        self._slots.take(session.id, is_leased=is_leased)
        self._counters["joined" if is_leased else "adopted"] += 1

    def _use_up(self, assignment: AssignmentTicket, answer: Aborted, *, is_leased: bool) -> None:
        """The session ends as it begins, with this answer."""
        self._sessions.remember(assignment.session, answer, assignment.confirm_by)
        self._slots.use_up(assignment.session, is_leased=is_leased)

    # -- revoked devices --------------------------------------------------------------------

    def end_revoked(self) -> Effects:
        """End sessions of revoked devices, except those whose update is being folded."""
        key = self._ledger.pseudonym_key
        found = (pseudonym_of(device, key) for device in self.revoked_devices)
        pseudonyms = [pseudonym for pseudonym in found if pseudonym]
        self.revoked = frozenset(pseudonyms)
        effects: Effects = []
        for pseudonym in pseudonyms:
            session = self._sessions.of_device(pseudonym)
            if session is not None and not session.is_complete:
                effects += self._endings.abort(session, "revoked")
        return effects

    def is_revoked(self, session_id: SessionId) -> bool:
        """Has a revoked device an active session whose update can be withdrawn?"""
        session = self._sessions.active.get(session_id)
        return session is not None and session.pseudonym in self.revoked and not session.is_complete

    def check(self) -> None:
        for session in self._sessions.active.values() if self.revoked else ():
            is_uploading = session.upload is not None and not session.is_complete
            if is_uploading and session.pseudonym in self.revoked:
                raise InvariantError(f"a revoked device uploads in session {session.id}")


def _is_known(sealed: bytes, session: Session) -> bool:
    """Is it exactly the ticket that was sealed before? Then it need not be opened again."""
    return compare_digest(sealed, session.sealed) or compare_digest(sealed, session.upload_sealed)


def _kept_until(ticket: SessionTicket | UploadTicket, session: Session | None) -> float:
    """The client may show its first ticket although the session was extended since then."""
    return ticket.kept_until if session is None else max(ticket.kept_until, session.kept_until)
