"""The door: which check-ins are held, once each, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from papaya.http.client_connection import Response
from papaya.http.listener import Listener, serve
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import Aborted, Join, Refused, Retry
from papaya.messages.paths import PATHS
from papaya.messages.selection import (
    Capabilities,
    CheckIn,
    Gone,
    IdentifiedCheckIn,
    JoinDecided,
    Rejected,
)
from papaya.server.auth import DeviceAuth, OpenDoor
from papaya.server.device_api import Door
from papaya.server.host import Host
from papaya.server.metrics import DriverMetrics
from papaya.server.replies import WaitingDevice, problem
from papaya.store.blobs import FolderBlobs
from tests.unit.http.loopback import Client, a_client, a_request

CHECK_IN = CheckIn(1, Capabilities())


class Selector:
    """Holds whoever comes."""

    def __init__(self) -> None:
        self.heard: list[tuple[Message, WaitingDevice]] = []
        self.decided: list[JoinDecided] = []
        self.fails = False

    def deliver(self, message: Message, waiting: WaitingDevice | None = None) -> None:
        if self.fails:
            raise ZeroDivisionError
        if isinstance(message, JoinDecided):
            self.decided.append(message)
            return
        assert waiting is not None
        self.heard.append((message, waiting))

    def gone(self) -> list[WaitingDevice]:
        return [waiting for message, waiting in self.heard if message == Gone()]


class Slow:
    """A verifier that takes its time, and believes what a token says."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def verify(self, token: str) -> str | None:
        self.asked.set()
        await self.may_answer.wait()
        return token


class Building:
    def __init__(self, door: Door, selector: Selector, listening: Listener) -> None:
        self.door = door
        self.selector = selector
        self.listening = listening
        self.port = listening.port

    async def until_heard(self, count: int) -> None:
        await until(lambda: len(self.selector.heard) >= count)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not holds():
            await asyncio.sleep(0)


@asynccontextmanager
async def a_door(folder: Path, auth: DeviceAuth) -> AsyncIterator[Building]:
    selector = Selector()
    door = Door(cast(Host, selector), auth, FolderBlobs(folder), DriverMetrics())
    listening = await serve(door.routes(), "127.0.0.1", 0, problem=partial(problem, retry_s=1.0))
    try:
        yield Building(door, selector, listening)
    finally:
        await listening.drain(0)


def check_in(client: Client, token: str = "a" * 32) -> None:
    headers = [("Authorization", f"Bearer {token}")]
    client.send(a_request("POST", "/v1/check-in", wire.encode(CHECK_IN), headers))


async def answer_to(client: Client) -> Message:
    return wire.to_device.parse((await client.response()).body)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        await asyncio.wait_for(test(), 60.0)

    asyncio.run(in_time())


def test_a_device_that_hangs_up_while_it_is_verified_is_not_held(tmp_path: Path) -> None:
    async def test() -> None:
        slow = Slow()
        async with a_door(tmp_path, DeviceAuth(slow)) as building:
            async with a_client(building.port) as client:
                check_in(client)
                await slow.asked.wait()
            await until(lambda: building.listening.connections == 0)
            slow.may_answer.set()
            await until(lambda: not building.door._verifying)
            assert building.selector.heard == []

    run(test)


def test_a_device_is_answered_whatever_fails_after_its_verification(tmp_path: Path) -> None:
    async def test() -> None:
        slow = Slow()
        slow.may_answer.set()
        async with a_door(tmp_path, DeviceAuth(slow)) as building:
            building.selector.fails = True
            async with a_client(building.port) as client:
                check_in(client)
                assert isinstance(await answer_to(client), Retry)

    run(test)


def test_the_selector_learns_the_identity_that_a_token_shows(tmp_path: Path) -> None:
    async def test(auth: DeviceAuth, expected: Message) -> None:
        async with a_door(tmp_path, auth) as building, a_client(building.port) as client:
            check_in(client)
            await building.until_heard(1)
            assert building.selector.heard[0][0] == expected

    async def known() -> None:
        slow = Slow()
        slow.may_answer.set()
        await test(DeviceAuth(slow), IdentifiedCheckIn("a" * 32, CHECK_IN))

    async def unknown() -> None:
        await test(DeviceAuth(OpenDoor()), CHECK_IN)

    run(known)
    run(unknown)


def test_the_selector_hears_of_who_hung_up_and_not_of_who_was_answered(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_door(tmp_path, DeviceAuth(OpenDoor())) as building:
            async with a_client(building.port) as client:
                check_in(client)
                await building.until_heard(1)
                building.selector.heard[0][1].answer(Rejected("no", 1.0, 2.0))
                assert isinstance(await answer_to(client), Rejected)
                check_in(client)
                await building.until_heard(2)
            await building.until_heard(3)
            assert building.selector.gone() == [building.selector.heard[1][1]]

    run(test)


RETRY = Retry("the task is about to move", 0.1)


@pytest.mark.parametrize("is_relayed", [False, True])
@pytest.mark.parametrize(
    ("message", "status", "is_decided"),
    [(Aborted("full"), 200, True), (Refused("expired"), 403, True), (RETRY, 503, False)],
)
def test_the_selector_hears_when_a_join_is_decided(
    tmp_path: Path, message: Message, status: int, *, is_decided: bool, is_relayed: bool
) -> None:
    """By an aggregator of this process or of another one."""

    async def test() -> None:
        auth = DeviceAuth(OpenDoor())
        async with a_door(tmp_path, auth) as building, a_client(building.port) as client:
            client.send(a_request("POST", PATHS[Join], wire.encode(Join(b"ticket"))))
            await building.until_heard(1)
            waiting = building.selector.heard[0][1]
            if is_relayed:
                waiting.pass_on(Response(status, {}, wire.encode(message)))
            else:
                waiting.answer(message)
            assert building.selector.decided == [JoinDecided(b"ticket")] * is_decided
            assert await answer_to(client) == message

    run(test)
