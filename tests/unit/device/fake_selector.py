"""A selector on loopback for device tests: honest, or with any answer replaced by a hostile one."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

from aiohttp import web
from msgspec import structs

from papaya.config import DeviceConfig
from papaya.device.device import Device
from papaya.device.eligibility import CONDITIONS, Eligibility
from papaya.device.limits import CheckInPacing, DeviceLimits
from papaya.device.process import DeviceProcess
from papaya.device.training import ProtocolTrainer
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import (
    Alive,
    ChunkReceived,
    Completed,
    Joined,
    Left,
    Refused,
    UploadGranted,
)
from papaya.messages.selection import Accepted

PARAMETERS = bytes(range(200))
KEY = f"next-word/3/version-7-{sha256(PARAMETERS).hexdigest()[:32]}"
UPDATE = b"0123456789ab"  # three parameters, two chunks
JOINED = Joined(
    ticket=b"session",
    task="next-word",
    session="ab12",
    version=7,
    parameters=KEY,
    model_length=3,
    update_length=3,
    evaluates=False,
    heartbeat_s=120.0,
    training_timeout_s=300.0,
    participation_gap_s=60.0,
    max_participations=None,
)
GRANTED = UploadGranted(b"upload \xff\x00", 7, 8, 300.0)
# Time enough for a busy machine; a test that works waits for none of it.
QUICK = DeviceConfig(
    request_timeout_s=120.0,
    check_in_timeout_s=120.0,
    backoff_s=0.005,
    max_backoff_s=0.01,
    give_up_s=300.0,
    participation_floor_s=0.0,
)
PACING = CheckInPacing(pause_s=0.0, backoff_s=0.01, max_backoff_s=0.02, leave_s=60.0, drain_s=60.0)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer(message: Message, status: int = 200) -> Handler:
    async def reply(request: web.Request) -> web.StreamResponse:
        return web.Response(body=wire.encode(message), status=status)

    return reply


def raw(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Handler:
    async def reply(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers=headers)

    return reply


async def reset(request: web.Request) -> web.StreamResponse:
    """The connection breaks."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


class FakeSelector:
    """`replace["join"] = handler` replaces one answer; `seen` are the requests, by their path."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.messages: list[Message] = []
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.completed: list[bytes] = []
        self.joined = JOINED
        self.replace: dict[str, Handler] = {}
        self.arrived: dict[str, asyncio.Event] = {}
        self.on_seen: Callable[[str], None] = lambda what: None

    def arrival(self, what: str) -> asyncio.Event:
        return self.arrived.setdefault(what, asyncio.Event())

    async def handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.split("/")
        what = "chunk" if parts[2] == "uploads" else parts[2]
        self.seen.append(what)
        self.on_seen(what)
        self.headers.append(dict(request.headers))
        body = await request.read()
        if what not in ("chunk", "parameters", "urls"):
            self.messages.append(wire.from_device.parse(body))
        self.arrival(what).set()
        if what in self.replace:
            return await self.replace[what](request)
        if what == "urls":
            return web.Response(
                body=wire.encode(Refused("there is no URL of this key")), status=404
            )
        if what == "parameters":
            assert request.path == f"/v1/parameters/{KEY}"
            return web.Response(body=PARAMETERS)
        return web.Response(body=wire.encode(self._answer(what, request, body)))

    def _answer(self, what: str, request: web.Request, body: bytes) -> Message:
        match what:
            case "check-in":
                return Accepted(b"assignment", "next-word", "ab12")
            case "join":
                return self.joined
            case "heartbeat":
                return Alive()
            case "report":
                return GRANTED
            case "leave":
                return Left()
            case "complete":
                [chunks] = self.uploads.values()
                self.completed.append(b"".join(chunks[index] for index in sorted(chunks)))
                self.uploads.clear()
                return Completed()
        _, _, _, upload, _, index = request.path.split("/")
        assert b64decode(request.headers["Papaya-Ticket"]) == GRANTED.ticket
        assert int(request.headers["Papaya-Crc32"], 16) == crc32(body)
        assert len(request.headers["Papaya-Crc32"]) == 8
        self.uploads.setdefault(upload, {})[int(index)] = body
        return ChunkReceived(upload, int(index))


@asynccontextmanager
async def serving() -> AsyncIterator[FakeSelector]:
    fake = FakeSelector()
    application = web.Application(client_max_size=1 << 24)
    application.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


class Clock:
    """The loop's clock, from a given time on; a test may move it forwards."""

    def __init__(self) -> None:
        self._zero = asyncio.get_running_loop().time() - 1_000_000.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() - self._zero

    def pass_(self, seconds: float) -> None:
        self._zero -= seconds


@asynccontextmanager
async def process(**changes: Any) -> AsyncIterator[DeviceProcess]:
    """A process whose devices are always eligible, unless told otherwise."""
    whole: dict[str, Any] = {
        "now": Clock(),
        "limits": DeviceLimits(),
        "pacing": PACING,
        "eligibility": Eligibility(assume=CONDITIONS),
    }
    async with DeviceProcess(**{**whole, **changes}) as opened:
        yield opened


def trainer(seconds: float = 0.0) -> ProtocolTrainer:
    return ProtocolTrainer(lambda session, length: UPDATE, lambda: seconds)


def device(
    host: DeviceProcess, *selectors: str, store: Path | str = ":memory:", **changes: Any
) -> Device:
    whole: dict[str, Any] = {"trainer": trainer(), "config": QUICK}
    return Device(host, selectors=selectors, store=store, **{**whole, **changes})


def joined(**changes: Any) -> Joined:
    return structs.replace(JOINED, **changes)
