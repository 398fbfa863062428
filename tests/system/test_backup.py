"""A backup while devices train, more training after it, and a restoration: a new generation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from papaya.config import AsyncFL, OptimizerConfig, StopRule, TaskConfig
from papaya.messages.base import SessionId
from papaya.store.backup import JUMP
from tests.postgresql import postgres
from tests.s3.server import BUCKET, key_file, s3_server
from tests.system.admin import Admin
from tests.system.fleet import Fleet, briefly, fleet
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess, Toml, run_to_the_end

_STEP_S = 240.0
TASK = TaskConfig(
    task="task",
    concurrency=8,
    model_length=48,
    regime=AsyncFL(aggregation_goal=4),
    optimizer=OptimizerConfig(kind="fedadam", rate=0.1),
    participation_gap_s=0.0,
    commit_interval_s=0.02,
    keep_versions=3,
    stop=StopRule(versions=500_000),
)


def store(*arguments: object) -> Any:
    ended = run_to_the_end("store", *map(str, arguments), "--format", "json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


async def counted(flying: Fleet, more: int) -> None:
    book = flying.book
    wanted = len(book.acknowledged) + more
    await book.until(lambda: len(book.acknowledged) >= wanted, _STEP_S, f"{wanted} counted")


def until_newer(admin: Admin, backup: Path) -> None:
    """An update counts before it is in a version. Of the last twelve, at most eight were on their
    way when the backup was made, so that four make a version after it.
    """
    saved = Books(backup, TASK.task).newest
    admin.until_task(TASK.task, lambda line: line["version"] > saved, _STEP_S)


def refusal(*restore: object) -> str:
    """What a restoration says that must not take place."""
    ended = run_to_the_end("store", "restore", *map(str, restore), "--yes")
    assert ended.returncode == 2
    return ended.stderr


async def train(server: ServerProcess, folder: Path, token: str, *backup: object) -> set[SessionId]:
    """The sessions that were acknowledged. `backup`: make one meanwhile."""
    urls = [f"http://{server.addresses['devices']}"]
    async with fleet(folder, urls, token, 8, briefly) as flying:
        await counted(flying, 8)
        if backup:
            done = await asyncio.to_thread(store, "backup", *backup)
            assert done["missing"] == []
            await counted(flying, 12)
        await flying.go_home(_STEP_S)
        return flying.book.of(TASK.task)


def each_counts_once(found: Books, acknowledged: set[SessionId]) -> None:
    times = found.counted()
    assert acknowledged <= times.keys()
    assert set(times.values()) == {1}


def test_a_backup_under_traffic_is_restored_as_a_new_generation(tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    with Installation(tmp_path) as installation:
        server, data = installation.add().start(), installation.data
        admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        admin.submit(TASK)
        urls = [f"http://{server.addresses['devices']}"]
        token = installation.secret("device.token")

        async def train_across_the_backup() -> None:
            async with fleet(tmp_path / "devices", urls, token, 12, briefly) as flying:
                await counted(flying, 12)
                done = await asyncio.to_thread(store, "backup", backup, "--data", data)
                assert done["missing"] == []
                await counted(flying, 12)

        asyncio.run(train_across_the_backup())
        until_newer(admin, backup)
        assert not store("restore", backup, "--data", data)["restored"]  # a preview
        assert "a server runs on" in refusal(backup, "--data", data)
        server.kill()
        lost = Books(data, TASK.task)

        planned = store("restore", backup, "--data", data)
        assert not planned["restored"]
        assert Books(data, TASK.task).rows == lost.rows
        [[task, saved, head]] = planned["continued"]
        assert (task, planned["missing"], planned["cancelled"]) == (TASK.task, [], [])
        assert saved < lost.newest < head

        store("restore", backup, "--data", data, "--yes")
        restored = Books(data, TASK.task)
        assert restored.newest == head
        assert restored.config.stop.versions == 500_000 + head - saved
        assert restored.counted() == {}
        restored.blobs.get(restored.optimizer.state)
        restored.parameters(head)

        server.start()
        acknowledged = asyncio.run(train(server, tmp_path / "new-devices", token))
        assert server.stop() == 0
        found = Books(data, TASK.task)
        assert found.newest > head > lost.newest + JUMP - 1
        each_counts_once(found, acknowledged)


def test_a_database_and_a_bucket_are_backed_up_and_restored(tmp_path: Path) -> None:
    """Into an empty database and under an empty prefix; the old ones stay as they are."""
    keys = key_file(tmp_path)
    with (
        postgres().schema() as old,
        postgres().schema() as new,
        s3_server() as s3,
        Installation(tmp_path) as installation,
    ):

        def a_server(name: str, state: str, prefix: str) -> ServerProcess:
            places: dict[str, Toml] = {
                "state": state,
                "blobs": f"s3://{BUCKET}/{prefix}",
                "blobs_endpoint": s3.endpoint,
                "blobs_credentials": str(keys),
            }
            return installation.add(name, deployment=places)

        server = a_server("old", old, "old").start()
        token, admin_token = map(installation.secret, ("device.token", "admin.token"))
        Admin(server.addresses["admin"], admin_token).submit(TASK)
        one, two = (("--config", installation.folder / f"{name}.toml") for name in ("old", "new"))

        asyncio.run(train(server, tmp_path / "devices", token, tmp_path / "backup", *one))
        until_newer(Admin(server.addresses["admin"], admin_token), tmp_path / "backup")
        assert server.stop() == 0
        assert "the database already holds state" in refusal(tmp_path / "backup", *one)
        store("backup", tmp_path / "lost", *one)
        lost, saved = Books(tmp_path / "lost", TASK.task), Books(tmp_path / "backup", TASK.task)
        assert lost.newest > saved.newest

        restored = a_server("new", new, "new")
        [[_, version, head]] = store("restore", tmp_path / "backup", *two)["continued"]
        assert version == saved.newest
        store("restore", tmp_path / "backup", *two, "--yes")
        assert "the database already holds state" in refusal(tmp_path / "backup", *two)

        restored.start()
        acknowledged = asyncio.run(train(restored, tmp_path / "new-devices", token))
        assert restored.stop() == 0
        store("backup", tmp_path / "after", *two)
        found = Books(tmp_path / "after", TASK.task)
        assert found.newest > head > lost.newest
        each_counts_once(found, acknowledged)
        assert not (installation.data / "store.cache").exists()
