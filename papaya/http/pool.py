"""Requests to other servers, over connections that are kept alive and bounded for each server.

No request is sent twice, with one exception: if a kept connection turns out to be closed before any
byte of the answer arrived, `request` tries once more on a new one. Callers decide about further
repetitions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from ssl import SSLContext

from papaya.http.client_connection import ClientConnection, Response
from papaya.http.errors import PeerUnavailable
from papaya.http.exchange import Headers
from papaya.http.limits import PeerLimits
from papaya.http.sockets import connected_socket
from papaya.http.tls import Tls
from papaya.http.tls_transport import start_tls

_SCRATCH_BYTES = 64 << 10


class ConnectionPool:
    """All connections of this process to other servers."""

    def __init__(self, *, limits: PeerLimits | None = None, tls: Tls | None = None) -> None:
        self._limits = limits or PeerLimits()
        self._tls = tls
        self._pools: dict[str, _Pool] = {}
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))  # all answers arrive here
        self._is_closed = False

    async def request(
        self,
        address: str,
        method: str,
        path: str,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = 10.0,
    ) -> Response:
        """One exchange with the server at `address` (`host:port`)."""
        pool = self._pool(address)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._exchange(pool, None, method, path, headers, body)
                if response is None:
                    fresh = await pool.fresh()
                    response = await self._exchange(pool, fresh, method, path, headers, body)
        except TimeoutError as error:
            raise _no_answer(address, timeout_s) from error
        if response is None:
            raise PeerUnavailable(f"{address} closed the connection without an answer")
        return response

    def open_upload(
        self,
        address: str,
        method: str,
        path: str,
        headers: Headers,
        length: int,
        timeout_s: float,
        on_room: Callable[[], None] = lambda: None,
    ) -> StreamedRequest:
        """Begins a request whose body is written piece by piece while it still arrives here.

        Returns at once, or raises PeerUnavailable if too many requests wait already. `on_room` is
        called whenever `is_full` has become false, and when the upload is over.
        """
        pool = self._pool(address)
        return StreamedRequest(pool, method, path, headers, length, timeout_s, on_room)

    async def close(self) -> None:
        """Closes all connections; later requests fail."""
        self._is_closed = True
        for pool in tuple(self._pools.values()):
            await pool.close()

    def _pool(self, address: str) -> _Pool:
        if self._is_closed:
            raise PeerUnavailable(f"cannot reach {address}: this server is stopping")
        pool = self._pools.get(address)
        if pool is None:
            if len(self._pools) >= self._limits.max_peers:
                self._pools = {a: p for a, p in self._pools.items() if p.is_in_use}
            if len(self._pools) >= self._limits.max_peers:
                raise PeerUnavailable(f"cannot connect to {address}: too many other servers")
            pool = _Pool(address, self._limits, self._tls, self._scratch)
            self._pools[address] = pool
        return pool

    async def _exchange(
        self,
        pool: _Pool,
        connection: ClientConnection | None,
        method: str,
        path: str,
        headers: Headers,
        body: bytes,
    ) -> Response | None:
        """None if a kept connection was closed before any byte of the answer."""
        if connection is None:
            connection = pool.kept() or await pool.lend()
        try:
            answer = connection.begin(method, path, headers, len(body))
            connection.send(body)
            return await answer
        except PeerUnavailable:
            if connection.is_used and not connection.has_heard:
                return None
            raise
        finally:
            pool.give_back(connection)


class StreamedRequest:
    """A request whose body is sent while it still arrives from someone else (cut-through).

        upload.write(view)          sends at once, copies what the socket does not take
        if upload.is_full: pause    until `on_room` is called
        upload.answer               may come early: a refusal before the body is sent

    It is full until there is a connection. `answer` becomes the other server's answer or
    PeerUnavailable; what has not been sent by then is dropped. The timeout runs from the last piece
    of the body: the body may be slow, the other server may not. It is never repeated, because the
    bytes are gone.
    """

    def __init__(
        self,
        pool: _Pool,
        method: str,
        path: str,
        headers: Headers,
        length: int,
        timeout_s: float,
        on_room: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._head = (method, path, headers, length)
        self._on_room = on_room  # called when `is_full` becomes false
        self._early = bytearray()  # written before there was a connection
        self._connection: ClientConnection | None = None
        self._is_over = False  # answered, failed or aborted
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()  # when the last piece was written
        self._timeout_s = timeout_s
        self.answer: asyncio.Future[Response] = self._loop.create_future()
        self._opening: asyncio.Task[None] | None = None  # waits for a connection
        if (connection := pool.kept()) is not None:
            self._use(connection)
        else:
            pool.check_room()
            self._opening = asyncio.create_task(self._open())
        self._timer = self._loop.call_later(timeout_s, self._check_timeout)

    @property
    def is_full(self) -> bool:
        """Nothing should be written now. False after the answer, when writing does nothing."""
        return not self._is_over and (self._connection is None or self._connection.is_full)

    def write(self, data: bytes | memoryview) -> None:
        """Sends the next bytes of the body. `data` may be reused when this returns."""
        if self._is_over:
            return
        self._moved_at = self._loop.time()
        if self._connection is None:
            self._early += data
        else:
            self._connection.send(data)

    def abort(self) -> None:
        """Ends the request. A connection in the middle of a body is closed."""
        if self._is_over:
            return
        self._is_over = True
        self._timer.cancel()
        self._early.clear()
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._pool.give_back(self._connection)
        if not self.answer.done():
            self.answer.cancel()

    async def _open(self) -> None:
        try:
            self._use(await self._pool.lend())
        except Exception as error:
            self._opening = None
            self._fail(error)
        else:
            self._opening = None
            self._on_room()

    def _use(self, connection: ClientConnection) -> None:
        self._connection = connection
        connection.on_room = self._on_room
        connection.begin(*self._head).add_done_callback(self._answered)
        connection.send(bytes(self._early))
        self._early.clear()

    def _answered(self, answer: asyncio.Future[Response]) -> None:
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            self._fail(error)
        elif not self._is_over:
            self.answer.set_result(answer.result())
            self._end()

    def _check_timeout(self) -> None:
        left_s = self._moved_at + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_timeout)
        else:
            self._fail(_no_answer(self._pool.address, self._timeout_s))

    def _fail(self, error: BaseException) -> None:
        if not self._is_over:
            self.answer.set_exception(error)
            self.answer.exception()  # Marks it as retrieved: the caller may ignore it.
            self._end()

    def _end(self) -> None:
        self.abort()
        self._on_room()


class _Pool:
    """The connections to one server."""

    def __init__(
        self, address: str, limits: PeerLimits, tls: Tls | None, scratch: memoryview
    ) -> None:
        self.address = address
        self._scratch = scratch
        self._host, self._port = _host_and_port(address)
        self._limits = limits
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._open = 0  # connections that exist or are being opened
        self._connections: set[ClientConnection] = set()  # those that exist
        self._kept: list[ClientConnection] = []  # those that no exchange uses
        # Callers in order. Each gets a connection, or None: the permission to open one.
        self._waiting: deque[asyncio.Future[ClientConnection | None]] = deque()
        self._all_lost = asyncio.Event()

    @property
    def is_in_use(self) -> bool:
        return self._open > 0

    def kept(self) -> ClientConnection | None:
        """An unused connection: the one used last, so that surplus ones reach their idle limit."""
        while self._kept:
            connection = self._kept.pop()
            if (
                connection.can_be_used
                and self._loop.time() - connection.idle_since < self._limits.idle_s
                and connection.context is self._context
            ):
                return connection
            connection.abort()
        return None

    @property
    def _context(self) -> SSLContext | None:
        """Connections with an earlier one are not used again: its certificates were replaced."""
        return None if self._tls is None else self._tls.context

    def check_room(self) -> None:
        """Raises if the queue for a connection is full."""
        is_exhausted = self._open >= self._limits.max_connections
        if is_exhausted and self._number_waiting() >= self._limits.max_waiting:
            raise PeerUnavailable(f"too many requests wait for {self.address}")

    def _number_waiting(self) -> int:
        return sum(not turn.done() for turn in self._waiting)

    async def lend(self) -> ClientConnection:
        """A new connection if the limit allows it, else the next one that is given back."""
        self.check_room()
        if self._open < self._limits.max_connections:
            self._open += 1
            return await self._connect()
        turn: asyncio.Future[ClientConnection | None] = self._loop.create_future()
        self._waiting.append(turn)
        try:
            connection = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on(turn.result())
            raise
        if connection is None:
            return await self._connect()
        if connection.can_be_used:
            return connection
        connection.abort()  # It closed meanwhile, which lets the next caller open one.
        return await self.lend()

    async def fresh(self) -> ClientConnection:
        """A new connection. Closes the kept ones, which are probably dead too."""
        kept, self._kept = self._kept, []
        for connection in kept:
            connection.abort()
        return await self.lend()

    def give_back(self, connection: ClientConnection) -> None:
        if connection.end():
            connection.idle_since = self._loop.time()
            self._pass_on(connection)

    async def close(self) -> None:
        self._is_closed = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(
                    PeerUnavailable(f"cannot reach {self.address}: this server is stopping")
                )
        if self._connections:
            for connection in tuple(self._connections):
                connection.abort()
            self._all_lost.clear()
            await self._all_lost.wait()

    async def _connect(self) -> ClientConnection:
        """Opens a connection, which `_open` counts already; uncounts it on failure."""
        context = self._context
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                connection = await self._open_connection(context)
        except BaseException as error:
            self._free_slot()
            # RuntimeError: asyncio looks a name up on a thread, and none can start.
            if isinstance(error, OSError | TimeoutError | RuntimeError):
                raise PeerUnavailable(f"cannot connect to {self.address}: {error}") from error
            raise
        if connection.is_lost or self._is_closed:
            connection.abort()
            self._free_slot()
            raise PeerUnavailable(f"{self.address} closed the connection at once")
        if self._tls is not None and (why := self._tls.refusal(connection.certificate)):
            connection.abort()
            self._free_slot()
            wrong = PeerUnavailable(f"{self.address} is a different server than expected: {why}")
            raise wrong from PermissionError(why)
        self._connections.add(connection)
        return connection

    async def _open_connection(self, context: SSLContext | None) -> ClientConnection:
        made = ClientConnection(self.address, self._limits, self._lost, context, self._scratch)
        if context is None:
            await self._loop.create_connection(lambda: made, self._host, self._port)
        else:
            plain = await connected_socket(self._host, self._port)
            await start_tls(plain, context, lambda: made, server_hostname=self._host)
        return made

    def _lost(self, connection: ClientConnection) -> None:
        if connection not in self._connections:
            return  # Lost before it was lent: `_connect` handles it.
        self._connections.discard(connection)
        if connection in self._kept:
            self._kept.remove(connection)
        self._free_slot()
        if not self._connections:
            self._all_lost.set()

    def _free_slot(self) -> None:
        self._open -= 1
        if any(not turn.done() for turn in self._waiting):
            self._open += 1
            self._pass_on(None)

    def _pass_on(self, connection: ClientConnection | None) -> None:
        """Gives the first waiting caller a connection, or the permission to open one."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(connection)
                return
        if connection is None:
            self._free_slot()
        elif len(self._kept) < self._limits.max_idle:
            self._kept.append(connection)
        else:
            connection.abort()


def _no_answer(address: str, timeout_s: float) -> PeerUnavailable:
    return PeerUnavailable(f"{address} did not answer within {timeout_s:g} s")


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise PeerUnavailable(f"{address!r} is not host:port, for example 10.0.0.7:8752")
    return host.removeprefix("[").removesuffix("]"), int(port)
