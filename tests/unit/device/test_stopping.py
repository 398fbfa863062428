"""How devices stop: uploads may end, sessions are left, and nothing is waited for without end."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack

from aiohttp import web
from msgspec import structs

from papaya.device.device import DeviceRuntime
from papaya.device.events import Event, VisitEnded
from papaya.messages.participation import Leave
from tests.unit.device.fake_selector import (
    JOINED,
    PACING,
    UPDATE,
    answer,
    device,
    process,
    reset,
    serving,
    trainer,
)


def test_a_signal_makes_every_device_leave() -> None:
    async def scenario() -> None:
        async with serving() as fake, process() as host:
            with ExitStack() as opened:
                phones = [
                    opened.enter_context(device(host, fake.url, trainer=trainer(300.0)))
                    for _ in range(3)
                ]
                runtime = DeviceRuntime(host, phones)
                with runtime.stopped_by_signals():
                    running = asyncio.create_task(runtime.run())
                    await fake.arrival("parameters").wait()
                    os.kill(os.getpid(), signal.SIGTERM)
                    async with asyncio.timeout(300):
                        await running
        assert fake.seen.count("leave") == fake.seen.count("join") >= 1

    asyncio.run(scenario())


def test_stopping_lets_an_upload_end() -> None:
    async def scenario() -> None:
        async with serving() as fake, process() as host:
            stopping = asyncio.Event()

            async def slow(request: web.Request) -> web.StreamResponse:
                runtime.stop()
                stopping.set()
                del fake.replace["chunk"]
                return await reset(request)

            fake.replace["chunk"] = slow
            with device(host, fake.url) as phone:
                runtime = DeviceRuntime(host, [phone])
                await runtime.run()
        assert stopping.is_set()
        assert fake.completed == [UPDATE]
        assert "leave" not in fake.seen

    asyncio.run(scenario())


def test_stopping_is_bounded_even_if_the_server_says_nothing() -> None:
    async def silence(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    async def scenario() -> None:
        pacing = structs.replace(PACING, drain_s=0.1, leave_s=0.1)
        async with serving() as fake, process(pacing=pacing) as host:
            fake.replace |= {"chunk": silence, "leave": silence}
            with device(host, fake.url) as phone:
                runtime = DeviceRuntime(host, [phone])
                running = asyncio.create_task(runtime.run())
                await fake.arrival("chunk").wait()
                runtime.stop()
                async with asyncio.timeout(300):
                    await running

    asyncio.run(scenario())


def test_a_device_that_is_told_to_stop_while_it_joins_leaves_what_it_joined() -> None:
    """The answer is on its way: whoever ignored it would hold a slot until the server gives up."""

    async def scenario() -> None:
        events: list[Event] = []
        async with serving() as fake, process() as host:

            async def stop_first(request: web.Request) -> web.StreamResponse:
                phone.stop()  # it hears of this before it has its answer
                return await answer(JOINED)(request)

            fake.replace["join"] = stop_first
            with device(host, fake.url, notify=events.append) as phone:
                async with asyncio.timeout(300):
                    await phone.run_forever()
        [leave] = [message for message in fake.messages if isinstance(message, Leave)]
        assert leave == Leave(JOINED.ticket, "stopped")
        assert "parameters" not in fake.seen
        [ended] = [event for event in events if isinstance(event, VisitEnded)]
        assert (ended.ending, ended.task) == ("stopped", "next-word")
        assert ended.detail == "the device was told to stop"

    asyncio.run(scenario())
