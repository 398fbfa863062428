"""The states of a server's connection, the moves between them, and how long each may last.

        ┌────────── next request ──────────┐
        ▼                                  │
      HEAD ──▶ BODY ◀──▶ HELD              │
        │        │ whole                   │
        └─────▶ ANSWER ──▶ FILE ──▶ IDLE ──┘
                 ▲
    answered before the body was whole: DISCARD the rest, or LINGER; every state may go to CLOSED

A listener checks all its connections once per `sweep_s`. Nothing is timed per byte or per exchange,
so ten thousand connections cost one short loop per sweep. A limit is noticed up to one sweep late.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from papaya.http.limits import ListenerLimits


class ConnectionState(Enum):
    """What a connection waits for."""

    IDLE = auto()  # the first byte of the next request; there was one before
    HEAD = auto()  # the rest of a head, or the first byte on a new connection
    BODY = auto()  # the rest of a body; a receiver takes it
    HELD = auto()  # the receiver, which asked us not to read for now
    DISCARD = auto()  # the rest of a body that nobody takes, to keep the connection
    ANSWER = auto()  # the route's answer; the request is complete
    FILE = auto()  # room to send the next piece of a file
    LINGER = auto()  # the peer to close, after our last answer
    CLOSED = auto()  # the loop, to report the lost connection

    __hash__ = object.__hash__  # that of Enum is slow, and every request changes the state


_S = ConnectionState
TRANSITIONS: dict[ConnectionState, frozenset[ConnectionState]] = {
    _S.IDLE: frozenset({_S.HEAD, _S.CLOSED}),
    # A malformed or late head is answered, then LINGER.
    _S.HEAD: frozenset({_S.BODY, _S.ANSWER, _S.LINGER, _S.CLOSED}),
    # DISCARD, LINGER and FILE: the route answered early, or the receiver failed.
    _S.BODY: frozenset({_S.HELD, _S.ANSWER, _S.DISCARD, _S.FILE, _S.LINGER, _S.CLOSED}),
    _S.HELD: frozenset({_S.BODY, _S.ANSWER, _S.DISCARD, _S.FILE, _S.LINGER, _S.CLOSED}),
    # ANSWER and FILE: the receiver failed, and the failure is not answered yet.
    _S.DISCARD: frozenset({_S.IDLE, _S.HEAD, _S.ANSWER, _S.FILE, _S.LINGER, _S.CLOSED}),
    # HEAD: the next request was pipelined.
    _S.ANSWER: frozenset({_S.IDLE, _S.HEAD, _S.FILE, _S.CLOSED}),
    _S.FILE: frozenset({_S.IDLE, _S.HEAD, _S.DISCARD, _S.LINGER, _S.CLOSED}),
    _S.LINGER: frozenset({_S.CLOSED}),
    _S.CLOSED: frozenset(),
}

# For timeouts these count as one: the time in BODY does not start again after HELD.
_SAME_WAIT = {_S.HELD: _S.BODY, _S.DISCARD: _S.BODY, _S.FILE: _S.ANSWER}


class RequestProgress(NamedTuple):
    """A connection at one moment."""

    state: ConnectionState
    requests: int  # begun so far
    received: int  # bytes so far
    taken: int  # bytes of answers that the peer has taken so far; all of them if none are unsent
    unsent: int  # bytes of answers that the kernel has not taken, because the peer is slow


class Timeouts:
    """Decides when a connection has been slow or silent for too long."""

    __slots__ = (
        "_before",
        "_checked_at",
        "_limits",
        "_moved_at",
        "_sent_at",
        "_start",
        "_state_at",
        "_taken_before",
        "_unsent_at",
    )

    def __init__(self, limits: ListenerLimits, now: float) -> None:
        self._limits = limits
        self._before: RequestProgress | None = None
        self._checked_at = now
        self._state_at = now  # the present wait began
        self._moved_at = now  # the last byte was received
        self._sent_at = now  # the peer last took some of an answer, or nothing was unsent
        self._start = 0  # bytes received when the present wait began
        self._unsent_at = now  # bytes of an answer were first found unsent
        self._taken_before = 0  # bytes that the peer had taken before the answer

    @property
    def waiting_since(self) -> float:
        """When the current wait was first noticed."""
        return self._state_at

    def exceeded(self, now: float, progress: RequestProgress) -> str | None:
        """Why the connection should be closed; None if it is within its limits."""
        before, self._before = self._before, progress
        elapsed, self._checked_at = now - self._checked_at, now
        is_held = progress.state is ConnectionState.HELD
        # A late sweep means that this process was busy: do not count that time against the peer.
        ours = elapsed if is_held else max(0.0, elapsed - 2 * self._limits.sweep_s)
        self._state_at += ours
        self._moved_at += ours
        self._sent_at += ours
        self._unsent_at += ours
        if before is None or _wait(before) != _wait(progress):
            self._state_at = self._moved_at = now
            self._start = progress.received
        elif before.received != progress.received:
            self._moved_at = now
        if not progress.unsent or before is None or not before.unsent:
            self._sent_at = self._unsent_at = now
            # What has gone into the peer's receive buffer since the answer began counts for it.
            self._taken_before = min(progress.taken, 0 if before is None else before.taken)
        elif before.taken < progress.taken:
            self._sent_at = now
        if now - self._sent_at > self._limits.answer_pause_s:
            return "the peer does not read the answer"
        return self._reads_too_slowly(now, progress) or self._too_slow(now, progress)

    def _reads_too_slowly(self, now: float, progress: RequestProgress) -> str | None:
        limits = self._limits
        counted_s = now - self._unsent_at - limits.write_timeout_s
        least = limits.min_answer_bytes_per_s * counted_s
        if progress.taken - self._taken_before >= least:
            return None
        return f"the peer reads the answer slower than {limits.min_answer_bytes_per_s:g} bytes/s"

    def _too_slow(self, now: float, progress: RequestProgress) -> str | None:
        limits = self._limits
        waited_s = now - self._state_at
        match _wait(progress)[0]:
            case ConnectionState.IDLE if waited_s > limits.idle_timeout_s:
                return "no further request arrived"
            case ConnectionState.HEAD if waited_s > limits.head_timeout_s:
                return f"the head did not arrive within {limits.head_timeout_s:g} s"
            case ConnectionState.LINGER if waited_s > limits.linger_s:
                return "the peer did not close"
            case ConnectionState.BODY:
                if now - self._moved_at > limits.body_timeout_s:
                    return f"nothing of the body arrived for {limits.body_timeout_s:g} s"
                least = limits.min_body_bytes_per_s * (waited_s - limits.body_timeout_s)
                if progress.received - self._start < least:
                    rate = f"{limits.min_body_bytes_per_s:g} bytes/s"
                    return f"the body arrived slower than {rate}"
        return None


def _wait(progress: RequestProgress) -> tuple[ConnectionState, int]:
    return _SAME_WAIT.get(progress.state, progress.state), progress.requests
