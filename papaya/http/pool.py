"""Connections to other servers: kept alive, bounded for each peer, never an unbounded queue.

Nothing is sent twice, with one exception: a kept connection that turns out to be closed before any
byte of the answer came is replaced once, for `request`. Callers know what may be repeated further.
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
from papaya.http.splice import Pipe, open_pipe
from papaya.http.upload import StreamedRequest


class ConnectionPool:
    """All connections of this process to other servers."""

    def __init__(self, *, limits: PeerLimits | None = None, ssl: SSLContext | None = None) -> None:
        self._limits = limits or PeerLimits()
        self._ssl = ssl
        self._pools: dict[str, _Pool] = {}
        self._pipe: Pipe | None = None
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
            raise PeerUnavailable(f"{address} did not answer in {timeout_s:g} s") from error
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
        """Begins an exchange whose body is written piece by piece while it is still arriving here.

        Returns at once, and raises PeerUnavailable at once when too many wait already. `on_room` is
        called whenever `is_full` has become false, and when the upload is over.
        """
        pool = self._pool(address)
        if self._pipe is None and self._ssl is None:
            self._pipe = open_pipe()
        return StreamedRequest(pool, method, path, headers, length, timeout_s, on_room, self._pipe)

    async def close(self) -> None:
        """Cuts everything off, for good."""
        self._is_closed = True
        for pool in tuple(self._pools.values()):
            await pool.close()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _pool(self, address: str) -> _Pool:
        if self._is_closed:
            raise PeerUnavailable(f"nothing is sent to {address} any more: this server stops")
        pool = self._pools.get(address)
        if pool is None:
            if len(self._pools) >= self._limits.max_peers:
                self._pools = {a: p for a, p in self._pools.items() if p.is_in_use}
            if len(self._pools) >= self._limits.max_peers:
                raise PeerUnavailable(f"{address} is one server more than can be talked to")
            pool = self._pools[address] = _Pool(address, self._limits, self._ssl)
        return pool

    async def _exchange(
        self,
        pool: _Pool,
        link: ClientConnection | None,
        method: str,
        path: str,
        headers: Headers,
        body: bytes,
    ) -> Response | None:
        """None if a kept connection was closed before any byte of an answer."""
        if link is None:
            link = pool.kept() or await pool.lend()
        try:
            answer = link.begin(method, path, headers, len(body))
            link.send(body)
            return await answer
        except PeerUnavailable:
            if link.is_used and not link.has_heard:
                return None
            raise
        finally:
            pool.give_back(link)


class _Pool:
    """The connections to one server. `_open` counts those that exist or are being made."""

    def __init__(self, address: str, limits: PeerLimits, ssl: SSLContext | None) -> None:
        self.address = address
        self._host, self._port = _host_and_port(address)
        self._limits = limits
        self._ssl = ssl
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._open = 0
        self._links: set[ClientConnection] = set()
        self._kept: list[ClientConnection] = []
        self._waiting: deque[asyncio.Future[ClientConnection | None]] = deque()
        self._all_lost = asyncio.Event()

    @property
    def is_in_use(self) -> bool:
        return self._open > 0

    def kept(self) -> ClientConnection | None:
        """A connection that is open and unused; the last one used, so that the others can age."""
        while self._kept:
            link = self._kept.pop()
            if link.can_be_used and self._loop.time() - link.idle_since < self._limits.idle_s:
                return link
            link.abort()
        return None

    def check_room(self) -> None:
        """Raises at once when one more exchange would have to wait too long in line."""
        if self._open >= self._limits.max_connections:
            waiting = sum(not future.done() for future in self._waiting)
            if waiting >= self._limits.max_waiting:
                raise PeerUnavailable(f"too many requests wait for {self.address}")

    async def lend(self) -> ClientConnection:
        """A connection: new if there may be one more, else the next one that is given back."""
        self.check_room()
        if self._open < self._limits.max_connections:
            self._open += 1
            return await self._connect()
        turn: asyncio.Future[ClientConnection | None] = self._loop.create_future()
        self._waiting.append(turn)
        try:
            link = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on(turn.result())
            raise
        if link is None:
            return await self._connect()
        if link.can_be_used:
            return link
        link.abort()  # It died on its way here: the place that it frees is somebody's next turn.
        return await self.lend()

    async def fresh(self) -> ClientConnection:
        """A connection that has never been used: those that are kept may be as dead as the last."""
        kept, self._kept = self._kept, []
        for link in kept:
            link.abort()
        return await self.lend()

    def give_back(self, link: ClientConnection) -> None:
        if link.end():
            link.idle_since = self._loop.time()
            self._pass_on(link)

    async def close(self) -> None:
        self._is_closed = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(PeerUnavailable(f"{self.address} is not waited for any more"))
        if self._links:
            for link in tuple(self._links):
                link.abort()
            self._all_lost.clear()
            await self._all_lost.wait()

    async def _connect(self) -> ClientConnection:
        """The place is counted already; it is given up if nobody answers there."""
        plain = self._ssl is None
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                _, link = await self._loop.create_connection(
                    lambda: ClientConnection(self.address, self._limits, self._lost, plain),
                    self._host,
                    self._port,
                    ssl=self._ssl,
                )
        except BaseException as error:
            self._free_place()
            if isinstance(error, OSError | TimeoutError):
                raise PeerUnavailable(f"cannot connect to {self.address}: {error}") from error
            raise
        if link.is_lost or self._is_closed:
            link.abort()
            self._free_place()
            raise PeerUnavailable(f"{self.address} closed the connection at once")
        self._links.add(link)
        return link

    def _lost(self, link: ClientConnection) -> None:
        if link not in self._links:
            return  # Lost before it was ever lent: `_connect` sees to it.
        self._links.discard(link)
        if link in self._kept:
            self._kept.remove(link)
        self._free_place()
        if not self._links:
            self._all_lost.set()

    def _free_place(self) -> None:
        self._open -= 1
        if any(not turn.done() for turn in self._waiting):
            self._open += 1
            self._pass_on(None)

    def _pass_on(self, link: ClientConnection | None) -> None:
        """To the first in line: a connection, or the place to make one."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(link)
                return
        if link is not None:
            self._kept.append(link)
        else:
            self._free_place()


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise PeerUnavailable(f"{address!r} is not host:port, for example 10.0.0.7:8752")
    return host.removeprefix("[").removesuffix("]"), int(port)
