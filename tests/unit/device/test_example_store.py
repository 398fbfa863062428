"""The example store: policies hold, what is expired is gone from the files, splits are stable."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.device import example_store
from papaya.device.example_store import (
    MAX_EXAMPLE_BYTES,
    SPLITS,
    ExampleStore,
    UseRefused,
    split_of,
)
from papaya.device.use_policy import UsePolicy
from papaya.errors import ConfigError, OperatorError

ALL = UsePolicy(tasks=("*",), max_age_s=100.0, validation=0.0, test=0.0)


def policy(**changes: Any) -> UsePolicy:
    whole: dict[str, Any] = {"tasks": ("*",), "max_age_s": 100.0, "validation": 0.0, "test": 0.0}
    return UsePolicy(**{**whole, **changes})


def everything(store: ExampleStore, now: float, collection: str = "text") -> list[bytes]:
    found = [store.query(collection, "a", split, 10**6, False, now) for split in SPLITS]
    return [example for examples in found for example in examples]


# --- Use


def test_only_the_tasks_that_the_owner_names_may_use_a_collection() -> None:
    with ExampleStore(":memory:", {"text": policy(tasks=("next-word", "emoji-*"))}) as store:
        store.add("text", [b"a"], 0.0)
        for task in ("next-word", "emoji-2", "emoji-"):
            assert store.query("text", task, "train", 10, True, 0.0) == [b"a"]
        for task in ("next-word-2", "emoji", "", "Next-word", "x/emoji-2"):
            with pytest.raises(UseRefused, match="may not use"):
                store.query("text", task, "train", 10, True, 0.0)


def test_nobody_may_use_a_collection_that_names_no_task() -> None:
    with ExampleStore(":memory:", {"text": UsePolicy()}) as store:
        store.add("text", [b"a"], 0.0)
        with pytest.raises(UseRefused):
            store.query("text", "next-word", "train", 10, True, 0.0)


def test_a_collection_that_was_not_declared_is_refused() -> None:
    with ExampleStore(":memory:", {"text": ALL}) as store:
        with pytest.raises(ConfigError, match="'photos'"):
            store.add("photos", [b"a"], 0.0)
        with pytest.raises(ConfigError, match="'photos'"):
            store.query("photos", "a", "train", 1, True, 0.0)
        with pytest.raises(ConfigError, match="'photos'"):
            store.counts("photos", 0.0)
        with pytest.raises(ConfigError, match="'photos'"):
            store.drop("photos")


def test_order_and_limit() -> None:
    with ExampleStore(":memory:", {"text": ALL}) as store:
        store.add("text", [b"a", b"b"], 0.0)
        store.add("text", [b"c"], 1.0)
        assert store.query("text", "a", "train", 2, True, 1.0) == [b"c", b"b"]
        assert store.query("text", "a", "train", 2, False, 1.0) == [b"a", b"b"]
        assert store.query("text", "a", "train", 0, False, 1.0) == []
        assert store.query("text", "a", "train", -1, False, 1.0) == []


def test_a_query_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_store, "MAX_QUERY_BYTES", 10)
    with ExampleStore(":memory:", {"text": ALL}) as store:
        store.add("text", [b"aaaa", b"bbbb", b"cccc"], 0.0)
        assert store.query("text", "a", "train", 9, False, 0.0) == [b"aaaa", b"bbbb"]
        assert store.query("text", "a", "train", 9, True, 0.0) == [b"cccc", b"bbbb"]


def test_policies_stay_with_the_file_and_can_be_declared_anew(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with ExampleStore(path, {"text": policy(max_count=2), "photos": ALL}) as store:
        store.add("text", [b"a", b"b", b"c"], 0.0)
    with ExampleStore(path) as store:
        assert store.collections == {"text": policy(max_count=2), "photos": ALL}
        assert everything(store, 0.0) == [b"b", b"c"]
    with ExampleStore(path, {"text": policy(max_count=1)}) as store:
        assert everything(store, 0.0) == [b"c"]
        assert store.collections["photos"] == ALL


def test_a_policy_that_another_process_tightens_holds_at_once(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with ExampleStore(path, {"text": ALL}) as trains, ExampleStore(path) as app:
        app.add("text", [b"a"], 0.0)
        assert everything(trains, 0.0) == [b"a"]
        app.declare({"text": policy(tasks=("another",))})
        with pytest.raises(UseRefused):
            everything(trains, 0.0)


# --- Retention


def test_an_example_is_gone_at_its_maximum_age() -> None:
    with ExampleStore(":memory:", {"text": ALL}) as store:
        store.add("text", [b"a"], 0.0)
        store.add("text", [b"b"], 1.0)
        assert everything(store, 99.9) == [b"a", b"b"]
        assert everything(store, 100.0) == [b"b"]
        assert everything(store, 0.0) == [b"b"]  # deleted, not hidden: a clock set back shows it


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"max_count": 2}, [b"ccc", b"d"]),
        ({"max_bytes": 4}, [b"ccc", b"d"]),
        ({"max_bytes": 3}, [b"d"]),
    ],
)
def test_the_oldest_go_first(changes: dict[str, int], kept: list[bytes]) -> None:
    with ExampleStore(":memory:", {"text": policy(**changes)}) as store:
        store.add("text", [b"aa", b"b"], 0.0)
        assert store.add("text", [b"ccc", b"d"], 1.0) == 2
        assert everything(store, 1.0) == kept


def test_a_collection_is_not_judged_by_anothers_policy() -> None:
    with ExampleStore(":memory:", {"text": policy(max_count=1), "photos": ALL}) as store:
        store.add("text", [b"a", b"b"], 0.0)
        store.add("photos", [b"c", b"d"], 0.0)
        assert everything(store, 0.0, "photos") == [b"c", b"d"]
        assert everything(store, 0.0) == [b"b"]


def test_too_large_an_example_is_refused_with_all_that_came_with_it() -> None:
    with ExampleStore(":memory:", {"text": ALL}) as store:
        with pytest.raises(ConfigError, match="above the limit"):
            store.add("text", [b"a", bytes(MAX_EXAMPLE_BYTES + 1)], 0.0)
        assert everything(store, 0.0) == []


def found_in_files(folder: Path, marker: bytes) -> bool:
    return any(marker in file.read_bytes() for file in folder.iterdir())


@pytest.mark.parametrize("size", [20, 5_000, 300_000])
@pytest.mark.parametrize("how", ["expired", "surplus", "dropped"])
def test_what_is_deleted_is_in_no_file_any_more(tmp_path: Path, size: int, how: str) -> None:
    marker, other = b"MARKER-OF-A-SECRET", b"x" * size
    with ExampleStore(tmp_path / "device.db", {"text": policy(max_count=8), "b": ALL}) as store:
        store.add("b", [other] * 4, 0.0)
        store.add("text", [marker + other, other + marker] * 4, 0.0)
        store.add("b", [other] * 4, 50.0)
        assert found_in_files(tmp_path, marker)
        match how:
            case "expired":
                store.sweep(100.0)
            case "surplus":
                store.add("text", [other] * 8, 1.0)
                store.sweep(1.0)
            case "dropped":
                store.drop("text")
        assert not found_in_files(tmp_path, marker)
    assert not found_in_files(tmp_path, marker)


@pytest.mark.parametrize("seed", [40, 223])
def test_copies_that_stayed_behind_when_rows_moved_are_gone_too(tmp_path: Path, seed: int) -> None:
    """With `secure_delete` and nothing else, these two orders of events leave an example behind."""
    rng, now, every = Random(seed), 0.0, list[bytes]()
    rule = policy(max_age_s=40.0, max_count=10, max_bytes=15_000)
    with ExampleStore(tmp_path / "device.db", {"text": rule}) as store:
        for _ in range(rng.randrange(1, 9)):
            now += rng.choice([0, rng.uniform(0, 30)])
            numbers = range(len(every), len(every) + rng.randrange(9))
            new = [
                b"<MARK%05d>" % number + bytes(rng.choice([0, 2, rng.randrange(3000)]))
                for number in numbers
            ]
            every += new
            store.add("text", new, now)
        store.sweep(now)
        kept = everything(store, now)
    for example in every:
        assert found_in_files(tmp_path, example[:11]) == (example in kept)


def test_a_scrub_that_a_crash_prevented_is_made_up_for(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with ExampleStore(path, {"text": policy(max_count=1)}) as store:
        store.add("text", [b"SECRET" * 2000, b"b"], 0.0)  # deleted, and then the power fails
    before = path.stat().st_size
    with ExampleStore(path) as store:
        store.sweep(0.0)
    assert path.stat().st_size < before
    assert not found_in_files(tmp_path, b"SECRET")


def test_files_shrink_when_examples_go(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with ExampleStore(path, {"text": ALL}) as store:
        empty = path.stat().st_size
        store.add("text", [bytes(100_000)] * 20, 0.0)
        assert path.stat().st_size > 2_000_000
        store.sweep(100.0)
        assert path.stat().st_size == empty


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 30),
            st.lists(st.integers(0, 3000), max_size=8),
        ),
        max_size=8,
    )
)
def test_against_a_slow_reference(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, list[int]]]
) -> None:
    """Any order of adding and waiting: the same examples as a list would keep, no other bytes."""
    folder = tmp_path_factory.mktemp("store")
    kept: list[tuple[float, bytes]] = []
    every: list[bytes] = []
    now = 0.0
    rule = policy(max_age_s=40.0, max_count=10, max_bytes=15_000)
    with ExampleStore(folder / "device.db", {"text": rule}) as store:
        for wait_s, sizes in steps:
            now += wait_s
            new = [b"<MARK%d>" % (len(every) + at) + bytes(n) for at, n in enumerate(sizes)]
            every += new
            store.add("text", new, now)
            kept = [(at, e) for at, e in kept + [(now, e) for e in new] if at > now - 40.0][-10:]
            while sum(len(example) for _, example in kept) > 15_000:
                kept.pop(0)
            assert everything(store, now) == [example for _, example in kept]
        store.sweep(now)
    rest = {example for _, example in kept}
    for example in every:
        marker = example.rstrip(b"\0")
        assert found_in_files(folder, marker) == (example in rest)


def test_only_what_is_new_is_added() -> None:
    with ExampleStore(":memory:", {"text": policy(), "other": policy()}) as store:
        assert store.add_new("text", [b"a", b"b", b"b"], 0.0) == 3, "a text may say it twice"
        assert store.add_new("text", [b"a", b"b", b"b", b"c"], 1.0) == 1
        assert store.add_new("text", [b"a", b"b", b"b", b"c"], 2.0) == 0
        assert everything(store, 2.0) == [b"a", b"b", b"b", b"c"]
        assert store.add_new("other", [b"a"], 2.0) == 1
        assert store.add("text", [b"a"], 2.0) == 1, "an app may add what it likes"


def test_an_example_from_the_future_does_not_outlive_a_window_of_the_budget() -> None:
    """Its clock was a year ahead. From the first look with the right clock it has its usual age."""
    with ExampleStore(":memory:", {"text": ALL}) as store:
        store.add("text", [b"early"], 1_000_000.0)
        assert everything(store, 50.0) == [b"early"]
        assert everything(store, 149.0) == [b"early"]
        assert everything(store, 151.0) == []


def test_what_has_expired_is_new_again() -> None:
    with ExampleStore(":memory:", {"text": policy(max_age_s=10.0)}) as store:
        assert store.add_new("text", [b"a"], 0.0) == 1
        assert store.add_new("text", [b"a"], 9.0) == 0
        assert store.add_new("text", [b"a"], 10.0) == 1


# --- Splits


def test_every_example_lies_on_one_side_and_duplicates_on_the_same() -> None:
    rule = policy(validation=0.1, test=0.2)
    examples = [f"example {number}".encode() for number in range(2000)]
    with ExampleStore(":memory:", {"text": rule}) as store:
        store.add("text", examples + examples[:50], 0.0)
        sides = {split: store.query("text", "a", split, 10**6, False, 0.0) for split in SPLITS}
        counts = store.counts("text", 0.0)
    assert {split: len(side) for split, side in sides.items()} == counts
    assert sum(counts.values()) == 2050
    assert sorted(chain(*sides.values())) == sorted(examples + examples[:50])
    for split, side in sides.items():
        assert all(split_of(example, rule) == split for example in side)
    assert 150 < counts["validation"] < 260
    assert 330 < counts["test"] < 490


def test_the_split_is_a_fixed_function_of_the_content() -> None:
    """Pinned: a later version must not move examples from test to train."""
    sides = [split_of(b"example %d" % number, UsePolicy()) for number in range(30)]
    assert [at for at, side in enumerate(sides) if side == "validation"] == [0, 1, 14, 23, 25]
    assert [at for at, side in enumerate(sides) if side == "test"] == [17, 24]


@given(st.binary(max_size=40), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_side_is_found_for_any_shares(example: bytes, validation: float, test: float) -> None:
    assert split_of(example, UsePolicy(validation=validation, test=test)) in SPLITS


def test_all_held_out_leaves_nothing_to_train_on() -> None:
    assert split_of(b"a", UsePolicy(validation=1.0, test=0.0)) == "validation"
    assert split_of(b"a", UsePolicy(validation=0.0, test=1.0)) == "test"


# --- Trouble


def test_a_file_that_is_no_database_is_refused_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(OperatorError, match=r"cannot use .*device\.db") as caught:
        ExampleStore(path)
    assert caught.value.hint
    with pytest.raises(OperatorError, match="cannot use"):
        ExampleStore(tmp_path / "no" / "folder.db")


def test_a_damaged_policy_is_an_error_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    ExampleStore(path, {"text": ALL}).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE collection SET policy = x'00'")
        database.commit()
    with pytest.raises(OperatorError, match="cannot use"):
        ExampleStore(path)


def test_a_closed_store_says_so() -> None:
    store = ExampleStore(":memory:", {"text": ALL})
    store.close()
    with pytest.raises(OperatorError, match="closed"):
        store.sweep(0.0)


# --- What a device keeps of a task


def test_a_state_is_kept_for_one_run_of_a_task(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with ExampleStore(path, {"text": policy()}) as store:
        assert store.state_of("a", "a-1") == b""
        store.keep_state("a", "a-1", "text", b"first", 1.0)
        store.keep_state("b", "b-1", "text", b"other", 1.0)
    with ExampleStore(path) as store:
        assert store.state_of("a", "a-1") == b"first"
        store.keep_state("a", "a-2", "text", b"second", 2.0)
        assert (store.state_of("a", "a-1"), store.state_of("a", "a-2")) == (b"", b"second")
        assert store.state_of("b", "b-1") == b"other"


def test_a_state_ends_with_its_collection_and_with_the_age_of_examples(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with ExampleStore(path, {"text": policy(), "clicks": policy()}) as store:
        store.keep_state("a", "a-1", "text", b"state of a", 0.0)
        store.keep_state("b", "b-1", "clicks", b"state of b", 50.0)
        store.sweep(99.0)
        assert store.state_of("a", "a-1") == b"state of a"
        store.sweep(100.0)
        assert store.state_of("a", "a-1") == b""
        assert store.state_of("b", "b-1") == b"state of b"
        store.drop("clicks")
        assert store.state_of("b", "b-1") == b""
    assert b"state of" not in path.read_bytes()


def test_participations_do_not_renew_the_age_of_a_state() -> None:
    """Otherwise each could pass on what was learnt from examples that the device has deleted."""
    with ExampleStore(":memory:", {"text": policy()}) as store:
        for now in (0.0, 60.0, 99.0):
            store.keep_state("a", "a-1", "text", b"state", now)
            assert store.state_of("a", "a-1") == b"state"
        store.sweep(100.0)
        assert store.state_of("a", "a-1") == b""
        store.keep_state("a", "a-1", "text", b"new state", 100.0)
        store.keep_state("a", "a-2", "text", b"new run", 150.0)
        store.sweep(200.0)
        assert store.state_of("a", "a-2") == b"new run", "it began with its run"


def test_a_state_does_not_outlive_the_one_that_it_continues() -> None:
    """Training began from a state that was deleted before its update was counted."""
    with ExampleStore(":memory:", {"text": policy()}) as store:
        store.keep_state("a", "a-1", "text", b"old", 0.0)
        store.sweep(100.0)
        store.keep_state("a", "a-1", "text", b"old and more", 95.0, b"old")
        assert store.state_of("a", "a-1") == b""
        store.keep_state("a", "a-1", "text", b"new", 95.0)
        store.keep_state("a", "a-1", "text", b"new and more", 120.0, b"new")
        assert store.state_of("a", "a-1") == b"new and more"
        store.sweep(195.0)
        assert store.state_of("a", "a-1") == b"", "it began with its first training"


def test_a_state_from_the_future_counts_as_begun_now() -> None:
    with ExampleStore(":memory:", {"text": policy()}) as store:
        store.keep_state("a", "a-1", "text", b"state", 1e9)
        store.sweep(0.0)
        store.sweep(100.0)
        assert store.state_of("a", "a-1") == b""


def test_a_state_of_a_collection_that_is_gone_is_refused() -> None:
    with ExampleStore(":memory:") as store, pytest.raises(ConfigError):
        store.keep_state("a", "a-1", "text", b"state", 0.0)


def test_policies_may_be_read_in_another_thread_while_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device checks budgets in threads of its own."""
    policy = UsePolicy(tasks=("*",))
    with ExampleStore(":memory:", {"notes": policy}) as store:
        transaction = store._file.transaction

        @contextmanager
        def followed_by_a_check() -> Iterator[None]:
            with transaction():
                yield
            with monkeypatch.context() as patched:
                patched.setattr(store._file, "transaction", transaction)
                store.refresh()

        monkeypatch.setattr(store._file, "transaction", followed_by_a_check)
        iterated = iter(store.collections)
        store.declare({"points": policy})
        assert list(iterated) == ["notes"]
        iterated = iter(store.collections)
        store.drop("notes")
        assert list(iterated) == ["notes", "points"]
        assert list(store.collections) == ["points"]
