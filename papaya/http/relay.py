"""A receiver that passes a body on to another server while it arrives (cut-through).

It stores no body: bytes go to the next socket at once, and while that one is full nothing more is
read. What the socket did not take is stored here: at most one piece of each body. Pieces are
smaller if there are many bodies. All bodies arrive in one buffer, because it is free again after
each piece.

A body gets a connection to the other server when its first bytes have arrived, so that silent peers
use none. From then on the other server decides which bodies are too slow, because it knows whose
they are. So the pool must allow as many connections as there can be bodies: if bodies had to wait
for a connection, slow bodies would block the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from papaya.http.client_connection import Response
from papaya.http.exchange import Exchange, Headers, as_refusal
from papaya.http.pool import ConnectionPool, StreamedRequest

_PIECE_BYTES = 1 << 20  # one chunk
_SHARED_BYTES = 64 << 20  # with more than 64 bodies, a piece is an equal part of this
_LEAST_PIECE_BYTES = 64 << 10  # the smallest piece
_STARTER_BYTES = 16 << 10  # stored before there is a connection


class Relays:
    """Passes bodies on to other servers, and returns their answers."""

    def __init__(
        self,
        connections: ConnectionPool,
        *,
        piece_bytes: int = _PIECE_BYTES,
        starter_bytes: int = _STARTER_BYTES,
    ) -> None:
        self._connections = connections
        self._starter_bytes = starter_bytes
        self._room = memoryview(bytearray(piece_bytes))
        self._passing = 0  # bodies that have a connection, or will have one soon

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

        def begin() -> StreamedRequest:
            upload = self._connections.open_upload(
                address, head.method, path, headers, head.length, timeout_s, exchange.resume_reading
            )
            self._passing += 1
            upload.answer.add_done_callback(self._forget)
            return upload

        starter_bytes = min(self._starter_bytes, head.length)
        return Relay(begin, starter_bytes, self.room, exchange, answer)

    def room(self) -> memoryview:
        """Where the next piece of a body arrives."""
        if self._passing * len(self._room) <= _SHARED_BYTES:
            return self._room
        return self._room[: max(_LEAST_PIECE_BYTES, _SHARED_BYTES // self._passing)]

    def _forget(self, answer: asyncio.Future[Response]) -> None:
        self._passing -= 1


class Relay:
    """The receiver of one body."""

    def __init__(
        self,
        begin: Callable[[], StreamedRequest],
        starter_bytes: int,
        room: Callable[[], memoryview],
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
        self._piece = memoryview(b"")  # where the current piece arrives

    def buffer(self, remaining: int) -> memoryview:
        self._piece = self._room()
        return self._piece

    def received(self, count: int) -> None:
        piece = self._piece[:count]
        if self._upload is not None:
            self._pass_on(self._upload, piece)
        elif len(self._starter) + count < self._starter_bytes:
            self._starter += piece
        else:
            self._upload = self._begin()
            self._upload.answer.add_done_callback(self._answered)
            # Mostly the first piece is the whole chunk: do not copy it.
            if self._starter:
                self._upload.write(bytes(self._starter))
                self._starter.clear()
            self._pass_on(self._upload, piece)

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
