"""Backups: what is missing is listed, and a restoration changes nothing before it is confirmed."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from papaya.aggregator.shards import initial_blobs
from papaya.cli import store_backup
from papaya.config import Evaluated, Requirements, StopRule, TaskConfig
from papaya.errors import OperatorError
from papaya.messages.base import BlobKey
from papaya.messages.storage import (
    BootRow,
    Candidate,
    EpochRow,
    FenceRow,
    LeaderRow,
    OptimizerRow,
    RecordRow,
    RolloutRow,
    TaskRow,
    TaskState,
    TicketKeyRow,
    Transaction,
    VersionRow,
    fence_key,
    optimizer_key,
    record_key,
    rollout_key,
    submission,
    task_key,
    ticket_key_key,
    version_key,
)
from papaya.store import backup
from papaya.store.backup import JUMP, back_up, plan_restore, restore
from papaya.store.blobs import FolderBlobs
from papaya.store.clusters import open_state
from papaya.store.postgresql import PostgresState
from papaya.store.state import SqliteState
from tests.postgresql import postgres
from tests.unit.messages.test_rollout import a_rollout

KEY, NOW = b"k" * 32, 1000.0


class Data:
    """A data folder with one task at version 0, placed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = TaskConfig(task="task", concurrency=4, model_length=3)
        self.state = SqliteState(folder / "state.db")
        self.blobs = FolderBlobs(folder / "blobs")
        initial = initial_blobs(self.config, np.ones(3, np.float32))
        for key, data in initial:
            self.blobs.put(key, data)
        self.parameters, self.optimizer = (key for key, _ in initial)
        self.write(submission(self.config, self.parameters, self.optimizer, NOW))
        self.put("leader", LeaderRow("coordinator", 1.0, 7, 9))
        self.put("epoch", EpochRow(7))
        self.put("boot/server", BootRow(3))
        self.put(fence_key("task"), FenceRow(5, "aggregator", 1.0))
        self.put(ticket_key_key(4), TicketKeyRow(b"old" * 11, NOW))
        (folder / "admin.token").write_text("secret")

    def put(self, key: str, row: object) -> None:
        self.write(Transaction(put=((key, row),)))  # type: ignore[arg-type]

    def write(self, change: Transaction) -> None:
        assert self.state.transact(change) == "committed"


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(tmp_path / "data")


def planned(data: Data, folder: Path) -> backup.RestorePlan:
    return plan_restore(folder, data.folder, NOW, KEY)


def test_every_number_of_a_restored_cluster_is_new(data: Data, tmp_path: Path) -> None:
    data.put(record_key("task", 1), RecordRow(1, data.parameters, (), 1.0))
    back_up(data.folder, tmp_path / "backup")
    # After the backup:
    data.put(version_key("task", 8), VersionRow(8, data.parameters, 9, NOW))
    data.put(fence_key("task"), FenceRow(9, "other", 1.0))
    data.put(ticket_key_key(6), TicketKeyRow(b"new" * 11, NOW))
    data.state.close()
    plan = planned(data, tmp_path / "backup")
    assert plan.continued == (("task", 0, 8 + JUMP),)
    assert plan.rows[fence_key("task")] == FenceRow(9 + JUMP, "", 0.0)
    assert plan.rows["boot/server"] == BootRow(3 + JUMP)
    assert plan.rows["epoch"] == EpochRow(7 + JUMP)
    assert plan.rows["leader"] == LeaderRow("coordinator", 1.0, 7 + JUMP, 9)
    assert plan.rows[optimizer_key("task")] == OptimizerRow(8 + JUMP, data.optimizer, 8 + JUMP)
    assert [row for row in plan.rows.values() if isinstance(row, TicketKeyRow)] == [
        TicketKeyRow(KEY, NOW)
    ]
    assert record_key("task", 1) not in plan.rows


def test_a_restoration_is_previewed_while_a_server_runs(data: Data, tmp_path: Path) -> None:
    back_up(data.folder, tmp_path / "backup")
    data.put(version_key("task", 8), VersionRow(8, data.parameters, 9, NOW))  # is in the WAL
    files = {path: path.read_bytes() for path in data.folder.rglob("*") if path.is_file()}
    with (data.folder / "server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        plan = plan_restore(tmp_path / "backup", data.folder, NOW, KEY, preview=True)
        with pytest.raises(OperatorError, match="a server runs on"):
            planned(data, tmp_path / "backup")
    assert plan.continued == (("task", 0, 8 + JUMP),)
    for path, content in files.items():
        # Readers note in the -shm file what they read.
        assert path.name == "state.db-shm" or path.read_bytes() == content


def test_a_task_makes_as_many_versions_as_before_however_its_rollout_ends(
    data: Data, tmp_path: Path
) -> None:
    """A restored task has higher version numbers. When a rollout ends, it stops at the last version
    of the candidate or of the settings from before.
    """
    now = structs.replace(data.config, stop=StopRule(versions=20))
    candidate = structs.replace(now, stop=StopRule(versions=30))
    rollout = structs.replace(a_rollout(), candidate=candidate, fallback_config=now)
    data.put(task_key("task"), TaskRow(now, candidate=Candidate(candidate, 0.1)))
    data.put(rollout_key("task"), rollout)
    data.state.close()
    back_up(data.folder, tmp_path / "backup")
    rows = planned(data, tmp_path / "backup").rows
    task, restored = rows[task_key("task")], rows[rollout_key("task")]
    assert isinstance(task, TaskRow)
    assert isinstance(restored, RolloutRow)
    assert task.candidate is not None
    assert task.config.stop.versions == JUMP + 20
    assert task.candidate.config.stop.versions == JUMP + 30
    assert restored.candidate.stop.versions == JUMP + 30
    assert restored.fallback_config.stop.versions == JUMP + 20


def test_a_restoration_puts_rows_blobs_and_tokens_back_and_keeps_the_rest(
    data: Data, tmp_path: Path
) -> None:
    assert back_up(data.folder, tmp_path / "backup") == (1, 0, 2, ())
    data.blobs.delete(data.parameters)
    (data.folder / "admin.token").write_text("changed")
    data.state.close()
    before = restore(planned(data, tmp_path / "backup"), NOW)
    assert before is not None
    assert (before / "admin.token").read_text() == "changed"
    assert (data.folder / "admin.token").read_text() == "secret"
    assert FolderBlobs(data.folder / "blobs").get(data.parameters)
    state = SqliteState(data.folder / "state.db")
    assert version_key("task", JUMP) in state.read(("",))
    state.close()


def test_evaluations_are_counted_apart_and_signed_runs_that_continue_are_named(
    data: Data, tmp_path: Path
) -> None:
    def signed(task: str, state: TaskState) -> TaskRow:
        content = task.encode()
        bundle = f"{task}/0/bundle-1-{sha256(content).hexdigest()[:32]}"
        data.blobs.put(bundle, content)
        config = structs.replace(data.config, task=task, requirements=Requirements(bundle=bundle))
        return TaskRow(config, state, name="lora")

    evaluated = Evaluated("task", 0, data.parameters, 4, 10)
    evaluation = structs.replace(data.config, task="task-eval-0", evaluates=evaluated)
    data.put(task_key("task"), signed("task", "running"))
    data.put(task_key("before"), signed("before", "completed"))
    data.put(task_key("task-eval-0"), TaskRow(evaluation, "completed"))
    done = back_up(data.folder, tmp_path / "backup")
    assert (done.tasks, done.evaluations) == (2, 1)
    data.state.close()
    plan = planned(data, tmp_path / "backup")
    assert plan.signed == (("lora", "1", "task"),)
    [line] = [line for line in store_backup._lines(plan) if "signed" in line]
    assert line.startswith("task: signed, revision 1 of lora.")
    assert line.endswith("papaya task update lora")


def test_files_of_processes_are_neither_backed_up_nor_restored(data: Data, tmp_path: Path) -> None:
    names = {"server.lock", "tsa-child.pid", "tsa.pid"}
    for name in names:
        (data.folder / name).write_text("1\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(data.folder / "tsa.sock"))
    back_up(data.folder, tmp_path / "backup")
    data.state.close()

    def found(folder: Path) -> set[str]:
        return {path.name for path in folder.iterdir()} & (names | {"tsa.sock"})

    assert found(tmp_path / "backup") == set()
    (tmp_path / "backup" / "tsa-child.pid").write_text("1\n")  # earlier versions copied it
    restore(planned(data, tmp_path / "backup"), NOW)
    assert found(data.folder) == set()


def test_tokens_and_keys_are_synced_before_a_backup_or_a_restoration_is_complete(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill keeps the page cache; only the calls show what a power loss would leave."""
    (data.folder / "log" / "tile").mkdir(parents=True)
    (data.folder / "log" / "tile" / "000").write_text("entries")
    data.state.close()
    synced: list[str] = []
    fsync = os.fsync

    def recorded(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)

    def missing(folder: Path) -> list[str]:
        places = ("", "admin.token", "log", "log/tile", "log/tile/000")
        return [place for place in places if str(folder / place) not in synced]

    back_up(data.folder, tmp_path / "backup")
    assert missing(tmp_path / "backup") == []
    restore(planned(data, tmp_path / "backup"), NOW)
    assert missing(tmp_path / "data.restoring") == []


def test_a_blob_that_is_deleted_during_the_backup_leads_to_another_snapshot(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, deleted = backup._copy_blob, [data.optimizer]
    [(_, content)] = initial_blobs(data.config, np.zeros(3, np.float32))[1:]
    later = data.optimizer.replace("task/0/optimizer-0", "task/1/optimizer-0")

    def meanwhile(source: FolderBlobs, copies: FolderBlobs, key: BlobKey) -> None:
        if deleted:
            data.blobs.put(later, content)
            data.put(optimizer_key("task"), OptimizerRow(0, later))
            data.blobs.delete(deleted.pop())
        copy(source, copies, key)

    monkeypatch.setattr(backup, "_copy_blob", meanwhile)
    assert back_up(data.folder, tmp_path / "backup").missing == ()
    rows = backup.read_rows(tmp_path / "backup" / "state.db")
    assert rows[optimizer_key("task")] == OptimizerRow(0, later)


def test_missing_blobs_are_listed_and_their_tasks_cancelled(data: Data, tmp_path: Path) -> None:
    data.blobs.delete(data.optimizer)
    assert back_up(data.folder, tmp_path / "backup").missing == (data.optimizer,)
    data.state.close()
    plan = planned(data, tmp_path / "backup")
    assert plan.missing == (data.optimizer,)
    assert plan.continued == ()
    [(task, why)] = plan.cancelled
    assert task == "task"
    assert data.optimizer in why
    row = plan.rows[task_key("task")]
    assert isinstance(row, TaskRow)
    assert row.state == "cancelled"


def test_a_version_without_its_blob_is_forgotten(data: Data, tmp_path: Path) -> None:
    data.put(version_key("task", 1), VersionRow(1, data.parameters, 5, NOW))
    data.put(optimizer_key("task"), OptimizerRow(1, data.optimizer))
    lost = f"task/0/version-0-{'0' * 32}"
    data.put(version_key("task", 0), VersionRow(0, lost, 0, NOW))
    back_up(data.folder, tmp_path / "backup")
    data.state.close()
    plan = planned(data, tmp_path / "backup")
    assert plan.continued == (("task", 1, 1 + JUMP),)
    assert version_key("task", 0) not in plan.rows
    assert version_key("task", 1) in plan.rows


def test_a_damaged_blob_is_not_backed_up(data: Data, tmp_path: Path) -> None:
    path = data.blobs.path(data.parameters)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(OperatorError, match="damaged"):
        back_up(data.folder, tmp_path / "backup")
    assert not (tmp_path / "backup").exists(), "the same command can be repeated"


def test_a_backup_that_was_killed_is_not_restored(data: Data, tmp_path: Path) -> None:
    back_up(data.folder, tmp_path / "backup")
    (tmp_path / "backup" / "complete").unlink()  # it is written last
    data.state.close()
    with pytest.raises(OperatorError, match="not a complete backup"):
        planned(data, tmp_path / "backup")
    with pytest.raises(OperatorError, match="exists already, and is not a complete backup"):
        back_up(data.folder, tmp_path / "backup")


def test_a_backup_needs_a_data_folder_and_a_new_place(data: Data, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"has no state\.db"):
        back_up(tmp_path / "nothing", tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    with pytest.raises(OperatorError, match="exists already"):
        back_up(data.folder, data.folder)


def test_a_backup_never_writes_into_the_folder_of_another(data: Data, tmp_path: Path) -> None:
    def contents() -> dict[Path, bytes]:
        files = (path for path in (tmp_path / "backup").rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files}

    back_up(data.folder, tmp_path / "backup")
    before = contents()
    with pytest.raises(OperatorError, match=r"backup exists already\n"):
        back_up(data.folder, tmp_path / "backup")
    assert contents() == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(OperatorError, match="exists already, and is not a complete backup"):
        back_up(data.folder, tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_restored_cluster_keeps_its_id(data: Data, tmp_path: Path) -> None:
    """Otherwise its folder and its bucket would belong to another cluster."""
    data.state.close()
    opened = open_state(None, data.folder, "server")
    opened.close()
    back_up(data.folder, tmp_path / "backup")
    restore(planned(data, tmp_path / "backup"), NOW)
    reopened = open_state(None, data.folder, "server")
    reopened.close()
    assert reopened.cluster == opened.cluster


def test_a_backup_without_any_blob_is_refused(data: Data, tmp_path: Path) -> None:
    """They are in a bucket, and only the configuration says where."""
    for key in (data.parameters, data.optimizer):
        data.blobs.delete(key)
    with pytest.raises(OperatorError, match="none of the 2 blobs was found") as refused:
        back_up(data.folder, tmp_path / "backup")
    assert "--config" in refused.value.hint
    assert not (tmp_path / "backup").exists()


def test_a_database_is_backed_up_with_the_folder_of_its_cluster(data: Data, tmp_path: Path) -> None:
    """Another folder has other tokens, or none, and the restored servers would be refused."""
    with postgres().schema() as url, closing(PostgresState(url, "test")) as database:
        database.fill(data.state.raw_rows())
        for found in ("no cluster", "another"):
            with pytest.raises(OperatorError, match=f"belongs to {found}, the database to"):
                back_up(data.folder, tmp_path / "backup", database=database)
            assert not (tmp_path / "backup").exists()
            (data.folder / "cluster.id").write_text("another\n", encoding="ascii")
        (data.folder / "cluster.id").write_text(database.cluster, encoding="ascii")
        assert back_up(data.folder, tmp_path / "backup", database=database) == (1, 0, 2, ())


def test_nothing_is_restored_into_a_database_while_a_server_runs(
    data: Data, tmp_path: Path
) -> None:
    """Filled once, it would be refused in the next attempt."""
    back_up(data.folder, tmp_path / "backup")
    plan = planned(data, tmp_path / "backup")
    with (
        postgres().schema() as url,
        closing(PostgresState(url, "test")) as database,
        (data.folder / "server.lock").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OperatorError, match="a server runs on"):
            restore(plan, NOW, database=database)
        assert database.raw_rows() == {}
