"""`papaya serve tsa-gate`: lets aggregators on other machines reach a TSA on this one.

    aggregator ── mutual TLS ──▶ gate ── Unix socket or loopback ──▶ TSA

The TSA itself listens on its own machine only. The gate admits peers whose certificate names the
role aggregator, and passes bytes on in both directions, unread. It is outside of what is measured:
it can cut connections, as the network can, but seeds are sealed to the TSA and the cluster proves
its key inside (docs/adr/0033). Restarting the gate loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import cast

from papaya.config import Deployment
from papaya.config.deployment import TLS_SCHEME, address
from papaya.errors import OperatorError
from papaya.http.acceptor import Acceptor, Admission, bind
from papaya.http.limits import ListenerLimits
from papaya.http.tls import NO_CERTIFICATE, Tls
from papaya.server.certificates import Certificates
from papaya.server.crew import on_thread
from papaya.tsa import endpoint

logger = logging.getLogger("papaya.server")

_BACKLOG = 128
_MAX_CONNECTIONS = 64  # the TSA takes as many
_CONNECT_S = 3.0
_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 60, 15, 4  # of a silent aggregator, by the kernel
_SCRATCH_BYTES = 64 << 10
_MAX_WARNINGS = 256
_LOOK_AT_FILES_S = 10.0


class TsaGate:
    """Passes connections on `listen` (`tls:host:port`) to the TSA at `tsa`."""

    def __init__(
        self, deployment: Deployment, listen: str, tsa: str, look_s: float = _LOOK_AT_FILES_S
    ) -> None:
        if not deployment.has_mutual_tls:
            raise OperatorError(
                f"the TSA cannot be reached at {listen} without certificates",
                hint="set servers_certificate, servers_key and servers_authority in --config FILE",
            )
        if not listen.startswith(TLS_SCHEME):
            raise OperatorError(
                f"{listen!r} is not an address for a gate",
                hint="write tls:host:port, for example --listen tls:0.0.0.0:8760",
            )
        self._where = address("listen", listen.removeprefix(TLS_SCHEME))
        self._tsa = tsa
        self._look_s = look_s
        self._certificates = Certificates(deployment, ("tsa",))
        self._pairs: set[_Pair] = set()
        self._told: set[tuple[str, str]] = set()  # hosts and reasons of refusals that were logged
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))  # bytes of all connections arrive here

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Connections that are open then are closed."""
        tls = self._certificates.servers
        assert tls is not None
        acceptor = Acceptor(
            self._sockets, lambda admission: _Pair(self, admission, tls).front, _LIMITS, tls, ()
        )
        try:
            while not stop.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._look_s):
                        await stop.wait()
                self._certificates.refresh()
        finally:
            acceptor.close()
            for pair in tuple(self._pairs):
                pair.close()

    async def bind(self) -> str:
        """Listen, and return the address to give to aggregators."""
        host, port = self._where
        try:
            self._sockets = await bind(host, port, _BACKLOG)
        except OSError as error:
            raise OperatorError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                hint="give an address of this machine and a free port above 1023",
            ) from error
        for listening in self._sockets:
            _notice_dead_peers(listening)
        shown = f"[{host}]" if ":" in host else host
        return f"{TLS_SCHEME}{shown}:{self._sockets[0].getsockname()[1]}"

    def warn_once(self, host: str, why: str) -> None:
        """Aggregators try again every second: say it once."""
        if (host, why) not in self._told and len(self._told) < _MAX_WARNINGS:
            self._told.add((host, why))
            logger.warning("%s is refused: %s", host, why)

    async def connect(self, back: asyncio.BufferedProtocol) -> None:
        """Connect to the TSA. Raises OSError or ValueError."""
        loop = asyncio.get_running_loop()
        connected = await on_thread(endpoint.connect, self._tsa, _CONNECT_S)
        connected.setblocking(False)
        if connected.family == socket.AF_UNIX:
            await loop.create_unix_connection(lambda: back, sock=connected)
        else:
            await loop.create_connection(lambda: back, sock=connected)

    def opened(self, pair: _Pair) -> None:
        self._pairs.add(pair)

    def closed(self, pair: _Pair) -> None:
        self._pairs.discard(pair)


def _notice_dead_peers(listening: socket.socket) -> None:
    """Accepted connections inherit it. Aggregators may be silent for long, so there is no timeout:
    the kernel asks, and ends the connections of machines that are gone.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


_LIMITS = ListenerLimits(
    max_connections=_MAX_CONNECTIONS, max_connections_per_address=_MAX_CONNECTIONS
)


class _Pair:
    """A connection of an aggregator, and the one to the TSA that belongs to it."""

    def __init__(self, gate: TsaGate, admission: Admission, tls: Tls) -> None:
        self._gate = gate
        self.scratch = gate.scratch
        self._admission = admission
        self._tls = tls
        self.front = _Side(self)
        self._back = _Side(self)
        self._opening: asyncio.Task[None] | None = None
        self._early = bytearray()  # decrypted before there is a connection to the TSA

    def made(self, side: _Side) -> None:
        if side is self._back:
            if self.front.is_lost:
                side.transport.close()
            else:
                side.transport.write(bytes(self._early))
                self.front.transport.resume_reading()
            return
        self._gate.opened(self)
        host = self._admission.client[0]
        certificate = side.transport.get_extra_info("peercert") or NO_CERTIFICATE
        why = self._admission.refusal or self._tls.refusal(certificate)
        if why:
            self._gate.warn_once(host, why)
            self.close()
            return
        side.transport.pause_reading()
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        try:
            await self._gate.connect(self._back)
        except (OSError, ValueError) as error:
            why = f"the TSA cannot be reached: {error} (hint: check that it runs)"
            self._gate.warn_once(self._admission.client[0], why)
            self.close()

    def received(self, side: _Side, data: bytes) -> None:
        other = self._other(side)
        if other.has_transport:
            other.transport.write(data)
        else:
            self._early += data

    def may_send(self, side: _Side, may: bool) -> None:
        """The buffer towards `side` is full, or has room again: so the other side may send."""
        other = self._other(side)
        if not other.is_lost and other.has_transport:
            if may:
                other.transport.resume_reading()
            else:
                other.transport.pause_reading()

    def close(self) -> None:
        for side in (self.front, self._back):
            if side.has_transport:
                side.transport.close()

    def lost(self, side: _Side) -> None:
        if side is self.front:
            self._admission.release()
            self._gate.closed(self)
        other = self._other(side)
        if other.has_transport:
            other.transport.close()  # what is buffered for it is still sent

    def _other(self, side: _Side) -> _Side:
        return self._back if side is self.front else self.front


class _Side(asyncio.BufferedProtocol):
    """One connection of a pair."""

    transport: asyncio.Transport

    def __init__(self, pair: _Pair) -> None:
        self._pair = pair
        self.has_transport = False
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.has_transport = True
        self._pair.made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pair.scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._pair.received(self, bytes(self._pair.scratch[:nbytes]))

    def pause_writing(self) -> None:
        self._pair.may_send(self, False)

    def resume_writing(self) -> None:
        self._pair.may_send(self, True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._pair.lost(self)
