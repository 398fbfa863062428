"""What all connections of one listener share: routes, limits, the receive buffer, the sweep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import Protocol

import msgspec

from papaya.http.exchange import Blame, blames_nobody, log
from papaya.http.limits import ListenerLimits
from papaya.http.routes import HttpRoute, Routes

RenderProblem = Callable[[int, str], bytes]
Observe = Callable[[str, int, float], None]
"""Told of each answer: the template of its route, the status, the seconds since the head."""

UNKNOWN_ROUTE = "unknown"


def plain_problem(status: int, text: str) -> bytes:
    """The body of an error, where no protocol message has to say it."""
    return msgspec.json.encode({"status": status, "problem": text})


def unobserved(route: str, status: int, seconds: float) -> None:
    """Nobody counts."""


class Connection(Protocol):
    """What the service asks of a connection."""

    def look_at_the_clock(self, now: float) -> None: ...

    def close_if_idle(self) -> None: ...

    def abort(self) -> None: ...


class ListenerState:
    """Shared by all connections of a listener. All of it is on one loop."""

    def __init__(
        self,
        routes: Iterable[HttpRoute],
        problem: RenderProblem,
        limits: ListenerLimits,
        observe: Observe = unobserved,
        blame: Blame = blames_nobody,
    ) -> None:
        self.routes = Routes(routes)
        self.observe = observe
        self.problem = problem
        self.blame = blame
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.is_accepting = True
        self.connections: set[Connection] = set()
        # Heads are received here. One buffer is enough for all: between the moment when a
        # connection is asked for room and the one when it is told of the bytes, no other is.
        self.scratch = memoryview(bytearray(limits.max_head_bytes))
        self.date = ""
        self._all_gone = asyncio.Event()
        self._sweep()

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()

    def stop(self) -> None:
        """No further exchanges: each connection closes after the one that it carries."""
        self.is_accepting = False
        for connection in tuple(self.connections):
            connection.close_if_idle()

    async def empty(self, timeout_s: float) -> None:
        """Waits until every connection has closed, then cuts off the others."""
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
                connection.look_at_the_clock(now)
            except Exception:
                log.exception("a connection could not be swept")
