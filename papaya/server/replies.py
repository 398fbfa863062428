"""Replies to devices: one JSON message, with a matching HTTP status.

A client needs only the message in the body; the status is for proxies and logs. `Retry` also sets
the header Retry-After.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from papaya.errors import ProtocolError
from papaya.http.client_connection import Response
from papaya.http.errors import HttpError
from papaya.http.exchange import Exchange
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import Refused, Retry

OK, NOT_MODIFIED = 200, 304
BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, BUSY = 400, 401, 403, 404, 503
# Temporary problems: the same request may succeed later.
_PASSING = (408, 429, 500, 502, 503, 504)
_FOR_DEVICES = (OK, BAD_REQUEST, FORBIDDEN, *_PASSING)
# The listener for other servers opens before the aggregator behind it has been made.
STARTING = Retry("this aggregator is starting", 0.5, elsewhere=True)


class WaitingDevice:
    """A device that waits for the answer to one request; the `Handle` of the machines."""

    __slots__ = ("_decided", "_exchange", "_observe")

    def __init__(
        self,
        exchange: Exchange,
        observe: Callable[[Message], None] | None = None,
        decided: Callable[[], None] | None = None,
    ) -> None:
        """`observe` gets each answer that this process makes. `decided` is called before an answer
        other than Retry is sent, no matter which server made it.
        """
        self._exchange = exchange
        self._observe = observe
        self._decided = decided

    def answer(self, message: Message) -> None:
        if self._observe is not None:
            self._observe(message)
        if self._decided is not None and not isinstance(message, Retry):
            self._decided()
        answer(self._exchange, message)

    def pass_on(self, response: Response) -> None:
        """Send the answer of another server unchanged."""
        if self._decided is not None and response.status not in _PASSING:
            self._decided()
        after = response.headers.get("retry-after")
        headers = (("Retry-After", after),) if after else ()
        self._exchange.answer(response.status, response.body, headers)


def is_for_devices(response: Response) -> bool:
    """Is it the answer to a device's request? Else the servers disagree, about their token for
    example, and the device has done nothing wrong.
    """
    return response.status in _FOR_DEVICES


def answer(exchange: Exchange, message: Message, status: int | None = None) -> None:
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(message, Retry):
        headers = (("Retry-After", str(math.ceil(message.after_s))),)
    exchange.answer(status or _status(message), wire.encode(message), headers)


def blame_peer(error: Exception) -> HttpError | None:
    """A 400 if the peer broke the protocol; None if the exception is our own fault."""
    return HttpError(400, str(error)) if isinstance(error, ProtocolError) else None


def retry_after_s(heartbeat_s: float) -> float:
    """When to retry if a server cannot be reached: soon enough for its successor, which adopts
    running clients for three heartbeats.
    """
    return min(1.0, heartbeat_s / 4)


def problem(
    status: int, text: str, retry_after_s: float | None = None, *, retry_s: float = 1.0
) -> bytes:
    """The message for an error of the HTTP layer: Retry or Refused, by status.

    `retry_after_s`: when to retry; if it is None, `retry_s` is used.
    """
    reason = text[:128]
    if status in _PASSING:
        after_s = retry_s if retry_after_s is None else retry_after_s
        return wire.encode(Retry(reason, after_s=after_s, elsewhere=True))
    return wire.encode(Refused(reason))


def _status(message: Message) -> int:
    match message:
        case Retry():
            return BUSY
        case Refused():
            return FORBIDDEN
    return OK
