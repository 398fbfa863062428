"""The peer of `check_ins.py`: answers whatever comes with the same bytes, no more.

    python bench/_bare_answers.py        prints its port; ends with its standard input

What the event loop and the kernel cost without HTTP, JSON, tokens or a machine.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

BODY = b'{"type":"Rejected","reason":"bare","retry_from_s":1.0,"retry_until_s":2.0}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Bare(asyncio.Protocol):
    _transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(ANSWER)


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Bare, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
