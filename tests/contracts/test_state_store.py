"""What every state store promises: one suite, run on each back end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from papaya.config import TaskConfig
from papaya.errors import OperatorError
from papaya.messages import wire
from papaya.messages.storage import (
    AccountRow,
    EpochRow,
    Outcome,
    QuotaRow,
    Row,
    TaskRow,
    Transaction,
    submission,
)
from papaya.server.admin.access import Caller
from papaya.server.admin.accounts import charged
from papaya.server.admin.problems import Conflict
from papaya.sim.engine import Engine
from papaya.sim.storage import StateTwin, StorageConfig
from papaya.store.postgresql import PostgresState
from papaya.store.state import SqliteState
from tests.postgresql import postgres
from tests.unit.messages.strategies import ROWS, a_row


class Store(Protocol):
    def transact(self, transaction: Transaction) -> Outcome: ...

    def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]: ...


class Twin:
    """The simulator's store, driven until it has answered."""

    def __init__(self, unknown: float = 0.0, seed: int = 0) -> None:
        self.engine = Engine()
        self.twin = StateTwin(self.engine, Random(seed), StorageConfig(unknown=unknown))

    def transact(self, transaction: Transaction) -> Outcome:
        outcomes: list[Outcome] = []
        self.twin.transact(("node", 0), transaction, outcomes.append)
        self.engine.run(self.engine.now + 1000)
        [outcome] = outcomes
        return outcome

    def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        found: list[dict[str, Row]] = []
        self.twin.read(prefixes, found.append)
        self.engine.run(self.engine.now + 1000)
        [rows] = found
        return rows


@contextmanager
def simulated() -> Iterator[Store]:
    yield Twin()


@contextmanager
def sqlite() -> Iterator[Store]:
    with TemporaryDirectory() as folder:
        store = SqliteState(Path(folder) / "state.sqlite")
        try:
            yield store
        finally:
            store.close()


@contextmanager
def postgresql() -> Iterator[Store]:
    with postgres().schema() as url, closing(PostgresState(url, "node")) as store:
        yield store


NewStore = Callable[[], AbstractContextManager[Store]]
STORES: list[NewStore] = [simulated, sqlite, postgresql]
on_every_store = pytest.mark.parametrize("new_store", STORES)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with request.param() as made:
        yield made


def put(key: str, value: int, before: int | None = None) -> Transaction:
    expected = None if before is None else EpochRow(before)
    return Transaction(require=((key, expected),), put=((key, EpochRow(value)),))


def test_a_row_is_put_when_what_it_requires_holds(store: Store) -> None:
    assert store.transact(put("a", 1)) == "committed"
    assert store.transact(put("a", 2, before=1)) == "committed"
    assert store.read(("a",)) == {"a": EpochRow(2)}


def test_a_row_that_is_not_as_required_refuses_everything(store: Store) -> None:
    store.transact(put("a", 1))
    both = Transaction(
        require=(("b", None), ("a", EpochRow(7))),
        put=(("b", EpochRow(1)),),
        delete=("a",),
    )
    assert store.transact(both) == "refused"
    assert store.read(("",)) == {"a": EpochRow(1)}


def test_to_require_absence_refuses_presence(store: Store) -> None:
    store.transact(put("a", 1))
    assert store.transact(put("a", 2)) == "refused"


def test_the_same_transaction_twice_is_refused_the_second_time(store: Store) -> None:
    change = put("a", 1)
    assert [store.transact(change), store.transact(change)] == ["committed", "refused"]


def test_deletes_and_puts_are_one(store: Store) -> None:
    store.transact(put("old", 1))
    change = Transaction(
        require=(("old", EpochRow(1)),), put=(("new", EpochRow(2)),), delete=("old",)
    )
    assert store.transact(change) == "committed"
    assert store.read(("",)) == {"new": EpochRow(2)}


def test_to_delete_what_is_not_there_is_no_error(store: Store) -> None:
    assert store.transact(Transaction(delete=("nothing",))) == "committed"


def test_a_read_is_ordered_and_by_prefix(store: Store) -> None:
    for key in ("b/2", "a/1", "b/10", "c"):
        store.transact(put(key, 1))
    assert list(store.read(("b/", "c"))) == ["b/10", "b/2", "c"]


def test_a_row_that_is_deleted_and_put_is_put(store: Store) -> None:
    store.transact(put("a", 1))
    change = Transaction(put=(("a", EpochRow(2)), ("a", EpochRow(3))), delete=("a",))
    assert store.transact(change) == "committed"
    assert store.read(("",)) == {"a": EpochRow(3)}


def test_a_read_under_no_prefix_finds_nothing(store: Store) -> None:
    store.transact(put("a", 1))
    assert store.read(()) == {}


def test_prefixes_that_meet_find_each_row_once_and_in_order(store: Store) -> None:
    for key in ("ab", "a", "b", "abc"):
        store.transact(put(key, 1))
    assert list(store.read(("ab", "b", "a", "ab"))) == ["a", "ab", "abc", "b"]


@on_every_store
@settings(max_examples=15)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.none() | st.integers(0, 2)),
        max_size=12,
    )
)
def test_it_is_the_store_that_a_dictionary_would_be(
    new_store: NewStore, changes: list[tuple[str, int, int | None]]
) -> None:
    model: dict[str, int] = {}
    with new_store() as store:
        for key, expected, value in changes:
            before = expected or None
            if value is None:
                require = ((key, None if before is None else EpochRow(before)),)
                outcome = store.transact(Transaction(require=require, delete=(key,)))
            else:
                outcome = store.transact(put(key, value, before))
            holds = model.get(key) == before
            assert outcome == ("committed" if holds else "refused")
            if holds and value is None:
                model.pop(key, None)
            elif holds and value is not None:
                model[key] = value
        assert store.read(("",)) == {key: EpochRow(value) for key, value in sorted(model.items())}


# Where an order of bytes, of UTF-16 and of code points could differ, and the ends of the alphabet.
odd_text = st.text(alphabet="a/\x00\x7fé\ud7ff\uffff\U00010000\U0010ffff", max_size=4)


@on_every_store
@settings(max_examples=15)
@given(keys=st.lists(odd_text, max_size=12), prefixes=st.lists(odd_text, max_size=3))
def test_a_read_finds_what_begins_with_its_prefixes_in_the_order_of_keys(
    new_store: NewStore, keys: list[str], prefixes: list[str]
) -> None:
    with new_store() as store:
        store.transact(Transaction(put=tuple((key, EpochRow(1)) for key in keys)))
        found = store.read(tuple(prefixes))
    assert list(found) == [key for key in sorted(set(keys)) if key.startswith(tuple(prefixes))]


@on_every_store
@pytest.mark.parametrize("kind", ROWS)
@settings(max_examples=4)
@given(data=st.data())
def test_every_row_comes_back_as_it_was_put_and_can_be_required(
    new_store: NewStore, kind: type[Row], data: st.DataObject
) -> None:
    row = data.draw(a_row(kind))
    with new_store() as store:
        store.transact(Transaction(put=(("a", row),)))
        assert store.read(("a",)) == {"a": row}
        required = Transaction(require=(("a", row),), put=(("b", row),))
        assert store.transact(required) == "committed"


@pytest.mark.parametrize("new_store", [sqlite, postgresql])
def test_a_store_that_holds_rows_is_not_filled(new_store: NewStore) -> None:
    """A server may have started since somebody looked."""
    with new_store() as store:
        assert isinstance(store, SqliteState | PostgresState)
        store.fill({b"a": wire.encode_row(EpochRow(1))})
        with pytest.raises(OperatorError, match="already holds state"):
            store.fill({b"b": wire.encode_row(EpochRow(2))})
        assert store.read(("",)) == {"a": EpochRow(1)}


def test_submissions_that_were_allowed_by_the_same_rows_cannot_all_commit(store: Store) -> None:
    """A quota holds whoever comes first, and whatever each of them has read."""
    caller, names = Caller("anna", "owner", ("v-",)), ("account/anna", "quota/anna", "task/")
    account, quota = AccountRow("owner", b"", 0.0, ("v-",)), QuotaRow(tasks=2)
    store.transact(Transaction(put=(("account/anna", account), ("quota/anna", quota))))

    def submit(number: int, rows: dict[str, Row]) -> Transaction:
        config = TaskConfig(task=f"v-{number}", concurrency=1, model_length=1)
        change = submission(config, "p", "o", 0.0)
        put = tuple(
            (key, replace(row, account="anna") if isinstance(row, TaskRow) else row)
            for key, row in change.put
        )
        return charged(rows, caller, config, Transaction(change.require, put))

    before = store.read(names)
    attempts = [submit(number, before) for number in range(6)]
    assert [store.transact(attempt) for attempt in attempts] == ["committed"] + ["refused"] * 5
    assert store.transact(submit(7, store.read(names))) == "committed"
    with pytest.raises(Conflict, match="tasks = 3 would exceed the quota"):
        submit(8, store.read(names))


@pytest.mark.parametrize("seed", range(30))
def test_an_unknown_outcome_is_all_or_nothing(seed: int) -> None:
    store = Twin(unknown=1.0, seed=seed)
    change = Transaction(put=(("a", EpochRow(1)), ("b", EpochRow(2))))
    assert store.transact(change) == "unknown"
    assert store.read(("",)) in ({}, {"a": EpochRow(1), "b": EpochRow(2)})


def test_unknown_outcomes_are_of_all_kinds() -> None:
    """Applied before the answer was lost, applied after, never: the twin plays them all."""
    fates = set()
    for seed in range(40):
        store = Twin(unknown=1.0, seed=seed)
        outcomes: list[Outcome] = []
        store.twin.transact(("node", 0), put("a", 1), outcomes.append)
        store.engine.run(2.0)
        assert outcomes == ["unknown"]
        early = "a" in store.twin.rows
        store.engine.run(1000.0)
        fates.add((early, "a" in store.twin.rows))
    assert fates == {(True, True), (False, True), (False, False)}
