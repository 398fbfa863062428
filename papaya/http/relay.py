"""A receiver that passes a body on to another server while it arrives (cut-through).

It stores no body: bytes go to the next socket at once, and while that one is full nothing more is
read. All relays of a process share one buffer, because it is free again after each piece.

Connections to the other server are few, and slow bodies must not hold all of them. So a body gets
one when its first bytes have arrived. If further bodies wait for a connection, those that have one
and stay too slow for a while are broken off and answered 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from papaya.http.client_connection import Response
from papaya.http.exchange import Exchange, Headers, as_refusal
from papaya.http.pool import ConnectionPool, StreamedRequest

_PIECE_BYTES = 1 << 20  # one chunk
_STARTER_BYTES = 16 << 10  # stored before there is a connection
_WINDOW_S = 10.0  # how long a body may be too slow while others wait
_MIN_BYTES_PER_S = 4096.0  # half of 64 kbit/s
_CHECK_S = 1.0


class Relays:
    """Passes bodies on to other servers, and returns their answers."""

    def __init__(
        self,
        connections: ConnectionPool,
        *,
        piece_bytes: int = _PIECE_BYTES,
        starter_bytes: int = _STARTER_BYTES,
        window_s: float = _WINDOW_S,
    ) -> None:
        self._connections = connections
        self._starter_bytes = starter_bytes
        self._room = memoryview(bytearray(piece_bytes))
        self._window_s = window_s
        # Bodies that have a connection or wait for one, in the order of their first bytes.
        self._passing: dict[str, dict[Relay, None]] = {}
        # The next check for slow bodies of each server, while others wait.
        self._checks: dict[str, asyncio.TimerHandle] = {}

    def relay(
        self,
        exchange: Exchange,
        address: str,
        path: str,
        headers: Headers,
        timeout_s: float,
        answer: Callable[[Exchange, Response], None],
    ) -> Relay:
        """The receiver of a streamed route. `answer` is called with the other server's answer.

        If too many requests wait for `address`, or the other server fails, the answer is 503.
        """
        head = exchange.head

        def begin(relay: Relay) -> StreamedRequest:
            upload = self._connections.open_upload(
                address, head.method, path, headers, head.length, timeout_s, exchange.resume_reading
            )
            self._passing.setdefault(address, {})[relay] = None
            upload.answer.add_done_callback(lambda _: self._forget(address, relay))
            if not upload.is_connected:
                self._check_later(address)
            return upload

        starter_bytes = min(self._starter_bytes, head.length)
        return Relay(begin, starter_bytes, self._room, exchange, answer)

    def _forget(self, address: str, relay: Relay) -> None:
        passing = self._passing[address]
        passing.pop(relay, None)
        if not passing:
            del self._passing[address]

    def _check_later(self, address: str) -> None:
        if address not in self._checks:
            loop, wait_s = asyncio.get_running_loop(), min(_CHECK_S, self._window_s)
            self._checks[address] = loop.call_later(wait_s, self._check, address)

    def _check(self, address: str) -> None:
        """Break off slow bodies, at most as many as wait. Again later, while any wait."""
        del self._checks[address]
        waiting = self._connections.waiting(address)
        if not waiting:
            return
        now = asyncio.get_running_loop().time()
        passing = self._passing.get(address, {})
        slow = [relay for relay in passing if relay.is_slow(now, self._window_s)]
        for relay in slow[:waiting]:
            relay.break_off()
        self._check_later(address)


class Relay:
    """The receiver of one body."""

    def __init__(
        self,
        begin: Callable[[Relay], StreamedRequest],
        starter_bytes: int,
        room: memoryview,
        exchange: Exchange,
        answer: Callable[[Exchange, Response], None],
    ) -> None:
        self._begin = begin
        self._starter_bytes = starter_bytes
        self._room = room
        self._exchange = exchange
        self._answer = answer
        self._starter = bytearray()  # what arrived before `_upload` began
        self._upload: StreamedRequest | None = None
        self._count = 0  # bytes of the body so far
        # When others were first found to wait while this body had a connection, and its bytes then.
        self._watched_since: float | None = None
        self._watched_from = 0

    def buffer(self, remaining: int) -> memoryview:
        return self._room

    def received(self, count: int) -> None:
        self._count += count
        if self._upload is not None:
            self._pass_on(self._upload, self._room[:count])
        elif self._count < self._starter_bytes:
            self._starter += self._room[:count]
        else:
            self._upload = self._begin(self)
            self._upload.answer.add_done_callback(self._answered)
            # Mostly the first piece is the whole chunk: do not copy it.
            if self._starter:
                self._upload.write(bytes(self._starter))
                self._starter.clear()
            self._pass_on(self._upload, self._room[:count])

    def is_slow(self, now: float, window_s: float) -> bool:
        """It has a connection, and less has arrived since than there should have been."""
        if self._upload is None or not self._upload.is_connected:
            return False
        if self._watched_since is None:
            self._watched_since, self._watched_from = now, self._count
        passed_s = now - self._watched_since
        arrived = self._count - self._watched_from
        return passed_s >= window_s and arrived < _MIN_BYTES_PER_S * passed_s

    def break_off(self) -> None:
        self.broken()
        if self._exchange.is_open:
            text = "the body arrives too slowly, and other requests wait"
            self._exchange.answer_problem(503, text)

    def _pass_on(self, upload: StreamedRequest, piece: memoryview) -> None:
        upload.write(piece)
        if upload.is_full:
            self._exchange.pause_reading()

    def finished(self) -> None:
        """No-op: the other server answers."""

    def broken(self) -> None:
        if self._upload is not None:
            self._upload.abort()

    def _answered(self, answer: asyncio.Future[Response]) -> None:
        if answer.cancelled():
            return
        try:
            self._answer(self._exchange, answer.result())
        except Exception as error:
            refusal = as_refusal(error)
            if self._exchange.is_open:
                self._exchange.answer_problem(refusal.status, str(refusal), refusal.headers)
