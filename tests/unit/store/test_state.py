"""The state store in SQLite: its file, its errors, its snapshots. The contract has the rest."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Thread

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from papaya.config import TaskConfig
from papaya.errors import OperatorError
from papaya.messages import wire
from papaya.messages.storage import (
    EpochRow,
    Member,
    Outcome,
    RecordRow,
    TaskRow,
    Transaction,
    VersionRow,
)
from papaya.sim.engine import Engine
from papaya.sim.storage import StateTwin, StorageConfig
from papaya.store import state
from papaya.store.state import SqliteState

LONG_S = 300.0  # a thread or process that has the write lock may get no processor
MANY_BYTES = VersionRow(0, "x" * 100_000, seq=0, created=0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteState]:
    made = SqliteState(path, busy_timeout_s=0.05)
    yield made
    made.close()


def put(key: str, value: int) -> Transaction:
    return Transaction(put=((key, EpochRow(value)),))


def add_one(store: SqliteState) -> Outcome:
    before = store.read(("count",)).get("count")
    after = EpochRow(before.epoch + 1 if isinstance(before, EpochRow) else 1)
    return store.transact(Transaction(require=(("count", before),), put=(("count", after),)))


def test_what_was_committed_is_there_after_closing_and_nothing_is_left_beside_it(
    path: Path,
) -> None:
    store = SqliteState(path)
    store.transact(put("a", 1))
    store.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    again = SqliteState(path)
    assert again.read(("",)) == {"a": EpochRow(1)}
    again.close()


def test_only_its_owner_may_read_the_file(path: Path) -> None:
    """It holds the keys of tickets."""
    path.touch(mode=0o644)
    store = SqliteState(path)
    store.transact(put("a", 1))
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    store.close()
    assert modes == dict.fromkeys((path.name, f"{path.name}-wal", f"{path.name}-shm"), 0o600)


def test_it_is_made_private_from_the_start_in_a_folder_that_is_made_too(tmp_path: Path) -> None:
    path = tmp_path / "data" / "deep" / "state.sqlite"
    SqliteState(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_commits_are_synced(store: SqliteState) -> None:
    full = 2
    assert store._pragma("synchronous") == full
    assert store._pragma("journal_mode") == "wal"


def test_a_read_by_prefix_uses_the_index(store: SqliteState) -> None:
    plan = store._connection.execute(f"EXPLAIN QUERY PLAN {state._RANGE}", (b"a", b"b")).fetchall()
    assert [step[3] for step in plan] == [
        "SEARCH rows USING INDEX sqlite_autoindex_rows_1 (key>? AND key<?)"
    ]


def test_a_read_is_one_snapshot_whoever_writes_meanwhile(store: SqliteState, path: Path) -> None:
    other = SqliteState(path)
    for key in "ab":
        store.transact(put(key, 1))

    def write_before_the_second_prefix(statement: str) -> None:
        if "key >= x'62'" in statement:  # the letter b
            other.transact(Transaction(put=(("a", EpochRow(2)), ("b", EpochRow(2)))))

    store._connection.set_trace_callback(write_before_the_second_prefix)
    assert store.read(("a", "b")) == {"a": EpochRow(1), "b": EpochRow(1)}
    store._connection.set_trace_callback(None)
    assert store.read(("a", "b")) == {"a": EpochRow(2), "b": EpochRow(2)}
    other.close()


def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    path.write_bytes(b"a letter to a friend, " * 100)
    with pytest.raises(OperatorError, match="not a database") as caught:
        SqliteState(path)
    assert "move it away" in caught.value.hint
    assert path.read_bytes() == b"a letter to a friend, " * 100


def test_the_database_of_another_program_is_refused_and_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE rows (key, row)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(OperatorError, match="another program"):
        SqliteState(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, 3])
def test_another_version_of_the_schema_is_refused_and_left_alone(path: Path, version: int) -> None:
    SqliteState(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(OperatorError, match=f"schema version {version}, this Papaya") as caught:
        SqliteState(path)
    assert "version of Papaya that wrote it" in caught.value.hint
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_used_is_the_operators_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError, match=r"cannot use .*: Not a directory") as caught:
        SqliteState(tmp_path / "file" / "data" / "state.sqlite")
    assert "mkdir -p" in caught.value.hint
    with pytest.raises(OperatorError, match="not a folder"):
        SqliteState(tmp_path / "file" / "state.sqlite")


def test_a_folder_in_the_place_of_the_file_is_the_operators_to_mend(path: Path) -> None:
    path.mkdir()
    with pytest.raises(OperatorError, match="SQLITE_CANTOPEN") as caught:
        SqliteState(path)
    assert str(path) in caught.value.hint


def test_a_damaged_row_is_named(store: SqliteState) -> None:
    store.transact(put("a", 1))
    store._connection.execute("UPDATE rows SET row = x'7b'")
    with pytest.raises(OperatorError, match=r"the row a of .* is damaged") as caught:
        store.read(("a",))
    assert "backup" in caught.value.hint


def test_a_lock_that_another_keeps_is_an_unknown_outcome_and_not_a_refusal(
    store: SqliteState, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert store.transact(put("a", 1)) == "unknown"
    assert store.read(("",)) == {}  # who reads does not wait for who writes
    other.close()
    assert store.transact(put("a", 1)) == "committed"
    [record] = caplog.records
    assert (record.name, record.levelno) == ("papaya.store", logging.ERROR)
    assert "SQLITE_BUSY" in record.message
    assert "hint: another process holds" in record.message


def test_a_full_disk_is_an_unknown_outcome_that_leaves_nothing(
    store: SqliteState, caplog: pytest.LogCaptureFixture
) -> None:
    store._connection.execute("PRAGMA max_page_count = 5")
    large = Transaction(put=(("a", EpochRow(1)), ("b", MANY_BYTES)))
    assert store.transact_all([put("c", 1), large]) == ["unknown", "unknown"]
    assert store.read(("",)) == {}
    assert "SQLITE_FULL" in caplog.text
    assert "hint: free space on the disk" in caplog.text
    assert store.transact(put("a", 1)) == "committed"


def test_an_error_half_way_leaves_nothing_and_no_transaction_open(store: SqliteState) -> None:
    """SQLite undoes only the statement after this one; after a full disk it undoes all itself."""
    store._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 50_000)
    assert store.transact(Transaction(put=(("a", EpochRow(1)), ("b", MANY_BYTES)))) == "unknown"
    assert store.read(("",)) == {}
    assert store.transact(put("a", 2)) == "committed"


def test_who_compares_has_the_write_lock_already(store: SqliteState, path: Path) -> None:
    """Or a commit of another process between comparing and writing would fail ours."""
    other = SqliteState(path, busy_timeout_s=0.0)
    others: list[Outcome] = []

    def write_while_it_compares(statement: str) -> None:
        if statement.startswith("SELECT"):
            others.append(other.transact(put("b", 1)))

    store._connection.set_trace_callback(write_while_it_compares)
    assert store.transact(Transaction(require=(("a", None),), put=(("a", EpochRow(1)),))) == (
        "committed"
    )
    store._connection.set_trace_callback(None)
    assert others == ["unknown"]
    other.close()


def test_another_process_that_makes_the_file_at_the_same_time_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waited: list[float] = []

    def let_go(wait_s: float) -> None:
        waited.append(wait_s)
        other.close()

    monkeypatch.setattr(time, "sleep", let_go)
    store = SqliteState(path, busy_timeout_s=LONG_S)
    assert store.transact(put("a", 1)) == "committed"
    assert len(waited) == 1
    store.close()


def test_a_store_that_is_closed_answers_with_errors(path: Path) -> None:
    store = SqliteState(path)
    store.close()
    assert store.transact(put("a", 1)) == "unknown"
    with pytest.raises(OperatorError, match="could not be read"):
        store.read(("a",))


changes = st.builds(
    Transaction,
    require=st.lists(
        st.tuples(st.sampled_from("ab"), st.none() | st.builds(EpochRow, st.integers(0, 1))),
        max_size=1,
    ).map(tuple),
    put=st.lists(
        st.tuples(st.sampled_from("ab"), st.builds(EpochRow, st.integers(0, 1))), max_size=2
    ).map(tuple),
    delete=st.lists(st.sampled_from("ab"), max_size=1).map(tuple),
)


@settings(max_examples=15)
@given(st.lists(changes, max_size=8))
def test_transactions_that_share_a_sync_are_as_one_after_the_other(
    transactions: list[Transaction],
) -> None:
    with TemporaryDirectory() as folder:
        together = SqliteState(Path(folder) / "state.sqlite")
        one_by_one = StateTwin(Engine(), Random(0), StorageConfig())
        outcomes = [one_by_one.apply(("node", 0), change) for change in transactions]
        assert together.transact_all(transactions) == outcomes
        assert together.read(("",)) == one_by_one.snapshot(("",))
        together.close()


@pytest.mark.parametrize("shared", [True, False])
def test_threads_that_race_lose_no_increment(path: Path, shared: bool) -> None:
    stores = [SqliteState(path, busy_timeout_s=LONG_S)]
    for _ in range(2):
        stores.append(stores[0] if shared else SqliteState(path, busy_timeout_s=LONG_S))
    outcomes: list[Outcome] = []

    def race(store: SqliteState) -> None:
        outcomes.extend([add_one(store) for _ in range(30)])

    threads = [Thread(target=race, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].read(("",)) == {"count": EpochRow(outcomes.count("committed"))}
    assert outcomes.count("committed") + outcomes.count("refused") == 90
    for store in stores:
        store.close()


def test_rows_of_an_earlier_version_can_be_replaced(path: Path) -> None:
    """Version 0.3.0 wrote them without fields that are new; the values are the same."""
    member = Member("s1", 0, 0, 1, 9.0)
    record, task = (
        RecordRow(1, "sum", (member,), 1.0),
        TaskRow(TaskConfig(task="words", concurrency=4, model_length=4)),
    )
    old_record = (
        b'{"type":"RecordRow","target":1,"sum":"sum","members":[["s1",0,0,1,9.0,-1]],"weight":1.0}'
    )
    document = msgspec.json.decode(wire.encode_row(task))
    for field in ("name", "pseudonym_key"):
        del document[field]
    for field in ("owner", "bundle", "program"):
        del document["config"]["requirements"][field]
    with closing(SqliteState(path)) as store:
        store.transact(Transaction(put=(("record", record), ("task", task))))
    with closing(sqlite3.connect(path)) as database:
        change = "UPDATE rows SET row = ? WHERE key = ?"
        database.execute(change, (old_record, b"record"))
        database.execute(change, (msgspec.json.encode(document), b"task"))
        database.commit()
    with closing(SqliteState(path)) as store:
        found = store.read(("record", "task"))
        assert found == {"record": record, "task": task}
        change_both = Transaction(
            require=(("record", found["record"]), ("task", found["task"])),
            put=(("record", structs.replace(record, weight=2.0)),),
        )
        assert store.transact(change_both) == "committed"
        assert store.transact(change_both) == "refused"
