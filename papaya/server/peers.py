"""Messages between servers: within the process by a call, to others by HTTP.

    Send      one-way; may be lost; in order to each peer, bounded, the oldest are dropped
    Forward   a device's request to the task's aggregator; the answer is passed back unchanged

A node's id contains its address (`aggregator@10.0.0.7:8752`). Every request has the servers' token.
With certificates between roles, a server that is called must have the role in its id, and each kind
of message is accepted only from the role that sends it (papaya/server/certificates.py).
Nothing is retried here: the machines do that. Bodies of chunks have connections of their own, so
that slow devices do not delay heartbeats and orders.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any

from papaya.credentials.tls import explain_peer, roles_of
from papaya.errors import ProtocolError
from papaya.http.client_connection import Response
from papaya.http.errors import HttpError, MisuseError
from papaya.http.exchange import Exchange
from papaya.http.pool import ConnectionPool
from papaya.http.routes import Buffered, HttpRoute
from papaya.messages import wire
from papaya.messages.base import Message, NodeId
from papaya.messages.control import (
    AggregatorOrders,
    AggregatorReport,
    SelectorOrders,
    SelectorReport,
)
from papaya.messages.participation import Retry
from papaya.messages.paths import PATHS
from papaya.server.host import Host
from papaya.server.replies import WaitingDevice, is_for_devices

logger = logging.getLogger("papaya.server")

MESSAGES_PATH = "/internal/messages"
TO_HEADER = "papaya-to"

TAKEN = 204

_MAX_QUEUED = 256
_MAX_COMPLAINTS = 1024
_QUOTED = 200  # characters of an answer in the log
_HINTS = {
    400: "another node runs at its address now, or another version of Papaya",
    403: "the certificate names another role than the sender has",
    401: "all servers need the same server.token in their data folder",
}
SENDERS: dict[type[Message], str] = {
    AggregatorReport: "aggregator",
    SelectorReport: "selector",
    AggregatorOrders: "coordinator",
    SelectorOrders: "coordinator",
}
_SEND_TIMEOUT_S = 5.0
_RELAY_TIMEOUT_S = 30.0


def address_of(node: NodeId) -> str:
    """`host:port` of a node that runs elsewhere."""
    _, at, address = node.partition("@")
    if not at:
        raise ProtocolError(f"node {node!r} has no address", hint="write it as role@host:port")
    return address


class Peers:
    """The messenger of every host in this process."""

    def __init__(
        self,
        connections: Mapping[str, ConnectionPool],
        relays: ConnectionPool,
        token: str,
        retry_s: float,
    ) -> None:
        """`connections`: by the role of the server. `relays` are for the bodies of chunks.

        `retry_s`: when devices should retry while their aggregator cannot be reached.
        """
        self.hosts: dict[NodeId, Host] = {}
        self.relays = relays
        self._connections = connections
        self.use_token(token)
        self._retry_s = retry_s
        self._loop = asyncio.get_running_loop()
        self._queues: dict[NodeId, deque[Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._complained: set[tuple[NodeId, int | str]] = set()
        # Devices whose requests were passed on and are not answered yet.
        self._relayed: set[WaitingDevice] = set()
        self.lost = 0

    def send(self, to: NodeId, message: Message) -> None:
        host = self.hosts.get(to)
        if host is not None:
            self._loop.call_soon(host.deliver, message)
            return
        queue = self._queues.get(to)
        if queue is None:
            self._queues[to] = deque((message,), maxlen=_MAX_QUEUED)
            self._spawn(self._send_all(to))
        else:
            self.lost += len(queue) == _MAX_QUEUED
            queue.append(message)

    def forward(self, request: WaitingDevice, to: NodeId, message: Message) -> None:
        """Pass a request on. Chunks are passed on in `papaya/server/uploads.py`."""
        host = self.hosts.get(to)
        if host is not None:
            host.deliver(message, request)
        else:
            self._spawn(self._relay(request, to, message))

    def use_token(self, token: str) -> None:
        self.headers = (("Authorization", f"Bearer {token}"),)

    async def finish(self, timeout_s: float) -> None:
        """Wait for messages and requests on their way. Then answer the devices that still wait."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=timeout_s)
        for request in tuple(self._relayed):
            self._relayed.discard(request)
            request.answer(Retry("this selector is stopping", self._retry_s))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self._connections.values():
            await pool.close()
        await self.relays.close()

    async def _send_all(self, to: NodeId) -> None:
        """Send until the queue is empty; the next message starts it again."""
        queue = self._queues[to]
        headers = (*self.headers, (TO_HEADER, to))
        try:
            address, pool = address_of(to), self._pool(to)
            while queue:
                body = wire.encode(queue.popleft())
                response = await pool.request(
                    address, "POST", MESSAGES_PATH, headers, body, _SEND_TIMEOUT_S
                )
                if response.status != TAKEN:
                    self.lost += 1
                    self._complain(to, "messages", response)
        except (ProtocolError, HttpError, MisuseError, OSError, TimeoutError) as error:
            self.lost += 1 + len(queue)
            self._cannot_reach(to, error)
        finally:
            del self._queues[to]

    def _pool(self, to: NodeId) -> ConnectionPool:
        role = to.partition("@")[0]
        found = self._connections.get(role)
        if found is None:
            raise ProtocolError(f"node {to!r} has an unknown role", hint="write role@host:port")
        return found

    def pass_back(self, request: WaitingDevice, to: NodeId, response: Response) -> None:
        """Send the answer of an aggregator to the device whose request was passed on."""
        if is_for_devices(response):
            request.pass_on(response)
            return
        self._complain(to, "requests", response)
        request.answer(Retry("the aggregator refuses requests of this selector", self._retry_s))

    def _complain(self, to: NodeId, what: str, response: Response) -> None:
        status = response.status
        if self._is_news(to, status):
            hint = _HINTS.get(status, "check its log, and compare the versions of both servers")
            answer = response.body[:_QUOTED].decode(errors="replace")
            logger.warning(
                "%s refuses %s with status %d: %s (hint: %s)", to, what, status, answer, hint
            )

    def _cannot_reach(self, to: NodeId, error: Exception) -> None:
        """A server may be away. A wrong name or certificate stays wrong: say so once."""
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError):
            why = explain_peer(cause)
        elif isinstance(cause, PermissionError):
            why = str(cause)
        elif isinstance(cause, socket.gaierror):
            why = f"cannot resolve its name: {cause.strerror} (hint: check the name and the DNS)"
        else:
            logger.info("%s cannot be reached: %s", to, error)
            return
        if self._is_news(to, why):
            logger.warning("%s cannot be reached: %s", to, why)

    def _is_news(self, to: NodeId, problem: int | str) -> bool:
        if (to, problem) in self._complained or len(self._complained) >= _MAX_COMPLAINTS:
            return False
        self._complained.add((to, problem))
        return True

    async def _relay(self, request: WaitingDevice, to: NodeId, message: Message) -> None:
        self._relayed.add(request)
        try:
            response = await self._pool(to).request(
                address_of(to),
                "POST",
                PATHS[type(message)],
                self.headers,
                wire.encode(message),
                _RELAY_TIMEOUT_S,
            )
            if request in self._relayed:
                self.pass_back(request, to, response)
        except (ProtocolError, HttpError, MisuseError, OSError, TimeoutError) as error:
            self._cannot_reach(to, error)
            if request in self._relayed:
                request.answer(Retry("the aggregator cannot be reached", self._retry_s))
        finally:
            self._relayed.discard(request)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def message_route(peers: Peers, *, checks_roles: bool = False) -> HttpRoute:
    """One-way messages to a machine of this process. 204 means received, not processed.

    `checks_roles`: the certificate of the sender must name the role that sends such messages.
    Selectors are reached from the internet: whoever takes one over must not give orders.
    """

    def on_message(exchange: Exchange, body: bytes) -> None:
        host = peers.hosts.get(exchange.head.headers.get(TO_HEADER, ""))
        if host is None:
            raise ProtocolError("this message is for a node that does not run here")
        message = wire.between_servers.parse(body)
        sender = SENDERS[type(message)]
        if checks_roles and sender not in roles_of(exchange.certificate):
            exchange.answer_problem(403, f"only the role {sender} sends this message")
            return
        host.deliver(message)
        exchange.answer(TAKEN)

    return Buffered("POST", MESSAGES_PATH, on_message, wire.MAX_MESSAGE_BYTES)
