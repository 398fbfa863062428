"""Threads of secure tasks that cannot start: a pids cgroup, TasksMax or ulimit -u is full."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from threading import Event, Semaphore, Thread
from typing import cast

import pytest

from papaya.aggregator.masked_sum import Tsa, TsaError
from papaya.aggregator.work import (
    Delayed,
    Drop,
    Folded,
    Forget,
    GetOffers,
    Offered,
    Restore,
    Restored,
)
from papaya.messages.base import BlobKey, TaskId
from papaya.server import workers
from papaya.server.workers import TOLD_FROM
from tests.unit.server.worker_builders import (
    CHUNK_BYTES,
    OTHER,
    PATIENCE_S,
    SECURE,
    WORDS,
    CountingKernel,
    Driver,
    MemoryBlobs,
    run,
    worker_threads,
)

UPDATE = [0.0] * (SECURE.update_bytes // 4)
NO_THREAD = "no thread can start for this task: its aggregator is at a limit on threads"


class ThreadLimit:
    """While it is reached, no thread starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached = False
        self._attempts = 0
        start = Thread.start

        def start_below_limit(thread: Thread) -> None:
            if self.is_reached:
                self._attempts += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(Thread, "start", start_below_limit)

    async def refused(self, count: int) -> None:
        """Wait for `count` more attempts. Needs no thread."""
        until = self._attempts + count
        async with asyncio.timeout(PATIENCE_S):
            while self._attempts < until:
                await asyncio.sleep(0)


def refuse(monkeypatch: pytest.MonkeyPatch, names: Set[str]) -> None:
    """Threads with these names cannot start."""
    start = Thread.start

    def start_others(thread: Thread) -> None:
        if thread.name in names:
            raise RuntimeError  # without a text
        start(thread)

    monkeypatch.setattr(Thread, "start", start_others)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> ThreadLimit:
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


def test_a_secure_task_without_a_thread_holds_no_memory_for_uploads(
    limit: ThreadLimit, caplog: pytest.LogCaptureFixture
) -> None:
    """Its updates fill the memory of all tasks. They are given back, as if the TSA did not answer,
    and count when they come again. Until a thread starts, the workers report a problem.
    """

    async def test(driver: Driver) -> None:
        limit.is_reached = True
        driver.fold(SECURE, "a", UPDATE)
        driver.fold(SECURE, "b", UPDATE)
        assert driver.pool.free == 0
        await driver.until(Folded, 2)
        assert all(folded.is_unanswered for folded in driver.of(Folded))
        await driver.workers.drain()
        assert driver.pool.free == driver.pool.count
        assert driver.workers.problem == "no thread can start for task next-word"
        driver.fold(WORDS, "c", [1, 2, 3, 4])
        await driver.until(Folded, 3)
        driver.fold(SECURE, "a", UPDATE)
        await driver.until(Folded, 4)
        assert driver.of(Folded)[-1].is_unanswered
        limit.is_reached = False
        while driver.workers.problem:
            await asyncio.sleep(0)
        driver.fold(SECURE, "a", UPDATE)
        await driver.until(Folded, 5)

    with caplog.at_level(logging.INFO):
        buffers = 2 * SECURE.update_bytes // CHUNK_BYTES
        driver = run(test, MemoryBlobs(WORDS), buffers=buffers, tsa=cast(Tsa, PausedTsa()))
    assert sessions(driver) == ["a", "b", "c", "a", "a"]
    assert not driver.of(Folded)[-1].is_unanswered
    *delayed, over = driver.of(Delayed)
    assert set(delayed) == {Delayed("next-word", 1, NO_THREAD, "threads")}
    assert over == Delayed("next-word", 1, "", "threads")
    events = [record.message for record in caplog.records if record.name == "papaya"]
    assert len(events) == 2
    assert events[0] == 'threads_refused task=next-word why="can\'t start new thread"'
    assert events[1].startswith("threads_started task=next-word after_s=")


def test_a_task_that_has_left_needs_no_thread(limit: ThreadLimit) -> None:
    """`/health` names only tasks that are held here, also while the limit lasts."""

    async def test(driver: Driver) -> None:
        limit.is_reached = True
        driver.fold(SECURE, "a", UPDATE)
        await driver.until(Folded)
        assert driver.workers.problem
        driver.workers.perform(Drop(SECURE.task, 1))
        await driver.workers.drain()
        assert driver.workers.problem == ""
        driver.fold(SECURE, "b", UPDATE)  # the task has come back
        await driver.until(Folded, 2)
        assert driver.workers.problem
        await driver.workers.drain()

    run(test, MemoryBlobs(SECURE), tsa=cast(Tsa, PausedTsa()))


def test_a_worker_goes_on_if_it_cannot_start_a_thread_for_the_next_work(
    limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold waits for a restore until the thread that should run the fold has ended."""
    monkeypatch.setattr(workers, "TSA_THREAD_LIFE_S", 0.001)
    blobs = SlowSweep(WORDS)

    async def test(driver: Driver) -> None:
        blobs.block("get")
        driver.workers.perform(Restore(SECURE, 1, (), ()))
        await blobs.blocked()
        driver.fold(SECURE, "a", UPDATE)
        for thread in worker_threads("papaya-tsa"):
            await asyncio.to_thread(thread.join, PATIENCE_S)
        limit.is_reached = True
        blobs.unblock()
        await driver.until(Folded)
        driver.fold(WORDS, "b", [1, 2, 3, 4])
        await driver.until(Folded, 2)
        limit.is_reached = False
        while driver.workers.problem:  # from now on, no update is given back
            await asyncio.sleep(0)
        driver.fold(SECURE, "a", UPDATE)
        await driver.until(Folded, 3)
        await driver.workers.drain()

    driver = run(test, blobs, threads=1, tsa=cast(Tsa, PausedTsa()))
    assert [(folded.session, folded.is_unanswered) for folded in driver.of(Folded)] == [
        ("a", True),
        ("b", False),
        ("a", False),
    ]
    assert len(driver.of(Restored)) == 1


def test_a_secure_task_goes_on_with_the_threads_that_it_has(limit: ThreadLimit) -> None:
    """It starts more when there is new work and the limit allows it. No problem is reported."""
    tsa = PausedTsa()

    async def test(driver: Driver) -> None:
        tsa.may_answer.clear()
        try:
            driver.fold(SECURE, "a", UPDATE, 1)
            assert await asyncio.to_thread(tsa.asked.acquire, timeout=PATIENCE_S)
            limit.is_reached = True
            driver.fold(SECURE, "b", UPDATE, 2)
            assert len(worker_threads("papaya-tsa")) == 1
            limit.is_reached = False
            driver.fold(SECURE, "c", UPDATE, 3)
            assert await asyncio.to_thread(tsa.asked.acquire, timeout=PATIENCE_S)
            assert len(worker_threads("papaya-tsa")) == 2
        finally:
            tsa.may_answer.set()
        await driver.until(Folded, 3)

    driver = run(test, MemoryBlobs(WORDS), threads=2, tsa=cast(Tsa, tsa))
    assert sorted(sessions(driver)) == ["a", "b", "c"]
    assert driver.of(Delayed) == []


def test_requests_for_offers_wait_until_their_thread_can_start(limit: ThreadLimit) -> None:
    """Every request must be answered: until then the machine sends no other one."""
    tsa = PausedTsa()

    async def test(driver: Driver) -> None:
        limit.is_reached = True
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        driver.workers.perform(Forget(SECURE))
        await limit.refused(2)
        assert driver.of(Offered) == []
        limit.is_reached = False
        await driver.until(Offered)
        assert await asyncio.to_thread(tsa.is_told_to_forget.wait, PATIENCE_S)
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        await driver.until(Offered, 2)

    run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, tsa))


def test_a_task_waits_for_a_thread_until_all_its_kinds_of_work_have_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Updates and requests have different threads."""
    refused = {"papaya-tsa-next-word", "papaya-tsa-next-word/requests"}
    refuse(monkeypatch, refused)

    async def test(driver: Driver) -> None:
        driver.fold(SECURE, "a", UPDATE)
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        await driver.until(Delayed, 4)
        refused.remove("papaya-tsa-next-word")
        while not worker_threads("papaya-tsa"):
            await asyncio.sleep(0)
        assert [told for told in driver.of(Delayed) if not told.reason] == []
        assert driver.workers.problem == "no thread can start for task next-word"
        refused.clear()
        await driver.until(Offered)

    with caplog.at_level(logging.INFO):
        driver = run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, PausedTsa()))
    overs = [told for told in driver.of(Delayed) if not told.reason]
    assert overs == [Delayed("next-word", 1, "", "threads")]
    events = [record.message for record in caplog.records if record.name == "papaya"]
    assert [event.split()[0] for event in events] == ["threads_refused", "threads_started"]


def test_there_are_no_offers_for_updates_that_would_be_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread for requests has started before."""
    refused = {"papaya-tsa-next-word"}
    refuse(monkeypatch, refused)

    async def test(driver: Driver) -> None:
        driver.fold(SECURE, "a", UPDATE)
        await driver.until(Folded)
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        await driver.until(Offered)
        [offered] = driver.of(Offered)
        assert (offered.is_unanswered, offered.problem) == (True, NO_THREAD)
        refused.clear()
        while driver.workers.problem:
            await asyncio.sleep(0)
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        await driver.until(Offered, 2)
        assert driver.of(Offered)[-1].problem == "the TSA knows too many tasks"

    run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, PausedTsa()))


def test_a_task_that_leaves_is_dropped_without_a_thread_of_its_own(limit: ThreadLimit) -> None:
    async def test(driver: Driver) -> None:
        limit.is_reached = True
        driver.fold(SECURE, "a", UPDATE)
        driver.upload("next-word", "b", UPDATE)
        driver.workers.perform(Drop("next-word", 1))
        await driver.workers.drain()

    driver = run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, PausedTsa()))
    assert driver.pool.free == driver.pool.count


def test_a_task_that_only_has_to_be_forgotten_waits_for_a_thread_too(limit: ThreadLimit) -> None:
    async def test(driver: Driver) -> None:
        limit.is_reached = True
        driver.workers.perform(Forget(SECURE))
        await limit.refused(TOLD_FROM)
        assert driver.workers.problem == "no thread can start for task next-word"

    assert run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, PausedTsa())).told == []


def test_the_newest_holder_of_a_task_is_told_that_it_waits_for_a_thread(
    limit: ThreadLimit,
) -> None:
    """Work for earlier holders may be at the head."""

    async def test(driver: Driver) -> None:
        limit.is_reached = True
        driver.fold(SECURE, "a", UPDATE)
        driver.workers.perform(Restore(SECURE, 2, (), ()))
        await driver.until(Delayed)
        limit.is_reached = False
        await driver.until(Restored)

    driver = run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, PausedTsa()))
    assert {told.seq for told in driver.of(Delayed)} == {2}


def test_a_later_holder_is_told_that_the_delay_is_over(limit: ThreadLimit) -> None:
    """The task has left and come back while the work of its earlier holder waited."""

    async def test(driver: Driver) -> None:
        limit.is_reached = True
        driver.fold(SECURE, "a", UPDATE)
        driver.workers.perform(Drop(SECURE.task, 1))
        driver.workers.perform(Restore(SECURE, 2, (), ()))
        await driver.until(Restored)
        await driver.workers.drain()

    driver = run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, PausedTsa()))
    *delayed, over = driver.of(Delayed)
    assert set(delayed) == {Delayed("next-word", 2, NO_THREAD, "threads")}
    assert over == Delayed("next-word", 2, "", "threads")


def test_the_tsa_is_told_to_forget_a_task_that_has_left_meanwhile(limit: ThreadLimit) -> None:
    tsa = PausedTsa()

    async def test(driver: Driver) -> None:
        limit.is_reached = True
        driver.workers.perform(Forget(SECURE))
        await limit.refused(1)
        driver.workers.perform(Drop(SECURE.task, 1))
        driver.workers.perform(Restore(SECURE, 2, (), ()))
        await driver.until(Restored)  # so the earlier holder's sums were dropped
        limit.is_reached = False
        await driver.workers.drain()
        assert tsa.is_told_to_forget.is_set()

    run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, tsa))


def test_closing_finishes_the_work_of_secure_tasks_without_their_threads(
    limit: ThreadLimit,
) -> None:
    """Closing needs no further thread."""

    async def test(driver: Driver) -> None:
        limit.is_reached = True
        for target in (1, 2, 3):  # one job each
            driver.fold(SECURE, f"s-{target}", UPDATE, target)
        driver.workers.perform(Restore(SECURE, 1, (), ()))
        driver.fold(SECURE, "s-4", UPDATE, 1)
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        driver.workers.perform(Forget(SECURE))

    tsa = PausedTsa()
    driver = run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, tsa))
    told = [message for message in driver.told if not isinstance(message, Delayed | Offered)]
    assert [type(message) for message in told] == [Folded, Folded, Folded, Restored, Folded]
    assert sessions(driver) == ["s-1", "s-2", "s-3", "s-4"]
    assert len(driver.of(Offered)) == 1
    assert tsa.is_told_to_forget.is_set()
    assert driver.pool.free == driver.pool.count
    assert worker_threads() == []


def test_closing_does_work_in_the_clear_before_it_asks_the_tsa(limit: ThreadLimit) -> None:
    """The TSA may be frozen."""
    kernel = CountingKernel()

    async def test(driver: Driver) -> None:
        limit.is_reached = True
        kernel.may_go_on.clear()
        try:
            driver.fold(WORDS, "first", [1, 2, 3, 4])
            while not kernel.is_waiting.is_set():
                await asyncio.sleep(0)
            driver.fold(SECURE, "secure", UPDATE)
            driver.fold(OTHER, "last", [1, 2, 3, 4])
            closing = asyncio.create_task(driver.workers.close())
            while not driver.workers._is_closing:
                await asyncio.sleep(0)
        finally:
            kernel.may_go_on.set()
        await closing

    driver = run(test, MemoryBlobs(WORDS), kernel=kernel, tsa=cast(Tsa, PausedTsa()))
    assert sessions(driver) == ["first", "last", "secure"]
