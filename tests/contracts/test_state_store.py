"""What every state store promises: one suite, run on each back end."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.messages.storage import EpochRow, Outcome, Row, Transaction
from papaya.sim.engine import Engine
from papaya.sim.storage import StateTwin, StorageConfig


class Twin:
    """The simulator's store, driven until it has answered."""

    def __init__(self, unknown: float = 0.0, seed: int = 0) -> None:
        self.engine = Engine()
        self.twin = StateTwin(self.engine, Random(seed), StorageConfig(unknown=unknown))

    def transact(self, transaction: Transaction) -> Outcome:
        outcomes: list[Outcome] = []
        self.twin.transact(("node", 0.0), transaction, outcomes.append)
        self.engine.run(self.engine.now + 1000)
        [outcome] = outcomes
        return outcome

    def read(self, *prefixes: str) -> dict[str, Row]:
        found: list[dict[str, Row]] = []
        self.twin.read(prefixes, found.append)
        self.engine.run(self.engine.now + 1000)
        [rows] = found
        return rows


STORES: list[Callable[[], Twin]] = [Twin]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Twin:
    made: Twin = request.param()
    return made


def put(key: str, value: int, before: int | None = None) -> Transaction:
    expected = None if before is None else EpochRow(before)
    return Transaction(require=((key, expected),), put=((key, EpochRow(value)),))


def test_a_row_is_put_when_what_it_requires_holds(store: Twin) -> None:
    assert store.transact(put("a", 1)) == "committed"
    assert store.transact(put("a", 2, before=1)) == "committed"
    assert store.read("a") == {"a": EpochRow(2)}


def test_a_row_that_is_not_as_required_refuses_everything(store: Twin) -> None:
    store.transact(put("a", 1))
    both = Transaction(
        require=(("b", None), ("a", EpochRow(7))),
        put=(("b", EpochRow(1)),),
        delete=("a",),
    )
    assert store.transact(both) == "refused"
    assert store.read("") == {"a": EpochRow(1)}


def test_to_require_absence_refuses_presence(store: Twin) -> None:
    store.transact(put("a", 1))
    assert store.transact(put("a", 2)) == "refused"


def test_the_same_transaction_twice_is_refused_the_second_time(store: Twin) -> None:
    change = put("a", 1)
    assert [store.transact(change), store.transact(change)] == ["committed", "refused"]


def test_deletes_and_puts_are_one(store: Twin) -> None:
    store.transact(put("old", 1))
    change = Transaction(
        require=(("old", EpochRow(1)),), put=(("new", EpochRow(2)),), delete=("old",)
    )
    assert store.transact(change) == "committed"
    assert store.read("") == {"new": EpochRow(2)}


def test_to_delete_what_is_not_there_is_no_error(store: Twin) -> None:
    assert store.transact(Transaction(delete=("nothing",))) == "committed"


def test_a_read_is_ordered_and_by_prefix(store: Twin) -> None:
    for key in ("b/2", "a/1", "b/10", "c"):
        store.transact(put(key, 1))
    assert list(store.read("b/", "c")) == ["b/10", "b/2", "c"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 2))))
def test_it_is_the_store_that_a_dictionary_would_be(
    changes: list[tuple[str, int, int]],
) -> None:
    store = Twin()
    model: dict[str, int] = {}
    for key, expected, value in changes:
        before = expected or None
        outcome = store.transact(put(key, value, before))
        holds = model.get(key) == before
        assert outcome == ("committed" if holds else "refused")
        if holds:
            model[key] = value
    assert store.read("") == {key: EpochRow(value) for key, value in sorted(model.items())}


@pytest.mark.parametrize("seed", range(30))
def test_an_unknown_outcome_is_all_or_nothing(seed: int) -> None:
    store = Twin(unknown=1.0, seed=seed)
    change = Transaction(put=(("a", EpochRow(1)), ("b", EpochRow(2))))
    assert store.transact(change) == "unknown"
    assert store.read("") in ({}, {"a": EpochRow(1), "b": EpochRow(2)})


def test_unknown_outcomes_are_of_all_kinds() -> None:
    """Applied before the answer was lost, applied after, never: the twin plays them all."""
    fates = set()
    for seed in range(40):
        store = Twin(unknown=1.0, seed=seed)
        outcomes: list[Outcome] = []
        store.twin.transact(("node", 0.0), put("a", 1), outcomes.append)
        store.engine.run(2.0)
        assert outcomes == ["unknown"]
        early = "a" in store.twin.rows
        store.engine.run(1000.0)
        fates.add((early, "a" in store.twin.rows))
    assert fates == {(True, True), (False, True), (False, False)}
