"""Servers of the last release and of the working tree, replaced one after the other under load."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path

import papaya
from tests.system.fleet import Book, fleet, some_across_failures
from tests.system.last_release import LastRelease
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess
from tests.system.test_roles_apart import CONFIG, Apart

_STEP_S = 60.0
_GOAL = CONFIG.aggregation_goal
_DEVICES = 14


def test_each_role_is_replaced_by_the_last_release_and_back(tmp_path: Path) -> None:
    """On the way, coordinators, aggregators and selectors of both versions work together: first a
    coordinator of the last release with the newer others, on the way back the other way round.
    """
    last = LastRelease(tmp_path / "last-release")
    assert last.version != papaya.__version__
    with Installation(tmp_path) as installation:
        apart = Apart(installation, selectors=2, aggregators=2)
        apart.start()
        apart.admin().submit(CONFIG)
        book = asyncio.run(_replace_all(apart, last))
        assert set(apart.stop().values()) == {0}
        books = Books(installation.data, CONFIG.task)
        books.check(book.acknowledged)
        assert books.newest >= 2 * len(installation.servers)


async def _replace_all(apart: Apart, last: LastRelease) -> Book:
    folder, token = apart.installation.folder / "devices", apart.installation.secret("device.token")
    async with fleet(folder, apart.urls(), token, _DEVICES, some_across_failures) as flying:
        book = flying.book
        await _more(book, _GOAL)
        servers = [apart.coordinator, *apart.aggregators, *apart.selectors]
        for server in servers:
            await _replace(server, book, last.packages, last.version)
        for server in servers:
            await _replace(server, book, None, papaya.__version__)
        await flying.go_home(_STEP_S)
    assert len(book.across_failures) >= len(servers)
    return book


async def _replace(server: ServerProcess, book: Book, packages: Path | None, version: str) -> None:
    assert await asyncio.to_thread(server.stop) == 0
    book.next_era()
    await asyncio.to_thread(server.start, packages)
    assert await asyncio.to_thread(_version_of, server) == version
    joined = len(book.joined)
    await book.until(lambda: len(book.joined) > joined, _STEP_S, "clients join")
    await _more(book, _GOAL)


async def _more(book: Book, count: int) -> None:
    wanted = len(book.acknowledged) + count
    await book.until(lambda: len(book.acknowledged) >= wanted, _STEP_S, f"{count} more are counted")


def _version_of(server: ServerProcess) -> str:
    connection = http.client.HTTPConnection(server.addresses["admin"], timeout=_STEP_S)
    try:
        connection.request("GET", "/health")
        return str(json.loads(connection.getresponse().read())["papaya"])
    finally:
        connection.close()
