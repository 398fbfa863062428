"""A TCP proxy in front of one server, which can be cut in either direction."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from threading import Event, Thread
from typing import Literal, Self

Direction = Literal["to", "from"]
_PIECE_BYTES = 64 << 10


class Proxy:
    """Forwards connections from `listen` to `target`, in a thread of its own.

    While it is cut, bytes in that direction wait, as they do when packets are lost; connections
    are accepted all the same.
    """

    def __init__(self, listen: str, target: str) -> None:
        self.listen, self._target = listen, target
        self._open: dict[Direction, asyncio.Event] = {}
        self._started, self._thread = Event(), Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(120), f"the proxy at {self.listen} did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def cut(self, direction: Direction) -> None:
        self._loop.call_soon_threadsafe(self._open[direction].clear)

    def mend(self, direction: Direction) -> None:
        self._loop.call_soon_threadsafe(self._open[direction].set)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._open = {"to": asyncio.Event(), "from": asyncio.Event()}
        for each in self._open.values():
            each.set()
        host, port = self.listen.rsplit(":", 1)
        server = await asyncio.start_server(self._connected, host, int(port), reuse_address=True)
        self._started.set()
        await self._over.wait()
        server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.rsplit(":", 1)
        try:
            behind, to = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        try:
            with suppress(asyncio.CancelledError):
                await asyncio.gather(
                    self._pump("to", reader, to), self._pump("from", behind, writer)
                )
        finally:
            for each in (writer, to):
                each.transport.abort()

    async def _pump(
        self, direction: Direction, source: asyncio.StreamReader, to: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await source.read(_PIECE_BYTES):
                await self._open[direction].wait()
                to.write(data)
                await to.drain()
        to.close()
