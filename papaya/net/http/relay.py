"""A receiver that passes a body on to another server while it arrives (DESIGN: cut-through).

It holds no body: what arrives goes to the next socket at once, and while that one is full nothing
more is read. All relays of a process share one buffer, for it is free again after each piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from papaya.net.http.connection import Connections
from papaya.net.http.exchange import Exchange, Headers, as_refusal
from papaya.net.http.link import Response

_PIECE_BYTES = 1 << 20  # a whole chunk, when the device was fast


class Relays:
    """Passes bodies on to other servers, and their answers back."""

    def __init__(self, connections: Connections, *, piece_bytes: int = _PIECE_BYTES) -> None:
        self._connections = connections
        self._room = memoryview(bytearray(piece_bytes))
        self._tasks: set[asyncio.Task[None]] = set()

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
        relay = Relay(self._connections, self._room, exchange, address, path, headers)
        task = asyncio.create_task(relay.answer(timeout_s, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return relay


class Relay:
    """One body on its way through."""

    def __init__(
        self,
        connections: Connections,
        room: memoryview,
        exchange: Exchange,
        address: str,
        path: str,
        headers: Headers,
    ) -> None:
        self._room = room
        self._exchange = exchange
        head = exchange.head
        self._upload = connections.open_upload(
            address, head.method, path, headers, head.length, exchange.resume_reading
        )
        if self._upload.is_full:
            exchange.pause_reading()

    def buffer(self, remaining: int) -> memoryview:
        return self._room

    def received(self, count: int) -> None:
        self._upload.write(self._room[:count])
        if self._upload.is_full:
            self._exchange.pause_reading()

    def finished(self) -> None:
        """The far side answers; there is nothing to do here."""

    def broken(self) -> None:
        self._upload.abort()

    async def answer(self, timeout_s: float, answer: Callable[[Exchange, Response], None]) -> None:
        try:
            answer(self._exchange, await self._upload.response(timeout_s))
        except Exception as error:
            refusal = as_refusal(error)
            if self._exchange.is_open:
                self._exchange.answer_problem(refusal.status, str(refusal), refusal.headers)
