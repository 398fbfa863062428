"""What one connection to another server puts on the wire."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from tests.unit.http.loopback import LOOPS, PatientPool, run

both_loops = pytest.mark.parametrize("loop", LOOPS)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Listener(asyncio.Protocol):
    """Answers once the whole body is there, and remembers how the request came."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.pieces: list[bytes] = []
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        _, found, body = b"".join(self.pieces).partition(b"\r\n\r\n")
        if found and len(body) == self.length:
            self.transport.write(ANSWER)


async def request(body: bytes) -> list[bytes]:
    """How the far side received it."""
    listener = Listener(len(body))
    server = await asyncio.get_running_loop().create_server(lambda: listener, "127.0.0.1", 0)
    connections = PatientPool()
    try:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        response = await connections.request(address, "POST", "/x", (), body)
        assert response.status == 200
    finally:
        await connections.close()
        await listener.lost.wait()
        server.close()
    return listener.pieces


@both_loops
def test_a_small_body_goes_out_with_its_head(loop: str) -> None:
    [piece] = run(request(b"small"), loop)
    assert piece.startswith(b"POST /x HTTP/1.1\r\n")
    assert piece.endswith(b"\r\n\r\nsmall")


@both_loops
def test_a_body_that_the_socket_cannot_take_at_once_arrives_whole(loop: str) -> None:
    body = bytes(range(256)) * (64 << 10)
    received = b"".join(run(request(body), loop))
    assert received.partition(b"\r\n\r\n")[2] == body


@both_loops
def test_without_a_body_the_head_goes_out_at_once(loop: str) -> None:
    [piece] = run(request(b""), loop)
    assert piece.endswith(b"Content-Length: 0\r\n\r\n")
