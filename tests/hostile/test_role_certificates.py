"""A server that was taken over has its token and its certificate, and can do what its role may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from papaya.config import Deployment
from papaya.http.client_connection import Response
from papaya.http.pool import ConnectionPool
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.control import AggregatorOrders
from papaya.messages.participation import Heartbeat
from papaya.messages.paths import PATHS
from papaya.server.certificates import Certificates
from papaya.server.peers import MESSAGES_PATH, TAKEN, TO_HEADER
from papaya.server.server import Server
from tests.system.tls import Authority

ORDERS = AggregatorOrders(
    epoch=1_000_000, leader="coordinator@127.0.0.1:1", boot=1.0, number=1, acked=0, tasks=()
)


class Attacked:
    """An aggregator with mutual TLS, and what an attacker at another server can send it."""

    def __init__(self, folder: Path, server: Server, authority: Authority) -> None:
        self._token = (folder / "data" / "server.token").read_text().strip()
        self._server = server
        self._authority = authority

    async def send(self, role: str, path: str, message: Message) -> Response:
        files = self._authority.issue(f"stolen-{role}", [role])
        own = Certificates(files.deployment(), (role,))
        pool = ConnectionPool(tls=own.calls("aggregator"))
        where = self._server.addresses["servers"]
        headers = (("Authorization", f"Bearer {self._token}"), (TO_HEADER, f"aggregator@{where}"))
        try:
            return await pool.request(where, "POST", path, headers, wire.encode(message))
        finally:
            await pool.close()


@asynccontextmanager
async def attacked(folder: Path) -> AsyncIterator[Attacked]:
    authority = Authority(folder / "tls")
    files = authority.issue("aggregator", ["aggregator"])
    deployment = Deployment(
        data=str(folder / "data"),
        servers="127.0.0.1:0",
        admin="127.0.0.1:0",
        coordinators=("127.0.0.1:1",),
        servers_certificate=str(files.certificate),
        servers_key=str(files.key),
        servers_authority=str(files.authority),
    )
    server = Server(deployment, ("aggregator",))
    await server.start()
    try:
        yield Attacked(folder, server, authority)
    finally:
        await server.stop()


def test_a_selector_cannot_give_orders(tmp_path: Path) -> None:
    """Devices reach selectors from the internet, so a selector is the first to fall."""

    async def main() -> None:
        async with attacked(tmp_path) as aggregator:
            answer = await aggregator.send("selector", MESSAGES_PATH, ORDERS)
            assert answer.status == 403
            assert b"only the role coordinator sends this message" in answer.body
            answer = await aggregator.send("coordinator", MESSAGES_PATH, ORDERS)
            assert answer.status == TAKEN, "the message is one that a coordinator sends"

    asyncio.run(main())


def test_a_coordinator_cannot_speak_for_devices(tmp_path: Path) -> None:
    async def main() -> None:
        heartbeat, path = Heartbeat(b"ticket"), PATHS[Heartbeat]
        async with attacked(tmp_path) as aggregator:
            answer = await aggregator.send("coordinator", path, heartbeat)
            assert b"only the role selector passes requests on" in answer.body
            answer = await aggregator.send("selector", path, heartbeat)
            assert b"only the role" not in answer.body

    asyncio.run(main())


@pytest.mark.parametrize("role", ["tsa", "aggregator"])
def test_a_role_that_never_calls_an_aggregator_gets_nothing(tmp_path: Path, role: str) -> None:
    async def main() -> None:
        async with attacked(tmp_path) as aggregator:
            for path, message in ((MESSAGES_PATH, ORDERS), (PATHS[Heartbeat], Heartbeat(b"t"))):
                answer = await aggregator.send(role, path, message)
                assert f"the certificate names {role}; ".encode() in answer.body

    asyncio.run(main())
