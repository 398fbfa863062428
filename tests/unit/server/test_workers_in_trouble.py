"""What the workers do when the disk is full, a blob is gone, or something else breaks."""

from __future__ import annotations

import logging
from typing import cast

import pytest

from papaya.aggregator.masked_sum import Tsa
from papaya.aggregator.work import (
    Delayed,
    DeleteBlobs,
    Drop,
    Folded,
    Forget,
    GetOffers,
    Lost,
    Offered,
    Restore,
    Restored,
    Snapshotted,
)
from papaya.errors import OperatorError
from papaya.messages.base import Message
from papaya.messages.storage import Member, RecordRow
from papaya.server.workers import TOLD_FROM
from tests.unit.server.worker_builders import (
    SECURE,
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

FULL = OperatorError("cannot write the blob: the disk is full", hint="make room")


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message.split()[0] for record in caplog.records if record.name == "papaya"]


def test_a_full_disk_is_tried_again_and_holds_up_no_fold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blobs = MemoryBlobs(WORDS)
    blobs.failures = [FULL, OSError(28, "No space left on device"), FULL]

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(SNAPSHOT)
        driver.fold(WORDS, "b", [1, 2, 3, 4])
        await driver.until(Snapshotted)
        await driver.workers.drain()

    with caplog.at_level(logging.INFO):
        driver = run(test, blobs)
    [snapshotted] = driver.of(Snapshotted)
    assert the_sum(blobs, snapshotted) == [1, 2, 3, 4]
    assert driver.workers.counters.storage_errors == 3
    assert len(driver.of(Folded)) == 2
    assert "the disk is full; will retry (hint: make room)" in caplog.text
    assert events(caplog) == ["storage_failed", "storage_recovered"]


def test_a_failed_write_is_reported_until_it_succeeds() -> None:
    """The first attempts are not reported, because single errors of a bucket are common."""
    blobs = MemoryBlobs(WORDS)
    blobs.failures = [FULL] * (TOLD_FROM + 1)

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        problems: list[str] = []
        deliver = driver.workers._deliver

        def note_problem(message: Message) -> None:
            if isinstance(message, Delayed):
                problems.append(driver.workers.problem)
            deliver(message)

        driver.workers._deliver = note_problem
        driver.workers.perform(SNAPSHOT)
        await driver.until(Snapshotted)
        await driver.workers.drain()
        assert problems[0] == "blobs of task words cannot be written"
        assert driver.workers.problem == ""

    driver = run(test, blobs)
    told = [message for message in driver.told if not isinstance(message, Folded)]
    assert told[:-1] == [Delayed("words", 1, "blobs cannot be written")] * 2
    assert isinstance(told[-1], Snapshotted)


def test_a_failed_read_is_reported_too() -> None:
    class Away(MemoryBlobs):
        failures_left = TOLD_FROM

        def get(self, key: str) -> bytes:
            if self.failures_left:
                self.failures_left -= 1
                raise OperatorError("cannot read the blob", hint="credentials")
            return super().get(key)

    blobs = Away(WORDS)
    record = RecordRow(1, "words/1/sum-1-1-0", (Member("a", 0, 0, 1, 0.0),), 1.0)

    async def test(driver: Driver) -> None:
        driver.workers.perform(Restore(WORDS, 1, (record,), ()))
        await driver.until(Lost)
        await driver.workers.drain()
        assert driver.workers.problem == ""

    [delayed, _] = run(test, blobs).told
    assert delayed == Delayed("words", 1, "blobs cannot be read")


def test_the_newest_holder_of_a_task_is_told_that_it_waits_for_blobs() -> None:
    """Work for an earlier holder may be at the head. The machine ignores what names that one."""
    blobs = MemoryBlobs(WORDS)
    blobs.failures = [FULL] * 6

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(SNAPSHOT)
        driver.workers.perform(Drop("words", 1))
        driver.workers.perform(Restore(WORDS, 2, (), ()))
        await driver.until(Restored)

    folded, *delayed, snapshotted, restored = run(test, blobs).told
    assert isinstance(folded, Folded)
    assert delayed == [Delayed("words", 2, "blobs cannot be written")] * 4
    assert isinstance(snapshotted, Snapshotted)
    assert restored == Restored("words", 2)  # for the machine, the delay is over


def test_a_single_error_is_not_reported() -> None:
    blobs = MemoryBlobs(WORDS)
    blobs.failures = [FULL] * (TOLD_FROM - 1)

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(SNAPSHOT)
        await driver.until(Snapshotted)

    assert run(test, blobs).of(Delayed) == []


def test_closing_gives_up_what_cannot_be_written_and_tells_nobody() -> None:
    blobs = MemoryBlobs(WORDS)
    blobs.failures = [FULL] * 100_000

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(SNAPSHOT)
        driver.fold(WORDS, "b", [1, 2, 3, 4])

    driver = run(test, blobs)
    assert [folded.session for folded in driver.of(Folded)] == ["a", "b"]
    assert driver.of(Snapshotted) == []
    assert driver.of(Lost) == []


def test_a_missing_blob_is_told_once_and_the_task_begins_again_when_it_is_restored() -> None:
    blobs = MemoryBlobs(WORDS)

    async def test(driver: Driver) -> None:
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(SNAPSHOT)
        await driver.until(Snapshotted)
        [snapshotted] = driver.of(Snapshotted)
        sums = blobs.blobs.pop(snapshotted.sums[0].blob)
        driver.workers.perform(step_of(blobs, snapshotted))
        await driver.until(Lost)
        # The machine has not heard of it yet.
        driver.fold(WORDS, "b", [5, 5, 5, 5])
        driver.workers.perform(SNAPSHOT)
        driver.workers.perform(step_of(blobs, snapshotted))
        await driver.workers.drain()
        assert driver.pool.free == driver.pool.count
        blobs.blobs[snapshotted.sums[0].blob] = sums
        driver.workers.perform(Restore(WORDS, 1, (record_of(snapshotted),), ()))
        driver.fold(WORDS, "c", [1, 1, 1, 1])
        driver.workers.perform(SNAPSHOT)
        await driver.until(Snapshotted, 2)

    driver = run(test, blobs)
    kinds = [type(message) for message in driver.told]
    assert kinds == [Folded, Snapshotted, Lost, Restored, Folded, Snapshotted]
    last = driver.told[-1]
    assert isinstance(last, Snapshotted)
    assert last.sums[0].sessions == ("a", "c")
    assert the_sum(blobs, last) == [2, 3, 4, 5]


def test_a_restore_without_its_blob_is_lost() -> None:
    blobs = MemoryBlobs(WORDS)
    record = RecordRow(1, "words/1/sum-1-1-0", (Member("a", 0, 0, 1, 0.0),), 1.0)

    async def test(driver: Driver) -> None:
        for _ in range(2):
            driver.workers.perform(Restore(WORDS, 1, (record,), ()))
        driver.workers.perform(Restore(WORDS, 1, (), ()))

    driver = run(test, blobs)
    assert [type(message) for message in driver.told] == [Lost, Lost, Restored]
    assert "words/1/sum-1-1-0 is missing" in driver.of(Lost)[0].reason


def test_an_error_that_nobody_expected_is_told_and_the_thread_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blobs, kernel = MemoryBlobs(WORDS), CountingKernel()

    async def test(driver: Driver) -> None:
        kernel.failures = [ZeroDivisionError("cosmic rays")]
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(SNAPSHOT)
        await driver.workers.drain()
        reason = "unexpected error (ZeroDivisionError): see the log of the aggregator"
        assert driver.told == [Lost("words", 1, reason)]
        assert driver.pool.free == driver.pool.count
        driver.workers.perform(Restore(WORDS, 1, (), ()))
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(SNAPSHOT)

    with caplog.at_level(logging.ERROR):
        driver = run(test, blobs, kernel=kernel)
    assert [type(told) for told in driver.told] == [Lost, Restored, Folded, Snapshotted]
    assert the_sum(blobs, driver.of(Snapshotted)[0]) == [1, 2, 3, 4]
    assert "ZeroDivisionError" in caplog.text


def test_an_extension_that_exits_ends_neither_its_thread_nor_the_work_of_its_task() -> None:
    kernel = CountingKernel()

    async def test(driver: Driver) -> None:
        kernel.failures = [SystemExit("usage: my-rule [-h]")]
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        await driver.until(Lost)
        await driver.workers.drain()
        driver.workers.perform(Restore(WORDS, 1, (), ()))
        driver.fold(WORDS, "a", [1, 2, 3, 4])

    driver = run(test, MemoryBlobs(WORDS), kernel=kernel)
    assert [type(told) for told in driver.told] == [Lost, Restored, Folded]
    assert worker_threads() == []


def test_an_error_after_the_work_itself_is_reported_too() -> None:
    """Closing must not wait for ever for work that has failed."""

    async def test(driver: Driver) -> None:
        def fail(seconds: float, work: str) -> None:
            raise ZeroDivisionError(work)

        driver.workers._observe = fail
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        await driver.until(Lost)
        driver.workers.perform(Restore(WORDS, 1, (), ()))

    driver = run(test, MemoryBlobs(WORDS))
    reason = "unexpected error (ZeroDivisionError): see the log of the aggregator"
    assert driver.told == 2 * [Lost("words", 1, reason)]


def test_an_unexpected_error_of_the_tsa_is_reported_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Owners and viewers of tasks can read the problem."""

    class BrokenTsa:
        def offers(self, parameters: object, count: int) -> None:
            raise ValueError("10.0.0.7: a secret address")

        def forget(self, parameters: object) -> None:
            raise ValueError("10.0.0.7: a secret address")

    async def test(driver: Driver) -> None:
        driver.workers.perform(GetOffers(SECURE, 1, 1))
        driver.workers.perform(Forget(SECURE))

    driver = run(test, MemoryBlobs(WORDS), tsa=cast(Tsa, BrokenTsa()))
    [offered] = driver.told
    assert isinstance(offered, Offered)
    assert offered.problem == "unexpected error (ValueError): see the log of the aggregator"
    assert caplog.text.count("ValueError: 10.0.0.7") == 2


def test_a_snapshot_of_sums_that_are_not_there_is_lost() -> None:
    async def test(driver: Driver) -> None:
        driver.workers.perform(SNAPSHOT)

    driver = run(test, MemoryBlobs(WORDS))
    assert [type(told) for told in driver.told] == [Lost]


def test_what_cannot_be_deleted_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(MemoryBlobs):
        def delete(self, key: str) -> None:
            raise PermissionError(13, "Permission denied")

        def sweep(self, task: str, below_seq: int, keep: object) -> None:
            raise OperatorError("cannot sweep", hint="chmod")

    async def test(driver: Driver) -> None:
        driver.workers.perform(Restore(WORDS, 1, (), ()))
        driver.workers.perform(DeleteBlobs(("words/0/a", "words/0/b")))
        driver.fold(WORDS, "a", [1, 2, 3, 4])
        driver.workers.perform(SNAPSHOT)

    with caplog.at_level(logging.INFO):
        driver = run(test, Stubborn(WORDS))
    assert [type(told) for told in driver.told] == [Restored, Folded, Snapshotted]
    assert driver.workers.counters.storage_errors == 3
    assert caplog.text.count("not deleted") == 3
    assert events(caplog) == []  # webhooks would post the first


def test_a_result_that_cannot_be_delivered_does_not_take_the_others_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = Restored("words", 1), Restored("words", 2)

    async def test(driver: Driver) -> None:
        told: list[Message] = []

        def deliver(message: Message) -> None:
            if message == first:
                raise ZeroDivisionError
            told.append(message)

        driver.workers._deliver = deliver
        driver.workers._deliver_all([first, second])
        assert told == [second]

    run(test, MemoryBlobs(WORDS))
    assert "Restored could not be delivered" in caplog.text
