"""Listens on an address: `serve` opens a listener; `close` and `drain` end it gracefully."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import partial
from heapq import nsmallest

import msgspec

from papaya.http.acceptor import Acceptor, bind
from papaya.http.errors import ListenError
from papaya.http.exchange import Blame, blames_nobody, log
from papaya.http.limits import ListenerLimits
from papaya.http.passthrough import Passthrough
from papaya.http.routes import HttpRoute, Routes
from papaya.http.server_connection import ServerConnection
from papaya.http.tls import Tls

RenderProblem = Callable[[int, str, float | None], bytes]
"""Makes the body of an error from the status, a text, and the seconds until a retry, if any. If the
answer has the header Retry-After, its value is the same time, rounded up to whole seconds.
"""
Observe = Callable[[str, int, float], None]
"""Called for each answer: the route's path template, the status, the seconds since the head."""

_BACKLOG = 4096
_MAX_WARNINGS = 256
_WARN_S = 60.0
# A connection is closed to make room only if it has been idle for this many sweeps. A late sweep
# counts as at most two, so the loop has run in between, and would have received a waiting request.
_IDLE_SWEEPS = 3


def plain_problem(status: int, text: str, retry_after_s: float | None) -> bytes:
    """The body of an error answer, if the user of this package defines none."""
    return msgspec.json.encode({"status": status, "problem": text})


def unobserved(route: str, status: int, seconds: float) -> None:
    """No-op."""


class ListenerState:
    """What the connections of one listener share. All of them run on one loop."""

    def __init__(
        self,
        routes: Iterable[HttpRoute],
        problem: RenderProblem,
        limits: ListenerLimits,
        observe: Observe = unobserved,
        blame: Blame = blames_nobody,
        tls: Tls | None = None,
    ) -> None:
        self.routes = Routes(routes)
        self.observe = observe
        self.problem = problem
        self.blame = blame  # decides which exceptions of a route are the peer's fault
        self.limits = limits
        self.tls = tls
        self.loop = asyncio.get_running_loop()
        self.is_accepting = True  # False: connections close after their present exchange
        self.connections: set[ServerConnection] = set()
        # Places that are taken, also by TLS handshakes. `serve` replaces it.
        self.places: Callable[[], int] = lambda: len(self.connections)
        # Heads are received here. All connections can share one buffer, because the loop reports
        # the bytes to a connection before it asks another one for a buffer.
        self.scratch = memoryview(bytearray(limits.max_head_bytes))
        self.date = ""  # the Date header, renewed by each sweep
        self._refused: set[tuple[str, str]] = set()  # hosts and reasons that were logged
        self._made_room_at = -math.inf  # when that was last logged
        self._all_gone = asyncio.Event()
        self._sweep()

    def warn_once(self, host: str, why: str) -> None:
        """Log that a peer is refused; not again while the reason is the same."""
        if (host, why) not in self._refused and len(self._refused) < _MAX_WARNINGS:
            self._refused.add((host, why))
            log.warning("%s is refused: %s", host, why)

    def left(self, connection: ServerConnection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()

    def stop(self) -> None:
        """Begins no further exchanges: each connection closes after its present one."""
        self.is_accepting = False
        for connection in tuple(self.connections):
            connection.close_if_idle()

    async def empty(self, timeout_s: float) -> None:
        """Waits until all connections have closed, and aborts those left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_all_are_gone()
        except TimeoutError:
            for connection in tuple(self.connections):
                connection.abort()
            await self._until_all_are_gone()
        self._timer.cancel()

    async def _until_all_are_gone(self) -> None:
        while self.connections:
            self._all_gone.clear()
            await self._all_gone.wait()

    def _sweep(self) -> None:
        now = self.loop.time()
        self.date = f"Date: {formatdate(usegmt=True)}\r\n"
        self._timer = self.loop.call_later(self.limits.sweep_s, self._sweep)
        for connection in tuple(self.connections):
            try:
                connection.check_timeouts(now)
            except Exception:
                log.exception("cannot check the timeouts of a connection")
        self._make_room(now)

    def _make_room(self, now: float) -> None:
        """Closes connections that wait for a request, the one that has waited longest first, until
        `spare` places are free.

        The next request may be on its way, most likely on a connection that has just become idle:
        clients reuse the connection that they used last. If it is closed, the client has to send
        the request again, and a selector that relays a body cannot do that. So connections are
        spared for a few sweeps.
        """
        missing = self.places() + self.limits.spare - self.limits.max_connections
        if not self.limits.spare or missing <= 0:
            return
        latest = now - _IDLE_SWEEPS * self.limits.sweep_s
        idle = [
            (since, id(connection), connection)
            for connection in self.connections
            if (since := connection.idle_since) is not None and since <= latest
        ]
        for _, _, connection in nsmallest(missing, idle):
            connection.close_if_idle()
        if idle and now - self._made_room_at >= _WARN_S:
            self._made_room_at = now
            log.warning(
                "idle connections are closed: fewer than %d of the %d connections of this listener "
                "are free (hint: raise max_connections and the limit on open files, ulimit -n)",
                self.limits.spare,
                self.limits.max_connections,
            )


class Listener:
    """An open listener."""

    def __init__(
        self, acceptor: Acceptor, state: ListenerState, passthrough: Passthrough | None, port: int
    ) -> None:
        self._acceptor = acceptor
        self._state = state
        self._passthrough = passthrough
        self.port = port

    @property
    def connections(self) -> int:
        """How many are open now, in a TLS handshake or later."""
        return self._acceptor.accepted

    def close(self) -> None:
        """Accepts no further connections; exchanges that have begun go on."""
        self._acceptor.close()
        self._state.stop()

    async def drain(self, timeout_s: float) -> None:
        """Closes, waits for open exchanges, and aborts those left after `timeout_s`."""
        self.close()
        emptied = [self._state.empty(timeout_s)]
        if self._passthrough is not None:
            emptied.append(self._passthrough.empty(timeout_s))
        await asyncio.gather(*emptied)


async def serve(
    routes: Iterable[HttpRoute],
    host: str,
    port: int,
    *,
    limits: ListenerLimits | None = None,
    problem: RenderProblem = plain_problem,
    observe: Observe = unobserved,
    blame: Blame = blames_nobody,
    tls: Tls | None = None,
    proxies: Iterable[str] = (),
    passthrough: Passthrough | None = None,
) -> Listener:
    """Listens on `host` and `port`; port 0 takes a free one.

    `proxies`: addresses or networks that send the PROXY protocol. `passthrough`: takes
    connections that ask for another server in TLS (SNI).
    """
    limits = limits or ListenerLimits()
    try:
        sockets = await bind(host, port, _BACKLOG)
    except (OSError, OverflowError) as error:
        is_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise ListenError(host, port, str(error), is_in_use=is_in_use) from error
    state = ListenerState(routes, problem, limits, observe, blame, tls)
    acceptor = Acceptor(
        sockets, partial(ServerConnection, state), limits, tls, proxies, passthrough
    )
    state.places = lambda: acceptor.places
    return Listener(acceptor, state, passthrough, sockets[0].getsockname()[1])
