"""Threads of secure tasks that cannot start: a pids cgroup, TasksMax or ulimit -u is full."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from threading import Event, Semaphore, Thread
from typing import cast

import pytest

from papaya.aggregator.masked_sum import Tsa, TsaError
from papaya.aggregator.work import Folded, Forget, GetOffers, Offered, Restore, Restored
from papaya.messages.base import BlobKey, TaskId
from papaya.server import workers
from tests.unit.server.worker_builders import (
    PATIENCE_S,
    SECURE,
    WORDS,
    Driver,
    MemoryBlobs,
    run,
)

UPDATE = [0.0] * (SECURE.update_bytes // 4)


class ThreadLimit:
    """While it is reached, no thread for calls to the TSA starts. `refused` counts attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached = False
        self._refused = Semaphore(0)
        start = Thread.start

        def start_below_limit(thread: Thread) -> None:
            if self.is_reached and thread.name.startswith(("papaya-tsa", "papaya-offers")):
                self._refused.release()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(Thread, "start", start_below_limit)

    async def refused(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self._refused.acquire, timeout=PATIENCE_S)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> ThreadLimit:
    monkeypatch.setattr(workers, "THREAD_RETRY_S", 0.001)
    monkeypatch.setattr(workers, "TSA_THREAD_LIFE_S", 10 * PATIENCE_S)
    return ThreadLimit(monkeypatch)


class PausedTsa:
    """Accepts every seed and has no offers; answers to seeds wait for `may_answer`."""

    def __init__(self) -> None:
        self.asked, self.may_answer, self.is_told_to_forget = Semaphore(0), Event(), Event()
        self.may_answer.set()

    def accept(self, parameters: object, index: int, group: int, sealed: bytes) -> None:
        self.asked.release()
        assert self.may_answer.wait(PATIENCE_S)

    def offers(self, parameters: object, count: int) -> None:
        raise TsaError("full", "the TSA knows too many tasks")

    def forget(self, parameters: object) -> None:
        self.is_told_to_forget.set()


class SlowSweep(MemoryBlobs):
    """`block("get")` also makes a sweep wait, so that a restore takes long."""

    def sweep(self, task: TaskId, below_seq: int, keep: Set[BlobKey]) -> None:
        self._pass("get")
        super().sweep(task, below_seq, keep)


def sessions(driver: Driver) -> list[str]:
    return [folded.session for folded in driver.of(Folded)]


def test_updates_of_a_secure_task_wait_until_its_first_thread_can_start(
    limit: ThreadLimit, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(driver: Driver) -> None:
        limit.is_reached = True
        driver.fold(SECURE, "a", UPDATE)
        driver.fold(SECURE, "b", UPDATE)
        await limit.refused(3)
        driver.fold(WORDS, "c", [1, 2, 3, 4])
        await driver.until(Folded)
        assert sessions(driver) == ["c"]
        limit.is_reached = False
        await driver.until(Folded, 3)
        await driver.workers.drain()

    with caplog.at_level(logging.WARNING):
        driver = run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, PausedTsa()))
    assert sorted(sessions(driver)) == ["a", "b", "c"]
    assert (
        "cannot start a thread for the TSA of task next-word: can't start new thread; will retry "
        "(hint: raise pids.max, TasksMax or ulimit -u)"
    ) in caplog.text


def test_a_worker_that_cannot_start_the_thread_for_the_next_work_lives_on(
    limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold waits for a restore so long that its own thread has ended before."""
    monkeypatch.setattr(workers, "TSA_THREAD_LIFE_S", 0.001)
    blobs = SlowSweep(WORDS)

    async def test(driver: Driver) -> None:
        blobs.block("get")
        driver.workers.perform(Restore(SECURE, 1, (), ()))
        await blobs.blocked()
        driver.fold(SECURE, "a", UPDATE)
        for thread in driver.workers._threads[1:]:
            await asyncio.to_thread(thread.join, PATIENCE_S)
        limit.is_reached = True
        blobs.unblock()
        await limit.refused(2)
        driver.fold(WORDS, "b", [1, 2, 3, 4])
        await driver.until(Folded)
        limit.is_reached = False
        await driver.until(Folded, 2)
        await driver.workers.drain()

    driver = run(test, blobs, threads=1, tsa=cast(Tsa, PausedTsa()))
    assert sessions(driver) == ["b", "a"]
    assert len(driver.of(Restored)) == 1


def test_a_secure_task_goes_on_with_the_threads_that_it_has(limit: ThreadLimit) -> None:
    """And tries to start more when there is new work, after a while."""
    tsa = PausedTsa()

    async def test(driver: Driver) -> None:
        tsa.may_answer.clear()
        try:
            driver.fold(SECURE, "a", UPDATE, 1)
            assert await asyncio.to_thread(tsa.asked.acquire, timeout=PATIENCE_S)
            limit.is_reached = True
            driver.fold(SECURE, "b", UPDATE, 2)
            await limit.refused(1)
        finally:
            tsa.may_answer.set()
        await driver.until(Folded, 2)
        assert [thread.name for thread in driver.workers._threads[2:]] == ["papaya-tsa-next-word-0"]

        limit.is_reached = False
        while driver.workers._callers["next-word"].is_at_limit:
            await asyncio.sleep(0)
        driver.fold(SECURE, "c", UPDATE, 3)
        assert len(driver.workers._threads) == 4
        await driver.until(Folded, 3)

    driver = run(test, MemoryBlobs(WORDS), threads=2, tsa=cast(Tsa, tsa))
    assert sessions(driver) == ["a", "b", "c"]


def test_requests_for_offers_wait_until_their_thread_can_start(limit: ThreadLimit) -> None:
    """Every request is answered: the machine has at most one that is not."""
    tsa = PausedTsa()

    async def test(driver: Driver) -> None:
        limit.is_reached = True
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        driver.workers.perform(Forget(SECURE))
        await limit.refused(2)
        assert driver.told == []
        limit.is_reached = False
        await driver.until(Offered)
        assert await asyncio.to_thread(tsa.is_told_to_forget.wait, PATIENCE_S)
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        await driver.until(Offered, 2)

    run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, tsa))


def test_closing_finishes_the_work_of_secure_tasks_without_their_threads(
    limit: ThreadLimit,
) -> None:
    async def test(driver: Driver) -> None:
        limit.is_reached = True
        for target in (1, 2, 3):  # one job each
            driver.fold(SECURE, f"s-{target}", UPDATE, target)
        driver.workers.perform(Restore(SECURE, 1, (), ()))
        driver.fold(SECURE, "s-4", UPDATE, 1)
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        await limit.refused(3)
        assert driver.told == []

    driver = run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, PausedTsa()))
    told = [type(message) for message in driver.told]
    assert told == [Folded, Folded, Folded, Restored, Folded]
    assert sessions(driver) == ["s-1", "s-2", "s-3", "s-4"]
    assert driver.pool.free == driver.pool.count
