"""When a connection has been slow or silent for too long.

One sweep per second asks every connection; nothing is timed per byte or per exchange, so that ten
thousand connections cost one short loop. What is seen late is forgiven: a limit is exceeded by up
to one sweep before it is noticed.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from papaya.http.limits import ListenerLimits


class ConnectionPhase(Enum):
    """What a connection waits for."""

    IDLE = auto()  # the next request, on a connection that had one
    HEAD = auto()
    BODY = auto()
    ANSWER = auto()  # ours; a route may take its time
    LINGER = auto()  # the peer to close, after a closing answer


class Seen(NamedTuple):
    """A connection at one moment."""

    phase: ConnectionPhase
    exchanges: int  # begun so far
    received: int  # bytes so far
    held: bool  # we do not read, on purpose
    flushed: int  # bytes of answers that the peer's side has taken so far
    unsent: int  # bytes of answers that wait for the peer


class Timeouts:
    """Remembers since when the same thing is waited for."""

    __slots__ = ("_last", "_limits", "_moved", "_seen", "_since", "_start", "_wrote")

    def __init__(self, limits: ListenerLimits, now: float) -> None:
        self._limits = limits
        self._seen: Seen | None = None
        self._last = self._since = self._moved = self._wrote = now
        self._start = 0

    def exceeded(self, now: float, seen: Seen) -> str | None:
        """What has been too slow, in words; None while all is well."""
        before, self._seen = self._seen, seen
        elapsed, self._last = now - self._last, now
        # A sweep that is late was late for the peer's bytes too: that time is ours, not the peer's.
        ours = elapsed if seen.held else max(0.0, elapsed - 2 * self._limits.sweep_s)
        self._since += ours
        self._moved += ours
        self._wrote += ours
        if before is None or (before.phase, before.exchanges) != (seen.phase, seen.exchanges):
            self._since = self._moved = now
            self._start = seen.received
        elif before.received != seen.received:
            self._moved = now
        if not seen.unsent or before is None or before.flushed != seen.flushed:
            self._wrote = now
        if now - self._wrote > self._limits.write_timeout_s:
            return "the answer is not taken"
        return self._too_slow(now, seen)

    def _too_slow(self, now: float, seen: Seen) -> str | None:
        limits = self._limits
        waited = now - self._since
        match seen.phase:
            case ConnectionPhase.IDLE if waited > limits.idle_timeout_s:
                return "no further request came"
            case ConnectionPhase.HEAD if waited > limits.head_timeout_s:
                return f"the head was not there after {limits.head_timeout_s:g} s"
            case ConnectionPhase.LINGER if waited > limits.linger_s:
                return "the peer did not close"
            case ConnectionPhase.BODY:
                if now - self._moved > limits.body_timeout_s:
                    return f"nothing of the body came for {limits.body_timeout_s:g} s"
                least = limits.min_body_bytes_per_s * (waited - limits.body_timeout_s)
                if seen.received - self._start < least:
                    return f"the body came slower than {limits.min_body_bytes_per_s:g} bytes/s"
        return None
