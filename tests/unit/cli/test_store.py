"""`papaya store`: between SQLite and PostgreSQL, two at a time, and what it refuses."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from papaya.cli import store_backup
from papaya.cli.main import main
from papaya.config import Deployment
from papaya.errors import OperatorError
from papaya.messages.storage import EpochRow, Transaction
from papaya.store.backup import back_up
from papaya.store.clusters import open_state
from papaya.store.postgresql import PostgresState
from papaya.store.state import SqliteState
from tests.postgresql import postgres
from tests.s3.server import BUCKET, key_file, s3_server
from tests.unit.store.test_backup import Data
from tests.vectors import data_of_0_3_0


@pytest.fixture
def url() -> Iterator[str]:
    with postgres().schema() as made:
        yield made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """State of 0.3.0."""
    folder = tmp_path / "data"
    folder.mkdir()
    data_of_0_3_0.write(folder)
    return folder


def migrate(source: object, target: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["store", "migrate", str(source), str(target), "--format", "json"])
    said = capsys.readouterr()
    return code, said.out if code == 0 else said.err


def test_state_goes_to_postgresql_and_back_unchanged(
    data: Path, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, there = migrate(data, url, capsys)
    assert code == 0
    back = tmp_path / "back"
    assert migrate(url, back, capsys) == (0, there)
    found = json.loads(there)
    assert found["rows"] == len(data_of_0_3_0.ROWS)
    with closing(SqliteState(back / "state.db")) as store:
        assert store.raw_rows() == data_of_0_3_0.ROWS
        assert store.cluster == found["cluster"]
    for folder in (data, back):
        open_state(None, folder, "node").close()
    (data / "state.db").unlink()
    open_state(url, data, "node").close()


def test_rows_of_0_3_0_are_upgraded_where_they_are(data: Path) -> None:
    with closing(SqliteState(data / "state.db")) as store:
        cluster = store.cluster
        assert store.raw_rows() == data_of_0_3_0.ROWS
        assert list(store.read(("",))) == sorted(map(bytes.decode, data_of_0_3_0.ROWS))
    with closing(SqliteState(data / "state.db")) as store:
        assert store.cluster == cluster
    with closing(sqlite3.connect(data / "state.db")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)


def test_an_upgrade_that_fails_changes_nothing(data: Path) -> None:
    """The disk is full in its middle."""

    class Full(SqliteState):
        def _cluster(self) -> str:
            raise AssertionError("the upgrade did not fail")

        def _upgrade(self, version: int, cluster: str) -> None:
            self._connection.execute("PRAGMA max_page_count = 1")
            super()._upgrade(version, "x" * 100_000)

    with pytest.raises(Exception, match="SQLITE_FULL"):
        Full(data / "state.db")
    with closing(sqlite3.connect(data / "state.db")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
        assert dict(database.execute("SELECT key, row FROM rows")) == data_of_0_3_0.ROWS


def test_a_target_that_holds_state_is_refused(
    data: Path, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = migrate(data, data, capsys)
    assert (code, "already holds state" in said) == (2, True)
    assert migrate(data, url, capsys)[0] == 0
    code, said = migrate(data, url, capsys)
    assert code == 2
    assert "the database already holds state" in said
    with postgres().schema() as other:
        with closing(PostgresState(other, "node")) as store:
            store.transact(Transaction(put=(("a", EpochRow(1)),)))
        code, said = migrate(data, other, capsys)
        assert code == 2
        assert "holds the cluster" in said
        with closing(PostgresState(other, "node")) as store:
            assert store.read(("",)) == {"a": EpochRow(1)}


def test_a_source_without_state_is_refused(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = migrate(tmp_path / "nothing", url, capsys)
    assert code == 2
    assert "has no state" in said
    code, said = migrate(url, tmp_path / "target", capsys)
    assert code == 2
    assert "has no rows of Papaya" in said
    assert not list(tmp_path.iterdir())


def test_servers_that_run_are_refused(
    data: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (data / "server.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        code, said = migrate(data, url, capsys)
    assert code == 2
    assert "a server runs on" in said
    assert migrate(data, url, capsys)[0] == 0
    with closing(PostgresState(url, "server")):
        code, said = migrate(url, tmp_path / "target", capsys)
    assert code == 2
    assert "1 server of the cluster" in said
    assert "stop all servers" in said


def test_a_password_in_the_command_is_refused_and_not_quoted(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = migrate(data, "postgresql://papaya:secret@db.example/papaya", capsys)
    assert code == 2
    assert "passfile" in said
    assert "secret" not in said


def test_a_backup_is_complete_although_another_one_is_started(tmp_path: Path) -> None:
    """Both would copy the blobs of a bucket to the same folder, and each empties it first."""
    source = Data(tmp_path / "data")
    source.state.close()
    named = (source.parameters, source.optimizer)
    with s3_server() as s3, ExitStack() as stack:
        deployment = Deployment(
            data=str(source.folder),
            blobs=f"s3://{BUCKET}/backup",
            blobs_endpoint=s3.endpoint,
            blobs_credentials=str(key_file(tmp_path)),
        )
        first = store_backup._open(stack, deployment, may_create=False)
        assert first["bucket"] is not None
        for key in named:
            first["bucket"].put(key, source.blobs.get(key))
        first["bucket"].path(named[0])
        with pytest.raises(OperatorError, match="another `papaya store` runs"):
            _copy_one(deployment, named[0])
        assert back_up(source.folder, tmp_path / "backup", **first).missing == ()
        stack.close()
        _copy_one(deployment, named[0])


def _copy_one(deployment: Deployment, key: str) -> None:
    """What another backup begins with."""
    with ExitStack() as stack:
        bucket = store_backup._open(stack, deployment, may_create=False)["bucket"]
        assert bucket is not None
        bucket.path(key)
