"""The chunk route of a listener for servers: how many chunks it receives at the same time."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

import pytest

from papaya.aggregator.upload import Owner
from papaya.clock import Clock
from papaya.http.limits import ListenerLimits
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import Chunk, ChunkOffer, ChunkReceived, Retry
from papaya.messages.tickets import Keyring, UploadTicket
from papaya.server.host import AggregatorHost
from papaya.server.metrics import DriverMetrics
from papaya.server.peers import Peers
from papaya.server.replies import WaitingDevice
from papaya.server.uploads import Uploads
from tests.unit.http.loopback import Client, PatientPool, a_client, a_request, a_server, run
from tests.unit.server.test_arrivals import Host

MOST = 3  # of four connections
DATA = b"12345678"


class Aggregator(Host):
    """Wants every chunk."""

    def wants(self, offer: ChunkOffer, reply_to: WaitingDevice) -> bool:
        return True

    def has_grown(self, owner: Owner) -> bool:
        return True

    def take(self, chunk: Chunk, buffer: memoryview, reply_to: object) -> None:
        super().take(chunk, buffer, reply_to)
        cast(WaitingDevice, reply_to).answer(ChunkReceived(chunk.upload, chunk.index))


def a_chunk(session: str) -> bytes:
    ticket = Keyring({1: bytes(32)}).seal(UploadTicket("t", session, 1, 0, "k", 9e9, 0, 1, 9e9))
    headers = (("Papaya-Ticket", b64encode(ticket).decode()), ("Papaya-Crc32", "00000000"))
    return a_request("PUT", "/v1/uploads/u/chunks/0", DATA, headers)


@asynccontextmanager
async def an_aggregator(host: Host) -> AsyncIterator[int]:
    """The port of its listener for servers."""
    peers = Peers({}, PatientPool(), "token", 0.5)
    aggregators = {"aggregator": cast(AggregatorHost, host)}
    limits = ListenerLimits(max_connections=4)
    route = Uploads(Clock(), peers, None, lambda: aggregators, DriverMetrics(), limits).route()
    async with a_server([route]) as server:
        yield server.port
    await peers.close()


async def answer_to(client: Client, request: bytes) -> Message:
    client.send(request)
    return wire.to_device.parse((await client.response()).body)


@pytest.mark.parametrize("end", ["answered", "lost", "broken off"])
def test_chunks_are_counted_until_they_end(end: str) -> None:
    """Each round would find no room if a chunk of an earlier round were still counted."""

    async def main() -> None:
        host = Aggregator()
        async with an_aggregator(host) as port, a_client(port) as other:
            for _ in range(3):
                async with AsyncExitStack() as stack:
                    slow = [await stack.enter_async_context(a_client(port)) for _ in range(MOST)]
                    for number, client in enumerate(slow):
                        client.send(a_chunk(f"s{number}")[:-1])
                    while host.pool.free > 1:
                        await asyncio.sleep(0)
                    refused = await answer_to(other, a_chunk("other"))
                    assert isinstance(refused, Retry)
                    assert refused.reason == "too many chunks are being received"
                    assert 5.0 <= refused.after_s <= 15.0, "as for connections over a limit"
                    if end == "answered":
                        for client in slow:
                            assert isinstance(await answer_to(client, DATA[-1:]), ChunkReceived)
                    elif end == "broken off":
                        host.arrivals.break_off("t", None)
                        for client in slow:
                            assert (await client.response()).status == 503
                while host.pool.free < 4:
                    await asyncio.sleep(0)
                assert isinstance(await answer_to(other, a_chunk("other")), ChunkReceived)

    run(main())


def test_connections_without_a_chunk_are_not_counted() -> None:
    async def main() -> None:
        async with an_aggregator(Aggregator()) as port, AsyncExitStack() as stack:
            for _ in range(2 * MOST):
                client = await stack.enter_async_context(a_client(port))
                assert isinstance(await answer_to(client, a_chunk("s")), ChunkReceived)

    run(main())
