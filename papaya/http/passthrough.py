"""Passes TLS connections through to other servers, chosen by the name that the client asks for.

Nothing is decrypted: the bytes of both directions go on as they come, behind a PROXY header with
the client's address. Nothing is buffered: the data in one socket is peeked at and sent to the
other, and only what was sent is removed. So a connection takes two descriptors and no memory here.

If the other server cannot be reached, the connection is closed. The other server enforces limits on
handshakes, requests and bodies; here, a connection ends if nothing is sent for 120 s, or for 5 s
after one side has ended.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from papaya.http.errors import PeerUnavailable
from papaya.http.lookups import Lookups
from papaya.http.proxy_protocol import ProxiedClient, render_v2
from papaya.http.sockets import Address, connect_to_any

FindServer = Callable[[str], Address | None]
"""The server with a name, in lower case; None: the connection is for this listener."""

_CONNECT_S = 2.0
_SILENT_S = 120.0  # longer than the limits of a listener, so that the other server decides
_LAST_S = 5.0  # the same, after one direction has ended
_PIECE_BYTES = 256 << 10
_PIECES_PER_TURN = 4  # before the loop serves other connections


class Passthrough:
    """The connections of one listener that are passed through."""

    def __init__(self, find: FindServer) -> None:
        self.find = find
        self.passed = 0  # connections so far
        self.unreachable = 0  # connections that were closed because their server was unreachable
        self._open: set[PassedConnection] = set()
        self._all_gone = asyncio.Event()
        self._room = memoryview(bytearray(_PIECE_BYTES))  # shared by all connections
        self._lookups = Lookups()

    async def open(
        self,
        connection: socket.socket,
        client: ProxiedClient,
        where: Address,
        on_end: Callable[[], None],
    ) -> None:
        """Raises PeerUnavailable; the connection is then still open, and `on_end` is not called."""
        try:
            found = await self._lookups.find(where)
            server = await connect_to_any(found, _CONNECT_S / len(found))
            try:
                server.send(render_v2(client, connection.getsockname()))  # the socket is empty
                passed = PassedConnection(
                    connection, server, self._room, lambda: self._ended(passed, on_end)
                )
            except BaseException:
                server.close()
                raise
        except OSError as error:  # also TimeoutError
            self.unreachable += 1
            why = str(error) or f"no answer within {_CONNECT_S:g} s"
            raise PeerUnavailable(f"{where[0]}:{where[1]} cannot be reached: {why}") from error
        self.passed += 1
        self._open.add(passed)

    async def empty(self, timeout_s: float) -> None:
        """Waits until all connections have ended, and ends those left after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._all_gone.clear()
                    await self._all_gone.wait()
        for passed in tuple(self._open):
            passed.close()
        self._lookups.close()

    def _ended(self, passed: PassedConnection, on_end: Callable[[], None]) -> None:
        self._open.discard(passed)
        if not self._open:
            self._all_gone.set()
        on_end()


class PassedConnection:
    """A connection of a client, and the one to the server that it asks for."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        room: memoryview,
        on_end: Callable[[], None],
    ) -> None:
        """It closes both sockets when it ends."""
        self._sockets = (client, server)
        self._on_end = on_end
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()  # when something was last sent
        self._silent_s = _SILENT_S
        self._directions = (
            _Direction(self, client, server, room),
            _Direction(self, server, client, room),
        )
        for direction in self._directions:
            direction.read()
        self._timer = self._loop.call_later(_SILENT_S, self._check)

    def moved(self) -> None:
        self._moved_at = self._loop.time()

    def direction_ended(self) -> None:
        if all(direction.is_over for direction in self._directions):
            self.close()
            return
        self._silent_s = _LAST_S
        self.moved()
        self._timer.cancel()
        self._check()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        for connection in self._sockets:
            self._loop.remove_reader(connection.fileno())
            self._loop.remove_writer(connection.fileno())
            connection.close()
        self._on_end()

    def _check(self) -> None:
        left_s = self._moved_at + self._silent_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check)
        else:
            self.close()


class _Direction:
    """From one of the two sockets to the other."""

    __slots__ = ("_loop", "_passed", "_room", "_source", "_target", "is_over")

    def __init__(
        self,
        passed: PassedConnection,
        source: socket.socket,
        target: socket.socket,
        room: memoryview,
    ) -> None:
        self.is_over = False  # one of the two is closed; the target was told
        self._passed = passed
        self._source = source
        self._target = target
        self._room = room
        self._loop = asyncio.get_running_loop()

    def read(self) -> None:
        self._loop.add_reader(self._source.fileno(), self._readable)

    def _readable(self) -> None:
        """Reads until the socket is empty: uvloop reports data that a reset follows only once."""
        for _ in range(_PIECES_PER_TURN):
            try:
                count = self._source.recv_into(self._room, 0, socket.MSG_PEEK)
                sent = self._send(self._room[:count])
                self._remove(sent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._end()
                return
            if not count:
                self._end()
                return
            if sent < count:
                self._loop.remove_reader(self._source.fileno())
                self._loop.add_writer(self._target.fileno(), self._writable)
                return
        self._loop.remove_reader(self._source.fileno())  # uvloop watches again only after this
        self.read()

    def _send(self, data: memoryview) -> int:
        try:
            return self._target.send(data) if data else 0
        except (BlockingIOError, InterruptedError):
            return 0

    def _remove(self, count: int) -> None:
        """From the source, without copying it."""
        if count:
            if self._source.recv_into(self._room, count, socket.MSG_TRUNC) != count:
                raise ConnectionAbortedError("what was sent cannot be removed")
            self._passed.moved()

    def _writable(self) -> None:
        self._loop.remove_writer(self._target.fileno())
        self.read()

    def _end(self) -> None:
        """The other direction stays open for a while: an answer may follow."""
        self._loop.remove_reader(self._source.fileno())
        with suppress(OSError):
            self._target.shutdown(socket.SHUT_WR)
        self.is_over = True
        self._passed.direction_ended()
