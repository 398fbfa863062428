"""A server process up and down: what it refuses, what it shares, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from papaya.config import Deployment
from papaya.errors import OperatorError, ProtocolError
from papaya.net.http.connection import Connections
from papaya.net.peers import address_of
from papaya.net.server import Server


def deployment(folder: Path, **changes: object) -> Deployment:
    values = {
        "data": str(folder / "data"),
        "devices": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "servers": "127.0.0.1:0",
    }
    return Deployment(**{**values, **changes})  # type: ignore[arg-type]


def test_two_servers_of_one_name_do_not_share_a_folder(tmp_path: Path) -> None:
    async def run() -> None:
        first, second = Server(deployment(tmp_path)), Server(deployment(tmp_path))
        await first.start()
        try:
            with pytest.raises(OperatorError, match="already runs") as caught:
                await second.start()
            assert "--data" in caught.value.hint
        finally:
            await first.stop()
        await second.start()
        await second.stop()

    asyncio.run(run())


def test_a_role_alone_needs_to_know_its_coordinators(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(OperatorError, match="without a coordinator") as caught:
            await Server(deployment(tmp_path), ("selector",)).start()
        assert "coordinators = " in caught.value.hint

    asyncio.run(run())


def test_a_port_in_use_is_named_and_nothing_stays_open(tmp_path: Path) -> None:
    async def run() -> None:
        first = Server(deployment(tmp_path / "a"))
        await first.start()
        try:
            taken = first.addresses["admin"]
            second = Server(deployment(tmp_path / "b", admin=taken))
            with pytest.raises(OperatorError, match=taken):
                await second.start()
        finally:
            await first.stop()

    before = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() == before


def test_health_and_metrics_need_no_token_and_the_admin_api_does(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(deployment(tmp_path))
        await server.start()
        connections = Connections()
        try:
            where = server.addresses["admin"]
            health = await connections.request(where, "GET", "/health")
            assert json.loads(health.body)["nodes"] == ["coordinator", "selector", "aggregator"]
            metrics = await connections.request(where, "GET", "/metrics")
            assert b"papaya_coordinator_aggregators" in metrics.body
            assert b"papaya_http_requests_total" in metrics.body
            assert (await connections.request(where, "GET", "/admin/status")).status == 401
            token = (tmp_path / "data" / "admin.token").read_text().strip()
            headers = (("Authorization", f"Bearer {token}"),)
            assert (await connections.request(where, "GET", "/admin/status", headers)).status == 200
        finally:
            await connections.close()
            await server.stop()

    asyncio.run(run())


def test_roles_apart_take_messages_only_from_servers(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(deployment(tmp_path), ("coordinator",))
        await server.start()
        connections = Connections()
        try:
            where = server.addresses["servers"]
            path = "/internal/messages"
            answer = await connections.request(where, "POST", path, body=b"{}")
            assert answer.status == 401
            token = (tmp_path / "data" / "server.token").read_text().strip()
            allowed = ("Authorization", f"Bearer {token}")
            stranger = (allowed, ("Papaya-To", "aggregator@nowhere:1"))
            answer = await connections.request(where, "POST", path, stranger, b"{}")
            assert answer.status == 400
            garbage = (allowed, ("Papaya-To", f"coordinator@{where}"))
            answer = await connections.request(where, "POST", path, garbage, b"{}")
            assert answer.status == 400
        finally:
            await connections.close()
            await server.stop()

    asyncio.run(run())


def test_the_address_of_a_node_is_in_its_name() -> None:
    assert address_of("aggregator@10.0.0.7:8752") == "10.0.0.7:8752"
    with pytest.raises(ProtocolError, match="names no address"):
        address_of("aggregator")
