"""A receiver that passes a body on to another server while it arrives (cut-through).

It stores no body: bytes go to the next socket at once, and while that one is full nothing more is
read. All relays of a process share one buffer, because it is free again after each piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from papaya.http.client_connection import Response
from papaya.http.exchange import Exchange, Headers, as_refusal
from papaya.http.pool import ConnectionPool, StreamedRequest

_PIECE_BYTES = 1 << 20  # one chunk


class Relays:
    """Passes bodies on to other servers, and returns their answers."""

    def __init__(self, connections: ConnectionPool, *, piece_bytes: int = _PIECE_BYTES) -> None:
        self._connections = connections
        self._room = memoryview(bytearray(piece_bytes))

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

        Raises PeerUnavailable (503) at once if too many requests wait for `address`. Later failures
        are answered with 503 too.
        """
        head = exchange.head
        upload = self._connections.open_upload(
            address, head.method, path, headers, head.length, timeout_s, exchange.resume_reading
        )
        return Relay(upload, self._room, exchange, answer)


class Relay:
    """The receiver of one body."""

    def __init__(
        self,
        upload: StreamedRequest,
        room: memoryview,
        exchange: Exchange,
        answer: Callable[[Exchange, Response], None],
    ) -> None:
        self._room = room
        self._exchange = exchange
        self._answer = answer
        self._upload = upload
        upload.answer.add_done_callback(self._answered)
        self._pause_if_full()

    def buffer(self, remaining: int) -> memoryview:
        return self._room

    def received(self, count: int) -> None:
        self._upload.write(self._room[:count])
        self._pause_if_full()

    def _pause_if_full(self) -> None:
        if self._upload.is_full:
            self._exchange.pause_reading()

    def finished(self) -> None:
        """No-op: the other server answers."""

    def broken(self) -> None:
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
