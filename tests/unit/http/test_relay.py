"""The cut-through: a body passes through a middle server that never holds it."""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from papaya.http.client_connection import Response
from papaya.http.exchange import Exchange
from papaya.http.limits import PeerLimits
from papaya.http.listener import Listener
from papaya.http.relay import Relay, Relays
from papaya.http.routes import Buffered, Receiver, Streamed
from tests.unit.http.loopback import (
    LOOPS,
    PATIENCE_S,
    Collector,
    ListTransport,
    PatientPool,
    a_client,
    a_request,
    a_server,
    a_service,
    responses_of,
    run,
)

both_loops = pytest.mark.parametrize("loop", LOOPS)
UPDATE = np.random.default_rng(1).bytes(20 << 20)


def pass_on(exchange: Exchange, response: Response) -> None:
    exchange.answer(response.status, response.body)


@asynccontextmanager
async def a_chain(
    receive: Callable[[Exchange], Receiver | None],
    limits: PeerLimits | None = None,
    starter_bytes: int = 1,
) -> AsyncIterator[tuple[Listener, Listener]]:
    """A middle server, and the one behind it, whose route is given."""
    connections = PatientPool(limits=limits)
    relays = Relays(connections, piece_bytes=32 << 10, starter_bytes=starter_bytes)
    async with a_server([Streamed("PUT", "/u/{n}", receive, 1 << 30)]) as far:

        def forward(exchange: Exchange) -> Relay:
            address = f"127.0.0.1:{far.port}"
            headers = [("Papaya-Crc32", exchange.head.headers["papaya-crc32"])]
            return relays.relay(exchange, address, exchange.head.path, headers, PATIENCE_S, pass_on)

        async with a_server([Streamed("PUT", "/u/{n}", forward, 1 << 30)]) as middle:
            yield middle, far
            await connections.close()


def a_put(body: bytes) -> bytes:
    return a_request("PUT", "/u/1", body, [("Papaya-Crc32", "00000000")])


class InPlace:
    """Receives a whole update where it stays, and rests after each piece."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.slot = memoryview(bytearray(exchange.head.length))
        self.at = 0

    def buffer(self, remaining: int) -> memoryview:
        return self.slot[self.at : self.at + 100_000]

    def received(self, count: int) -> None:
        self.at += count
        self.exchange.pause_reading()
        asyncio.get_running_loop().call_soon(self.exchange.resume_reading)

    def finished(self) -> None:
        self.exchange.answer(200, b"%d" % zlib.crc32(self.slot))

    def broken(self) -> None:
        raise AssertionError("the update did not come whole")


@both_loops
def test_a_whole_update_passes_through_small_buffers(loop: str) -> None:
    async def send(port: int, body: bytes) -> None:
        async with a_client(port) as client:
            for _ in range(2):
                client.send(a_put(body))
                response = await client.response()
                assert (response.status, response.body) == (200, b"%d" % zlib.crc32(body))

    async def main() -> None:
        async with a_chain(InPlace) as (middle, far):
            # Two at a time, for they share a buffer.
            await asyncio.gather(send(middle.port, UPDATE), send(middle.port, UPDATE[::-1]))
            assert far.connections == 2

    run(main(), loop)


@both_loops
def test_a_refusal_of_the_far_side_comes_back_before_the_body_is_sent(loop: str) -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.answer(503, b"no slot")

    async def main() -> None:
        async with a_chain(refuse) as (middle, _), a_client(middle.port) as client:
            request = a_put(UPDATE)
            client.send(request[:100_000])
            response = await client.response()
            assert (response.status, response.body) == (503, b"no slot")

    run(main(), loop)


def test_a_peer_that_dies_breaks_both_receivers() -> None:
    made: list[Collector] = []

    def receive(exchange: Exchange) -> Collector:
        made.append(Collector(exchange))
        return made[-1]

    async def main() -> None:
        async with a_chain(receive) as (middle, _):
            async with a_client(middle.port) as client:
                client.send(a_put(UPDATE[:100])[:-1])
                while not made or len(made[0].body) < 99:
                    await asyncio.sleep(0)
            while not made[0].ends:
                await asyncio.sleep(0)
            assert made[0].ends == ["broken"]
            async with a_client(middle.port) as client:
                client.send(a_put(b"next"))
                assert (await client.response()).body == b"next"

    run(main())


def test_a_far_side_that_dies_or_is_busy_is_a_503() -> None:
    made: list[Collector] = []

    def receive(exchange: Exchange) -> Collector:
        made.append(Collector(exchange))
        return made[-1]

    async def main() -> None:
        limits = PeerLimits(max_connections=1, max_waiting=0)
        async with a_chain(receive, limits) as (middle, far), a_client(middle.port) as client:
            client.send(a_put(UPDATE[:100])[:-1])
            while not made:
                await asyncio.sleep(0)
            async with a_client(middle.port) as other:
                other.send(a_put(b"too many"))
                response = await other.response()
                assert response.status == 503
                assert b"too many requests wait" in response.body
                assert response.headers["retry-after"] in ("1", "2", "3")
            await far.drain(0)
            response = await client.response()
            assert response.status == 503
            assert b"without an answer" in response.body
            assert response.headers["retry-after"] in ("1", "2", "3")

    run(main())


@both_loops
def test_after_a_far_side_that_breaks_the_next_request_is_none_of_the_body(loop: str) -> None:
    """What was taken from the device and lost has come, too: or as much would be skipped later."""
    body = UPDATE[:40_000]

    async def main() -> None:
        connections, turns = PatientPool(), asyncio.get_running_loop()
        relays = Relays(connections, starter_bytes=1)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)

        def forward(exchange: Exchange) -> Relay:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            return relays.relay(exchange, address, "/u/1", (), PATIENCE_S, pass_on)

        ping = Buffered("GET", "/ping", lambda exchange, _: exchange.answer(200, b"pong"))
        async with a_server([Streamed("PUT", "/u/{n}", forward, 1 << 20), ping]) as middle:
            device = socket.create_connection(("127.0.0.1", middle.port))
            with listener, device:
                device.setblocking(False)
                device.send(a_request("PUT", "/u/1", body)[:-30_000])
                far, _ = await turns.sock_accept(listener)
                await read_until(far, body[9_990:10_000])
                # In one turn of the loop: more of the body is there, and the far side is gone.
                device.send(body[10_000:30_000])
                far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                far.close()
                refusal = await read_until(device, b'without an answer"}')
                assert b" 503 " in refusal
                assert b"Connection: close" not in refusal
                device.send(body[30_000:] + a_request("GET", "/ping"))
                assert b" 200 " in await read_until(device, b"pong")
            await connections.close()

    run(main(), loop)


async def read_until(end: socket.socket, last: bytes) -> bytes:
    data = b""
    while not data.endswith(last):
        piece = await asyncio.get_running_loop().sock_recv(end, 1 << 16)
        assert piece, "the other side closed"
        data += piece
    return data


def test_nothing_piles_up_in_the_middle_while_the_far_side_rests() -> None:
    resting: list[Exchange] = []

    def rest(exchange: Exchange) -> Collector:
        exchange.pause_reading()
        resting.append(exchange)
        return Collector(exchange, 1 << 20)

    async def main() -> None:
        connections = PatientPool(limits=PeerLimits(max_response_bytes=32 << 20))
        relays = Relays(connections, starter_bytes=1)
        async with a_server([Streamed("PUT", "/u/{n}", rest, 1 << 30)]) as far:

            def forward(exchange: Exchange) -> Relay:
                address = f"127.0.0.1:{far.port}"
                return relays.relay(exchange, address, "/u/1", (), PATIENCE_S, pass_on)

            async with a_service([Streamed("PUT", "/u/{n}", forward, 1 << 30)]) as middle:
                sender = ListTransport(middle)
                sender.feed(a_put(UPDATE))
                # It is held back before there is a connection, and again when that one is full.
                while len(sender.waiting) > len(UPDATE) - 100_000:
                    await asyncio.sleep(0)
                while not resting or (sender.waiting and not sender.is_paused):
                    await asyncio.sleep(0)
                assert len(sender.waiting) > len(UPDATE) / 4
                resting[0].resume_reading()
                while not sender.sent:
                    await asyncio.sleep(0)
                (response,) = responses_of(sender.sent)
                assert response.body == UPDATE
                await connections.close()

    run(main())


def test_a_body_gets_a_connection_when_its_first_bytes_have_arrived() -> None:
    """Else silent devices could hold all connections to another server."""

    async def main() -> None:
        limits = PeerLimits(max_connections=1, max_waiting=0)
        async with (
            a_chain(Collector, limits, starter_bytes=10) as (middle, far),
            a_client(middle.port) as silent,
            a_client(middle.port) as quick,
        ):
            silent.send(a_put(b"123456789012")[:-3])
            for body in (b"short", b"0123456789 and more"):
                quick.send(a_put(body))
                assert (await quick.response()).body == body
            assert far.connections == 1
            silent.send(b"012")
            assert (await silent.response()).body == b"123456789012"

    run(main())


def test_pieces_are_shorter_if_there_are_many_bodies() -> None:
    """The relay stores what the next socket does not take: at most one piece of each body."""
    made: list[Relay] = []

    async def main() -> None:
        connections = PatientPool(limits=PeerLimits(max_connections=256))
        relays = Relays(connections, starter_bytes=1)
        async with a_server([Streamed("PUT", "/u/{n}", Collector, 1 << 30)]) as far:

            def forward(exchange: Exchange) -> Relay:
                address = f"127.0.0.1:{far.port}"
                made.append(relays.relay(exchange, address, "/u/1", (), PATIENCE_S, pass_on))
                return made[-1]

            async with a_service([Streamed("PUT", "/u/{n}", forward, 1 << 30)]) as middle:
                for bodies, piece_bytes in ((64, 1 << 20), (128, 1 << 19), (256, 1 << 18)):
                    while len(made) < bodies:
                        ListTransport(middle).feed(a_put(b"12")[:-1])
                    assert len(made[0].buffer(1 << 20)) == piece_bytes
                for relay in made[64:]:
                    relay.broken()
                await asyncio.sleep(0)
                assert len(made[0].buffer(1 << 20)) == 1 << 20
                for relay in made[:64]:
                    relay.broken()
                await connections.close()

    run(main())
