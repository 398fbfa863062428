"""Listening on an address: `serve` starts it, `close` and `drain` end it without cutting anyone."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable
from ssl import SSLContext

from papaya.errors import OperatorError
from papaya.net.http.cut_through import CutThrough
from papaya.net.http.limits import Limits
from papaya.net.http.routes import Route
from papaya.net.http.service import Observe, Problem, Service, plain_problem, unobserved

_BACKLOG = 4096


class Listening:
    """A listener that is open until it is closed and drained."""

    def __init__(self, server: asyncio.Server, service: Service) -> None:
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
    routes: Iterable[Route],
    host: str,
    port: int,
    *,
    limits: Limits | None = None,
    problem: Problem = plain_problem,
    observe: Observe = unobserved,
    ssl: SSLContext | None = None,
) -> Listening:
    """Listens on `host` and `port`; port 0 takes a free one."""
    limits = limits or Limits()
    service = Service(routes, problem, limits, observe)
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
        raise _cannot_listen(host, port, error) from error
    return Listening(server, service)


def _cannot_listen(host: str, port: int, error: Exception) -> OperatorError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return OperatorError(
            f"{host}:{port} is in use by another program",
            hint=f"stop it, or choose another port; `ss -ltnp 'sport = :{port}'` shows who it is",
        )
    return OperatorError(
        f"cannot listen on {host}:{port}: {error}",
        hint="give an address of this machine and a port above 1023",
    )
