"""A device on a slow line: a chunk takes as long as it needs, while its bytes move."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from zlib import crc32

import pytest

from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import Chunk, ChunkReceived, Retry
from tests.unit.device.fake_selector import process

DATA = bytes(1 << 20)
CHUNK = Chunk(b"ticket", "u1", 0, crc32(DATA), DATA)
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answer(writer: asyncio.StreamWriter, message: Message) -> None:
    body = wire.encode(message)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@asynccontextmanager
async def a_line(script: Script) -> AsyncIterator[str]:
    """A server whose side of the line holds little."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
    listener.bind(("127.0.0.1", 0))
    over = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
            await over.wait()
        finally:
            writer.close()

    server = await asyncio.start_server(talk, sock=listener, limit=16 << 10)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        server.close()
        await asyncio.sleep(0)


async def ask(url: str, timeout_s: float) -> tuple[Message | None, list[float]]:
    """The answer, and when the device was told that bytes move, in seconds before the end."""
    told: list[float] = []
    now = asyncio.get_running_loop().time
    async with process() as host:
        found = await host.selectors.ask(url, None, CHUNK, timeout_s, lambda: told.append(now()))
    over_at = now()
    return found, [over_at - at for at in told]


def test_a_chunk_that_moves_slowly_is_answered_after_the_time_for_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock of the loop advances only when bytes arrive."""

    async def scenario() -> None:
        loop, passed_s = asyncio.get_running_loop(), 0.0

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal passed_s
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(16):
                await reader.readexactly(len(DATA) // 16)
                passed_s += 0.25
                await asyncio.sleep(0)  # lets timers run that are due
            answer(writer, ChunkReceived("u1", 0))

        async with a_line(slow) as url:
            began_at = loop.time()
            with monkeypatch.context() as patch:
                patch.setattr(loop, "time", lambda: began_at + passed_s)
                found, told = await ask(url, timeout_s=3.0)
            assert found == ChunkReceived("u1", 0)
            assert passed_s > 3.0
            assert len(told) >= 2

    asyncio.run(scenario())


def test_a_chunk_that_stands_still_is_given_up() -> None:
    async def still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async def scenario() -> None:
        async with a_line(still) as url:
            found, told = await ask(url, timeout_s=0.2)
            assert found is None
            # The kernel takes the first pieces, which can take long on a busy machine.
            assert all(ago > 0.1 for ago in told)

    asyncio.run(scenario())


def test_an_answer_before_the_end_of_the_body_is_an_answer() -> None:
    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        answer(writer, Retry("all upload slots are taken", 0.5))
        while await reader.read(1 << 16):
            pass

    async def scenario() -> None:
        async with a_line(early) as url:
            found, _ = await ask(url, timeout_s=60.0)
            assert found == Retry("all upload slots are taken", 0.5)

    asyncio.run(scenario())
