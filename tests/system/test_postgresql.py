"""State on PostgreSQL, with real processes: from 0.3.0 into a database that is killed, and back.

What was acknowledged, by 0.3.0 or since, is counted exactly once; no task changes hands.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from papaya.messages.storage import FenceRow, fence_key
from papaya.store.clusters import state_file
from papaya.store.postgresql import PostgresState
from tests.chaos.faults import Stalls
from tests.postgresql import Postgres, running
from tests.system.fleet import Book, fleet, some_across_failures
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess, Toml, run_to_the_end
from tests.vectors import data_of_0_3_0

_STEP_S = 240.0
_RESUME_S = 2.0
_TASK, _GOAL = data_of_0_3_0.TASK, 4
_HEARTBEAT_S = 1.5
_SERVER: dict[str, Toml] = {"heartbeat_s": _HEARTBEAT_S}


def migrate(source: object, target: object) -> None:
    ended = run_to_the_end("store", "migrate", str(source), str(target), "--format", "json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["rows"] > 0


def add_servers(installation: Installation, url: str) -> dict[str, ServerProcess]:
    where = installation.reserve()
    shared: dict[str, Toml] = {"coordinators": [where], "state": url}
    return {
        name: installation.add(
            name,
            name.split("-")[0],
            deployment=shared | ({"servers": where} if name == "coordinator" else {}),
            server=_SERVER,
        )
        for name in ("coordinator", "selector", "aggregator-1", "aggregator-2")
    }


def _pids(servers: dict[str, ServerProcess]) -> list[int]:
    return [server.process.pid for server in servers.values()]


def fence(url: str) -> FenceRow:
    with closing(PostgresState(url, "the test")) as store:
        row = store.read((fence_key(_TASK),))[fence_key(_TASK)]
    assert isinstance(row, FenceRow)
    return row


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.soak)])
def test_the_database_is_killed_under_traffic(tmp_path: Path, kills: int) -> None:
    with running() as database, Installation(tmp_path) as installation:
        installation.data.mkdir()
        data_of_0_3_0.write(installation.data, data_of_0_3_0.rows_at(time.time()))
        url = database.url()
        migrate(installation.data, url)
        state_file(installation.data).rename(tmp_path / "state-of-0.3.0")
        servers = add_servers(installation, url)
        with ThreadPoolExecutor() as threads:
            list(threads.map(ServerProcess.start, servers.values()))
        with Stalls(_HEARTBEAT_S, lambda: _pids(servers)) as stalls:
            book, resumed_s, has_moved = asyncio.run(
                _kill_again_and_again(installation, database, servers, kills)
            )
        # A server that waits for a core may look dead; otherwise no task changes hands.
        assert not has_moved or stalls.is_long
        for server in reversed(servers.values()):
            assert server.stop() == 0
        if kills > 2:  # a busy machine may be slow, but not each time
            assert min(resumed_s) < _RESUME_S, resumed_s
        migrate(url, installation.data)
        books = Books(installation.data, _TASK)
        books.check([*data_of_0_3_0.ACKNOWLEDGED, *book.acknowledged])
        assert books.newest >= 1 + kills


async def _kill_again_and_again(
    installation: Installation,
    database: Postgres,
    servers: dict[str, ServerProcess],
    kills: int,
) -> tuple[Book, list[float], bool]:
    """The book, the seconds to the first update after each kill, and whether the task has moved."""
    token = installation.secret("device.token")
    urls = [f"http://{servers['selector'].addresses['devices']}"]
    resumed_s = []
    devices = installation.folder / "devices"
    async with fleet(devices, urls, token, 14, some_across_failures) as flying:
        book = flying.book
        await _more(book, 2 * _GOAL)
        before = await asyncio.to_thread(fence, database.url())
        for turn in range(kills):
            await book.until(lambda: bool(book.in_mid_upload), _STEP_S, "an upload is half-way")
            database.kill()
            book.next_era()
            if turn == 1:  # away until everybody has noticed
                for server in servers.values():
                    await asyncio.to_thread(server.until_logged, "; retrying; hint", _STEP_S)
            database.begin_to_start()
            ready_at = await asyncio.to_thread(database.until_ready)
            await _more(book, 1)
            resumed_s.append(time.monotonic() - ready_at)
            await _more(book, _GOAL)
        has_moved = await asyncio.to_thread(fence, database.url()) != before
        await flying.go_home(_STEP_S)
    return book, resumed_s, has_moved


async def _more(book: Book, count: int) -> None:
    wanted = len(book.acknowledged) + count
    await book.until(lambda: len(book.acknowledged) >= wanted, _STEP_S, f"{count} more are counted")
