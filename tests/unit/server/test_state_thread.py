"""A store on its own thread: order, callbacks on the loop, repeated reads, a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest

from papaya.errors import LostHistory, OperatorError, StateUnreachable
from papaya.messages.storage import EpochRow, Outcome, Row, Transaction
from papaya.server.state_thread import MAX_SHARED, StateStore, StateThread
from papaya.store.state import SqliteState


class FakeStore:
    """Answers when it is let; the reads and writes that are to fail raise instead."""

    def __init__(self, *failures: Exception) -> None:
        self.let = Event()
        self.failures = list(failures)
        self.calls: list[object] = []
        self.threads: set[int] = set()
        self.reading = Event()

    def transact_all(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        self._called(len(transactions))
        return ["committed"] * len(transactions)

    def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        self.reading.set()
        self._called(prefixes)
        return {prefix: EpochRow(1) for prefix in prefixes}

    def close(self) -> None:
        self.calls.append("close")

    def _called(self, call: object) -> None:
        self.let.wait()
        self.threads.add(get_ident())
        self.calls.append(call)
        if self.failures:
            raise self.failures.pop(0)


def run(store: StateStore, use: Callable[[StateThread], Awaitable[None]]) -> None:
    async def used() -> None:
        await use(StateThread(store, first_retry_s=0.001))

    asyncio.run(used())


def change(value: int, before: int | None = None) -> Transaction:
    expected = None if before is None else EpochRow(before)
    return Transaction(require=(("a", expected),), put=(("a", EpochRow(value)),))


def test_answers_come_in_order_on_the_loop_and_work_is_done_on_one_other_thread() -> None:
    store = FakeStore()
    heard: list[object] = []

    async def use(thread: StateThread) -> None:
        loop_thread = get_ident()

        def hear(future: asyncio.Future[object]) -> None:
            assert get_ident() == loop_thread
            heard.append(future.result())

        futures: list[asyncio.Future[Any]] = [
            thread.read(("first",)),
            thread.transact(change(1)),
            thread.transact(change(2)),
            thread.read(("last",)),
            thread.transact(change(3)),
        ]
        for future in futures:
            future.add_done_callback(hear)
        assert heard == []
        store.let.set()
        await thread.close()
        assert store.threads.isdisjoint({loop_thread})

    run(store, use)
    assert heard == [
        {"first": EpochRow(1)}, "committed", "committed", {"last": EpochRow(1)}, "committed",
    ]  # fmt: skip
    # The two that waited together shared a sync; none went ahead of a read.
    assert store.calls == [("first",), 2, ("last",), 1, "close"]
    assert len(store.threads) == 1


def test_no_more_than_a_bounded_number_share_a_sync() -> None:
    store = FakeStore()

    async def use(thread: StateThread) -> None:
        thread.read(())
        for value in range(MAX_SHARED + 1):
            thread.transact(change(value))
        store.let.set()
        await thread.close()

    run(store, use)
    assert store.calls == [(), MAX_SHARED, 1, "close"]


def test_transactions_that_wait_together_have_their_own_outcomes(tmp_path: Path) -> None:
    heard: list[Outcome] = []

    async def use(thread: StateThread) -> None:
        changes = (change(1), change(2), change(2, before=1), change(3, before=1))
        heard.extend(await asyncio.gather(*map(thread.transact, changes)))
        await thread.close()

    run(SqliteState(tmp_path / "state.sqlite"), use)
    assert heard == ["committed", "refused", "committed", "refused"]
    again = SqliteState(tmp_path / "state.sqlite")
    assert again.read(("",)) == {"a": EpochRow(2)}
    again.close()


def test_a_read_that_fails_is_repeated_and_what_is_behind_it_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeStore(OperatorError("the disk sleeps", hint="wake it"), RuntimeError("a bug"))
    store.let.set()

    async def use(thread: StateThread) -> None:
        read, outcome = thread.read(("a",)), thread.transact(change(1))
        assert await read == {"a": EpochRow(1)}
        assert await outcome == "committed"
        await thread.close()

    run(store, use)
    assert store.calls == [("a",), ("a",), ("a",), 1, "close"]
    assert "the disk sleeps; retrying in 0.0 s; hint: wake it" in caplog.text
    assert "RuntimeError: a bug" in caplog.text


def test_a_write_that_was_not_sent_is_repeated_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = [StateUnreachable("the database is away", hint="start it") for _ in range(3)]
    store = FakeStore(*away, OperatorError("a lost connection"))
    store.let.set()
    heard: list[Outcome] = []

    async def use(thread: StateThread) -> None:
        heard.append(await thread.transact(change(1)))
        store.failures = list(away)
        await thread.read(("a",))
        heard.append(await thread.transact(change(1)))
        assert thread.problem == ""
        await thread.close()

    run(store, use)
    assert heard == ["unknown", "committed"]
    assert store.calls == [1] * 4 + [("a",)] * 4 + [1, "close"]
    assert caplog.text.count("the database is away; retrying; hint: start it") == 2


def test_to_close_does_not_wait_for_a_database_that_is_away() -> None:
    store = FakeStore(*[StateUnreachable("the database is away") for _ in range(10_000)])
    store.let.set()

    async def use(thread: StateThread) -> None:
        outcome = thread.transact(change(1))
        while not thread.problem:
            await asyncio.sleep(0.001)
        await thread.close()
        assert await outcome == "unknown"

    run(store, use)


def test_lost_history_ends_a_read() -> None:
    store = FakeStore(LostHistory("commits are gone"), LostHistory("commits are gone"))
    store.let.set()

    async def use(thread: StateThread) -> None:
        assert await thread.transact(change(1)) == "unknown"
        with pytest.raises(LostHistory, match="commits are gone"):
            await thread.read(("a",))
        assert thread.problem == "commits are gone"
        await thread.close()

    run(store, use)


def test_a_write_that_raises_has_an_unknown_outcome(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore(RuntimeError("a bug"))
    store.let.set()
    heard: list[Outcome] = []

    async def use(thread: StateThread) -> None:
        outcome = thread.transact(change(1))
        await thread.close()
        heard.append(outcome.result())

    run(store, use)
    assert heard == ["unknown"]
    assert "RuntimeError: a bug" in caplog.text


def test_to_close_does_not_wait_for_a_disk_that_cannot_be_read() -> None:
    store = FakeStore(*[OperatorError("the disk is gone") for _ in range(10_000)])

    async def use(thread: StateThread) -> None:
        read = thread.read(("a",))
        store.let.set()
        store.reading.wait()
        await thread.close()
        await thread.close()  # a second time changes nothing
        assert not read.done()

    run(store, use)
    assert store.calls[-1] == "close"


def test_it_tells_whether_the_store_works() -> None:
    store = FakeStore(RuntimeError("a bug"))
    store.let.set()
    problems: list[str] = []

    async def use(thread: StateThread) -> None:
        for _ in range(2):
            await thread.transact(change(1))
            problems.append(thread.problem)
        store.failures = [OperatorError("the disk is gone") for _ in range(10_000)]
        read = thread.read(())
        while not thread.problem:
            await asyncio.sleep(0.001)
        problems.append(thread.problem)
        store.failures.clear()
        await read
        problems.append(thread.problem)
        await thread.close()

    run(store, use)
    assert problems == ["the last commit failed", "", "the last read failed", ""]


def test_a_read_that_works_does_not_hide_a_commit_that_did_not() -> None:
    store = FakeStore(RuntimeError("a bug"))
    store.let.set()

    async def use(thread: StateThread) -> None:
        thread.transact(change(1))
        await thread.read(())
        assert thread.problem == "the last commit failed"
        await thread.close()

    run(store, use)


def test_a_store_that_cannot_be_closed_does_not_keep_the_server_from_stopping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unclosable(FakeStore):
        def close(self) -> None:
            raise OSError("the disk is gone")

    async def use(thread: StateThread) -> None:
        await asyncio.wait_for(thread.close(), 60.0)

    run(Unclosable(), use)
    assert "the disk is gone" in caplog.text


def test_each_transaction_is_observed_with_its_outcome(tmp_path: Path) -> None:
    observed: list[tuple[float, Outcome]] = []

    async def use() -> None:
        store = SqliteState(tmp_path / "state.sqlite")
        thread = StateThread(
            store, observe=lambda seconds, outcome: observed.append((seconds, outcome))
        )
        await asyncio.gather(thread.transact(change(1)), thread.transact(change(2)))
        await thread.read(("a",))
        await thread.close()

    asyncio.run(use())
    assert [outcome for _, outcome in observed] == ["committed", "refused"]
    assert all(seconds > 0 for seconds, _ in observed)


def test_a_coroutine_that_is_cancelled_does_not_disturb_the_others() -> None:
    store = FakeStore()

    async def use(thread: StateThread) -> None:
        cancelled, other = thread.transact(change(1)), thread.transact(change(2))
        cancelled.cancel()
        store.let.set()
        assert await other == "committed"
        await thread.close()

    run(store, use)
