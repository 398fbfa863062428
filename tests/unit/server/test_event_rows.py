"""Events as rows: what is kept, how often it is written, and what a store that is away costs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from papaya.messages.events import (
    BufferDropped,
    CredentialsRejected,
    EvaluationStarted,
    ServerSilent,
    ServerStarted,
    TaskEnded,
    TaskMoved,
    TaskPlaced,
    VersionPublished,
)
from papaya.messages.storage import EVENTS, EventRow, Outcome, Row, Transaction
from papaya.server import event_rows
from papaya.server.event_rows import MAX_WAITING, EventRows
from papaya.server.logs import BURST, WINDOW_S
from papaya.store.state import SqliteState


class CountingState:
    """SQLite, awaited; counts transactions. `outcome`: what to answer instead of asking it."""

    def __init__(self, folder: Path) -> None:
        self.store = SqliteState(folder / "state.db")
        self.outcome: Outcome | None = None
        self.commits = 0

    async def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        return self.store.read(prefixes)

    async def transact(self, transaction: Transaction) -> Outcome:
        self.commits += 1
        return self.outcome or self.store.transact(transaction)


class Kept:
    """A process and its rows."""

    def __init__(self, folder: Path) -> None:
        self.state = CountingState(folder)
        self.time = 1000.0
        self.rows = EventRows("aggregator@host:1", lambda: self.time)
        self.rows.open(self.state)

    def told(self) -> list[EventRow]:
        return [r for r in self.state.store.read((EVENTS,)).values() if isinstance(r, EventRow)]

    def write(self) -> list[EventRow]:
        asyncio.run(self.rows.write())
        return self.told()


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


MOVED = TaskMoved("digits", 7, 3, "aggregator@b", "aggregator@a", "its holder is silent")


def test_an_event_is_kept_with_its_time_and_who_told_it(kept: Kept) -> None:
    kept.rows.offer(MOVED, "coordinator@c")
    kept.time += 5
    kept.rows.offer(ServerStarted("0.5", ("aggregator",), "{a secret}"), "")
    moved, started = kept.write()
    assert (moved.at, moved.node, moved.event, moved.level) == (
        1000.0,
        "coordinator@c",
        "task_moved",
        "warning",
    )
    assert msgspec.json.decode(moved.fields)["holder"] == "aggregator@b"
    assert started.node == "aggregator@host:1", "no machine told it"
    assert b"secret" not in started.fields


def test_many_events_are_one_transaction_and_no_event_is_none(kept: Kept) -> None:
    for number in range(50):
        kept.rows.offer(ServerSilent(f"selector-{number}", 3.0), "coordinator@c")
    assert len(kept.write()) == 50
    assert kept.state.commits == 1
    kept.write()
    assert kept.state.commits == 1


def test_what_comes_with_every_update_or_from_strangers_is_not_kept(kept: Kept) -> None:
    kept.rows.offer(VersionPublished("digits", 7, 12, 4), "aggregator")
    kept.rows.offer(CredentialsRejected("devices", ""), "")
    assert kept.write() == []
    assert kept.state.commits == 0


def test_of_an_evaluation_only_trouble_is_kept(kept: Kept) -> None:
    kept.rows.offer(TaskPlaced("digits-eval-5", 0, 1, "aggregator", "new"), "coordinator")
    kept.rows.offer(EvaluationStarted("digits-eval-5", 5), "")
    kept.rows.offer(TaskEnded("digits-eval-5", 0, "completed", "loss 0.3"), "")
    kept.rows.offer(structs.replace(MOVED, task="digits-eval-5"), "coordinator")
    assert [row.event for row in kept.write()] == ["task_moved"]


def test_repetitions_are_bounded(kept: Kept) -> None:
    for _ in range(5):
        for _ in range(3 * BURST):
            kept.rows.offer(BufferDropped("digits", 7, 12, 4, "lost"), "aggregator")
        kept.time += WINDOW_S
    assert len(kept.write()) == 5 * BURST


def test_events_wait_for_a_store_that_is_away_and_the_newest_stay(kept: Kept) -> None:
    kept.state.outcome = "unknown"
    for number in range(MAX_WAITING + 10):
        kept.time += 1
        kept.rows.offer(ServerSilent(f"selector-{number}", 3.0), "coordinator@c")
        if number == 0:
            assert kept.write() == []
    kept.state.outcome = None
    found = kept.write()
    assert len(found) == MAX_WAITING
    assert (found[0].at, found[-1].at) == (1011.0, 1510.0), "when they happened, not when written"


def test_a_repeated_write_adds_no_row(kept: Kept) -> None:
    """An unknown outcome may have been a commit."""
    kept.rows.offer(MOVED, "coordinator@c")
    waiting = tuple(kept.rows._waiting)
    kept.state.store.transact(Transaction(put=waiting))
    assert len(kept.write()) == 1


def test_the_oldest_rows_are_deleted(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_rows, "MAX_ROWS", 30)
    for number in range(250):
        kept.time += 1
        kept.rows.offer(ServerSilent(f"selector-{number}", 3.0), "coordinator@c")
    kept.write()
    asyncio.run(kept.rows.prune())
    assert [row.at for row in kept.told()] == [1221.0 + n for n in range(30)]
    commits = kept.state.commits
    asyncio.run(kept.rows.prune())
    assert kept.state.commits == commits, "nothing is left to delete"
