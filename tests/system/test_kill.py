"""The server is killed in mid-upload, again and again: what was acknowledged counts exactly once.

All roles in one process, both regimes and a median at once, devices that go on through every
failure. Each kill waits for something to happen (so many chunks acknowledged, an upload half-way,
an acknowledgement lost on its way), never for time to pass.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from papaya.config import Aggregation, AsyncFL, OptimizerConfig, SyncFL, TaskConfig, Weighting
from tests.system.admin import Admin
from tests.system.fleet import Book, fleet, some_across_failures
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess

_LENGTH = 48  # 12 chunks of 16 bytes
_DEVICES = 23
_STEP_S = 240.0

_FEDAVG = OptimizerConfig(kind="fedavg", rate=1.0)
ASYNC = TaskConfig(
    task="async-task",
    concurrency=8,
    model_length=_LENGTH,
    regime=AsyncFL(aggregation_goal=4),
    optimizer=_FEDAVG,
    participation_gap_s=0.0,
    commit_interval_s=0.02,
    keep_versions=100_000,
    training_timeout_s=3600.0,
)
SYNC = TaskConfig(
    task="sync-task",
    concurrency=10,
    model_length=_LENGTH,
    regime=SyncFL(over_selection=0.25),
    optimizer=_FEDAVG,
    participation_gap_s=0.0,
    commit_interval_s=0.02,
    keep_versions=100_000,
    training_timeout_s=3600.0,
)


MEDIAN = structs.replace(
    ASYNC,
    task="median-task",
    concurrency=5,
    regime=AsyncFL(aggregation_goal=3),
    aggregation=Aggregation("median"),
    weighting=Weighting("equal"),
)
TASKS = (ASYNC, SYNC, MEDIAN)


def test_ten_kills_in_mid_upload_lose_and_double_nothing(tmp_path: Path) -> None:
    kill_and_count(tmp_path, kills=10)


@pytest.mark.soak
def test_a_hundred_kills_in_mid_upload_lose_and_double_nothing(tmp_path: Path) -> None:
    kill_and_count(tmp_path, kills=100)


def kill_and_count(folder: Path, kills: int) -> None:
    with Installation(folder) as installation:
        server = installation.add().start()
        admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        for config in TASKS:
            admin.submit(config)
        book = asyncio.run(_kill_again_and_again(installation, server, kills))
        assert server.stop() == 0
        for config in TASKS:
            books = Books(installation.data, config.task)
            books.check(book.of(config.task))
            assert books.newest >= 1, f"{config.task} made no version; {book}"
        assert len(book.across_failures) >= kills, f"too few came through a failure: {book}"


async def _kill_again_and_again(
    installation: Installation, server: ServerProcess, kills: int
) -> Book:
    urls = [f"http://{server.addresses['devices']}"]
    token = installation.secret("device.token")
    devices = installation.folder / "devices"
    async with fleet(devices, urls, token, _DEVICES, some_across_failures) as flying:
        book = flying.book
        for kill in range(kills):
            await _until_a_bad_moment(book, kill)
            server.kill()
            book.next_era()
            await asyncio.to_thread(server.start)
        book.last_era()
        before = {config.task: len(book.of(config.task)) for config in TASKS}
        await book.until(
            lambda: all(
                len(book.of(config.task)) >= before[config.task] + config.aggregation_goal
                for config in TASKS
            ),
            _STEP_S,
            "a version of each task after the last failure",
        )
        await flying.go_home(_STEP_S)
    return book


async def _until_a_bad_moment(book: Book, kill: int) -> None:
    """In mid-upload; every second time just after an acknowledgement was lost on its way, so that
    its client will ask a server which knows no more than the rows; every third time after new
    clients have come, because until then the adopted ones are alone.
    """
    chunks = book.chunks + 20 + 7 * (kill % 5)
    counted = len(book.acknowledged) + (ASYNC.aggregation_goal if kill % 3 == 0 else 0)
    await book.until(
        lambda: (
            book.chunks >= chunks and len(book.acknowledged) >= counted and bool(book.in_mid_upload)
        ),
        _STEP_S,
        f"{chunks} chunks, {counted} counted, and an upload that is half-way",
    )
    if kill % 2 == 1:
        book.to_lose, lost = 1, book.lost
        await book.until(lambda: book.lost > lost, _STEP_S, "an acknowledgement is lost")
