"""The Client (paper, "Client Independence"): one visit of one device, from check-in to the end.

    CHECKING_IN ▶ JOINING ▶ DOWNLOADING ▶ TRAINING ▶ REPORTING ▶ (SEALING) ▶ UPLOADING ▶ COMPLETING

"All stages happen within a virtual session": each request carries its ticket, may be sent again and
may go through any selector. An upload goes to the aggregator itself if it has an address for that,
until this fails once. The client stops at once when it is aborted, leaves when a stage takes too
long, never takes part if its own history forbids it, and never runs code from a server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from msgspec.structs import replace

from papaya.client.history import History, evaluations_of
from papaya.client.work import (
    Answered,
    DirectFailure,
    DirectUploadFailed,
    Download,
    Downloaded,
    Ending,
    Finish,
    Moving,
    Remember,
    RememberDeclined,
    Seal,
    Sealed,
    SendRequest,
    Stop,
    Train,
    Trained,
    Unanswered,
    WorkFailed,
)
from papaya.config import DeviceConfig
from papaya.errors import ProtocolError
from papaya.machine import Effects
from papaya.messages.base import (
    MAX_EXCLUDED,
    PROTOCOL_VERSION,
    BlobKey,
    Message,
    NodeId,
    SealedTicket,
    TaskId,
)
from papaya.messages.participation import (
    MAX_CHUNKS,
    MAX_EXTRA_S,
    Aborted,
    Alive,
    Chunk,
    ChunkReceived,
    Complete,
    Completed,
    Heartbeat,
    Incomplete,
    Join,
    Joined,
    Leave,
    LeaveReason,
    Refused,
    Report,
    Retry,
    UploadGranted,
)
from papaya.messages.reasons import lacks_in_words
from papaya.messages.selection import Accepted, Capabilities, CheckIn, Rejected


class Stage(Enum):
    CHECKING_IN = "checking in"
    JOINING = "joining"
    DOWNLOADING = "downloading"
    TRAINING = "training"
    REPORTING = "reporting"
    SEALING = "sealing"
    UPLOADING = "uploading"
    COMPLETING = "completing"
    OVER = "over"


# Checked for every message. Python 3.11 takes longer to look them up in the class.
_CHECKING_IN = Stage.CHECKING_IN
_OVER = Stage.OVER
_WORKING = (Stage.DOWNLOADING, Stage.TRAINING, Stage.SEALING)
_NEVER = float("inf")
_MIN_HEARTBEAT_S = 0.2


class CountedAs(NamedTuple):
    """An entry of the history, and the gap and the limit that apply to it."""

    name: TaskId
    gap_s: float
    limit: int | None


class AcceptedBundles(Protocol):
    """What the device has accepted of its owners, and what follows for participations."""

    def refused(self) -> Sequence[str]:
        """Bundles that it does not train, as a check-in names them."""
        ...

    def lacks(self, bundle: BlobKey) -> bool:
        """Does the device have to fetch this bundle before it can join?"""
        ...

    def counted(self, joined: Joined) -> tuple[CountedAs, ...]:
        """The names under which a participation counts; all of them must allow it."""
        ...


class NoBundles:
    """A device without owners: the limits are those of the server, within the device's own."""

    def refused(self) -> Sequence[str]:
        return ()

    def lacks(self, bundle: BlobKey) -> bool:
        return False

    def counted(self, joined: Joined) -> tuple[CountedAs, ...]:
        name = evaluations_of(joined.parameters) if joined.evaluates else joined.task
        return (CountedAs(name, joined.participation_gap_s, joined.max_participations),)


class Client:
    """Invariant: at most one request of the stage and one heartbeat are unanswered."""

    __slots__ = (
        "_attempt",
        "_bundles",
        "_capabilities",
        "_chunk_bytes",
        "_config",
        "_counted",
        "_examples",
        "_extra_s",
        "_failures",
        "_heartbeat_at",
        "_heartbeat_attempt",
        "_pending",
        "_pending_attempt",
        "_resend_at",
        "_rng",
        "_sealed",
        "_selector",
        "_selectors",
        "_stage_ends",
        "_stopping",
        "_ticket",
        "_to_send",
        "_update",
        "_upload_id",
        "_upload_url",
        "history",
        "joined",
        "stage",
        "task",
    )

    def __init__(
        self,
        selectors: Sequence[NodeId],
        capabilities: Capabilities,
        history: History,
        config: DeviceConfig,
        rng: Random,
        bundles: AcceptedBundles | None = None,
    ) -> None:
        self._bundles = bundles or NoBundles()
        self._capabilities = capabilities
        self._config = config
        self._rng = rng
        # The participations of this device so far.
        self.history = history

        # Progress: the current stage, when it times out, and whether the device wants to stop.
        self.stage = _CHECKING_IN
        self._stage_ends = _NEVER
        self._stopping = False
        # By how much servers have moved the ends of stages, because they could not go on.
        self._extra_s = 0.0
        # The assigned task, the answer to the join, and the newest ticket of the session.
        self.task: TaskId | None = None
        self.joined: Joined | None = None
        self._ticket = b""
        # The history entries of this participation: the task, or all evaluations of its program,
        # or the run and the task of an owner.
        self._counted: tuple[CountedAs, ...] = ()

        # All selectors, and the index of the one in use. A failed request moves on to the next.
        self._selectors = selectors
        self._selector = int(rng.random() * len(selectors))
        # The number of the last request, and failures in a row, for the back-off.
        self._attempt = 0
        self._failures = 0
        # The request of the stage, its number (0 while it waits to be sent again), and when to give
        # up waiting or to send it again.
        self._pending: Message | None = None
        self._pending_attempt = 0
        self._resend_at = _NEVER
        # The next heartbeat, from the join to the end, and the number of the last one.
        self._heartbeat_at = _NEVER
        self._heartbeat_attempt = 0

        # The trained update, masked once it is sealed, and how many examples it comes from.
        self._update = memoryview(b"")
        self._examples = 0
        # The sealed seed of the mask, under secure aggregation.
        self._sealed = b""
        # The upload: its id, the size of a chunk, and the chunks to send.
        self._upload_id = ""
        self._chunk_bytes = 1
        self._to_send: list[int] = []
        # Where the aggregator takes the upload itself; empty: through selectors.
        self._upload_url = ""

    # -- the machine contract ---------------------------------------------------------------

    def start(self, now: float) -> Effects:
        self._stage_ends = now + self._config.give_up_s
        excluded = (*self._bundles.refused(), *self.history.excluded(now))[:MAX_EXCLUDED]
        return self._ask(now, CheckIn(PROTOCOL_VERSION, self._capabilities, excluded))

    def receive(self, now: float, message: Message) -> Effects:
        if self.stage is _OVER:
            return []
        match message:
            case Answered():
                return self._on_answer(now, message)
            case Unanswered():
                return self._on_unanswered(now, message.attempt)
            case Moving():
                if message.attempt == self._pending_attempt:
                    self._resend_at = now + self._config.request_timeout_s
                return []
            case Downloaded():
                return self._on_downloaded()
            case Trained():
                return self._on_trained(now, message)
            case Sealed():
                return self._on_sealed(now, message)
            case WorkFailed():
                return self._leave("failed", message.reason)
            case Stop():
                return self._on_stop()
        raise ProtocolError(f"a client does not accept {type(message).__name__}")

    def _on_stop(self) -> Effects:
        """Leave. If a join is unanswered, wait first: only its answer has the ticket to leave."""
        if self.stage is Stage.JOINING and self._pending_attempt and not self._stopping:
            self._stopping = True
            return []
        return self._leave("stopped", "stopped")

    def wake(self, now: float) -> Effects:
        if self.stage is _OVER:
            return []
        if now >= self._stage_ends:
            ending: Ending = "failed" if self.stage in _WORKING else "gave_up"
            return self._leave(ending, "timed_out", f"{self.stage.value} took too long")
        effects: Effects = []
        if now >= self._resend_at and self._pending is not None:
            if self._pending_attempt:
                effects = self._on_unanswered(now, self._pending_attempt)
            else:
                effects = self._ask(now, self._pending)
        if now >= self._heartbeat_at:
            effects.append(self._send_heartbeat(now))
        return effects

    def beat(self, now: float) -> SendRequest | None:
        """Do what `wake` does if only a heartbeat is due; otherwise do nothing and return None."""
        if now < self._heartbeat_at or now >= self._resend_at or now >= self._stage_ends:
            return None
        return self._send_heartbeat(now)

    def next_wake(self) -> float:
        due = self._resend_at if self._resend_at < self._heartbeat_at else self._heartbeat_at
        return due if due < self._stage_ends else self._stage_ends

    # -- asking -----------------------------------------------------------------------------

    def _ask(self, now: float, message: Message) -> Effects:
        self._attempt += 1
        self._pending, self._pending_attempt = message, self._attempt
        is_held = self.stage is _CHECKING_IN
        timeout_s = self._config.check_in_timeout_s if is_held else self._config.request_timeout_s
        self._resend_at = now + timeout_s
        return [SendRequest(self._server_for(message), self._attempt, message)]

    def _server_for(self, message: Message) -> NodeId:
        is_direct = self._upload_url and isinstance(message, Chunk | Complete)
        return self._upload_url if is_direct else self._selectors[self._selector]

    def _leave_direct_path(self, now: float, reason: DirectFailure) -> Effects:
        """Go on through selectors. The copy of the request gets the same answer, whatever the
        aggregator has received. With jitter: all clients of a halted task come at the same time.
        """
        failed = DirectUploadFailed(self._upload_url, reason)
        effects = self._ask_again(now, 0.0)
        self._upload_url = ""
        return [failed, *effects]

    def _ask_again(self, now: float, after_s: float) -> Effects:
        """Send the request again later, with jittered back-off; through another selector, if it
        was sent to one.
        """
        if self._stopping:
            return self._finish("stopped", "stopped")
        if not self._upload_url:
            self._selector = (self._selector + 1) % len(self._selectors)
        self._failures += 1
        ceiling = self._config.backoff_s * 2.0 ** min(self._failures, 16)
        jitter = self._rng.random() * min(self._config.max_backoff_s, ceiling)
        self._pending_attempt = 0
        self._resend_at = now + after_s + jitter
        return []

    def _extend_stage(self, now: float, keep_s: float) -> None:
        """The server cannot go on and keeps the session meanwhile. A visit has one limit for it."""
        extra_s = min(now + keep_s - self._stage_ends, MAX_EXTRA_S - self._extra_s)
        if extra_s > 0:
            self._stage_ends += extra_s
            self._extra_s += extra_s

    def _on_unanswered(self, now: float, attempt: int) -> Effects:
        if attempt == self._pending_attempt:
            if self._upload_url:
                return self._leave_direct_path(now, "unanswered")
            return self._ask_again(now, 0.0)
        if attempt == self._heartbeat_attempt:
            return self._retry_heartbeat(now, 0.0)
        return []

    def _answered(self) -> None:
        self._pending, self._pending_attempt, self._resend_at = None, 0, _NEVER
        self._failures = 0

    def _send_heartbeat(self, now: float) -> SendRequest:
        assert self.joined is not None
        self._attempt += 1
        self._heartbeat_attempt = self._attempt
        self._heartbeat_at = now + max(_MIN_HEARTBEAT_S, self.joined.heartbeat_s)
        heartbeat = Heartbeat(self._ticket)
        return SendRequest(self._server_for(heartbeat), self._attempt, heartbeat)

    def _retry_heartbeat(self, now: float, after_s: float) -> Effects:
        """Retry before the next heartbeat is due: a new holder adopts clients only for a while."""
        self._selector = (self._selector + 1) % len(self._selectors)
        jitter = self._rng.random() * self._config.max_backoff_s
        self._heartbeat_at = min(self._heartbeat_at, now + after_s + jitter)
        return []

    # -- answers ----------------------------------------------------------------------------

    def _on_answer(self, now: float, answered: Answered) -> Effects:
        answer = answered.answer
        is_heartbeat = answered.attempt == self._heartbeat_attempt
        if answered.attempt != self._pending_attempt and not is_heartbeat:
            return []  # answers a request that was given up
        if is_heartbeat and isinstance(answer, Alive):
            return []
        progress = None if is_heartbeat else _PROGRESS.get(type(answer))
        if progress is not None and progress[0] is self.stage:
            return progress[1](self, now, answer)
        is_direct = self._upload_url and not is_heartbeat
        match answer:
            case Aborted():
                return self._finish("aborted", answer.reason)
            case Refused() if is_direct:
                return self._leave_direct_path(now, "refused")
            case Refused():
                return self._finish("refused", answer.reason)
            case Completed() if self.stage in (Stage.UPLOADING, Stage.COMPLETING):
                ending: Ending = "counted" if answer.discarded is None else "discarded"
                return self._finish(ending, answer.discarded or "")
            case Retry() if is_heartbeat:
                return self._retry_heartbeat(now, answer.after_s)
            case Retry():
                self._extend_stage(now, answer.keep_s)
                if answer.ticket and isinstance(self._pending, Report | Chunk | Complete):
                    self._ticket = answer.ticket
                    self._pending = replace(self._pending, ticket=answer.ticket)
                if is_direct and answer.elsewhere:
                    return self._leave_direct_path(now, "moved")
                return self._ask_again(now, answer.after_s)
            case Rejected() if self.stage is _CHECKING_IN:
                window = (answer.retry_from_s, answer.retry_until_s)
                detail = lacks_in_words(answer.lacks)
                return self._finish("rejected", answer.reason, *window, detail)
        if is_direct:
            # Another server may answer there. Only what a selector answers ends the visit.
            return self._leave_direct_path(now, "unexpected")
        detail = f"unexpected answer while {self.stage.value}: {type(answer).__name__}"
        return self._leave("failed", "protocol", detail)

    def _on_accepted(self, now: float, accepted: Accepted) -> Effects:
        self._answered()
        if accepted.bundle and self._bundles.lacks(accepted.bundle):
            # Give the place up: fetching may take long, and a slot is not for waiting.
            self.task = accepted.task
            effects = [self._goodbye(accepted.ticket, "no_program")]
            return effects + self._finish("unprepared", accepted.bundle)
        self.stage = Stage.JOINING
        self._stage_ends = now + self._config.give_up_s
        self._ticket = accepted.ticket
        self.task = accepted.task
        return self._ask(now, Join(accepted.ticket))

    def _on_joined(self, now: float, joined: Joined) -> Effects:
        self._answered()
        self.joined = joined
        self.task = joined.task
        self._ticket = joined.ticket
        if self._stopping:
            return self._leave("stopped", "stopped")
        self._counted = self._bundles.counted(joined)
        for counted in self._counted:
            if counted.name != joined.task:
                self.history.learn(joined.task, counted.name)
        declined = [
            counted.name for counted in self._counted if not self.history.allows(now, *counted)
        ]
        if declined:
            detail = "this device has taken part too recently or too often"
            remembered = [
                RememberDeclined(name, now) for name in declined if self.history.decline(now, name)
            ]
            return [*remembered, *self._leave("gave_up", "declined", detail)]
        self.stage = Stage.DOWNLOADING
        self._stage_ends = now + joined.training_timeout_s
        self._heartbeat_at = now + joined.heartbeat_s
        return [Download(joined.parameters, joined.model_length)]

    def _on_downloaded(self) -> Effects:
        assert self.joined is not None
        assert self.stage is Stage.DOWNLOADING
        self.stage = Stage.TRAINING
        joined, timeout_s = self.joined, self.joined.training_timeout_s
        return [Train(joined.task, joined.session, joined.parameters, timeout_s, joined.evaluates)]

    def _on_trained(self, now: float, trained: Trained) -> Effects:
        assert self.joined is not None
        assert self.stage is Stage.TRAINING
        self.stage = Stage.REPORTING
        self._stage_ends += self.joined.heartbeat_s
        self._update = memoryview(trained.update)
        if not trained.update or trained.examples < 1:
            return self._leave("failed", "training_failed", "training returned no update")
        self._examples = trained.examples
        # A masked update does not reveal its number of examples, so the report must not either.
        return self._ask(now, Report(self._ticket, 1 if self.joined.secure else trained.examples))

    def _on_granted(self, now: float, granted: UploadGranted) -> Effects:
        assert self.joined is not None
        self._answered()
        self._chunk_bytes = granted.chunk_bytes
        self._upload_url = granted.upload_url
        self._stage_ends = now + granted.upload_timeout_s
        self._ticket = granted.ticket
        # A running heartbeat has the old ticket: a refusal of it says nothing about the upload.
        self._heartbeat_attempt = 0
        if not self.joined.secure:
            return self._upload(now)
        if granted.secure is None:
            detail = "the server sent no offer of a TSA for a secure task"
            return self._leave("failed", "protocol", detail)
        self.stage = Stage.SEALING
        joined, update = self.joined, bytes(self._update)
        return [
            Seal(
                joined.task,
                granted.secure,
                update,
                self._examples,
                joined.version,
                granted.version,
            )
        ]

    def _on_sealed(self, now: float, sealed: Sealed) -> Effects:
        """The update leaves the device only in this masked form."""
        assert self.stage is Stage.SEALING
        self._update, self._sealed = memoryview(sealed.update), sealed.sealed
        return self._upload(now)

    def _upload(self, now: float) -> Effects:
        """Record the participation before the first byte of the update leaves the device."""
        assert self.joined is not None
        if self._chunks > MAX_CHUNKS:
            detail = f"{self._chunks} chunks, the limit is {MAX_CHUNKS}"
            return self._leave("failed", "protocol", detail)
        self._upload_id = f"{self._rng.getrandbits(64):016x}"
        self._to_send = list(range(self._chunks))
        remembered = [
            Remember(counted.name, self.history.record(now, *counted)) for counted in self._counted
        ]
        return [*remembered, *self._send_next(now)]

    @property
    def _chunks(self) -> int:
        return -(-len(self._update) // self._chunk_bytes)

    def _on_chunk_received(self, now: float, received: ChunkReceived) -> Effects:
        return self._send_next(now)

    def _on_incomplete(self, now: float, incomplete: Incomplete) -> Effects:
        self._to_send = [index for index in incomplete.missing if index < self._chunks]
        return self._send_next(now)

    def _send_next(self, now: float) -> Effects:
        self._answered()
        if not self._to_send:
            self.stage = Stage.COMPLETING
            return self._ask(now, Complete(self._ticket, self._upload_id, self._sealed))
        self.stage = Stage.UPLOADING
        index = self._to_send.pop(0)
        start = index * self._chunk_bytes
        data = bytes(self._update[start : start + self._chunk_bytes])
        return self._ask(now, Chunk(self._ticket, self._upload_id, index, crc32(data), data))

    # -- the end ----------------------------------------------------------------------------

    def _leave(self, ending: Ending, reason: LeaveReason, detail: str = "") -> Effects:
        """Tell the server once that the slot is free, and finish without waiting for an answer.

        The server learns the reason, never the detail.
        """
        effects: Effects = []
        if self.joined is not None:
            effects.append(self._goodbye(self._ticket, reason))
        return effects + self._finish(ending, reason, detail=detail)

    def _goodbye(self, ticket: SealedTicket, reason: LeaveReason) -> SendRequest:
        self._attempt += 1
        leave = Leave(ticket, reason)
        return SendRequest(self._server_for(leave), self._attempt, leave)

    def _finish(
        self,
        ending: Ending,
        reason: str,
        retry_from_s: float = 0.0,
        retry_until_s: float = 0.0,
        detail: str = "",
    ) -> Effects:
        self.stage = _OVER
        self._pending, self._pending_attempt = None, 0
        self._stage_ends = self._resend_at = self._heartbeat_at = _NEVER
        return [Finish(ending, reason, retry_from_s, retry_until_s, detail)]


# The answer that leads on from each stage.
_PROGRESS: dict[type, tuple[Stage, Callable[[Client, float, Any], Effects]]] = {
    Accepted: (_CHECKING_IN, Client._on_accepted),
    Joined: (Stage.JOINING, Client._on_joined),
    UploadGranted: (Stage.REPORTING, Client._on_granted),
    ChunkReceived: (Stage.UPLOADING, Client._on_chunk_received),
    Incomplete: (Stage.COMPLETING, Client._on_incomplete),
}
