"""A proxy in front of the real server: records every exchange, and lets a scenario perturb it.

It keeps listening while the server behind it restarts. Requests are read by the parser of the
server (`papaya/messages/wire.py`), so what counts as a valid message is defined once.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import Protocol, Self
from zlib import crc32

import aiohttp
from aiohttp import web
from msgspec import Struct

from papaya.errors import ProtocolError
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import Chunk
from papaya.messages.paths import CRC32_HEADER, PATHS, TICKET_HEADER

_KINDS = {path: kind.__name__ for kind, path in PATHS.items()}
_MAX_BODY_BYTES = 4 << 20
_PASSED_ON = ("authorization", "range", "if-range", "if-none-match", TICKET_HEADER, CRC32_HEADER)
_SENT_BACK = ("ETag", "Cache-Control", "Content-Range", "Accept-Ranges", "Retry-After", "Allow")


class HttpReply(Struct):
    """An answer as the client gets it. `cut_at`: the connection breaks after this many bytes."""

    status: int
    body: bytes
    headers: dict[str, str] = {}
    cut_at: int | None = None


class NoAnswer(Exception):
    """The connection closes without an answer."""


class Seen(Struct):
    """One request, and what became of it. Times are those of `time.monotonic`."""

    at: float  # the whole request had arrived
    kind: str  # the type of its message, or "Chunk", "Parameters", "Log", "Unknown"
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    message: Message | None = None
    problem: str = ""  # why the message is not valid
    answered_at: float = float("inf")
    status: int = 0
    answer: Message | None = None  # as the client got it; None if it got none
    reply: HttpReply | None = None


PassOn = Callable[[], Awaitable[HttpReply]]


class Perturbs(Protocol):
    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        """The answer to send. Raises `NoAnswer` to send none."""
        ...


class Gateway:
    """`async with Gateway() as gateway:`, then set `server` and `perturbs`."""

    def __init__(self) -> None:
        self.address = ""
        self.server = ""  # http://host:port of the server behind; empty while it is down
        self.perturbs: Perturbs | None = None
        self.seen: list[Seen] = []
        self.changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = _read(request, body)
        self.seen.append(seen)
        self.changed.set()
        assert self.perturbs is not None
        try:
            reply = await self.perturbs.answer(seen, lambda: self._pass_on(seen))
            return await self._send(request, seen, reply)
        except (NoAnswer, aiohttp.ClientError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        finally:
            self.changed.set()

    async def _send(self, request: web.Request, seen: Seen, reply: HttpReply) -> web.StreamResponse:
        if request.transport is None or request.transport.is_closing():
            raise NoAnswer  # the client gave this request up
        seen.status, seen.reply, seen.answered_at = reply.status, reply, time.monotonic()
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        response.content_length = len(reply.body)
        if reply.cut_at is not None:
            await response.prepare(request)
            await response.write(reply.body[: reply.cut_at])
            raise NoAnswer
        try:
            seen.answer = wire.to_device.parse(reply.body)
        except ProtocolError:
            seen.answer = None
        await response.prepare(request)
        if request.method != "HEAD":
            await response.write(reply.body)
        await response.write_eof()
        return response

    async def _pass_on(self, seen: Seen) -> HttpReply:
        if not self.server:
            raise NoAnswer
        headers = {name: seen.headers[name] for name in _PASSED_ON if name in seen.headers}
        async with self._session.request(
            seen.method,
            self.server + seen.path,
            data=seen.body or None,
            headers=headers,
            allow_redirects=False,
        ) as response:
            body = await response.read()
            back = {name: response.headers[name] for name in _SENT_BACK if name in response.headers}
            return HttpReply(response.status, body, back)


def _read(request: web.Request, body: bytes) -> Seen:
    headers = {name.lower(): value for name, value in request.headers.items()}
    seen = Seen(time.monotonic(), "Unknown", request.method, request.path_qs, headers, body)
    parts = request.path.split("/")
    if request.path in _KINDS and request.method == "POST":
        seen.kind = _KINDS[request.path]
        try:
            seen.message = wire.from_device.parse(body)
        except ProtocolError as error:
            seen.problem = str(error)
        else:
            if type(seen.message).__name__ != seen.kind:
                seen.problem = f"{type(seen.message).__name__} was sent to {request.path}"
    elif len(parts) == 6 and parts[2] == "uploads" and request.method == "PUT":
        seen.kind = "Chunk"
        try:
            ticket = b64decode(headers[TICKET_HEADER], validate=True)
            checksum = int(headers[CRC32_HEADER], 16)
            seen.message = Chunk(ticket, parts[3], int(parts[5]), checksum, body)
        except (KeyError, ValueError) as error:
            seen.problem = f"the path or a header of the chunk is not valid: {error}"
    elif request.path.startswith("/v1/parameters/") and request.method in ("GET", "HEAD"):
        seen.kind = "Parameters"
    elif request.path.startswith("/v1/log/"):
        seen.kind = "Log"
    else:
        seen.problem = "no such path"
    return seen


def has_right_checksum(chunk: Chunk) -> bool:
    return crc32(chunk.data) == chunk.crc32
