"""Messages to other servers: what is lost is counted, and a refusal is not silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast, get_args

import pytest

from papaya.http.exchange import Exchange
from papaya.http.listener import serve
from papaya.http.pool import ConnectionPool
from papaya.http.routes import Buffered
from papaya.messages.base import Message
from papaya.messages.control import Control
from papaya.messages.participation import Alive, Heartbeat, Retry
from papaya.messages.paths import PATHS
from papaya.server.peers import MESSAGES_PATH, SENDERS, Peers
from papaya.server.replies import WaitingDevice


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
    peers = Peers({"aggregator": ConnectionPool()}, ConnectionPool(), "token", 1.0)
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
        peers = Peers({"aggregator": ConnectionPool()}, ConnectionPool(), "token", 0.5)
        waiting, node = Waiting(), f"aggregator@127.0.0.1:{listening.port}"
        peers.forward(cast(WaitingDevice, waiting), node, Heartbeat(b"ticket"))
        async with asyncio.timeout(60.0):
            await asked.wait()
        await peers.finish(0.0)
        await peers.close()
        await listening.drain(0)
        assert waiting.answers == [Retry("this selector is stopping", 0.5)], "and only once"

    asyncio.run(run())
