"""Threads that take jobs from the same place."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Barrier, Condition, Event, RLock, Thread

import pytest

from papaya.server.crew import LONGEST_RETRY_S, Crew, CrewJob, on_thread, retry_delay_s
from tests.unit.server.worker_builders import PATIENCE_S


class Jobs:
    """The jobs of a crew. Taking a job wakes a thread for the next one."""

    def __init__(self, most: int, life_s: float | None = None) -> None:
        self.waiting: deque[CrewJob] = deque()
        self.told: list[tuple[int, str | None]] = []
        self.failure: Exception | None = None
        self.search: Callable[[], object] = lambda: None
        self._lock = RLock()
        self.crew = Crew(
            "a-crew",
            most,
            self._find,
            self._lock,
            asyncio.get_running_loop(),
            life_s=life_s,
            first_retry_s=0.001,
            on_limit=self._on_limit,
        )

    def _on_limit(self, attempts: int, why: str | None) -> None:
        self.told.append((attempts, why))
        if self.failure is not None:
            raise self.failure

    def _find(self) -> CrewJob | None:
        self.search()
        if not self.waiting:
            return None
        job = self.waiting.popleft()
        if self.waiting:
            self.crew.wake()
        return job

    def put(self, *jobs: CrewJob) -> None:
        with self._lock:
            self.waiting.extend(jobs)
            self.crew.wake()

    async def ended(self) -> None:
        with self._lock:
            self.crew.stop()
        async with asyncio.timeout(PATIENCE_S):
            await self.crew.ended()


def on_a_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    asyncio.run(within())


def test_threads_start_for_jobs_that_may_run_together() -> None:
    async def test() -> None:
        jobs, together = Jobs(most=3), Barrier(3)
        assert jobs.crew.size == 0
        jobs.put(*3 * [lambda: together.wait(PATIENCE_S)])
        while jobs.waiting:
            await asyncio.sleep(0)
        assert jobs.crew.size == 3
        await jobs.ended()
        assert jobs.crew.size == 0

    on_a_loop(test)


def test_threads_without_work_end_and_others_start() -> None:
    async def test() -> None:
        jobs, loop = Jobs(most=2, life_s=0.001), asyncio.get_running_loop()
        for _ in range(3):
            done = asyncio.Event()
            jobs.put(partial(loop.call_soon_threadsafe, done.set))
            await done.wait()
            while jobs.crew.is_in_use:
                await asyncio.sleep(0)
        await jobs.ended()

    on_a_loop(test)


def test_a_crew_without_threads_backs_off_until_one_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_reached, start = True, Thread.start

    def start_below_limit(thread: Thread) -> None:
        if is_reached:
            raise RuntimeError("too many")
        start(thread)

    monkeypatch.setattr(Thread, "start", start_below_limit)

    async def test() -> None:
        nonlocal is_reached
        jobs, done = Jobs(most=2), asyncio.Event()
        loop = asyncio.get_running_loop()
        for _ in range(10):  # new work causes no earlier attempt
            jobs.put(lambda: None)
        assert jobs.told == [(1, "too many")]
        while len(jobs.told) < 3:
            await asyncio.sleep(0)
        is_reached = False
        jobs.put(lambda: loop.call_soon_threadsafe(done.set))
        await done.wait()
        *tried, over = jobs.told
        assert tried == [(1 + number, "too many") for number in range(len(tried))]
        assert over == (len(tried), None)
        await jobs.ended()

    on_a_loop(test)


@pytest.mark.parametrize("refusal", [RuntimeError("too many"), MemoryError("too many")])
def test_no_job_is_lost_if_no_thread_can_start_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    left, start = 1, Thread.start

    def start_below_limit(thread: Thread) -> None:
        nonlocal left
        if left == 0:
            raise refusal
        left -= 1
        start(thread)

    monkeypatch.setattr(Thread, "start", start_below_limit)

    async def test() -> None:
        jobs, loop = Jobs(most=2), asyncio.get_running_loop()
        done = [asyncio.Event(), asyncio.Event()]
        jobs.put(*(partial(loop.call_soon_threadsafe, event.set) for event in done))
        for event in done:
            await event.wait()
        assert (jobs.crew.size, jobs.told) == (1, [])
        await jobs.ended()

    on_a_loop(test)


def test_a_crew_starts_threads_if_its_limit_cannot_be_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_reached, start = True, Thread.start

    def start_below_limit(thread: Thread) -> None:
        if is_reached:
            raise RuntimeError("too many")
        start(thread)

    monkeypatch.setattr(Thread, "start", start_below_limit)

    async def test() -> None:
        nonlocal is_reached
        jobs, done = Jobs(most=1), asyncio.Event()
        jobs.failure = ZeroDivisionError()
        jobs.put(partial(asyncio.get_running_loop().call_soon_threadsafe, done.set))
        is_reached = False
        await done.wait()
        assert jobs.told == [(1, "too many"), (1, None)]
        await jobs.ended()

    on_a_loop(test)
    messages = [record.message for record in caplog.records]
    assert messages == 2 * ["the limit on threads of a-crew cannot be reported"]


def test_a_crew_lives_on_if_a_job_or_the_search_for_one_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def test() -> None:
        jobs, done = Jobs(most=1), asyncio.Event()
        loop = asyncio.get_running_loop()
        jobs.put(fail, partial(loop.call_soon_threadsafe, done.set))
        await done.wait()
        assert jobs.crew.size == 1
        done.clear()
        jobs.search = fail
        jobs.put()
        while jobs.crew.size:
            await asyncio.sleep(0)
        jobs.search = lambda: None
        jobs.put(partial(loop.call_soon_threadsafe, done.set))
        await done.wait()
        jobs.search = fail
        await jobs.ended()

    on_a_loop(test)
    messages = [record.message for record in caplog.records]
    assert messages == [
        "a job of a-crew failed unexpectedly",
        "a thread of a-crew cannot find a job, and ends",
    ]


def test_another_thread_starts_if_one_could_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting makes a lock, which needs memory."""
    wait, failures = Condition.wait, [MemoryError()]
    changed: Condition | None = None

    def wait_or_fail(condition: Condition, timeout: float | None = None) -> bool:
        if failures and condition is changed:
            raise failures.pop()
        return wait(condition, timeout)

    async def test() -> None:
        nonlocal changed
        jobs, done = Jobs(most=1), asyncio.Event()
        changed = jobs.crew._changed
        jobs.put(lambda: None)
        while failures or jobs.crew.size:
            await asyncio.sleep(0)
        jobs.put(partial(asyncio.get_running_loop().call_soon_threadsafe, done.set))
        await done.wait()
        await jobs.ended()

    monkeypatch.setattr(Condition, "wait", wait_or_fail)
    on_a_loop(test)


def test_the_back_off_is_limited_even_after_a_day() -> None:
    assert [retry_delay_s(attempts, 0.5) for attempts in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert retry_delay_s(100_000) == LONGEST_RETRY_S


def test_a_call_that_another_thread_makes_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor queues it before it tries to start a thread, and just then another one of its
    threads has nothing to do.
    """
    has_begun, may_end = Event(), Event()

    def call() -> int:
        has_begun.set()
        assert may_end.wait(PATIENCE_S)
        return 7

    async def test() -> None:
        executor, may_start = ThreadPoolExecutor(), Event()
        asyncio.get_running_loop().set_default_executor(executor)
        executor.submit(may_start.wait, PATIENCE_S)

        def start_none(thread: Thread) -> None:
            may_start.set()
            assert has_begun.wait(PATIENCE_S)
            raise RuntimeError("too many")

        with monkeypatch.context() as limit:
            limit.setattr(Thread, "start", start_none)
            waiting = asyncio.create_task(on_thread(call))
            await asyncio.sleep(0)
        may_end.set()
        assert await waiting == 7

    on_a_loop(test)


def test_what_a_failed_call_has_used_is_freed_at_once() -> None:
    """Without the garbage collector, which finds open sockets before their owners close them."""
    used: list[weakref.ref[Event]] = []

    def fail() -> None:
        event = Event()
        used.append(weakref.ref(event))
        raise ZeroDivisionError

    async def test() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        with suppress(ZeroDivisionError):
            await on_thread(fail)
        await on_thread(int)  # the thread has forgotten the first call
        assert used[0]() is None

    gc.disable()
    try:
        on_a_loop(test)
    finally:
        gc.enable()
