"""One task at the aggregator that holds it: requests of clients in, new versions out.

Paper, "Aggregator": it "aggregates client model updates to produce new versions of the server
model [...] drives participating clients to run the client execution protocol [...] tracks whether
or not a task needs more clients".

    requests ─▶ sessions ─▶ Fold ─▶ pipeline ─▶ acknowledged sessions, new versions

Requests (paper, "Client Independence"): "transient client failures do not cause clients to dropout
because the client protocol is based on virtual sessions". A request that arrives twice gets the
same answer twice. A session that is unknown here but shows a valid ticket belonged to an earlier
holder and is adopted if there is room. A session that has ended gets the same final answer again.

The pipeline (`pipeline.py`) makes updates durable. If the fence row no longer names this holder, it
stops. If the outcome of a write is unknown, it reads the rows again.

Revisions (`revisions.py`): a client continues under the signed manifest that it joined under.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from hmac import compare_digest
from typing import TypeVar

from papaya.aggregator import regime
from papaya.aggregator.endings import Endings
from papaya.aggregator.ledger import Ledger
from papaya.aggregator.offers import Stocks
from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.revisions import Revisions
from papaya.aggregator.sessions import (
    Session,
    Sessions,
    session_life_s,
    ticket_life_s,
)
from papaya.aggregator.slots import Slots
from papaya.aggregator.task_events import TaskEvents
from papaya.aggregator.update_queue import BUSY_RETRY_S, UpdateQueue
from papaya.aggregator.upload import (
    Claim,
    Upload,
    UploadMemory,
    chunk_count,
    chunk_length,
    crc32,
    why_not_served,
)
from papaya.aggregator.work import (
    UNREACHABLE,
    DeleteBlobs,
    Drop,
    Keep,
    Lost,
    Offered,
    Snapshotted,
    StepFailed,
    Stepped,
)
from papaya.config import ServerConfig, TaskConfig
from papaya.errors import ConfigError, InvariantError, TicketError
from papaya.learning.methods import require_methods
from papaya.learning.weighting import counted_examples
from papaya.machine import Effects, Handle, Read, Reply
from papaya.messages.base import Message, SessionId, TaskId
from papaya.messages.control import TaskReport
from papaya.messages.events import ServerEvent
from papaya.messages.participation import (
    Aborted,
    Alive,
    Chunk,
    ChunkOffer,
    ChunkReceived,
    Complete,
    Completed,
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
from papaya.messages.reasons import (
    is_reported,
    leave_code,
)
from papaya.messages.storage import FenceRow, Rows, Transacted, holder_prefixes
from papaya.messages.tickets import (
    AnyTicket,
    AssignmentTicket,
    Keyring,
    SessionTicket,
    UploadTicket,
    pseudonym_of,
)

R = TypeVar("R")
_NEVER = float("inf")
_REPLACED = Aborted("replaced")
_MOVED = Retry("the task has moved", 0.0, elsewhere=True)
_FAILING = "the TSA has an internal error at a release; restart it to give up the buffer"


class TaskPhase(Enum):
    """What the aggregator is doing with a task it holds."""

    LOADING = "the task is loading"
    SERVING = "serving clients"
    HALTED = "the task is halted until its owner acts"
    STOPPED = "the task is held by another aggregator"


class SessionEnded(Exception):
    """Not an error: the session is over or cannot start, and `answer` tells the client so."""

    def __init__(self, answer: Message) -> None:
        super().__init__(answer)
        self.answer = answer


class HeldTask:
    """Invariant: versions only grow."""

    def __init__(
        self,
        task: TaskId,
        fence: FenceRow,
        epoch: int,
        leases: Sequence[SessionId],
        predecessors_active: int | None,
        server: ServerConfig,
        keyring: Keyring,
        memory: UploadMemory,
        tokens: Iterator[int],
        events: list[ServerEvent],
        upload_url: str = "",
    ) -> None:
        """`events`: where to add events for the log; the aggregator empties it.

        `upload_url`: where devices can upload without a selector in between.
        """
        self.task = task
        self._upload_url = upload_url
        # The row that makes this aggregator the holder. Every write requires it.
        self.fence = fence
        self.phase = TaskPhase.LOADING
        # Why the task is halted, for the owner; empty while it is not.
        self.halted_because = ""

        # Active clients, and how ended sessions ended.
        self.sessions = Sessions(server.dead_after_s)
        # Counts of events, for metrics and simulation results.
        self.counters: Counter[str] = Counter()
        # The demand for clients, and for whom slots are kept.
        self.slots = Slots(fence.seq, epoch, leases, predecessors_active, self.sessions)
        # How sessions end.
        self.endings = Endings(self.sessions, self.slots, memory, server, self.counters)
        # Complete updates that are not in a sum yet.
        self.queue = UpdateQueue(self.sessions, self.slots, self.endings, memory, keyring, server)
        # Buffers, records and versions. Set by the first load; nothing is served before.
        self.pipeline: Pipeline
        # Under which manifests clients may take part. Set by each load.
        self.revisions: Revisions
        # Offers of the TSA; None unless the task is secure.
        self.offers: Stocks | None = None

        # The process is about to stop: nothing new begins here, and the task moves after its last
        # record. Later the time for uploads is over too.
        self._is_draining = False
        self._drops_uploads = False

        # What uploads needed that were turned away since the last heartbeat. Part of the load.
        self.turned_away_bytes = 0

        self._events = TaskEvents(task, fence.seq, events)
        self._server = server
        self._keyring = keyring
        # Memory for uploads, and tokens for storage requests: shared by all tasks held here.
        self._memory = memory
        self._tokens = tokens
        # The token of the read that loads the task.
        self._read_token = 0
        # Deadlines are swept at most once per interval.
        self._swept_at = 0.0
        self._sweep_s = server.heartbeat_s / 20
        # The version at which a blob was last found missing.
        self._lost_at: int | None = None
        # Effects of ending sessions before the current request is answered.
        self._replaced: Effects = []
        # Devices that may not take part, by identity and by their pseudonyms in this task.
        self._revoked_devices: tuple[str, ...] = ()
        self._revoked: frozenset[bytes] = frozenset()

    @property
    def ledger(self) -> Ledger:
        return self.pipeline.ledger

    @property
    def config(self) -> TaskConfig:
        return self.pipeline.config

    # -- loading and stopping ---------------------------------------------------------------

    def load(self) -> Effects:
        """Read everything durable about the task, in one snapshot."""
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
        # Updates of a candidate have the same size. Those of an earlier revision that do not fit
        # into the memory wait until their session times out.
        problem = why_not_served(ledger.config, self._server.chunk_bytes, self._memory.total_bytes)
        if problem := problem or _missing_methods(ledger):
            return self._halt(problem)
        garbage = self.ledger.replaced_by(ledger) if self.has_served else ()
        self.pipeline = Pipeline(ledger, self._tokens)
        self._events.versions(ledger, has_served=self.has_served)
        if ledger.config.secure_aggregation is not None:
            self.offers = self.offers or Stocks(ledger.config, self.fence.seq)
            self.offers.on_loaded(self.pipeline)
        self.revisions = Revisions(self.pipeline, self._server)
        self.slots.load(self.pipeline)
        self.endings.load(self.pipeline, self.revisions)
        self.queue.load(self.pipeline, self.revisions, self.offers)
        effects = [*self.endings.settle(), *self._end_revoked()]
        self.queue.keep_places()
        deleted: Effects = [DeleteBlobs(garbage)] if garbage else []
        return [*effects, *deleted, self.pipeline.restore()]

    def on_restored(self, now: float) -> Effects:
        self.phase = TaskPhase.SERVING
        if not self.has_served:
            self._events.taken(self.ledger)
        if self.halted_because:
            self._events.resumed(self.ledger)
            self.halted_because = ""
        self.slots.may_want_more = True
        for session in self.sessions.active.values():
            session.seen_at = now  # while the rows were read, no request could be answered
            self.sessions.refile(session)
        if not self.has_served:
            self.slots.open(now, self._server.dead_after_s)
        return [
            *self.endings.abort_outdated(),
            *self._end_revoked(),  # it may have arrived while the sums were restored
            *self.queue.refill_offers(now),
            *self.pipeline.restored(now),
        ]

    def stop(self) -> Effects:
        """Another aggregator holds the task now; clients reach it through any selector."""
        self.phase = TaskPhase.STOPPED
        if self.has_served:
            self._events.left(self.ledger)
        effects: Effects = [Drop(self.task, self.fence.seq)]
        for session in self.sessions.active.values():
            effects += self.endings.answer(session, _MOVED)
            self._memory.release(session.claim)
        return effects

    def drain(self, *, drops_uploads: bool) -> Effects:
        """Begin nothing new. Uploads that have begun may finish, until they are dropped."""
        self._is_draining = True
        self._drops_uploads |= drops_uploads
        if not drops_uploads or self.phase is not TaskPhase.SERVING:
            return []
        return self.queue.drop_unfinished()

    def record_now(self, now: float) -> Effects:
        """Commit what is folded without waiting for more of it."""
        return self.pipeline.flush(now) if self.phase is TaskPhase.SERVING else []

    @property
    def is_drained(self) -> bool:
        """Every update that was folded is in a record, and no other will be folded here.

        A successor does not know the places that are kept, so their clients have as much time as
        uploads have.
        """
        if not self._is_draining or self.phase is TaskPhase.LOADING:
            return False
        if self.phase is not TaskPhase.SERVING:
            return True
        waits = not self._drops_uploads and bool(self.pipeline.kept_places)
        return not self.sessions.uploads and not waits and self.pipeline.is_settled

    def _halt(self, reason: str) -> Effects:
        """Stop serving until the rows change. Sessions continue; uploads are dropped."""
        self.phase = TaskPhase.HALTED
        if reason != self.halted_because:  # the rows are read again every heartbeat
            self._events.halted(reason)
        self.halted_because = reason
        return self.endings.request_all_again()

    # -- revoked devices --------------------------------------------------------------------

    def revoke(self, devices: tuple[str, ...]) -> Effects:
        """These devices, and no others, may not take part."""
        self._revoked_devices = devices
        if self.phase is not TaskPhase.SERVING:
            return []
        return [*self._end_revoked(), *self.queue.place_waiting()]

    def _end_revoked(self) -> Effects:
        """End sessions of revoked devices, except those whose update is being folded."""
        key = self.ledger.pseudonym_key
        found = (pseudonym_of(device, key) for device in self._revoked_devices)
        pseudonyms = [pseudonym for pseudonym in found if pseudonym]
        self._revoked = frozenset(pseudonyms)
        effects: Effects = []
        for pseudonym in pseudonyms:
            session = self.sessions.of_device(pseudonym)
            if session is not None and not session.is_complete:
                effects += self.endings.abort(session, "revoked")
        return effects

    # -- demand -----------------------------------------------------------------------------

    @property
    def _no_room(self) -> Aborted:
        """For a client that finds no slot: none comes free while the last version is made."""
        return Aborted("task_over" if self.pipeline.has_all_updates else "full")

    @property
    def has_served(self) -> bool:
        """From then on every report must name the task.

        A report that leaves it out would be acknowledged without its confirmations.
        """
        return self.slots.adopts_until != _NEVER

    def demand(self, now: float) -> int:
        """The demand to report: without the room that is kept for clients of earlier holders, and
        zero while those that are here wait for the TSA, or would when they report.
        """
        if self.phase is not TaskPhase.SERVING or self._is_draining or self.queue.waits_for_tsa:
            return 0
        if self.offers is not None and (
            self.offers.current.are_refused or not self.slots.admits_joins
        ):
            return 0
        return self.slots.wanted(now)

    def report(self, now: float, number: int) -> TaskReport:
        """The part of report `number` about this task (paper, "High Client Utilization")."""
        slots = self.slots
        is_adopting = now < slots.adopts_until
        if not is_adopting:
            slots.promises.forget_inherited()
        demand = self.demand(now)
        slots.promise(demand)
        return TaskReport(
            task=self.task,
            seq=self.fence.seq,
            active=len(self.sessions.active),
            demand=demand,
            halted=self.halted_because or self.tsa_problem,
            ended=self.sessions.ended_count,
            joined=slots.confirmations.name_in(number),
            version=self.ledger.version if self.has_served else 0,
            drained=self.is_drained,
            awaited=slots.awaited if self.has_served and is_adopting else 0,
            endings=tuple((name, n) for name, n in self.counters.items() if is_reported(name)),
        )

    # -- requests of clients ----------------------------------------------------------------

    def answer(self, now: float, request: Ticketed, claim: AnyTicket, reply_to: Handle) -> Effects:
        """Answer a request. `claim` is what its ticket says, not verified yet."""
        effects = self._serve(now, request, claim, reply_to)
        if not self._replaced:
            return effects
        replaced, self._replaced = self._replaced, []
        return replaced + effects

    def _serve(self, now: float, request: Ticketed, claim: AnyTicket, reply_to: Handle) -> Effects:
        if claim.seq > self.fence.seq:
            return [Reply(reply_to, _MOVED)]
        if self._revoked and self._is_revoked(claim.session):
            # Its update was being folded when the device was revoked, but was not counted.
            self._replaced += self._end_revoked() + self.queue.place_waiting()
        if self._is_draining and self._begins_something(request, claim):
            return [Reply(reply_to, Retry("the task is about to move", BUSY_RETRY_S))]
        try:
            match request:
                case Heartbeat():
                    self._participant(now, request.ticket, claim)
                    return [Reply(reply_to, Alive())]
                case Join():
                    return [Reply(reply_to, self._join(now, request))]
                case Chunk():
                    session = self._uploader(now, request.ticket, claim)
                    return self._chunk(now, session, request, reply_to)
                case ChunkOffer():
                    session = self._uploader(now, request.ticket, claim)
                    answer = self._why_no_body(now, session, request, request.length)
                    return [] if answer is None else [Reply(reply_to, answer)]
                case Complete():
                    session = self._uploader(now, request.ticket, claim)
                    return self._complete(now, session, request, reply_to)
                case Report():
                    session = self._participant(now, request.ticket, claim)
                    return self._report(now, session, request, reply_to)
                case Leave() if isinstance(claim, AssignmentTicket):
                    return self._give_up(now, request, reply_to)
                case Leave():
                    session = self._participant(now, request.ticket, claim)
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
        session = self.sessions.active.get(claim.session)
        if session is None:
            return claim.session not in self.sessions.ended
        has_place = not self._drops_uploads and session.id in self.pipeline.kept_places
        return session.upload is None and not has_place

    def _is_revoked(self, session_id: SessionId) -> bool:
        """Has a revoked device an active session whose update can be withdrawn?"""
        session = self.sessions.active.get(session_id)
        return (
            session is not None and session.pseudonym in self._revoked and not session.is_complete
        )

    def touch(self, now: float, sealed: bytes, claim: AnyTicket) -> bool:
        """Note that a client is alive, if it shows the ticket that its session has here."""
        session = self.sessions.active.get(claim.session)
        if session is None or self._revoked or not _is_known(sealed, session):
            return False
        session.seen_at = now
        return True

    def _participant(self, now: float, sealed: bytes, claim: AnyTicket) -> Session:
        """The session of a heartbeat, report or leave, which carry a session or upload ticket."""
        session = self.sessions.active.get(claim.session)
        if session is not None and _is_known(sealed, session):
            session.seen_at = now
            return session
        if isinstance(claim, UploadTicket):
            return self._uploader(now, sealed, claim)
        ticket = self._keyring.open(sealed, SessionTicket)
        self._raise_if_ended(ticket)
        if now >= max(ticket.expires, _kept_until(ticket, session)):
            raise TicketError("the session has expired")
        if session is None:
            if (reason := self.revisions.why_outdated(ticket)) is not None:
                raise SessionEnded(Aborted(reason))
            session = self._adopt(now, ticket, sealed)
        elif session.is_training:
            self.sessions.rebase(session, ticket, sealed)
        session.seen_at = now
        return session

    def _uploader(self, now: float, sealed: bytes, claim: AnyTicket) -> Session:
        """The session of a chunk or a completion."""
        session = self.sessions.active.get(claim.session)
        if session is None or not compare_digest(sealed, session.upload_sealed):
            ticket = self._keyring.open(sealed, UploadTicket)
            self._raise_if_ended(ticket)
            if now >= max(ticket.upload_by, _kept_until(ticket, session)):
                raise TicketError("the upload deadline has passed")
            if session is None and not self.revisions.may_go_on(ticket.manifest):
                raise SessionEnded(Aborted("revised"))
            if not regime.accepts(self.config, ticket.version, self.ledger.version + 1):
                raise SessionEnded(Aborted(self.revisions.unless_revised(ticket, "round_over")))
            if ticket.version < self.ledger.void_below:
                raise SessionEnded(Aborted("stale"))
            if session is None:
                session = self._adopt(now, ticket, b"")
            if not session.is_complete:
                # A duplicate of the report may have been granted a second ticket here, with
                # another offer. The client works with the ticket that it shows.
                known = session.upload_ticket
                if known is None or known.offer != ticket.offer:
                    session.offer = None
                self.sessions.rebase(session, ticket, b"")
                self.sessions.reported(session, ticket, sealed)
        session.seen_at = now
        return session

    def _adopt(self, now: float, ticket: SessionTicket | UploadTicket, sealed: bytes) -> Session:
        """Continue a session of an earlier holder, so that the client's training is not lost."""
        earlier = self._earlier_session(ticket)
        if earlier is not None and earlier.is_complete:
            reason = "the last update of this device is being processed"
            raise SessionEnded(Retry(reason, BUSY_RETRY_S))
        if earlier is not None and earlier.ticket.expires >= ticket.expires:
            raise SessionEnded(_REPLACED)  # it joined later than this one
        is_leased = self.slots.promises.inherits(ticket.session)
        free = self.slots.client_demand if is_leased else self.slots.room
        if free + (earlier is not None) < 1:
            raise SessionEnded(self._no_room)
        session = Session(ticket, sealed, now)
        self._add(session, earlier, is_leased=is_leased)
        return session

    def _earlier_session(self, ticket: AnyTicket) -> Session | None:
        """The session of the same device that a new one replaces, unless its update is complete.
        Raises if the device is revoked.
        """
        if ticket.pseudonym in self._revoked:
            raise SessionEnded(Aborted("revoked"))
        return self.sessions.of_device(ticket.pseudonym)

    def _raise_if_ended(self, ticket: AnyTicket) -> None:
        ended = self.sessions.ended.get(ticket.session)
        if ended is not None:
            raise SessionEnded(ended[0])
        # The rows decide, not the answers above: those are dropped when this clock says so.
        if ticket.session not in self.sessions.active and self.pipeline.counts(ticket.session):
            raise SessionEnded(Completed())

    def _join(self, now: float, request: Join) -> Message:
        ticket = self._keyring.open(request.ticket, AssignmentTicket)
        self._raise_if_ended(ticket)
        session = self.sessions.active.get(ticket.session)
        if session is None:
            session = self._admit(now, ticket)
        elif not session.sealed:
            session.sealed = self._keyring.seal(_session_ticket(session))
        config = self.revisions.terms(session.manifest)
        pinned = config.evaluates
        return Joined(
            ticket=session.sealed,
            task=self.task,
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

    def _admit(self, now: float, assignment: AssignmentTicket) -> Session:
        if assignment.version < self.ledger.optimizer.settled:
            raise SessionEnded(Aborted("stale"))
        if now > assignment.confirm_by:
            raise TicketError("the assignment was not confirmed in time")
        if self.pipeline.is_over:
            raise SessionEnded(Aborted("task_over"))
        is_leased = self.slots.promises.cover(assignment)
        if not self.revisions.is_current(assignment.manifest):
            # The device has a bundle of another revision: it fetches this one after a check-in.
            self._use_up(assignment, Aborted("revised"), is_leased=is_leased)
            raise SessionEnded(Aborted("revised"))
        if not self.slots.admits_joins:
            raise SessionEnded(Retry("the round is closing", BUSY_RETRY_S))
        earlier = self._earlier_session(assignment)
        if earlier is not None and earlier.is_complete:
            # Its update cannot be withdrawn, so this session ends as it begins.
            self._use_up(assignment, _REPLACED, is_leased=is_leased)
            raise SessionEnded(_REPLACED)
        free = self.slots.client_demand if is_leased else self.slots.room
        if free + (earlier is not None) < 1:
            raise SessionEnded(self._no_room)
        newest, pinned = self.ledger.newest, self.config.evaluates
        ticket = SessionTicket(
            self.task,
            assignment.session,
            self.fence.seq,
            newest.version,
            newest.parameters if pinned is None else pinned.parameters,
            expires=now + session_life_s(self.ledger.terms[assignment.manifest], self._server),
            pseudonym=assignment.pseudonym,
            manifest=assignment.manifest,
        )
        session = Session(ticket, self._keyring.seal(ticket), now)
        self._add(session, earlier, is_leased=is_leased)
        return session

    def _report(self, now: float, session: Session, request: Report, reply_to: Handle) -> Effects:
        if self.offers is not None and request.examples != 1:
            # The weight travels under the mask. A count in the clear would tell it to the server.
            reason = f"examples = {request.examples} in a secure task"
            return [Reply(reply_to, Refused(reason, "report examples = 1"))]
        if session.upload_ticket is None:
            staleness = self._staleness(session)
            if (outdated := self.revisions.why_outdated(session.ticket)) is not None:
                return [*self.endings.abort(session, outdated), Reply(reply_to, Aborted(outdated))]
            # While the TSA is away nobody seals: if it is lost, those updates are not.
            if self.queue.waits_for_tsa or not self._grant(
                now, session, staleness, request.examples
            ):
                retry = Reply(reply_to, self.queue.wait_for_tsa(now, session))
                return [retry, *self.queue.refill_offers(now)]
        ticket = session.upload_ticket
        assert ticket is not None
        granted = UploadGranted(
            ticket=session.upload_sealed,
            version=ticket.version + ticket.staleness,
            chunk_bytes=self._server.chunk_bytes,
            upload_timeout_s=self.revisions.terms(session.manifest).upload_timeout_s,
            secure=session.offer,
            upload_url=self._upload_url,
        )
        return [Reply(reply_to, granted)]

    def _staleness(self, session: Session) -> int:
        """Versions made since the client's initial version, when it reports. Final from then on."""
        return self.ledger.version - session.version

    def _grant(self, now: float, session: Session, staleness: int, examples: int) -> bool:
        """Give the session an upload ticket. False if a needed offer of the TSA is not in stock."""
        config, index = self.revisions.terms(session.manifest), -1
        if (offers := self.queue.offers_for(session)) is not None:
            found = offers.take(now)
            if found is None:
                return False
            index, session.offer = found[0].index, found[1]
        ticket = UploadTicket(
            *_session_fields(session),
            staleness=staleness,
            examples=counted_examples(config, examples),
            upload_by=now + config.upload_timeout_s,
            offer=index,
            pseudonym=session.pseudonym,
            manifest=session.manifest,
        )
        self.sessions.reported(session, ticket, self._keyring.seal(ticket))
        return True

    def _chunk(self, now: float, session: Session, chunk: Chunk, reply_to: Handle) -> Effects:
        answer = self._why_no_body(now, session, chunk, len(chunk.data))
        if answer is not None:
            return [Reply(reply_to, answer)]
        if crc32(chunk.data) != chunk.crc32:
            # The claim was made for this chunk: if nothing else is kept, give it up.
            released = self.endings.drop_upload(session) if session.upload is None else []
            return [*released, Reply(reply_to, Retry("the chunk has a wrong checksum", 0.0))]
        assert session.claim is not None
        size, piece = self.revisions.terms(session.manifest).update_bytes, self._server.chunk_bytes
        upload = session.upload
        effects: Effects = []
        if upload is None or upload.id != chunk.upload:
            if upload is not None:
                session.claim.kept_bytes = 0
                effects.append(Drop(self.task, self.fence.seq, session.id))
            upload = session.upload = Upload(chunk.upload, chunk_count(size, piece))
        self._memory.keep(now, session.claim, len(chunk.data))
        del upload.missing[chunk.index]
        effects.append(Keep(self.task, session.id, chunk.index * piece, chunk.data, size))
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
        size, piece = self.revisions.terms(session.manifest).update_bytes, self._server.chunk_bytes
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
        session.claim = session.claim or Claim(
            (self.task, session.id), self.revisions.terms(session.manifest), piece
        )
        if self.queue.waits_for_tsa and not self._memory.holds(session.claim):
            return self.queue.wait_for_tsa(now, session)
        has_arrived = isinstance(chunk, Chunk)
        has_room = self._memory.may_keep if has_arrived else self._memory.may_send
        if not has_room(now, session.claim, length):
            self.turned_away_bytes += session.claim.needed_bytes
            return Retry("the memory for uploads is in use", BUSY_RETRY_S)
        return None

    def _complete(
        self, now: float, session: Session, request: Complete, reply_to: Handle
    ) -> Effects:
        upload = session.upload
        if self.queue.waits_for_tsa and not session.is_complete and not (upload and upload.missing):
            return [Reply(reply_to, self.queue.wait_for_tsa(now, session))]
        if upload is None or upload.id != request.upload:
            count = chunk_count(
                self.revisions.terms(session.manifest).update_bytes, self._server.chunk_bytes
            )
            return [Reply(reply_to, Incomplete(tuple(range(count))))]
        if upload.missing:
            return [Reply(reply_to, Incomplete(tuple(upload.missing)))]
        if self.offers is not None and not request.sealed:
            return [Reply(reply_to, Refused("the sealed seed of the mask is missing"))]
        session.sealed_seed = session.sealed_seed or request.sealed
        effects = session.await_answer(reply_to)
        if upload.is_folding:
            return effects
        upload.is_folding = True
        assert session.claim is not None
        session.claim.is_complete = True
        self.counters["trips"] += 1
        return [*effects, *self.queue.place(session)]

    def _leave(self, session: Session, request: Leave, reply_to: Handle) -> Effects:
        if session.is_complete:
            # The update is being folded and cannot be withdrawn: answer with how it ends.
            return session.await_answer(reply_to)
        self.endings.count(session, f"left_{leave_code(request.reason)}")
        return [
            *self.endings.abort(session, "left"),
            Reply(reply_to, Left()),
            *self.queue.place_waiting(),
        ]

    def _give_up(self, now: float, request: Leave, reply_to: Handle) -> Effects:
        """A client that has not joined, because it has to fetch the task's bundle first, gives its
        assignment back. This is no participation, so it is not counted.
        """
        ticket = self._keyring.open(request.ticket, AssignmentTicket)
        self._raise_if_ended(ticket)
        if (session := self.sessions.active.get(ticket.session)) is not None:
            return self._leave(session, request, reply_to)
        if now > ticket.confirm_by:
            raise TicketError("the assignment was not confirmed in time")
        self._use_up(ticket, Aborted("left"), is_leased=self.slots.promises.cover(ticket))
        return [Reply(reply_to, Left())]

    # -- sessions ---------------------------------------------------------------------------

    def _add(self, session: Session, earlier: Session | None, *, is_leased: bool) -> None:
        """The client takes a slot. Its device's `earlier` session ends."""
        if earlier is not None:
            self._replaced += [
                *self.endings.abort(earlier, "replaced"),
                *self.queue.place_waiting(),
            ]
        self.sessions.admit(session)
        self.slots.take(session.id, is_leased=is_leased)
        self.counters["joined" if is_leased else "adopted"] += 1

    def _use_up(self, assignment: AssignmentTicket, answer: Aborted, *, is_leased: bool) -> None:
        """The session ends as it begins, with this answer."""
        self.sessions.remember(assignment.session, answer, assignment.confirm_by)
        self.slots.use_up(assignment.session, is_leased=is_leased)

    # -- the TSA ----------------------------------------------------------------------------

    @property
    def tsa_problem(self) -> str:
        """For the owner; empty if there is none."""
        if self.offers is None:
            return ""
        return _FAILING if self.pipeline.is_failing else self.offers.current.problem

    def on_offered(self, now: float, message: Offered) -> Effects:
        if self.offers is None:
            return []
        self.slots.may_want_more |= self.offers.current.is_away or self.offers.current.are_refused
        self.offers.on_offered(now, message, self.pipeline)
        if self.phase is not TaskPhase.SERVING:
            return []
        return [*self.pipeline.pump(now), *self.queue.refill_offers(now)]

    # -- storage ----------------------------------------------------------------------------

    def on_snapshotted(self, message: Snapshotted) -> Effects:
        """A snapshot may hold updates whose `Folded` message has not arrived here yet."""
        effects = self.pipeline.on_snapshotted(message)
        sums = () if self.pipeline.keeps_members else message.sums
        active = self.sessions.active
        for session_id in (session for found in sums for session in found.sessions):
            if session_id in active:
                self._memory.release(active[session_id].claim)
        if self.pipeline.current.is_full and regime.ends_round_when_full(self.config):
            effects += self.endings.end_round()
        return effects

    def on_stepped(self, now: float, message: Stepped) -> Effects:
        life_s = max(ticket_life_s(config, self._server) for config in self.ledger.terms.values())
        oldest_kept = self.sessions.oldest_kept(now)
        effects = self.pipeline.on_stepped(now, message, life_s, oldest_kept)
        self._events.dropping(message.version, message.dropped if effects else "")
        if message.dropped:
            what = f"buffers_dropped_{message.dropped}" if effects else "steps_postponed"
            self.counters[what] += 1
        if message.dropped == UNREACHABLE and self.offers is not None:
            self.offers.current.on_unanswered()
            effects = self.queue.refill_offers(now)
        return effects

    def on_step_failed(self, message: StepFailed) -> Effects:
        """Publish nothing. A record stays until the task's owner acts; members that are in none are
        asked for their updates again.
        """
        self.counters["steps_failed"] += 1
        return self._halt(message.reason)

    def on_lost(self, message: Lost) -> Effects:
        """A blob is missing. Read the rows: a successor may hold the task and have deleted it.

        If the rows are fresh and still name the blob, it is lost, and the task halts.
        """
        head = None if self.phase is TaskPhase.LOADING else self.ledger.version
        if head is None or head == self._lost_at:
            return self._halt(message.reason)
        self._lost_at = head
        return self.load()

    def on_transacted(self, now: float, message: Transacted) -> Effects:
        if message.outcome == "refused":
            return self.pipeline.on_refused() or self.load()
        if message.outcome != "committed":
            return self.load()
        durable, has_advanced, effects = self.pipeline.on_committed(now)
        for session_id in durable:
            session = self.sessions.active.get(session_id)
            if session is not None:
                effects += self.endings.acknowledge(session)
        if has_advanced:
            self.counters["versions"] += 1
            self._events.versions(self.ledger, has_served=True)
            self.slots.may_want_more = True
            effects += [*self.endings.abort_outdated(), *self.queue.end_revised(now)]
            effects += [*self.revisions.forget(now), *self.queue.place_waiting()]
        return effects + self.pipeline.pump(now)

    # -- time -------------------------------------------------------------------------------

    def must_wake(self, now: float) -> bool:
        """Is a deadline due, so that `wake` comes before the next request? If all deadlines have
        moved and `wake` would do nothing else, it counts as done.
        """
        if self.sessions.next_deadline() > now:
            return False
        if self.offers is not None or self.pipeline.is_bound or self.queue.waiting:
            return True
        if self.pipeline.next_wake() <= now or self.sessions.has_expired(now):
            return True
        self._swept_at = now
        return False

    def wake(self, now: float) -> Effects:
        self._swept_at = now
        return [
            *self.endings.abort_expired(now),
            *self.queue.end_revised(now),
            *self.queue.place_waiting(),
            *self.queue.refill_offers(now),
            *self.pipeline.pump(now),
        ]

    def next_wake(self) -> float:
        if self.phase is not TaskPhase.SERVING:
            return _NEVER
        # Sweep deadlines together: most have moved or no longer matter when they are due.
        sweep = self._swept_at + self._sweep_s
        if (deadline := self.sessions.next_deadline()) > sweep:
            sweep = deadline
        commit = self.pipeline.next_wake()
        due = commit if commit < sweep else sweep
        if self.offers is None:
            return due
        if self.revisions.served:
            due = min(due, self._swept_at + self._sweep_s)
        return due if self.pipeline.is_over else min(due, self.offers.next_wake())

    def check(self) -> None:
        if self.phase is TaskPhase.SERVING:
            self.sessions.check(self.config.concurrency)
            self.pipeline.check()
            self._check_revoked()

    def _check_revoked(self) -> None:
        for session in self.sessions.active.values() if self._revoked else ():
            is_uploading = session.upload is not None and not session.is_complete
            if is_uploading and session.pseudonym in self._revoked:
                raise InvariantError(f"a revoked device uploads in session {session.id}")


def _missing_methods(ledger: Ledger) -> str:
    """What the task needs and this aggregator does not have; empty if it has all."""
    try:
        for config in ledger.terms.values():
            require_methods(config)
    except ConfigError as error:
        return f"{error}; {error.hint}"
    return ""


def _is_known(sealed: bytes, session: Session) -> bool:
    """Is it exactly the ticket that was sealed before? Then it need not be opened again."""
    return compare_digest(sealed, session.sealed) or compare_digest(sealed, session.upload_sealed)


def _kept_until(ticket: SessionTicket | UploadTicket, session: Session | None) -> float:
    """The client may show its first ticket although the session was extended since then."""
    return ticket.kept_until if session is None else max(ticket.kept_until, session.kept_until)


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
    return SessionTicket(
        *_session_fields(session), pseudonym=session.pseudonym, manifest=session.manifest
    )
