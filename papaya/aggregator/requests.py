"""The answers to requests of clients (`papaya/messages/participation.py`).

    Join ─▶ Joined         Report ─▶ UploadGranted     Heartbeat ─▶ Alive
    Chunk ─▶ ChunkReceived     Complete ─▶ Completed       Leave ─▶ Left

Other answers: `Retry` (not now), `Incomplete` (send these chunks), `Aborted` (the session is over)
and `Refused` (the client is at fault). A request that arrives twice gets the same answer twice. A
Complete is answered when the update is durable.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from papaya.aggregator.endings import Endings
from papaya.aggregator.ledger import Ledger
from papaya.aggregator.offers import Stocks
from papaya.aggregator.participants import Participants, SessionEnded
from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.revisions import Revisions
from papaya.aggregator.sessions import Session, Sessions
from papaya.aggregator.update_queue import BUSY_RETRY_S, UpdateQueue
from papaya.aggregator.upload import Claim, Upload, UploadMemory, chunk_count, chunk_length, crc32
from papaya.aggregator.work import Drop, Keep
from papaya.config import ServerConfig
from papaya.errors import TicketError
from papaya.learning.weighting import counted_examples
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
from papaya.messages.reasons import leave_code
from papaya.messages.tickets import AnyTicket, AssignmentTicket, Keyring

MOVED = Retry("the task has moved", 0.0, elsewhere=True)


class Draining(Enum):
    """The process is about to stop: nothing new begins here."""

    FINISHES_UPLOADS = "uploads that have begun may finish"
    DROPS_UPLOADS = "the time for uploads is over"


class Requests:
    """Answers what the clients of a task ask."""

    def __init__(
        self,
        participants: Participants,
        sessions: Sessions,
        endings: Endings,
        queue: UpdateQueue,
        memory: UploadMemory,
        keyring: Keyring,
        server: ServerConfig,
        counters: Counter[str],
        upload_url: str,
    ) -> None:
        self._participants = participants
        self._sessions = sessions
        self._endings = endings
        self._queue = queue
        self._memory = memory
        self._keyring = keyring
        self._server = server
        self._counters = counters
        # Where devices can upload without a selector in between.
        self._upload_url = upload_url
        # None unless the process is about to stop.
        self.draining: Draining | None = None
        # What uploads needed that were turned away since the last heartbeat. Part of the load.
        self.turned_away_bytes = 0
        # Set by each load. The offers of the TSA are None unless the task is secure.
        self._pipeline: Pipeline
        self._ledger: Ledger
        self._revisions: Revisions
        self._offers: Stocks | None

    def load(self, pipeline: Pipeline, revisions: Revisions, offers: Stocks | None) -> None:
        self._pipeline = pipeline
        self._ledger = pipeline.ledger
        self._revisions = revisions
        self._offers = offers

    def answer(self, now: float, request: Ticketed, claim: AnyTicket, reply_to: Handle) -> Effects:
        """Answer a request. `claim` is what its ticket says, not verified yet."""
        effects = self._serve(now, request, claim, reply_to)
        participants = self._participants
        if not participants.replaced:
            return effects
        replaced, participants.replaced = participants.replaced, []
        return replaced + effects

    def _serve(self, now: float, request: Ticketed, claim: AnyTicket, reply_to: Handle) -> Effects:
        if claim.seq > self._ledger.fence.seq:
            return [Reply(reply_to, MOVED)]
        participants = self._participants
        if participants.revoked and participants.is_revoked(claim.session):
            # Its update was being folded when the device was revoked, but was not counted.
            participants.replaced += participants.end_revoked() + self._queue.place_waiting()
        if self.draining is not None and self._begins_something(request, claim):
            return [Reply(reply_to, Retry("the task is about to move", BUSY_RETRY_S))]
        try:
            match request:
                case Heartbeat():
                    participants.participant(now, request.ticket, claim)
                    return [Reply(reply_to, Alive())]
                case Join():
                    session = participants.join(now, request.ticket)
                    return [Reply(reply_to, self._joined(session))]
                case Chunk():
                    session = participants.uploader(now, request.ticket, claim)
                    return self._chunk(now, session, request, reply_to)
                case ChunkOffer():
                    session = participants.uploader(now, request.ticket, claim)
                    answer = self._why_no_body(now, session, request, request.length)
                    return [] if answer is None else [Reply(reply_to, answer)]
                case Complete():
                    session = participants.uploader(now, request.ticket, claim)
                    return self._complete(now, session, request, reply_to)
                case Report():
                    session = participants.participant(now, request.ticket, claim)
                    return self._report(now, session, request, reply_to)
                case Leave() if isinstance(claim, AssignmentTicket):
                    joined = participants.give_up(now, request.ticket)
                    if joined is None:
                        return [Reply(reply_to, Left())]
                    return self._leave(joined, request, reply_to)
                case Leave():
                    session = participants.participant(now, request.ticket, claim)
                    return self._leave(session, request, reply_to)
        except SessionEnded as ended:
            has_left = isinstance(request, Leave) and ended.answer == Aborted("left")
            return [Reply(reply_to, Left() if has_left else ended.answer)]
        except TicketError as error:
            return [Reply(reply_to, Refused(str(error), error.hint))]

    def _begins_something(self, request: Ticketed, claim: AnyTicket) -> bool:
        """Is it a join, or part of an upload that has not begun here?

        An update whose place is kept has begun. It may be sent again until uploads are dropped.
        """
        if isinstance(request, Heartbeat | Leave):
            return False
        session = self._sessions.active.get(claim.session)
        if session is None:
            return claim.session not in self._sessions.ended
        may_finish = self.draining is Draining.FINISHES_UPLOADS
        has_place = may_finish and session.id in self._pipeline.kept_places
        return session.upload is None and not has_place

    def _joined(self, session: Session) -> Joined:
        config = self._revisions.terms(session.manifest)
        pinned = config.evaluates
        return Joined(
            ticket=session.sealed,
            task=self._ledger.task,
            session=session.id,
            version=session.version,
            parameters=session.ticket.parameters,
            model_length=config.model_length if pinned is None else pinned.model_length,
            update_length=config.model_length,
            evaluates=pinned is not None,
            norms=pinned is not None and pinned.norms,
            heartbeat_s=self._server.heartbeat_s,
            training_timeout_s=config.training_timeout_s,
            participation_gap_s=config.participation_gap_s,
            max_participations=config.max_participations,
            secure=config.secure_aggregation is not None,
            upload_bits=config.upload_bits,
        )

    def _leave(self, session: Session, request: Leave, reply_to: Handle) -> Effects:
        if session.is_complete:
            # The update is being folded and cannot be withdrawn: answer with how it ends.
            return session.await_answer(reply_to)
        self._endings.count(session, f"left_{leave_code(request.reason)}")
        aborted = self._endings.abort(session, "left")
        return [*aborted, Reply(reply_to, Left()), *self._queue.place_waiting()]

    # -- reports ----------------------------------------------------------------------------

    def _report(self, now: float, session: Session, request: Report, reply_to: Handle) -> Effects:
        if self._offers is not None and request.examples != 1:
            # The weight travels under the mask. A count in the clear would tell it to the server.
            reason = f"examples = {request.examples} in a secure task"
            return [Reply(reply_to, Refused(reason, "report examples = 1"))]
        if session.upload_ticket is None:
            staleness = self._staleness(session)
            if (outdated := self._revisions.why_outdated(session.ticket)) is not None:
                aborted = self._endings.abort(session, outdated)
                return [*aborted, Reply(reply_to, Aborted(outdated))]
            # While the TSA is away nobody seals: if it is lost, those updates are not.
            must_wait = self._queue.waits_for_tsa
            if must_wait or not self._grant(now, session, staleness, request.examples):
                retry = Reply(reply_to, self._queue.wait_for_tsa(now, session))
                return [retry, *self._queue.refill_offers(now)]
        ticket = session.upload_ticket
        assert ticket is not None
        granted = UploadGranted(
            ticket=session.upload_sealed,
            version=ticket.version + ticket.staleness,
            chunk_bytes=self._server.chunk_bytes,
            upload_timeout_s=self._revisions.terms(session.manifest).upload_timeout_s,
            secure=session.offer,
            upload_url=self._upload_url,
        )
        return [Reply(reply_to, granted)]

    def _staleness(self, session: Session) -> int:
        """Versions made since the client's initial version, when it reports. Final from then on."""
        return self._ledger.version - session.version

    def _grant(self, now: float, session: Session, staleness: int, examples: int) -> bool:
        """Give the session an upload ticket. False if a needed offer of the TSA is not in stock."""
        config, index = self._revisions.terms(session.manifest), -1
        if (offers := self._queue.offers_for(session)) is not None:
            found = offers.take(now)
            if found is None:
                return False
            index, session.offer = found[0].index, found[1]
        ticket = session.as_upload_ticket(
            staleness=staleness,
            examples=counted_examples(config, examples),
            upload_by=now + config.upload_timeout_s,
            offer=index,
        )
        self._sessions.reported(session, ticket, self._keyring.seal(ticket))
        return True

    # -- uploads ----------------------------------------------------------------------------

    def _chunk(self, now: float, session: Session, chunk: Chunk, reply_to: Handle) -> Effects:
        answer = self._why_no_body(now, session, chunk, len(chunk.data))
        if answer is not None:
            return [Reply(reply_to, answer)]
        if crc32(chunk.data) != chunk.crc32:
            # The claim was made for this chunk: if nothing else is kept, give it up.
            released = self._endings.drop_upload(session) if session.upload is None else []
            return [*released, Reply(reply_to, Retry("the chunk has a wrong checksum", 0.0))]
        assert session.claim is not None
        task, piece = self._ledger.task, self._server.chunk_bytes
        size = self._revisions.terms(session.manifest).update_bytes
        upload = session.upload
        effects: Effects = []
        if upload is None or upload.id != chunk.upload:
            if upload is not None:
                session.claim.kept_bytes = 0
                effects.append(Drop(task, self._ledger.fence.seq, session.id))
            upload = session.upload = Upload(chunk.upload, chunk_count(size, piece))
        self._memory.keep(now, session.claim, len(chunk.data))
        del upload.missing[chunk.index]
        effects.append(Keep(task, session.id, chunk.index * piece, chunk.data, size))
        return [*effects, Reply(reply_to, ChunkReceived(chunk.upload, chunk.index))]

    def _why_no_body(
        self, now: float, session: Session, chunk: Chunk | ChunkOffer, length: int
    ) -> Message | None:
        """The answer to a chunk whose bytes are not needed, or None if they are.

        None also means that there is memory for the chunk, so the server only reads bodies that it
        can keep. An offer does not count as progress of the upload; only its bytes do.
        """
        received = ChunkReceived(chunk.upload, chunk.index)
        if session.is_complete:
            return received
        terms, piece = self._revisions.terms(session.manifest), self._server.chunk_bytes
        size = terms.update_bytes
        count = chunk_count(size, piece)
        expected = chunk_length(size, piece, chunk.index)
        if chunk.index >= count:
            return Refused(f"there is no chunk {chunk.index}: an update has {count} chunks")
        if length != expected:
            return Refused(f"chunk {chunk.index} of {count} has {length} bytes, not {expected}")
        upload = session.upload
        if upload is not None and upload.id == chunk.upload and upload.has(chunk.index):
            return received  # a duplicate: not progress
        if upload is not None and upload.id != chunk.upload and chunk.index > 0:
            return Refused("a new upload must start with chunk 0")
        session.claim = session.claim or Claim((self._ledger.task, session.id), terms, piece)
        if self._queue.waits_for_tsa and not self._memory.holds(session.claim):
            return self._queue.wait_for_tsa(now, session)
        has_arrived = isinstance(chunk, Chunk)
        has_room = self._memory.may_keep if has_arrived else self._memory.may_send
        if not has_room(now, session.claim, length):
            self.turned_away_bytes += session.claim.needed_bytes
            return Retry("the memory for uploads is in use", BUSY_RETRY_S)
        return None

    def _complete(
        self, now: float, session: Session, request: Complete, reply_to: Handle
    ) -> Effects:
        upload, queue = session.upload, self._queue
        if queue.waits_for_tsa and not session.is_complete and not (upload and upload.missing):
            return [Reply(reply_to, queue.wait_for_tsa(now, session))]
        if upload is None or upload.id != request.upload:
            size = self._revisions.terms(session.manifest).update_bytes
            count = chunk_count(size, self._server.chunk_bytes)
            return [Reply(reply_to, Incomplete(tuple(range(count))))]
        if upload.missing:
            return [Reply(reply_to, Incomplete(tuple(upload.missing)))]
        if self._offers is not None and not request.sealed:
            return [Reply(reply_to, Refused("the sealed seed of the mask is missing"))]
        session.sealed_seed = session.sealed_seed or request.sealed
        effects = session.await_answer(reply_to)
        if upload.is_folding:
            return effects
        upload.is_folding = True
        assert session.claim is not None
        session.claim.is_complete = True
        self._counters["trips"] += 1
        return [*effects, *queue.place(session)]
