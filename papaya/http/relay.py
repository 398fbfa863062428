"""A receiver that passes a body on to another server while it arrives (DESIGN: cut-through).

It holds no body: what arrives goes to the next socket at once, and while that one is full nothing
more is read. All relays of a process share one buffer, for it is free again after each piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from papaya.http.client_connection import Response
from papaya.http.exchange import Exchange, Headers, as_refusal
from papaya.http.pool import ConnectionPool
from papaya.http.splice import Puller
from papaya.http.upload import StreamedRequest

_PIECE_BYTES = 1 << 20  # a whole chunk, when the device was fast


class Relays:
    """Passes bodies on to other servers, and their answers back."""

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
        """For a streamed route. `answer` is called with the far side's answer, early or not.

        Raises PeerUnavailable (503) at once when too much waits for `address`; later failures are
        answered the same way.
        """
        head = exchange.head
        upload = self._connections.open_upload(
            address, head.method, path, headers, head.length, timeout_s, exchange.resume_reading
        )
        return Relay(upload, self._room, exchange, answer)


class Relay(Puller):
    """One body on its way through."""

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

    def pull(self, file: int, remaining: int) -> int:
        count = self._upload.pull(file, remaining)
        if self._upload.is_full:
            asyncio.get_running_loop().call_soon(self._pause_if_full)
        return count

    def _pause_if_full(self) -> None:
        if self._upload.is_full:
            self._exchange.pause_reading()

    def finished(self) -> None:
        """The far side answers; there is nothing to do here."""

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
