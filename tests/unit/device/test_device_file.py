"""The participation history on disk: it survives, and two processes cannot both take part."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from papaya.client.history import History, Participated
from papaya.device.device_file import DeviceFile, DeviceHistory
from papaya.device.example_store import ExampleStore
from papaya.device.use_policy import UsePolicy
from papaya.errors import OperatorError

FIRST = Participated(1, 1000.0, 60.0, None)
SECOND = Participated(2, 2000.0, 60.0, 5)


def test_what_is_remembered_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with DeviceHistory(path) as history:
        history.remember("a", FIRST)
    with DeviceHistory(path) as history:
        history.remember("a", SECOND)
        history.remember("b", FIRST)
    with DeviceHistory(path) as history:
        loaded = history.load(floor_s=3600.0)
    assert loaded.excluded(2001.0) == ("a", "b")
    assert not loaded.allows(5599.0, "a", 0.0, None)
    assert loaded.allows(5600.0, "a", 0.0, None)
    assert not loaded.allows(5600.0, "a", 0.0, 2)


def test_a_declined_join_survives_a_restart_and_ends_with_the_next_participation(
    tmp_path: Path,
) -> None:
    path, entry = tmp_path / "device.db", Participated(1, 1000.0, 1e300, None)
    with DeviceHistory(path) as history:
        history.remember("a", entry)
        history.remember("b", entry)
        history.remember_declined("a", 2000.0)
        history.remember_declined("a", 3000.0)
    with DeviceHistory(path) as history:
        loaded = history.load(0.0, ceiling_s=500.0)
        assert loaded.entries == {"a": structs.replace(entry, declined_at=3000.0), "b": entry}
        assert loaded.excluded(3499.0) == ("a",)
        assert loaded.excluded(3500.0) == ()
        next_one = loaded.record(3500.0, "a", 60.0, None)
        history.remember("a", next_one)
        assert history.load(0.0).entries["a"] == next_one == Participated(2, 3500.0, 60.0, None)


def test_a_participation_ends_a_declined_join_of_a_clock_that_was_ahead(tmp_path: Path) -> None:
    with DeviceHistory(tmp_path / "device.db") as history:
        history.remember("a", FIRST)
        history.remember("b", FIRST)
        history.remember_declined("a", 9000.0)
        history.remember_declined("b", 9000.0)
        history.remember("a", SECOND)  # at 2000, after the clock was set right
        with pytest.raises(OperatorError):
            history.remember("b", FIRST)  # no participation: nothing is forgotten
        loaded = history.load(0.0).entries
    assert loaded == {"a": SECOND, "b": structs.replace(FIRST, declined_at=9000.0)}


def test_a_history_of_0_4_0_is_loaded(tmp_path: Path) -> None:
    """It knew no declined joins."""
    path = tmp_path / "device.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "CREATE TABLE participation (task TEXT PRIMARY KEY, count INTEGER NOT NULL, "
            "last_at REAL NOT NULL, gap_s REAL NOT NULL, max_count INTEGER) STRICT, WITHOUT ROWID"
        )
        database.execute("INSERT INTO participation VALUES ('a', 2, 2000.0, 60.0, 5)")
        database.commit()
    with DeviceHistory(path) as history:
        assert history.load(0.0).entries == {"a": SECOND}
        history.remember_declined("a", 3000.0)
    with closing(sqlite3.connect(path)) as database:  # as 0.4.0 reads and writes it
        [row] = database.execute("SELECT * FROM participation").fetchall()
        assert row == ("a", 2, 2000.0, 60.0, 5)
        database.execute("UPDATE participation SET count = 3, last_at = 4000.0")
        database.commit()
    with DeviceHistory(path) as history:
        assert history.load(0.0).entries == {"a": Participated(3, 4000.0, 60.0, 5)}


def test_it_is_written_with_the_greatest_care(tmp_path: Path) -> None:
    with DeviceHistory(tmp_path / "device.db") as history:
        [[level]] = history._file.rows("PRAGMA synchronous")
    assert level == 3  # EXTRA


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    DeviceHistory(tmp_path / "device.db").close()
    assert (tmp_path / "device.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("entry", [FIRST, SECOND, Participated(4, 1.0, 0.0, None)])
def test_a_participation_that_is_not_the_next_one_is_refused(
    tmp_path: Path, entry: Participated
) -> None:
    with DeviceHistory(tmp_path / "device.db") as history:
        history.remember("a", FIRST)
        history.remember("a", SECOND)
        with pytest.raises(OperatorError, match="another process"):
            history.remember("a", entry)
        with pytest.raises(OperatorError, match="another process"):
            history.remember("b", SECOND)
        assert history.load(0.0).record(3000.0, "a", 60.0, 5).count == 3


def test_of_two_processes_with_one_file_only_one_takes_part(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with DeviceHistory(path) as one, DeviceHistory(path) as other:
        entries = [opened.load(0.0).record(1000.0, "a", 60.0, None) for opened in (one, other)]
        one.remember("a", entries[0])
        with pytest.raises(OperatorError, match="another process used the history") as caught:
            other.remember("a", entries[1])
        assert caught.value.hint == "run one process per device"


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.floats(0, 1e6),
            st.none() | st.integers(1, 5),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_a_loaded_history_is_the_one_in_memory(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, float, int | None, bool]],
) -> None:
    path = tmp_path_factory.mktemp("history") / "device.db"
    memory, now = History(10.0), 0.0
    opened = DeviceHistory(path)
    try:
        for task, gap_s, limit, restarts in steps:
            now += 7.0
            opened.remember(task, memory.record(now, task, gap_s, limit))
            if restarts:
                opened.close()
                opened = DeviceHistory(path)
            loaded = opened.load(10.0)
            assert loaded.excluded(now) == memory.excluded(now)
            assert loaded.entries == memory.entries
    finally:
        opened.close()


def test_it_shares_its_file_with_the_examples(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with (
        DeviceHistory(path) as history,
        ExampleStore(path, {"a": UsePolicy(tasks=("*",))}) as store,
    ):
        store.add("a", [b"SECRET" * 1000], 0.0)
        history.remember("a", FIRST)
        full = path.stat().st_size
        store.drop("a")
        assert b"SECRET" not in path.read_bytes()
        assert path.stat().st_size < full
        assert history.load(0.0).excluded(1001.0) == ("a",)


def test_a_file_that_cannot_be_used_is_an_error_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(OperatorError, match="cannot use") as caught:
        DeviceHistory(path)
    assert caught.value.hint


def test_a_table_that_is_gone_lets_nothing_be_remembered(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with DeviceHistory(path) as history:
        with closing(sqlite3.connect(path)) as database:
            database.execute("DROP TABLE participation")
            database.commit()
        with pytest.raises(OperatorError, match="cannot use"):
            history.remember("a", FIRST)


def test_evaluations_that_the_device_met_are_known_at_its_next_visit(tmp_path: Path) -> None:
    with DeviceHistory(tmp_path / "device.db") as kept:
        history = kept.load(100.0)
        history.learn("words-eval-1", "words/evaluate")
        kept.remember("words/evaluate", history.record(1000.0, "words/evaluate", 0.0, None))
        assert kept.load(100.0).excluded(1050.0) == ("words-eval-1",)
        assert kept.load(100.0).excluded(1100.0) == ()


_TAKES_THE_LOCK = """
import sqlite3, sys
other = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
try:
    other.execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as error:
    print(error, end="")
finally:
    other.close()
"""


def test_what_another_process_deletes_during_a_scrub_is_left_to_the_next(tmp_path: Path) -> None:
    path, schema = tmp_path / "device.db", "CREATE TABLE IF NOT EXISTS word (text TEXT) STRICT"
    with closing(DeviceFile(path, schema)) as runtime, closing(DeviceFile(path, schema)) as app:
        with app.transaction():
            app.insert("INSERT INTO word VALUES (?)", [("first",), ("second",)])
            app.delete("DELETE FROM word WHERE text = 'first'")
        seen: list[str] = []

        def deleting(statement: str) -> None:
            is_next = "VACUUM" in seen and not statement.startswith("--")
            seen.append(statement)
            if is_next and seen.count("VACUUM") == 1 and "deleted" not in seen:
                seen.append("deleted")
                with app.transaction():
                    app.delete("DELETE FROM word WHERE text = 'second'")

        runtime._database.set_trace_callback(deleting)
        runtime.scrub()
        assert "deleted" in seen
        assert app.rows("SELECT * FROM word") == []
        runtime.scrub()
        assert seen.count("VACUUM") == 2
        runtime.scrub()
        assert seen.count("VACUUM") == 2, "nothing was deleted since"


def test_version_0_4_0_knows_that_something_was_deleted(tmp_path: Path) -> None:
    """It scrubs a file with user_version 1 and no other, and apps may have it for longer."""
    path, schema = tmp_path / "device.db", "CREATE TABLE IF NOT EXISTS word (text TEXT) STRICT"
    with closing(DeviceFile(path, schema)) as file:
        for word in ("first", "second"):
            with file.transaction():
                file.insert("INSERT INTO word VALUES (?)", [(word,)])
                file.delete("DELETE FROM word")
        assert file.rows("PRAGMA user_version") == [(1,)]
        file.scrub()
        assert file.rows("PRAGMA user_version") == [(0,)]


def test_to_open_the_file_again_drops_no_lock_of_this_process(tmp_path: Path) -> None:
    """POSIX drops all locks of a process on a file when it closes any descriptor of it."""
    path = tmp_path / "device.db"
    first = DeviceFile(path, "")
    with first.transaction():
        second = DeviceFile(path, "")
        asked = [sys.executable, "-c", _TAKES_THE_LOCK, str(path)]
        found = subprocess.run(asked, capture_output=True, text=True, check=True)
    second.close()
    first.close()
    assert found.stdout == "database is locked"
    assert [entry.name for entry in tmp_path.iterdir()] == ["device.db"]
