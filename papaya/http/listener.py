"""Listening on an address: `serve` starts it, `close` and `drain` end it without cutting anyone."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable
from ssl import SSLContext

from papaya.http.cut_through import CutThrough
from papaya.http.errors import ListenError
from papaya.http.exchange import Blame, blames_nobody
from papaya.http.limits import ListenerLimits
from papaya.http.listener_state import (
    ListenerState,
    Observe,
    RenderProblem,
    plain_problem,
    unobserved,
)
from papaya.http.routes import HttpRoute

_BACKLOG = 4096


class Listener:
    """A listener that is open until it is closed and drained."""

    def __init__(self, server: asyncio.Server, service: ListenerState) -> None:
        self._server = server
        self._service = service
        self.port: int = server.sockets[0].getsockname()[1]

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._service.connections)

    def close(self) -> None:
        """Accepts no one any more; exchanges that have begun go on."""
        self._server.close()
        self._service.stop()

    async def drain(self, timeout_s: float) -> None:
        """Closes, waits for open exchanges, and cuts off what is left after `timeout_s`."""
        self.close()
        await self._service.empty(timeout_s)


async def serve(
    routes: Iterable[HttpRoute],
    host: str,
    port: int,
    *,
    limits: ListenerLimits | None = None,
    problem: RenderProblem = plain_problem,
    observe: Observe = unobserved,
    blame: Blame = blames_nobody,
    ssl: SSLContext | None = None,
) -> Listener:
    """Listens on `host` and `port`; port 0 takes a free one."""
    limits = limits or ListenerLimits()
    service = ListenerState(routes, problem, limits, observe, blame)
    try:
        server = await asyncio.get_running_loop().create_server(
            lambda: CutThrough(service),
            host,
            port,
            ssl=ssl,
            backlog=_BACKLOG,
            ssl_handshake_timeout=limits.head_timeout_s if ssl else None,
        )
    except (OSError, OverflowError) as error:
        await service.empty(0)
        is_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise ListenError(host, port, str(error), is_in_use=is_in_use) from error
    return Listener(server, service)
