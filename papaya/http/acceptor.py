"""Accepts connections and limits how many there are, also before their TLS handshake ends.

                                   under both limits          over a limit
    below `max_connections`        served                     503 with Retry-After
    at `max_connections`                                      503 with Retry-After
    and MAX_REFUSED being refused                             not accepted until one has closed

A connection over the limit of its own client address takes a place while it is refused. So if all
phones behind a carrier's address come back at once, each of them gets an answer. Such refusals take
at most two thirds of the places that serve nobody, whatever the number of addresses. One address
takes at most half of what the others have left of these two thirds, so it leaves room for the
refusals of others. Further connections over the limit of their address are closed without an
answer.

The kernel's queue holds what is not accepted. Every accepted socket is a descriptor, so a listener
uses at most `max_connections + MAX_REFUSED` of them, whatever its peers do. A connection that is
passed through uses one more, to the other server.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from ssl import CERT_REQUIRED, SSLEOFError, SSLError

from papaya.http.client_hello import peek_server_name
from papaya.http.errors import HttpError, PeerUnavailable
from papaya.http.exchange import log
from papaya.http.limits import ListenerLimits
from papaya.http.passthrough import Passthrough
from papaya.http.proxy_protocol import (
    LeadsBack,
    ProxiedClient,
    UnexpectedProxyHeader,
    read_client,
)
from papaya.http.tls import Tls
from papaya.http.tls_transport import start_tls

# How many connections of a full listener may be answered 503 at a time. They have places of their
# own, above `max_connections`.
MAX_REFUSED = 64

_PER_TURN = 64  # accepted before the loop serves its connections
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_S = 1.0
_WARN_S = 60.0


class Admission:
    """The place of one accepted socket, until `release` is called."""

    __slots__ = (
        "_acceptor",
        "_is_released",
        "client",
        "counted_in",
        "is_brief",
        "is_extra",
        "key",
        "refusal",
    )

    def __init__(self, acceptor: Acceptor, client: ProxiedClient, is_extra: bool) -> None:
        self.client = client  # the real one, if a proxy told it
        self.is_extra = is_extra  # it came when all of `max_connections` were taken
        # What to tell the client instead of serving it.
        self.refusal: str | None = "too many connections" if is_extra else None
        self.is_brief = is_extra  # its handshake may take at most `linger_s`
        self._acceptor = acceptor
        # Where and under which key the client's address is counted; None if it is not.
        self.counted_in: Counter[str] | None = None
        self.key = ""
        self._is_released = False

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._acceptor.released(self)


class Acceptor:
    """The listening sockets of one listener and the places of its connections."""

    def __init__(
        self,
        sockets: list[socket.socket],
        make: Callable[[Admission], asyncio.BufferedProtocol],
        limits: ListenerLimits,
        tls: Tls | None,
        proxies: Iterable[str],
        passthrough: Passthrough | None = None,
    ) -> None:
        self._sockets = sockets
        self._make = make  # makes the protocol of a connection
        self._limits = limits
        self._tls = tls
        self._passthrough = passthrough  # None: all connections are served here
        self._proxies = tuple(ip_network(proxy, strict=False) for proxy in proxies)
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()  # not handed to their protocol yet
        self.places = 0  # accepted sockets within `max_connections`, in a handshake or later
        self._extra = 0  # accepted sockets above it, which are refused
        self._served: Counter[str] = Counter()  # by address
        self._refused: Counter[str] = Counter()  # likewise, those over the limit of their address
        self._refusals = 0  # the sum of `_refused`
        self._warned_at: dict[str, float] = {}  # by reason, when a refusal was last logged
        self._is_paused = False  # nothing is accepted now
        self._is_closed = False
        self._listen()

    @property
    def accepted(self) -> int:
        """Sockets that are open now, in a handshake or later."""
        return self.places + self._extra

    def close(self) -> None:
        self._pause()
        self._is_closed = True
        for listening in self._sockets:
            listening.close()
        for task in self._opening:
            task.cancel()

    def released(self, admission: Admission) -> None:
        if admission.is_extra:
            self._extra -= 1
        else:
            self.places -= 1
        if (counts := admission.counted_in) is not None:
            self._refusals -= counts is self._refused
            counts[admission.key] -= 1
            if not counts[admission.key]:
                del counts[admission.key]
        if self._is_paused:
            self._listen()

    def _listen(self) -> None:
        if not self._is_closed:
            self._is_paused = False
            for listening in self._sockets:
                self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _pause(self) -> None:
        if not (self._is_paused or self._is_closed):
            self._is_paused = True
            for listening in self._sockets:
                self._loop.remove_reader(listening.fileno())

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_PER_TURN):
            is_extra = self.places >= self._limits.max_connections
            if is_extra and self._extra >= MAX_REFUSED:
                self._pause()
                return
            try:
                connection, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                log.warning("cannot accept connections: %s (hint: raise ulimit -n)", error)
                self._pause()
                self._loop.call_later(_RETRY_S, self._listen)
                return
            connection.setblocking(False)
            if is_extra:
                self._warn("max_connections", peer[0])
            self.places += not is_extra
            self._extra += is_extra
            admission = Admission(self, (peer[0], peer[1]), is_extra)
            is_proxy = any(ip_address(peer[0]) in network for network in self._proxies)
            # Not in the task: connections that are closed here must not make the listener full.
            if not (is_proxy or self._admit(admission)):
                connection.close()
                admission.release()
                continue
            task = self._loop.create_task(self._open(connection, admission, is_proxy))
            self._opening.add(task)
            task.add_done_callback(partial(self._opened, connection, admission))

    def _warn(self, limit: str, host: str) -> None:
        """At most once a minute for each limit."""
        if self._is_news(limit):
            log.warning(
                "connections are refused, the last one from %s: %s = %d is reached (hint: raise it;"
                " if this is the address of a load balancer, add it to proxies)",
                host,
                limit,
                getattr(self._limits, limit),
            )

    def _is_news(self, reason: str) -> bool:
        now = self._loop.time()
        if now - self._warned_at.get(reason, -math.inf) < _WARN_S:
            return False
        self._warned_at[reason] = now
        return True

    def _no_handshake(self, host: str, is_proxied: bool, error: OSError) -> None:
        """Warns about other servers and load balancers, which operators can repair, and not about
        devices. A health check that only connects and closes has not failed.
        """
        log.debug("%s did not finish the TLS handshake: %s", host, error)
        if isinstance(error, UnexpectedProxyHeader) and not is_proxied:
            # Strangers on the internet must not hide a load balancer.
            is_stranger = ip_address(host.partition("%")[0]).is_global
            if self._is_news(f"unexpected PROXY header {is_stranger}"):
                if self._passthrough is None:
                    hint = (
                        "if it is a load balancer of yours in front of devices, or a selector with "
                        "upload_routes, add its address to proxies; only the listener `devices` of "
                        "an aggregator takes such connections"
                    )
                else:
                    hint = (
                        "if it is a load balancer of yours in front of devices, add its address to "
                        "proxies; if it is a selector, correct its upload_routes"
                    )
                log.warning(
                    "%s sends the PROXY protocol, and its connections are closed (hint: %s)",
                    host,
                    hint,
                )
            return
        wants_certificates = (
            self._tls is not None and self._tls.context.verify_mode is CERT_REQUIRED
        )
        has_failed = isinstance(error, SSLError) and not isinstance(error, SSLEOFError)
        if wants_certificates and has_failed and self._is_news("handshake"):
            log.warning(
                "the TLS handshake of %s failed: %s (hint: check the dates of the certificate there"
                " and that servers_authority is the same on both sides)",
                host,
                getattr(error, "verify_message", "") or getattr(error, "reason", "") or error,
            )

    def _opened(
        self, connection: socket.socket, admission: Admission, task: asyncio.Task[None]
    ) -> None:
        self._opening.discard(task)
        if task.cancelled():  # perhaps before it began: then `_open` has released nothing
            connection.close()
            admission.release()

    async def _open(self, connection: socket.socket, admission: Admission, is_proxy: bool) -> None:
        peer = admission.client
        try:
            if is_proxy and not await self._admit_proxied(connection, admission):
                connection.close()
                admission.release()
                return
        except BaseException:
            connection.close()
            admission.release()
            raise
        limits, tls, make = self._limits, self._tls, partial(self._make, admission)
        handshake_s = limits.linger_s if admission.is_brief else limits.head_timeout_s
        ends_at = self._loop.time() + handshake_s
        try:
            if tls is None:
                await self._loop.connect_accepted_socket(make, connection)
            elif not await self._pass_through(connection, admission, handshake_s):
                left_s = ends_at - self._loop.time()
                await start_tls(connection, tls.context, make, timeout_s=left_s)
        except OSError as error:  # also every error of TLS, and TimeoutError
            self._no_handshake(admission.client[0], admission.client != peer, error)
            connection.close()
            admission.release()
        except BaseException:
            connection.close()
            admission.release()
            raise

    async def _admit_proxied(self, connection: socket.socket, admission: Admission) -> bool:
        """Learns the client's address and counts it. False: close without an answer."""
        try:
            async with asyncio.timeout(self._limits.head_timeout_s):
                is_last = self._passthrough is None
                client = await read_client(connection, accepts_passed=is_last)
                admission.client = client or admission.client
        except TimeoutError:
            log.info("proxy %s: no PROXY header in time", admission.client[0])
            return False
        except HttpError as error:
            if self._is_news("proxy"):
                log.warning(
                    "connections from proxy %s are closed: %s (hint: check that it sends the "
                    "PROXY protocol, in haproxy with send-proxy-v2, or remove it from proxies)",
                    admission.client[0],
                    error,
                )
            return False
        except OSError as error:
            if isinstance(error, LeadsBack) and self._is_news("leads back"):
                log.warning("connections from %s are closed: %s", admission.client[0], error)
            log.debug("proxy %s: %s", admission.client[0], error)
            return False
        return self._admit(admission)

    def _admit(self, admission: Admission) -> bool:
        """Counts the client's address. False: close without an answer."""
        if admission.refusal is not None:
            return True
        key = address_key(admission.client[0])
        counts = self._served
        if counts[key] >= self._limits.max_connections_per_address:
            self._warn("max_connections_per_address", admission.client[0])
            counts = self._refused
            serving_nobody = self._limits.max_connections - self.places + self._refusals
            if counts[key] >= 2 * serving_nobody // 3 - self._refusals:
                return False
            self._refusals += 1
            # A phone needs a while for a handshake, but silent peers must not hold most places.
            admission.is_brief = self._refusals > self._limits.max_connections // 4
            admission.refusal = "too many connections from your address"
        counts[key] += 1
        admission.counted_in, admission.key = counts, key
        return True

    async def _pass_through(
        self, connection: socket.socket, admission: Admission, timeout_s: float
    ) -> bool:
        """False: serve the connection here. True: it was passed through, or closed."""
        if self._passthrough is None:
            return False
        async with asyncio.timeout(timeout_s):
            name = await peek_server_name(connection)
        where = self._passthrough.find(name)
        if where is None:
            return False
        if admission.refusal is None:
            try:
                client = admission.client
                await self._passthrough.open(connection, client, where, admission.release)
            except PeerUnavailable as error:
                self._not_passed(name, error)
            else:
                return True
        connection.close()
        admission.release()
        return True

    def _not_passed(self, name: str, error: PeerUnavailable) -> None:
        is_unknown = isinstance(error.__cause__, socket.gaierror)
        # Strangers choose names that do not exist; these must not hide a server that is down.
        if self._is_news(f"passthrough {is_unknown}"):
            log.warning(
                "a connection for %s was closed: %s; its device uploads through a selector instead "
                "(hint: check that the aggregator runs, and check upload_routes and the firewall)",
                name,
                error,
            )


def address_key(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 of an IPv6 address."""
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return address.packed[:8].hex()
    return str(address)


async def bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`, all with the same port."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                listening = socket.socket(family, socket.SOCK_STREAM)
            except OSError:  # a kernel without IPv6, for example
                continue
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted sockets inherit it. Small answers must not wait for more bytes.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.setblocking(False)
            listening.bind((address[0], port, *address[2:]))
            listening.listen(backlog)
            port = listening.getsockname()[1]
    except BaseException:
        for listening in sockets:
            listening.close()
        raise
    if not sockets:
        raise OSError(errno.EAFNOSUPPORT, f"no address family of {host} is available")
    return sockets
