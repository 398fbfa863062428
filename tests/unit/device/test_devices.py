"""Devices between their visits: when they come back, when they stay away."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from papaya.client.work import Trained
from papaya.device.bundles import BundleStore
from papaya.device.device import DeviceRuntime
from papaya.device.eligibility import Condition, Eligibility
from papaya.device.events import (
    Event,
    NotEligible,
    SelectorReachable,
    SelectorUnreachable,
    Troubled,
    VisitEnded,
    VisitScheduled,
)
from papaya.device.example_store import ExampleStore
from papaya.device.limits import CheckInPacing
from papaya.device.owners import OwnerPolicy
from papaya.device.process import OwnLoad
from papaya.device.training import ProtocolTrainer, TrainingRequest
from papaya.device.use_policy import UsePolicy
from papaya.errors import ConfigError
from papaya.messages.participation import Completed, Leave, Refused
from papaya.messages.selection import Rejected
from tests.unit.device.fake_selector import (
    PACING,
    QUICK,
    UPDATE,
    Clock,
    answer,
    device,
    joined,
    process,
    reset,
    serving,
    trainer,
)

POLL = structs.replace(PACING, eligibility_poll_s=0.02)


class Switch:
    """A probe that can be switched, and that tells when it was asked twice since."""

    def __init__(self, condition: Condition = "charging", reason: str | None = None) -> None:
        self.condition: Condition = condition
        self.reason = reason
        self.seen_twice = asyncio.Event()
        self._seen = 0
        self._loop = asyncio.get_running_loop()

    def check(self) -> str | None:
        """Called on a thread."""
        if self.reason is not None:
            self._seen += 1
            if self._seen == 2:
                self._loop.call_soon_threadsafe(self.seen_twice.set)
        return self.reason


class Watcher:
    """Collects events; lets a test wait for one of a kind."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._tasks.append(asyncio.create_task(self._tell()))

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, kind: type[Event], count: int = 1) -> None:
        async with asyncio.timeout(300), self._news:
            await self._news.wait_for(lambda: len(self.of(kind)) >= count)


def test_devices_make_their_visits_and_end() -> None:
    async def scenario() -> None:
        async with serving() as fake, process() as host:
            fake.joined = joined(participation_gap_s=0.0)
            with ExitStack() as opened:
                uploads: list[bytes] = []

                async def complete(request: web.Request) -> web.StreamResponse:
                    uploads.append(UPDATE)
                    return await answer(Completed())(request)

                fake.replace["complete"] = complete
                phones = [opened.enter_context(device(host, fake.url)) for _ in range(5)]
                await DeviceRuntime(host, phones).run(visits=3)
        assert len(uploads) == 15

    asyncio.run(scenario())


def test_a_visit_counts_whatever_its_outcome() -> None:
    async def scenario() -> None:
        watcher = Watcher()
        async with serving() as fake, process() as host, asyncio.timeout(300):
            fake.replace["check-in"] = answer(Rejected("no task", 0.0, 0.0))
            with device(host, fake.url, notify=watcher) as phone:
                await phone.run_forever(visits=3)
        assert [event.ending for event in watcher.of(VisitEnded)] == ["rejected"] * 3

    asyncio.run(scenario())


def test_a_device_that_has_pinned_the_wrong_key_says_whose_tasks_it_waits_for(
    tmp_path: Path,
) -> None:
    """The server explains nothing about owners that the device has not pinned."""
    policy = OwnerPolicy(key="0a" * 32)
    owner = policy.pin.owner

    async def scenario() -> None:
        watcher, store = Watcher(), BundleStore(tmp_path, {owner: policy})
        async with serving() as fake, process() as host, asyncio.timeout(300):
            fake.replace["check-in"] = answer(Rejected("no task", 0.0, 0.0))
            with device(host, fake.url, notify=watcher, bundles=store) as phone:
                await phone.run_forever(visits=1)
        store.close()
        [ended] = watcher.of(VisitEnded)
        assert f"no task of the pinned owners ({owner}) needs this device now" in ended.detail
        assert "papaya owner show" in ended.detail

    asyncio.run(scenario())


def test_only_so_many_train_at_a_time() -> None:
    async def scenario() -> None:
        training = most = 0
        two_train = asyncio.Event()

        class Counting(ProtocolTrainer):
            async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
                nonlocal training, most
                training += 1
                most = max(most, training)
                if training == 2:
                    two_train.set()
                try:
                    await two_train.wait()
                    return await super().train(assignment, store)
                finally:
                    training -= 1

        async with serving() as fake, process(max_parallel=2) as host:
            fake.replace["complete"] = answer(Completed())
            counting = Counting(lambda session, length: UPDATE, lambda: 0.01)
            with ExitStack() as opened:
                phones = [
                    opened.enter_context(device(host, fake.url, trainer=counting)) for _ in range(8)
                ]
                async with asyncio.timeout(300):
                    await DeviceRuntime(host, phones).run(visits=1)
        assert most == 2

    asyncio.run(scenario())


def test_a_rejected_device_comes_back_within_the_window() -> None:
    async def scenario() -> None:
        watcher = Watcher()
        async with serving() as fake, process() as host:
            fake.replace["check-in"] = answer(Rejected("no demand", 100.0, 200.0))
            waits = []
            for seed in range(5):
                with device(host, fake.url, notify=watcher, rng=Random(seed)) as phone:
                    running = asyncio.create_task(phone.run_forever())
                    await watcher.until(VisitScheduled, seed + 1)
                    phone.stop()
                    await running
                    waits.append(watcher.of(VisitScheduled)[-1].seconds)
        assert all(100 <= wait <= 200 for wait in waits)
        assert len(set(waits)) == 5

    asyncio.run(scenario())


def test_failures_make_a_device_wait_longer_and_longer() -> None:
    async def scenario() -> None:
        watcher = Watcher()
        pacing = CheckInPacing(backoff_s=0.01, max_backoff_s=0.06)
        async with serving() as fake, process(pacing=pacing) as host:
            fake.replace["check-in"] = answer(Refused("bad token"), 401)
            with device(host, fake.url, notify=watcher) as phone:
                running = asyncio.create_task(phone.run_forever())
                await watcher.until(VisitScheduled, 5)
                phone.stop()
                await running
        ceilings = [0.05, 0.05, 0.05, 0.06, 0.06]  # none shorter than the shortest pause
        waits = [event.seconds for event in watcher.of(VisitScheduled)]
        assert all(wait <= most for wait, most in zip(waits, ceilings, strict=False))
        assert waits[4] >= 0.05
        assert {ended.reason for ended in watcher.of(VisitEnded)} == {"bad token"}

    asyncio.run(scenario())


def test_a_device_that_is_not_eligible_asks_nobody() -> None:
    async def scenario() -> None:
        watcher, switch = Watcher(), Switch(reason="the battery is discharging")
        eligibility = Eligibility([switch])
        async with serving() as fake, process(pacing=POLL, eligibility=eligibility) as host:
            with device(host, fake.url, notify=watcher) as phone:
                running = asyncio.create_task(phone.run_forever(visits=1))
                await watcher.until(NotEligible, 2)
                assert fake.seen == []
                switch.reason = None
                await running
        assert fake.completed == [UPDATE]
        assert watcher.of(NotEligible)[0].reasons == ("the battery is discharging",)

    asyncio.run(scenario())


def test_a_device_that_becomes_ineligible_while_training_leaves() -> None:
    async def scenario() -> None:
        watcher, switch = Watcher(), Switch()
        eligibility = Eligibility([switch])
        async with serving() as fake, process(pacing=POLL, eligibility=eligibility) as host:
            with device(host, fake.url, notify=watcher, trainer=trainer(300.0)) as phone:
                visit = asyncio.create_task(phone.visit())
                await fake.arrival("parameters").wait()
                switch.reason = "the battery is discharging"
                finish = await visit
        assert finish.ending == "stopped"
        [leave] = [message for message in fake.messages if isinstance(message, Leave)]
        assert leave.reason == "stopped"
        assert watcher.of(VisitEnded)[0].detail == "the battery is discharging"

    asyncio.run(scenario())


@pytest.mark.parametrize(("condition", "ending"), [("idle", "counted"), ("unmetered", "stopped")])
def test_an_upload_goes_on_unless_it_would_cost_money(condition: Condition, ending: str) -> None:
    async def scenario() -> None:
        switch = Switch(condition)
        eligibility = Eligibility([switch])
        async with serving() as fake, process(pacing=POLL, eligibility=eligibility) as host:

            async def slow(request: web.Request) -> web.StreamResponse:
                switch.reason = "no longer"
                await switch.seen_twice.wait()
                return await answer(Completed())(request)

            fake.replace["complete"] = slow
            with device(host, fake.url) as phone:
                assert (await phone.visit()).ending == ending

    asyncio.run(scenario())


def test_an_unreachable_server_is_told_once_and_again_when_it_is_back() -> None:
    async def scenario() -> None:
        watcher, clock = Watcher(), Clock()

        def pass_time(what: str) -> None:
            """Let so much time pass that the device gives up an unanswered visit."""
            if what in fake.replace:
                clock.pass_(QUICK.give_up_s + 1.0)

        async with serving() as fake, process(notify=watcher, now=clock) as host:
            fake.replace["check-in"] = reset
            fake.on_seen = pass_time
            with device(host, fake.url, notify=watcher) as phone:
                running = asyncio.create_task(phone.run_forever())
                await watcher.until(VisitEnded, 3)
                assert len(watcher.of(SelectorUnreachable)) == 1
                del fake.replace["check-in"]
                await fake.arrival("complete").wait()
                phone.stop()
                await running
        assert [event.server for event in watcher.of(SelectorReachable)] == [fake.url]
        assert fake.completed[:1] == [UPDATE]

    asyncio.run(scenario())


def test_a_single_lost_request_is_no_news() -> None:
    async def scenario() -> None:
        watcher = Watcher()
        async with serving() as fake, process(notify=watcher) as host:

            async def broken_once(request: web.Request) -> web.StreamResponse:
                del fake.replace["report"]
                return await reset(request)

            fake.replace["report"] = broken_once
            with device(host, fake.url) as phone:
                assert (await phone.visit()).ending == "counted"
        assert watcher.events == []

    asyncio.run(scenario())


def test_our_own_training_does_not_make_the_machine_busy() -> None:
    """The same average that the kernel computes, of our own trainings only."""
    now = kernel = 0.0
    running = 0
    load = OwnLoad(lambda: now)
    for second, by in ((0, 2), (30, 1), (45, -2), (200, -1), (400, 0)):
        while now < second:
            now += 1.0
            kernel = kernel * math.exp(-1 / 60) + running * (1 - math.exp(-1 / 60))
        assert load() == pytest.approx(kernel)
        load.change(by)
        running += by
    assert load() < 0.1


def test_a_broken_store_is_tried_again_and_harms_no_other_device(tmp_path: Path) -> None:
    async def scenario() -> None:
        watcher = Watcher()
        async with serving() as fake, process() as host:
            broken = device(host, fake.url, store=tmp_path / "a.db", notify=watcher)
            with broken, device(host, fake.url, store=tmp_path / "b.db") as whole:
                broken.close()
                runtime = DeviceRuntime(host, [broken, whole])
                running = asyncio.create_task(runtime.run())
                await watcher.until(Troubled, 3)
                await fake.arrival("complete").wait()
                runtime.stop()
                await running
        assert fake.completed[:1] == [UPDATE]

    asyncio.run(scenario())


def test_expired_examples_go_whether_the_device_takes_part_or_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        pacing = structs.replace(PACING, sweep_s=0.01)
        eligibility = Eligibility([Switch(reason="never")])
        watcher, path = Watcher(), tmp_path / "device.db"
        async with process(pacing=pacing, eligibility=eligibility) as host:
            policies = {"text": UsePolicy(max_age_s=10.0)}
            with device(
                host, "http://127.0.0.1:9", store=path, policies=policies, notify=watcher
            ) as phone:
                phone.store.add("text", [b"a secret of long ago"], host.now() - 11.0)
                running = asyncio.create_task(phone.run_forever())
                async with asyncio.timeout(300):
                    while b"long ago" in path.read_bytes():
                        await asyncio.to_thread(phone.store.counts, "text", host.now())
                phone.stop()
                await running

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["", "ftp://x", "127.0.0.1:8750", "http://", "http://x/?a=b"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    async def scenario() -> None:
        async with process() as host:
            with pytest.raises(ConfigError, match="server"):
                device(host, url)

    asyncio.run(scenario())
