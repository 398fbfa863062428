"""A fleet of protocol-only devices in one event loop, and when each slot was free and taken.

Each device lives on one connection: check in, join, download, train (which is to wait, with
heartbeats), report, upload, complete, and again. One in ten vanishes somewhere in its training
without a word, and comes back as another device; the server finds out by its silence, so that it is
known here when the slot became free. Everything else waits as the server tells it to.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from random import Random
from typing import NamedTuple, cast

from _devices import CHECK_IN, Encoded
from _servers import require

from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import (
    Aborted,
    Alive,
    ChunkReceived,
    Complete,
    Completed,
    Heartbeat,
    Join,
    Joined,
    Report,
    Retry,
    UploadGranted,
)
from papaya.messages.paths import PATHS
from papaya.messages.selection import Accepted, Rejected


class Plan(NamedTuple):
    """What the devices do; `slots` is the concurrency of their task."""

    slots: int
    address: tuple[str, int]
    token: str
    update: Encoded
    mean_training_s: float
    dropout: float
    dead_after_s: float  # how long the server waits for the silent


class Log:
    """What the devices saw, by the clock of this process."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._freed: list[tuple[float, bool]] = []
        self._joined: list[float] = []
        self.completed = 0
        self.aborted: list[str] = []

    def joins(self, at: float) -> None:
        self._joined.append(at)

    def frees(self, at: float, *, completes: bool) -> None:
        self._freed.append((at, completes))
        self.completed += completes

    def active(self, at: float) -> int:
        """Slots that are taken, as far as devices can know."""
        joined = sum(when <= at for when in self._joined)
        return joined - sum(when <= at for when, _ in self._freed)

    def joined_between(self, since: float, until: float) -> int:
        return sum(since <= at < until for at in self._joined)

    def waits_s(self, since: float, until: float) -> list[float]:
        """From each completion to the join that took its slot: the first free is the first taken.

        Slots that were never used are taken first. What silence or an abort freed is taken in its
        turn and not counted. A join may be heard of before the completion that made room for it.
        """
        freed, joined = sorted(self._freed), sorted(self._joined)[self._slots :]
        return [
            max(0.0, taken_at - at)
            for (at, completes), taken_at in zip(freed, joined, strict=False)
            if completes and since <= at < until
        ]


class Link(asyncio.Protocol):
    """One connection: a request, its answer, the next."""

    _transport: asyncio.Transport

    def __init__(self, common: str) -> None:
        self._common = common
        self._received = b""
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return
        head = self._received[:end]
        at = head.lower().index(b"content-length:") + 15
        stop = end + 4 + int(head[at:].split(b"\r\n", 1)[0])
        if len(self._received) >= stop:
            body, self._received = self._received[end + 4 : stop], self._received[stop:]
            answer, self._answer = self._answer, None
            if not answer.cancelled():
                answer.set_result(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the server hung up"))

    def close(self) -> None:
        self._transport.close()

    async def exchange(self, line: str, body: bytes | memoryview = b"", more: str = "") -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        head = f"{line} HTTP/1.1\r\n{self._common}{more}Content-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        return await self._answer


class Fleet:
    """Runs until it is cancelled."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.log = Log(plan.slots)
        self._plan = plan
        self._rng = Random(seed)
        self._common = f"Host: bench\r\nAuthorization: Bearer {plan.token}\r\n"

    async def live(self, number: int, over_s: float) -> None:
        """One device after the other under this number, the first at some time within `over_s`."""
        await asyncio.sleep(self._rng.uniform(0, over_s))
        loop = asyncio.get_running_loop()
        trips = 0
        while True:
            _, link = await loop.create_connection(lambda: Link(self._common), *self._plan.address)
            try:
                vanishes = False
                while not vanishes:
                    trips += 1
                    vanishes = await self._trip(link, f"u{number}-{trips}")
            finally:
                link.close()

    async def _trip(self, link: Link, upload: str) -> bool:
        """Whether the device vanishes."""
        checked_in = await self._ask(link, CHECK_IN)
        if isinstance(checked_in, Rejected):
            window = (checked_in.retry_from_s, checked_in.retry_until_s)
            await asyncio.sleep(self._rng.uniform(*window))
            return False
        assert isinstance(checked_in, Accepted), checked_in
        joined = await self._ask(link, Join(checked_in.ticket))
        if not isinstance(joined, Joined):
            return self._end(joined)
        self.log.joins(time.monotonic())
        await link.exchange(f"GET /v1/parameters/{joined.parameters}")
        seen_at = await self._train(link, joined)
        if seen_at is not None:
            self.log.frees(seen_at + self._plan.dead_after_s, completes=False)
            return True
        granted = await self._ask(link, Report(joined.ticket, examples=1))
        if not isinstance(granted, UploadGranted):
            return self._end(granted)
        ended = await self._upload(link, granted, upload)
        return self._end(ended or await self._ask(link, Complete(granted.ticket, upload)))

    async def _train(self, link: Link, joined: Joined) -> float | None:
        """When the server heard of it last, if it vanished."""
        left_s = self._rng.expovariate(1 / self._plan.mean_training_s)
        vanishes = self._rng.random() < self._plan.dropout
        if vanishes:
            left_s *= self._rng.random()
        seen_at = time.monotonic()
        while left_s > joined.heartbeat_s:
            await asyncio.sleep(joined.heartbeat_s)
            left_s -= joined.heartbeat_s
            seen_at = time.monotonic()
            if not isinstance(await self._ask(link, Heartbeat(joined.ticket)), Alive):
                break  # the report will be told the same
        await asyncio.sleep(left_s)
        return seen_at if vanishes else None

    async def _upload(self, link: Link, granted: UploadGranted, upload: str) -> Message | None:
        ticket = b64encode(granted.ticket).decode()
        for index, (piece, checksum) in enumerate(self._plan.update.chunks):
            line = f"PUT /v1/uploads/{upload}/chunks/{index}"
            more = f"Papaya-Ticket: {ticket}\r\nPapaya-Crc32: {checksum}\r\n"
            while True:
                answer = wire.to_device.parse(await link.exchange(line, piece, more))
                if not isinstance(answer, Retry):
                    break
                await asyncio.sleep(answer.after_s)
            if not isinstance(answer, ChunkReceived):
                return answer
        return None

    async def _ask(self, link: Link, message: Message) -> Message:
        line, body = f"POST {PATHS[type(message)]}", wire.encode(message)
        while True:
            answer = wire.to_device.parse(await link.exchange(line, body))
            if not isinstance(answer, Retry):
                return answer
            await asyncio.sleep(answer.after_s)

    def _end(self, answer: Message) -> bool:
        if isinstance(answer, Aborted):
            self.log.aborted.append(answer.reason)
        else:
            require(answer == Completed(None), f"a device was answered {answer}")
        self.log.frees(time.monotonic(), completes=isinstance(answer, Completed))
        return False
