"""Threads that fold, snapshot and step: order, failures, closing."""

from __future__ import annotations

import asyncio
from threading import Barrier, Event, Lock, Semaphore
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs

from papaya.aggregator.masked_sum import MaskedSum, Tsa, TsaError
from papaya.aggregator.shards import Shards
from papaya.aggregator.work import (
    UNREACHABLE,
    DeleteBlobs,
    Drop,
    Fold,
    Folded,
    Forget,
    GetOffers,
    Lost,
    Offered,
    Restore,
    Restored,
    Snapshotted,
    Stepped,
)
from papaya.config import SecureAggregation
from papaya.learning import parameters
from papaya.learning.kernels import Kernel, fastest
from papaya.learning.parameters import FLOAT32
from papaya.secagg.parameters import PublicParameters
from papaya.server import workers
from papaya.server.buffers import BufferPool
from papaya.server.workers import threaded_shards
from tests.unit.server.worker_builders import (
    LENGTH,
    OTHER,
    PATIENCE_S,
    SNAPSHOT,
    WORDS,
    CountingKernel,
    Driver,
    MemoryBlobs,
    record_of,
    run,
    step_of,
    the_sum,
    worker_threads,
)


def test_updates_are_folded_recorded_and_stepped() -> None:
    blobs = MemoryBlobs(WORDS)

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.fold(WORDS, "b", [3, 2, 1, 0])
        driver.workers.perform(SNAPSHOT)
        await driver.until(Snapshotted)
        [snapshotted] = driver.of(Snapshotted)
        driver.workers.perform(step_of(blobs, snapshotted))
        await driver.until(Stepped)

    driver = run(test, blobs)
    folded_a, folded_b, snapshotted, stepped = driver.told
    assert [folded_a, folded_b] == [Folded("words", 1, 1, "a"), Folded("words", 1, 1, "b")]
    assert isinstance(snapshotted, Snapshotted)
    assert the_sum(blobs, snapshotted) == [4, 4, 4, 4]
    assert isinstance(stepped, Stepped)
    assert parameters.decode(blobs.blobs[stepped.parameters], LENGTH).tolist() == [2, 2, 2, 2]
    assert driver.pool.free == driver.pool.count
    counters = driver.workers.counters
    assert (counters.updates, counters.folded_bytes) == (2, 2 * WORDS.model_bytes)
    assert (counters.snapshots, counters.steps) == (1, 1)
    assert counters.step_seconds > 0
    written = [snapshotted.sums[0].blob, stepped.parameters, stepped.optimizer]
    assert counters.written_bytes == sum(len(blobs.blobs[key]) for key in written)
    assert set(driver.times) == {"fold", "snapshot", "step"}


def test_folds_go_on_while_a_blob_is_written_and_other_work_of_the_task_waits() -> None:
    blobs = MemoryBlobs(WORDS)

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 0, 0, 0])
        blobs.block("put")
        driver.workers.perform(SNAPSHOT)
        await blobs.blocked()
        driver.fold(WORDS, "b", [0, 1, 0, 0])
        driver.workers.perform(SNAPSHOT)
        driver.fold(WORDS, "c", [0, 0, 1, 0])
        await driver.until(Folded, 2)
        assert [folded.session for folded in driver.of(Folded)] == ["a", "b"]
        assert driver.workers.queue_length == 1
        assert driver.of(Snapshotted) == []
        blobs.unblock()
        await driver.until(Folded, 3)

    driver = run(test, blobs, threads=3)
    first, second = driver.of(Snapshotted)
    assert (first.sums[0].sessions, the_sum(blobs, first)) == (("a",), [1, 0, 0, 0])
    assert (second.sums[0].sessions, the_sum(blobs, second)) == (("a", "b"), [1, 1, 0, 0])


def test_another_task_does_not_wait() -> None:
    blobs = MemoryBlobs(WORDS, OTHER)

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 0, 0, 0])
        blobs.block("put")
        driver.workers.perform(SNAPSHOT)
        await blobs.blocked()
        driver.workers.perform(Restore(OTHER, 1, (), ()))
        driver.fold(OTHER, "b", [1, 0, 0, 0])
        await driver.until(Folded, 2)
        assert driver.of(Snapshotted) == []

    driver = run(test, blobs, threads=2)
    assert len(driver.of(Snapshotted)) == 1


async def a_free_thread_finds_nothing_to_do(driver: Driver) -> None:
    """It has been through all lanes more than once when these are done."""
    before = len(driver.of(Restored))
    for number in range(1, 4):
        driver.workers.perform(Restore(OTHER, 1, (), ()))
        await driver.until(Restored, before + number)


def test_a_snapshot_waits_for_every_fold_before_it_and_for_none_behind_it() -> None:
    blobs, kernel = MemoryBlobs(WORDS), CountingKernel()

    async def test(driver: Driver) -> None:
        kernel.may_go_on.clear()
        driver.fold(WORDS, "a", [1, 0, 0, 0])
        assert await asyncio.to_thread(kernel.is_waiting.wait, PATIENCE_S)
        driver.workers.perform(SNAPSHOT)
        driver.fold(WORDS, "b", [0, 1, 0, 0])
        await a_free_thread_finds_nothing_to_do(driver)
        assert driver.of(Snapshotted) == driver.of(Lost) == []
        kernel.may_go_on.set()

    driver = run(test, blobs, threads=2, kernel=kernel)
    [snapshotted] = driver.of(Snapshotted)
    assert (snapshotted.sums[0].sessions, the_sum(blobs, snapshotted)) == (("a",), [1, 0, 0, 0])
    assert len(driver.of(Folded)) == 2


def test_a_fold_behind_a_restore_waits_until_the_sums_are_there() -> None:
    blobs = MemoryBlobs(WORDS)

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 0, 0, 0])
        driver.workers.perform(SNAPSHOT)
        await driver.until(Snapshotted)
        blobs.block("get")
        driver.workers.perform(Restore(WORDS, 1, (record_of(driver.of(Snapshotted)[0]),), ()))
        driver.fold(WORDS, "b", [0, 1, 0, 0])
        driver.workers.perform(SNAPSHOT)
        await blobs.blocked()
        await a_free_thread_finds_nothing_to_do(driver)
        assert len(driver.of(Folded)) == 1
        blobs.unblock()

    driver = run(test, blobs, threads=2)
    _, snapshotted = driver.of(Snapshotted)
    assert snapshotted.sums[0].sessions == ("a", "b")
    assert the_sum(blobs, snapshotted) == [1, 1, 0, 0]


def test_waiting_updates_of_one_buffer_share_a_pass_of_at_most_eight() -> None:
    blobs, kernel = MemoryBlobs(WORDS), CountingKernel()

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "first", [1, 0, 0, 0])
        blobs.block("put")
        driver.workers.perform(SNAPSHOT)
        await blobs.blocked()
        for i in range(10):
            driver.fold(WORDS, f"one-{i}", [1, 0, 0, 0])
        for i in range(2):
            driver.fold(WORDS, f"two-{i}", [1, 0, 0, 0], target=2)
        assert driver.workers.queue_length == 12
        blobs.unblock()

    driver = run(test, blobs, kernel=kernel)
    # Each update is two pieces.
    assert kernel.passes == [1, 1, 8, 8, 2, 2, 2, 2]
    assert len(driver.of(Folded)) == 13


def test_closing_finishes_what_was_given_and_what_the_results_give() -> None:
    blobs = MemoryBlobs(WORDS)

    async def test(driver: Driver) -> None:
        deliver = driver.workers._deliver

        def snapshot_when_folded(message: object) -> None:
            if isinstance(message, Folded):
                driver.workers.perform(SNAPSHOT)
            deliver(message)  # type: ignore[arg-type]

        driver.workers._deliver = snapshot_when_folded
        driver.fold(WORDS, "a", [1, 2, 3, 4])

    driver = run(test, blobs, threads=2)
    assert [type(message) for message in driver.told] == [Folded, Snapshotted]
    assert worker_threads() == []


def test_dropping_a_session_forgets_its_upload_but_not_a_fold_that_was_given() -> None:
    blobs = MemoryBlobs(WORDS)

    async def test(driver: Driver) -> None:
        driver.upload("words", "dropped", [9, 9, 9, 9])
        driver.workers.perform(Drop("words", 1, "dropped"))
        driver.workers.perform(Fold(WORDS, 1, 1, "dropped", 1, 0))
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(Drop("words", 1, "a"))
        driver.workers.perform(SNAPSHOT)

    driver = run(test, blobs)
    assert [folded.refused for folded in driver.of(Folded)] == ["wrong_size", None]
    assert driver.workers.counters.refused == 1
    assert driver.of(Snapshotted)[0].sums[0].sessions == ("a",)
    assert driver.pool.free == driver.pool.count


def test_dropping_a_task_comes_after_the_folds_before_it() -> None:
    blobs = MemoryBlobs(WORDS)

    async def test(driver: Driver) -> None:
        driver.upload("words", "half", [9, 9, 9, 9])
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(Drop("words", 1))
        driver.fold(WORDS, "b", [0, 0, 0, 1])
        driver.workers.perform(SNAPSHOT)

    driver = run(test, blobs, threads=2)
    assert [folded.session for folded in driver.of(Folded)] == ["a", "b"]
    assert driver.of(Snapshotted)[0].sums[0].sessions == ("b",)
    assert driver.pool.free == driver.pool.count


def test_deleting_comes_before_the_same_blob_is_written_again() -> None:
    blobs = MemoryBlobs(WORDS)

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(SNAPSHOT)
        await driver.until(Snapshotted)
        key = driver.of(Snapshotted)[0].sums[0].blob
        driver.workers.perform(DeleteBlobs((key,)))
        driver.workers.perform(SNAPSHOT)
        driver.workers.perform(DeleteBlobs(()))

    driver = run(test, blobs, threads=4)
    first, second = driver.of(Snapshotted)
    assert first == second
    assert first.sums[0].blob in blobs.blobs


def test_shards_for_threads_use_the_fastest_kernel_and_return_buffers() -> None:
    pool = BufferPool(1, 16)
    shards: Shards = threaded_shards(3, pool)
    view = pool.take(16)
    assert view is not None
    view[:] = np.ones(LENGTH, FLOAT32).tobytes()
    fold = Fold(WORDS, 1, 1, "a", 1, 0)
    assert shards.fold_all([(fold, {0: view})])[0].refused is None
    assert pool.free == 1
    assert shards.count == 3
    assert shards._kernel is fastest()


class SilentTsa:
    """Takes a seed, and does not answer until it may."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = Event(), Event()

    def accept(self, parameters: object, index: int, group: int, sealed: bytes) -> None:
        self.is_asked.set()
        assert self.may_answer.wait(PATIENCE_S)


SECURE = structs.replace(
    WORDS, task="secure", secure_aggregation=SecureAggregation(), clip=1.0, max_examples=1
)


def test_an_update_that_the_tsa_does_not_answer_is_not_counted_as_folded() -> None:
    class AwayTsa:
        def accept(self, parameters: object, index: int, group: int, sealed: bytes) -> None:
            raise TsaError(UNREACHABLE, "no answer")

    async def test(driver: Driver) -> None:
        driver.fold(SECURE, "a", [0] * (SECURE.update_bytes // 4))
        await driver.until(Folded)

    driver = run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, AwayTsa()))
    assert [folded.is_unanswered for folded in driver.of(Folded)] == [True]
    counters = driver.workers.counters
    assert (counters.updates, counters.refused, counters.folded_bytes) == (0, 0, 0)


def test_tasks_in_the_clear_never_wait_for_the_tsa() -> None:
    """Not even if more secure updates wait for it than there are threads."""
    blobs, tsa = MemoryBlobs(WORDS), SilentTsa()

    async def test(driver: Driver) -> None:
        try:
            for session in ("a", "b", "c"):
                driver.fold(SECURE, session, [0] * (SECURE.update_bytes // 4))
            assert await asyncio.to_thread(tsa.is_asked.wait, PATIENCE_S)
            driver.fold(WORDS, "d", [1, 2, 3, 4])
            driver.workers.perform(SNAPSHOT)
            await driver.until(Snapshotted)
            [snapshotted] = driver.of(Snapshotted)
            driver.workers.perform(step_of(blobs, snapshotted))
            await driver.until(Stepped)
            assert [folded.session for folded in driver.of(Folded)] == ["d"]
        finally:
            tsa.may_answer.set()
        await driver.until(Folded, 4)

    run(test, blobs, threads=1, tsa=cast(Tsa, tsa))


class FrozenTsa:
    """Two TSAs: the one of the task SECURE waits for `may_answer`, the other answers at once."""

    def __init__(self) -> None:
        self.asked, self.may_answer = Semaphore(0), Event()

    def accept(self, parameters: PublicParameters, index: int, group: int, sealed: bytes) -> None:
        self._answer(parameters)

    def offers(self, parameters: PublicParameters, count: int) -> None:
        self._answer(parameters)
        raise TsaError("full", "the TSA knows too many tasks")

    def forget(self, parameters: PublicParameters) -> None:
        self._answer(parameters)

    def _answer(self, parameters: PublicParameters) -> None:
        if parameters == SECURE.public_parameters:
            self.asked.release()
            assert self.may_answer.wait(PATIENCE_S)


def test_tasks_of_another_tsa_do_not_wait_for_a_frozen_one() -> None:
    """Neither folds nor offers wait, although every thread of the first task waits."""
    tsa, threads = FrozenTsa(), 2
    other = structs.replace(SECURE, task="elsewhere", clip=2.0)

    async def test(driver: Driver) -> None:
        values = [0.0] * (SECURE.update_bytes // 4)
        try:
            for target in range(2 * threads):  # one job each
                driver.fold(SECURE, f"frozen-{target}", values, target)
            driver.workers.perform(GetOffers(SECURE, 1, 1))
            driver.workers.perform(GetOffers(SECURE, 1, 1))
            for _ in range(threads + 1):
                assert await asyncio.to_thread(tsa.asked.acquire, timeout=PATIENCE_S)
            driver.fold(other, "a", values)
            driver.workers.perform(GetOffers(other, 1, 1))
            driver.workers.perform(Forget(other))
            await driver.until(Folded)
            await driver.until(Offered)
            assert [folded.session for folded in driver.of(Folded)] == ["a"]
            assert [offered.task for offered in driver.of(Offered)] == ["elsewhere"]
        finally:
            tsa.may_answer.set()
        await driver.until(Folded, 1 + 2 * threads)
        await driver.until(Offered, 3)

    run(test, MemoryBlobs(WORDS), threads, tsa=cast(Tsa, tsa))


def test_requests_of_a_task_have_one_thread() -> None:
    """They run one after the other."""
    tsa, requests = FrozenTsa(), 5
    tsa.may_answer.set()

    async def test(driver: Driver) -> None:
        for _ in range(requests):
            driver.workers.perform(GetOffers(SECURE, 1, 1))
        await driver.until(Offered, requests)
        assert len(worker_threads("papaya-tsa")) == 1

    run(test, MemoryBlobs(WORDS), 4, tsa=cast(Tsa, tsa))


def test_threads_of_a_secure_task_end_when_it_has_no_work_and_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "TSA_THREAD_LIFE_S", 0.01)
    tsa = FrozenTsa()
    tsa.may_answer.set()

    async def test(driver: Driver) -> None:
        for number in range(1, 4):
            driver.fold(SECURE, f"s-{number}", [0.0] * (SECURE.update_bytes // 4))
            driver.workers.perform(GetOffers(SECURE, 1, 1))
            await driver.until(Folded, number)
            await driver.until(Offered, number)
            for thread in worker_threads("papaya-tsa"):
                await asyncio.to_thread(thread.join, PATIENCE_S)
            assert [thread.name for thread in worker_threads()] == 2 * ["papaya-worker"]

    run(test, MemoryBlobs(WORDS), 2, tsa=cast(Tsa, tsa))


def test_the_loop_goes_on_while_the_workers_wait_for_the_last_offers() -> None:
    """A call to the TSA asks the loop which TSA serves the task."""
    is_asked, may_answer, answered = Event(), Event(), []

    class AskingTsa:
        def offers(self, parameters: object, count: int) -> None:
            is_asked.set()
            answered.append(may_answer.wait(PATIENCE_S))
            raise TsaError(UNREACHABLE, "no answer")

    async def test(driver: Driver) -> None:
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        assert await asyncio.to_thread(is_asked.wait, PATIENCE_S)
        closing = asyncio.create_task(driver.workers.close())
        for _ in range(100):
            await asyncio.sleep(0)
        may_answer.set()
        await closing

    run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, AskingTsa()))
    assert answered == [True]


UPDATE = [0.0] * (SECURE.update_bytes // 4)


class PromptTsa:
    """Accepts every seed at once. `has_all` is set when it has accepted `count` seeds."""

    def __init__(self, count: int = 1) -> None:
        self.has_all, self._left, self._lock = Event(), count, Lock()

    def accept(self, parameters: object, index: int, group: int, sealed: bytes) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.has_all.set()


def test_no_more_threads_than_shards_add_up_updates_of_secure_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each task has threads of its own, but these only wait for the TSA."""
    tasks, guard, add_all = 6, Lock(), MaskedSum.add_all
    tsa, now, most = PromptTsa(tasks), 0, 0

    def add_after_all_are_accepted(total: MaskedSum, members: Any, kernel: Kernel) -> None:
        nonlocal now, most
        with guard:
            now += 1
            most = max(most, now)
        assert tsa.has_all.wait(PATIENCE_S)
        add_all(total, members, kernel)
        with guard:
            now -= 1

    monkeypatch.setattr(MaskedSum, "add_all", add_after_all_are_accepted)

    async def test(driver: Driver) -> None:
        for number in range(tasks):
            driver.fold(structs.replace(SECURE, task=f"task-{number}"), "a", UPDATE)
        await driver.until(Folded, tasks)

    run(test, MemoryBlobs(WORDS), threads=1, tsa=cast(Tsa, tsa))
    assert most == 1


class GatedTsa:
    """Accepts a seed for a buffer when the gate of this buffer is open."""

    def __init__(self) -> None:
        self.asked, self.gates = Semaphore(0), {1: Event(), 2: Event()}

    def accept(self, parameters: object, index: int, group: int, sealed: bytes) -> None:
        self.asked.release()
        assert self.gates[group].wait(PATIENCE_S)


def test_threads_of_a_task_never_wait_for_each_other_to_add_up_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that start after others have ended do not wait either."""
    monkeypatch.setattr(workers, "TSA_THREAD_LIFE_S", 0.01)
    tsa, together, add_all = GatedTsa(), Barrier(2), MaskedSum.add_all

    def add_together(total: MaskedSum, members: Any, kernel: Kernel) -> None:
        if tsa.gates[2].is_set():
            together.wait(PATIENCE_S)
        add_all(total, members, kernel)

    monkeypatch.setattr(MaskedSum, "add_all", add_together)

    async def fold(driver: Driver, session: str, target: int) -> None:
        driver.fold(SECURE, session, UPDATE, target)
        assert await asyncio.to_thread(tsa.asked.acquire, timeout=PATIENCE_S)

    async def test(driver: Driver) -> None:
        try:
            await fold(driver, "a", 1)
            await fold(driver, "b", 2)
            tsa.gates[1].set()
            while len(worker_threads("papaya-tsa")) == 2:
                await asyncio.sleep(0)
            await fold(driver, "c", 2)
        finally:
            tsa.gates[2].set()
        await driver.until(Folded, 3)

    run(test, MemoryBlobs(WORDS), threads=2, tsa=cast(Tsa, tsa))


def test_a_fold_behind_other_work_does_not_wait_for_the_threads_that_do_it() -> None:
    """The fold starts when a thread takes the work before it, even if all threads were busy."""

    class SlowDelete(MemoryBlobs):
        def __init__(self) -> None:
            super().__init__(WORDS)
            self.is_deleting, self.may_delete = Event(), Event()

        def delete(self, key: str) -> None:
            self.is_deleting.set()
            assert self.may_delete.wait(PATIENCE_S)

    blobs = SlowDelete()

    async def test(driver: Driver) -> None:
        blobs.block("put")
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(SNAPSHOT)
        await blobs.blocked()
        try:
            driver.workers.perform(DeleteBlobs((f"{SECURE.task}/1/x",)))
            driver.fold(SECURE, "b", UPDATE)
            blobs.unblock()
            await driver.until(Folded, 2)
            assert blobs.is_deleting.is_set()
        finally:
            blobs.may_delete.set()

    run(test, blobs, threads=1, tsa=cast(Tsa, PromptTsa()))
