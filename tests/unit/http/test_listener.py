"""What the connections of a listener share."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import cast

import pytest
from msgspec import structs

from papaya.http.server_connection import ServerConnection
from tests.unit.http.loopback import (
    IMPATIENT,
    LOOPS,
    PATIENCE_S,
    PATIENT,
    Client,
    PatientPool,
    Shop,
    a_client,
    a_request,
    a_server,
    a_service,
    run,
)


def test_a_connection_that_cannot_be_swept_leaves_the_others_their_sweep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swept = asyncio.Event()

    class Swept:
        def __init__(self, fails: bool) -> None:
            self.fails = fails
            self.times = 0

        def check_timeouts(self, now: float) -> None:
            self.times += 1
            if self.fails:
                raise ZeroDivisionError
            if self.times == 3:
                swept.set()

        def close_if_idle(self) -> None: ...

        idle_since = None

        def abort(self) -> None: ...

    async def main() -> None:
        async with a_service([], IMPATIENT) as service:
            connections = [Swept(True), Swept(False), Swept(True)]
            service.connections.update(cast(list[ServerConnection], connections))
            await swept.wait()
            service.connections.clear()

    run(main())
    assert "cannot check the timeouts" in caplog.text


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_that_was_just_accepted_is_closed_with_the_listener(loop: str) -> None:
    """Its task is cancelled before it has begun."""

    async def main() -> None:
        async with a_server([]) as listening:
            with socket.create_connection(("127.0.0.1", listening.port), timeout=60) as client:
                acceptor = listening._acceptor
                acceptor._accept(acceptor._sockets[0])
                assert listening.connections == 1
                listening.close()
                assert await asyncio.to_thread(client.recv, 1) == b""
                assert listening.connections == 0

    run(main(), loop)


class Waiting:
    def __init__(self, closed: list[float], since: float | None) -> None:
        self.idle_since = since
        self._closed = closed

    def check_timeouts(self, now: float) -> None: ...

    def close_if_idle(self) -> None:
        assert self.idle_since is not None
        self._closed.append(self.idle_since)


def test_the_connections_that_have_waited_longest_make_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed: list[float] = []

    async def main() -> None:
        limits = structs.replace(PATIENT, max_connections=6, spare=2)
        async with a_service([], limits) as service:
            found = [Waiting(closed, since) for since in (4.0, None, 1.0, 3.0, None, 2.0)]
            for connection in found[:4]:
                service.connections.add(cast(ServerConnection, connection))
            service._sweep()
            assert closed == []
            assert not caplog.records
            service.places = lambda: 5  # one is in a TLS handshake
            service._sweep()
            assert closed == [1.0]
            closed.clear()
            service.places = lambda: 6
            service.connections.update(cast(list[ServerConnection], found))
            service._sweep()
            assert closed == [1.0, 2.0]
            service.connections.clear()

    run(main())
    [warning] = caplog.messages  # it is written at most once a minute
    assert "fewer than 2 of the 6 connections of this listener are free" in warning


def test_connections_that_have_just_become_idle_are_not_closed_to_make_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed: list[float] = []

    async def main() -> None:
        limits = structs.replace(PATIENT, max_connections=2, spare=2)
        async with a_service([], limits) as service:
            idle = [Waiting(closed, since) for since in (100.0, 98.5)]
            service.connections.update(cast(list[ServerConnection], idle))
            service._make_room(now=101.0)
            assert closed == []
            assert not caplog.records
            service._make_room(now=101.5)
            assert closed == [98.5]
            service.connections.clear()

    run(main())


@pytest.mark.parametrize("loop", LOOPS)
def test_the_next_upload_on_an_idle_connection_is_served_although_few_places_are_free(
    loop: str,
) -> None:
    """A relayed chunk cannot be sent again."""
    shop = Shop()

    async def main() -> None:
        limits = structs.replace(PATIENT, max_connections=2, spare=1, sweep_s=PATIENCE_S)
        async with a_server(shop.routes, limits) as listening:
            listening._state.places = lambda: 2
            address, pool = f"127.0.0.1:{listening.port}", PatientPool()
            assert (await pool.request(address, "GET", "/echo")).status == 200
            listening._state._sweep()
            upload = pool.open_upload(address, "PUT", "/stream/chunk", (), 5, PATIENCE_S)
            upload.write(b"chunk")
            assert (await upload.answer).body == b"chunk"
            await pool.close()

    run(main(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_listener_full_of_connections_without_requests_serves_others(loop: str) -> None:
    """Each client keeps its connection after its answer, and more come than there are places."""
    most = 8
    limits = structs.replace(PATIENT, max_connections=most, spare=2, sweep_s=0.02)
    shop = Shop()

    async def main() -> None:
        async with a_server(shop.routes, limits) as listening, AsyncExitStack() as stack:

            async def connect() -> Client:
                return await stack.enter_async_context(a_client(listening.port))

            busy = await connect()
            busy.send(a_request("POST", "/hold"))
            for _ in range(2 * most):
                while (await (await connect()).ask("GET", "/echo")).status == 503:
                    """Until a sweep has closed others."""
            shop.held[0].answer(200)
            assert (await busy.response()).status == 200

    run(main(), loop)
