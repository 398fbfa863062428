"""Messages to other servers: what is lost is counted, and a refusal is not silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast, get_args

import pytest

from papaya.clock import Clock
from papaya.config import Deployment
from papaya.http.exchange import Exchange
from papaya.http.listener import serve
from papaya.http.routes import Buffered
from papaya.machine import Effects, Forward
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.control import Control
from papaya.messages.participation import Alive, Heartbeat, Refused, Retry
from papaya.messages.paths import CHUNK_PATH, CRC32_HEADER, PATHS, TICKET_HEADER
from papaya.selector.selector import Selector
from papaya.server import peers as peers_module
from papaya.server.device_api import participation_routes
from papaya.server.metrics import DriverMetrics
from papaya.server.peers import MESSAGES_PATH, SENDERS, Peers
from papaya.server.replies import WaitingDevice
from papaya.server.server import Server as ServerProcess
from papaya.server.uploads import Uploads
from tests.unit.http.loopback import PATIENCE_S, Client, PatientPool, a_client, a_request, run


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message is lost because the machine is busy."""
    for name in ("_SEND_TIMEOUT_S", "_RELAY_TIMEOUT_S"):
        monkeypatch.setattr(peers_module, name, PATIENCE_S)


class Server:
    """Answers messages with a status."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.heard = 0
        self.node = ""

    def on_message(self, exchange: Exchange, body: bytes) -> None:
        self.heard += 1
        exchange.answer(self.status)


@asynccontextmanager
async def a_peer(status: int) -> AsyncIterator[tuple[Peers, Server]]:
    server = Server(status)
    listening = await serve(
        [Buffered("POST", MESSAGES_PATH, server.on_message, 1000)], "127.0.0.1", 0
    )
    server.node = f"aggregator@127.0.0.1:{listening.port}"
    peers = Peers({"aggregator": PatientPool()}, PatientPool(), "token", 1.0)
    try:
        yield peers, server
    finally:
        await peers.close()
        await listening.drain(0)


async def send(peers: Peers, server: Server, count: int) -> None:
    until = server.heard + count
    for _ in range(count):
        peers.send(server.node, Alive())
    while server.heard < until or peers._tasks:
        await asyncio.sleep(0)


def test_a_refused_message_is_lost_and_said_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with a_peer(401) as (peers, server):
            await send(peers, server, 3)
            assert peers.lost == 3
            server.status = 400
            await send(peers, server, 2)
            assert peers.lost == 5

    asyncio.run(run())
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "401" in warnings[0]
    assert "server.token" in warnings[0]
    assert "400" in warnings[1]


def test_a_message_that_was_taken_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with a_peer(204) as (peers, server):
            await send(peers, server, 3)
            assert (peers.lost, server.heard) == (0, 3)

    asyncio.run(run())
    assert caplog.text == ""


def test_every_message_between_servers_has_one_sender() -> None:
    assert set(SENDERS) == set(get_args(Control))


def test_bodies_have_connections_of_their_own() -> None:
    """Else slow devices keep heartbeats and orders waiting in line."""

    async def run() -> None:
        async with a_peer(204) as (peers, server):
            address = server.node.partition("@")[2]
            bodies = [peers.relays.open_upload(address, "PUT", "/", (), 9, 300) for _ in range(64)]
            await asyncio.wait_for(send(peers, server, 1), 60.0)
            assert (peers.lost, server.heard) == (0, 1)
            for body in bodies:
                body.abort()

    asyncio.run(run())


class Waiting:
    """A device that waits for one answer."""

    def __init__(self) -> None:
        self.answers: list[Message] = []

    def answer(self, message: Message) -> None:
        self.answers.append(message)


def test_a_device_whose_request_was_passed_on_is_answered_when_the_process_stops() -> None:
    async def run() -> None:
        asked = asyncio.Event()

        def never_answer(exchange: Exchange, body: bytes) -> None:
            asked.set()

        route = Buffered("POST", PATHS[Heartbeat], never_answer, 1000)
        listening = await serve([route], "127.0.0.1", 0)
        peers = Peers({"aggregator": PatientPool()}, PatientPool(), "token", 0.5)
        waiting, node = Waiting(), f"aggregator@127.0.0.1:{listening.port}"
        peers.forward(cast(WaitingDevice, waiting), node, Heartbeat(b"ticket"))
        async with asyncio.timeout(60.0):
            await asked.wait()
        await peers.finish(0.0)
        await peers.close()
        await listening.drain(0)
        assert waiting.answers == [Retry("this selector is stopping", 0.5)], "and only once"

    asyncio.run(run())


class Router:
    """A selector that sends every chunk to one aggregator."""

    def __init__(self, node: str) -> None:
        self._node = node

    def receive(self, now: float, offer: Message, request: WaitingDevice) -> Effects:
        return [Forward(request, self._node, offer)]


@asynccontextmanager
async def a_selector_before(status: int, reason: Message) -> AsyncIterator[Client]:
    """A client of a selector whose aggregator answers with this status and message."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r")[0]))
        body = wire.encode(reason)
        line = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(line.encode() + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as aggregator:
        node = f"aggregator@127.0.0.1:{aggregator.sockets[0].getsockname()[1]}"
        peers = Peers({"aggregator": PatientPool()}, PatientPool(), "token", 0.5)
        router = cast(Selector, Router(node))
        uploads = Uploads(Clock(), peers, router, dict, DriverMetrics())

        def on_heartbeat(exchange: Exchange, body: bytes) -> None:
            peers.forward(WaitingDevice(exchange), node, Heartbeat(b"ticket"))

        heartbeats = Buffered("POST", PATHS[Heartbeat], on_heartbeat)
        listening = await serve([heartbeats, uploads.route()], "127.0.0.1", 0)
        try:
            async with a_client(listening.port) as client:
                yield client
        finally:
            await peers.close()
            await listening.drain(0)


A_HEARTBEAT = a_request("POST", PATHS[Heartbeat])
A_CHUNK = a_request(
    "PUT",
    CHUNK_PATH.replace("{upload}", "u").replace("{index}", "0"),
    b"chunk",
    ((TICKET_HEADER, "dGlja2V0"), (CRC32_HEADER, "00000000")),
)


@pytest.mark.parametrize("request_", [A_HEARTBEAT, A_CHUNK], ids=["heartbeat", "chunk"])
@pytest.mark.parametrize("status", [401, 404, 599])
def test_a_device_is_not_refused_because_its_servers_disagree(
    status: int, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """As during a rotation of server.token. `Refused` would end the visit and lose the training."""

    async def main() -> None:
        async with a_selector_before(status, Refused("the servers' token is missing")) as client:
            client.send(request_)
            found = await client.response()
            assert found.status == 503
            retry = wire.to_device.parse(found.body)
            assert retry == Retry("the aggregator refuses requests of this selector", 0.5)

    run(main())
    assert f"refuses requests with status {status}" in caplog.text
    assert ("server.token" in caplog.text) == (status == 401)


@pytest.mark.parametrize("request_", [A_HEARTBEAT, A_CHUNK], ids=["heartbeat", "chunk"])
@pytest.mark.parametrize(
    ("status", "message"),
    [(200, Alive()), (400, Refused("a")), (403, Refused("b")), (503, Retry("c", 1.0))],
)
def test_what_an_aggregator_answers_to_a_device_is_passed_on(
    status: int, message: Message, request_: bytes
) -> None:
    async def main() -> None:
        async with a_selector_before(status, message) as client:
            client.send(request_)
            found = await client.response()
            assert (found.status, wire.to_device.parse(found.body)) == (status, message)

    run(main())


def test_requests_that_come_before_an_aggregator_has_read_its_state_are_answered_retry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The listener for other servers opens first: this server is called by its address."""

    async def main() -> None:
        server = ServerProcess(Deployment(), ("aggregator",))
        peers = Peers({}, PatientPool(), "token", 0.5)
        uploads = Uploads(Clock(), peers, None, server._aggregators, DriverMetrics())
        heartbeats = participation_routes(server._to_aggregator, kinds=(Heartbeat,))
        listening = await serve([*heartbeats, uploads.route()], "127.0.0.1", 0)
        async with a_client(listening.port) as client:
            heartbeat = a_request("POST", PATHS[Heartbeat], wire.encode(Heartbeat(b"ticket")))
            for request in (heartbeat, A_CHUNK):
                client.send(request)
                found = await client.response()
                assert found.status == 503
                retry = wire.to_device.parse(found.body)
                assert retry == Retry("this aggregator is starting", 0.5, elsewhere=True)
        await peers.close()
        await listening.drain(0)

    run(main())
    assert caplog.text == ""
