"""Boot numbers come from the state store: they increase, and no two processes have the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from papaya import __version__
from papaya.errors import OperatorError
from papaya.messages.storage import BOOTS, FORMAT, BootRow, Outcome, Row, Transaction, boot_key
from papaya.server.boots import Boots
from papaya.server.state_thread import StateThread
from papaya.store.state import SqliteState


def test_every_start_of_a_node_has_the_next_number(tmp_path: Path) -> None:
    async def boots() -> list[int]:
        state = StateThread(SqliteState(tmp_path / "state.db", busy_timeout_s=60.0))
        try:
            starts = ("agg@a:1", "agg@a:1", "agg@a:2", "agg@a:1")
            return [await Boots(state).take(node) for node in starts]
        finally:
            await state.close()

    assert asyncio.run(boots()) == [1, 2, 1, 3]
    assert asyncio.run(boots()) == [4, 5, 2, 6]


def test_processes_that_start_at_the_same_time_have_different_numbers(tmp_path: Path) -> None:
    async def boots() -> list[int]:
        states = [
            StateThread(SqliteState(tmp_path / "state.db", busy_timeout_s=60.0)) for _ in range(3)
        ]
        try:
            return await asyncio.gather(*(Boots(state).take("agg") for state in states))
        finally:
            for state in states:
                await state.close()

    assert sorted(asyncio.run(boots())) == [1, 2, 3]


def test_the_earlier_of_two_processes_is_told_to_stop(tmp_path: Path) -> None:
    async def run() -> None:
        state = StateThread(SqliteState(tmp_path / "state.db", busy_timeout_s=60.0))
        try:
            first, second = Boots(state), Boots(state)
            await first.take("agg")
            await first.take("selector")
            first.check(await state.read((BOOTS,)))
            await second.take("agg")
            rows = await state.read((BOOTS,))
            second.check(rows)
            with pytest.raises(OperatorError, match="as agg: it has boot number 2, this one has 1"):
                first.check(rows)
        finally:
            await state.close()

    asyncio.run(run())


class Forgetful:
    """Every answer to a transaction is lost, although it was applied."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.outcomes: list[Outcome] = ["unknown", "unknown", "committed"]

    async def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        return dict(self.rows)

    async def transact(self, transaction: Transaction) -> Outcome:
        self.rows.update(transaction.put)
        return self.outcomes.pop(0)


def test_a_number_is_used_only_if_it_was_surely_written() -> None:
    state = Forgetful()
    assert asyncio.run(Boots(state).take("agg")) == 3
    assert state.rows == {boot_key("agg"): BootRow(3, FORMAT, __version__)}


def test_a_server_that_cannot_write_its_number_does_not_start() -> None:
    state = Forgetful()
    state.outcomes = ["unknown"] * 5
    with pytest.raises(OperatorError, match="cannot store the boot number of agg"):
        asyncio.run(Boots(state).take("agg"))
