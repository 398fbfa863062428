"""The six requests of a participating client, answered for one task.

Paper, "Client Independence": "transient client failures do not cause clients to dropout because the
client protocol is based on virtual sessions". So: a request that arrives twice gets the same answer
twice; a session that is not known here but has a valid ticket was a predecessor's and is adopted
while there is room; an ended session is told how it ended.
"""

from __future__ import annotations

from hmac import compare_digest

from papaya.aggregator import regime
from papaya.aggregator.held_task import HeldTask
from papaya.aggregator.sessions import Session, session_life_s
from papaya.aggregator.upload import (
    Slots,
    Upload,
    buffers_of,
    chunk_count,
    chunk_length,
    crc32,
)
from papaya.aggregator.work import Drop, Keep
from papaya.config import ServerConfig
from papaya.errors import TicketError
from papaya.learning.weighting import capped
from papaya.machine import Effects, Handle, Reply
from papaya.messages.base import Message
from papaya.messages.participation import (
    Aborted,
    Alive,
    Chunk,
    ChunkOffer,
    ChunkReceived,
    Complete,
    Heartbeat,
    Incomplete,
    Join,
    Joined,
    Leave,
    Left,
    Refused,
    Report,
    Retry,
    Ticketed,
    UploadGranted,
)
from papaya.messages.tickets import (
    AnyTicket,
    AssignmentTicket,
    Keyring,
    SessionTicket,
    UploadTicket,
)

_BUSY_RETRY_S = 0.5


class SessionEnded(Exception):
    """Not an error: the session is over (or cannot begin), and this is the answer."""

    def __init__(self, answer: Message) -> None:
        super().__init__(answer)
        self.answer = answer


class Participation:
    """Answers clients of any held task. Keeps no state of its own."""

    def __init__(self, config: ServerConfig, keyring: Keyring, slots: Slots) -> None:
        self._config = config
        self._keyring = keyring
        self._slots = slots

    def answer(
        self,
        now: float,
        held: HeldTask,
        request: Ticketed,
        claim: AnyTicket,
        reply_to: Handle,
    ) -> Effects:
        if claim.seq > held.fence.seq:
            return [Reply(reply_to, Retry("the task has moved", 0.0))]
        try:
            match request:
                case Heartbeat():
                    self._participant(now, held, request.ticket, claim)
                    return [Reply(reply_to, Alive())]
                case Join():
                    return [Reply(reply_to, self._join(now, held, request))]
                case Chunk():
                    session = self._uploader(now, held, request.ticket, claim)
                    return self._chunk(now, held, session, request, reply_to)
                case ChunkOffer():
                    session = self._uploader(now, held, request.ticket, claim)
                    answer = self._why_no_body(now, held, session, request, request.length)
                    return [] if answer is None else [Reply(reply_to, answer)]
                case Complete():
                    session = self._uploader(now, held, request.ticket, claim)
                    return self._complete(held, session, request, reply_to)
                case Report():
                    session = self._participant(now, held, request.ticket, claim)
                    return self._report(now, held, session, request, reply_to)
                case Leave():
                    session = self._participant(now, held, request.ticket, claim)
                    return self._leave(held, session, reply_to)
        except SessionEnded as ended:
            has_left = isinstance(request, Leave) and ended.answer == Aborted("left")
            return [Reply(reply_to, Left() if has_left else ended.answer)]
        except TicketError as error:
            return [Reply(reply_to, Refused(str(error), error.hint))]

    # -- finding the session ----------------------------------------------------------------

    def _participant(self, now: float, held: HeldTask, sealed: bytes, claim: AnyTicket) -> Session:
        """The session of a heartbeat, report or leave; these carry either kind of later ticket."""
        session = held.sessions.active.get(claim.session)
        if session is not None and _is_known(sealed, session):
            session.seen_at = now
            return session
        if isinstance(claim, UploadTicket):
            return self._uploader(now, held, sealed, claim)
        ticket = self._keyring.open(sealed, SessionTicket)
        self._tell_if_ended(held, ticket)
        if now >= ticket.expires:
            raise TicketError("the session has expired")
        if session is None:
            if ticket.version < held.ledger.oldest_allowed(held.pipeline.max_staleness):
                raise SessionEnded(Aborted("stale"))
            session = self._adopt(now, held, ticket, sealed)
        elif session.is_training:
            held.sessions.rebase(session, ticket, sealed)
        session.seen_at = now
        return session

    def _uploader(self, now: float, held: HeldTask, sealed: bytes, claim: AnyTicket) -> Session:
        """The session of a chunk or a completion."""
        session = held.sessions.active.get(claim.session)
        if session is None or not compare_digest(sealed, session.upload_sealed):
            ticket = self._keyring.open(sealed, UploadTicket)
            self._tell_if_ended(held, ticket)
            if now >= ticket.upload_by:
                raise TicketError("the upload came too late")
            if not regime.accepts(held.ledger.config, ticket.version, held.ledger.version + 1):
                raise SessionEnded(Aborted("round_over"))
            if ticket.version < held.ledger.restarted_at:
                raise SessionEnded(Aborted("stale"))
            if session is None:
                session = self._adopt(now, held, ticket, b"")
            if not session.is_complete:
                # A doubled report may have been granted another ticket, with another offer, here:
                # the one that the client shows is the one it has worked for.
                held.sessions.rebase(session, ticket, b"")
                held.sessions.reported(session, ticket, sealed)
                session.offer = None
        session.seen_at = now
        return session

    def _adopt(
        self,
        now: float,
        held: HeldTask,
        ticket: SessionTicket | UploadTicket,
        sealed: bytes,
    ) -> Session:
        """A predecessor's client: its training is not lost while there is room for it."""
        if held.room < 1:
            raise SessionEnded(Aborted("task_over" if held.is_over else "full"))
        session = Session(ticket, sealed, now)
        held.admit(session, is_leased=False)
        return session

    def _tell_if_ended(self, held: HeldTask, ticket: AnyTicket) -> None:
        ended = held.sessions.ended.get(ticket.session)
        if ended is not None:
            raise SessionEnded(ended[0])

    # -- the requests -----------------------------------------------------------------------

    def _join(self, now: float, held: HeldTask, request: Join) -> Message:
        ticket = self._keyring.open(request.ticket, AssignmentTicket)
        self._tell_if_ended(held, ticket)
        session = held.sessions.active.get(ticket.session)
        if session is None:
            session = self._admit(now, held, ticket)
        elif not session.sealed:
            session.sealed = self._keyring.seal(_session_ticket(session))
        config = held.ledger.config
        pinned = config.evaluates
        return Joined(
            ticket=session.sealed,
            task=held.task,
            session=session.id,
            version=session.version,
            parameters=session.ticket.parameters,
            model_length=config.model_length if pinned is None else pinned.model_length,
            update_length=config.model_length,
            evaluates=pinned is not None,
            heartbeat_s=self._config.heartbeat_s,
            training_timeout_s=config.training_timeout_s,
            participation_gap_s=config.participation_gap_s,
            max_participations=config.max_participations,
            secure=config.secure_aggregation is not None,
        )

    def _admit(self, now: float, held: HeldTask, assignment: AssignmentTicket) -> Session:
        if now > assignment.confirm_by:
            raise TicketError("the assignment was not confirmed in time")
        if held.is_over:
            raise SessionEnded(Aborted("task_over"))
        if not regime.admits_joins(held.ledger.config, held.pipeline.current.is_full):
            raise SessionEnded(Retry("the round is closing", _BUSY_RETRY_S))
        is_leased = held.promises.cover(assignment)
        if (held.config_demand if is_leased else held.room) < 1:
            raise SessionEnded(Aborted("full"))
        newest, pinned = held.ledger.newest, held.ledger.config.evaluates
        life_s = session_life_s(held.ledger.config, self._config)
        ticket = SessionTicket(
            held.task,
            assignment.session,
            held.fence.seq,
            newest.version,
            newest.parameters if pinned is None else pinned.parameters,
            expires=now + life_s,
        )
        session = Session(ticket, self._keyring.seal(ticket), now)
        held.admit(session, is_leased=is_leased)
        return session

    def _report(
        self, now: float, held: HeldTask, session: Session, request: Report, reply_to: Handle
    ) -> Effects:
        if session.upload_ticket is None:
            staleness = self._staleness(held, session)
            if session.version < held.ledger.oldest_allowed(held.pipeline.max_staleness):
                return [*held.end(session, "stale"), Reply(reply_to, Aborted("stale"))]
            if not self._grant(now, held, session, staleness, request.examples):
                return [Reply(reply_to, Retry("the TSA makes offers", _BUSY_RETRY_S))]
        ticket = session.upload_ticket
        assert ticket is not None
        granted = UploadGranted(
            ticket=session.upload_sealed,
            version=ticket.version + ticket.staleness,
            chunk_bytes=self._config.chunk_bytes,
            upload_timeout_s=held.ledger.config.upload_timeout_s,
            secure=session.offer,
        )
        return [Reply(reply_to, granted)]

    def _staleness(self, held: HeldTask, session: Session) -> int:
        """Versions made since the client's own initial version; frozen from here on."""
        return held.ledger.version - session.version

    def _grant(
        self, now: float, held: HeldTask, session: Session, staleness: int, examples: int
    ) -> bool:
        """False while there is no offer of the TSA to give."""
        config, index = held.ledger.config, -1
        if held.offers is not None:
            found = held.offers.take(now)
            if found is None:
                return False
            index, session.offer = found[0].index, found[1]
        ticket = UploadTicket(
            *_session_fields(session),
            staleness=staleness,
            examples=capped(examples, config.max_examples),
            upload_by=now + config.upload_timeout_s,
            offer=index,
        )
        held.sessions.reported(session, ticket, self._keyring.seal(ticket))
        return True

    def _chunk(
        self, now: float, held: HeldTask, session: Session, chunk: Chunk, reply_to: Handle
    ) -> Effects:
        answer = self._why_no_body(now, held, session, chunk, len(chunk.data))
        if answer is not None:
            return [Reply(reply_to, answer)]
        if crc32(chunk.data) != chunk.crc32:
            # With nothing to keep there is no claim on the slot that the offer was given.
            released = held.reclaim_slot(session) if session.upload is None else []
            return [*released, Reply(reply_to, Retry("the chunk was damaged on its way", 0.0))]
        self._slots.touch(now, (held.task, session.id))
        size, piece = held.ledger.config.update_bytes, self._config.chunk_bytes
        upload = session.upload
        effects: Effects = []
        if upload is None or upload.id != chunk.upload:
            if upload is not None:
                effects.append(Drop(held.task, held.fence.seq, session.id))
            upload = session.upload = Upload(chunk.upload, chunk_count(size, piece))
        del upload.missing[chunk.index]
        effects.append(Keep(held.task, session.id, chunk.index * piece, chunk.data, size))
        return [*effects, Reply(reply_to, ChunkReceived(chunk.upload, chunk.index))]

    def _why_no_body(
        self, now: float, held: HeldTask, session: Session, chunk: Chunk | ChunkOffer, length: int
    ) -> Message | None:
        """The answer to a chunk whose bytes are not wanted.

        None when they are: then the upload has its slot, so that only those bodies arrive whose
        updates there is memory for. Announcing bytes is no progress, only bytes are.
        """
        received = ChunkReceived(chunk.upload, chunk.index)
        if session.is_complete:
            return received
        size, piece = held.ledger.config.update_bytes, self._config.chunk_bytes
        count = chunk_count(size, piece)
        expected = chunk_length(size, piece, chunk.index)
        if chunk.index >= count:
            return Refused(f"there is no chunk {chunk.index}: an update has {count}, from 0 on")
        if length != expected:
            return Refused(f"chunk {chunk.index} of {count} has {length} bytes, not {expected}")
        upload = session.upload
        if upload is not None and upload.id == chunk.upload and upload.has(chunk.index):
            return received  # known already: no progress, so no claim on the slot
        if upload is not None and upload.id != chunk.upload and chunk.index > 0:
            return Refused("another upload begins with chunk 0")
        owner, buffers = (held.task, session.id), buffers_of(held.ledger.config, piece)
        if not self._slots.has_room(owner, buffers):
            held.turned_away += 1
            return Retry("all upload slots are taken", _BUSY_RETRY_S)
        self._slots.take(now, owner, buffers)
        return None

    def _complete(
        self, held: HeldTask, session: Session, request: Complete, reply_to: Handle
    ) -> Effects:
        upload = session.upload
        if upload is None or upload.id != request.upload:
            count = chunk_count(held.ledger.config.update_bytes, self._config.chunk_bytes)
            return [Reply(reply_to, Incomplete(tuple(range(count))))]
        if upload.missing:
            return [Reply(reply_to, Incomplete(tuple(upload.missing)))]
        if held.offers is not None and not request.sealed:
            return [Reply(reply_to, Refused("the sealed seed of the mask is missing"))]
        session.sealed_seed = session.sealed_seed or request.sealed
        effects = session.await_answer(reply_to)
        return effects if upload.is_folding else [*effects, *held.complete(session)]

    def _leave(self, held: HeldTask, session: Session, reply_to: Handle) -> Effects:
        if session.is_complete:
            return session.await_answer(reply_to)  # too late to take it back: tell how it ends
        return [*held.end(session, "left"), Reply(reply_to, Left())]


def _is_known(sealed: bytes, session: Session) -> bool:
    """The very ticket that was sealed before: no need to open it again."""
    return compare_digest(sealed, session.sealed) or compare_digest(sealed, session.upload_sealed)


def _session_fields(session: Session) -> tuple[str, str, int, int, str, float]:
    ticket = session.ticket
    return (
        ticket.task,
        ticket.session,
        ticket.seq,
        ticket.version,
        ticket.parameters,
        ticket.expires,
    )


def _session_ticket(session: Session) -> SessionTicket:
    return SessionTicket(*_session_fields(session))
