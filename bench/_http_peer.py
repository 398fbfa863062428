"""The servers of `http_peers.py`: the same two routes on our endpoint and on aiohttp.

python bench/_http_peer.py papaya|aiohttp        prints its port; ends with its standard input
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop
from aiohttp import web

from papaya.http.exchange import Exchange
from papaya.http.listener import serve
from papaya.http.routes import Buffered, Streamed

CHUNK_BYTES = 1 << 20
SAMPLED_EVERY = 64 << 10  # an answer to a chunk has one byte of this many


class Small(msgspec.Struct):
    """A message of about the size of a check-in."""

    number: int
    text: str
    labels: tuple[str, ...]


_decoder = msgspec.json.Decoder(Small)


def answer_to(message: bytes) -> bytes:
    found = _decoder.decode(message)
    return msgspec.json.encode(Small(found.number + 1, found.text, found.labels))


_free: list[bytearray] = []


class InPlace:
    """Receives a chunk into a pooled buffer, as an aggregator does."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._buffer = _free.pop() if _free else bytearray(CHUNK_BYTES)
        self._view = memoryview(self._buffer)
        self._count = 0

    def buffer(self, remaining: int) -> memoryview:
        return self._view[self._count :]

    def received(self, count: int) -> None:
        self._count += count

    def finished(self) -> None:
        self._exchange.answer(200, bytes(self._view[: self._count : SAMPLED_EVERY]))
        _free.append(self._buffer)

    def broken(self) -> None:
        _free.append(self._buffer)


async def papaya() -> int:
    listener = await serve(
        [
            Buffered("POST", "/small", lambda e, body: e.answer(200, answer_to(body)), 4096),
            Streamed("PUT", "/chunk", InPlace, CHUNK_BYTES),
        ],
        "127.0.0.1",
        0,
    )
    return listener.port


async def aiohttp() -> int:
    async def small(request: web.Request) -> web.Response:
        return web.Response(body=answer_to(await request.read()), content_type="application/json")

    async def chunk(request: web.Request) -> web.Response:
        return web.Response(body=(await request.read())[::SAMPLED_EVERY])

    app = web.Application(client_max_size=2 * CHUNK_BYTES)
    app.add_routes([web.post("/small", small), web.put("/chunk", chunk)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return int(runner.addresses[0][1])


async def main() -> None:
    print(await {"papaya": papaya, "aiohttp": aiohttp}[sys.argv[1]](), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
