"""Servers of the last release and of the working tree, replaced one after the other under load."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

import papaya
from papaya.config import AsyncFL, StopRule, TaskConfig
from tests.postgresql import postgres
from tests.system.fleet import Book, fleet, some_across_failures
from tests.system.last_release import LastRelease, unpack_last_release
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess, run_to_the_end
from tests.system.test_postgresql import migrate
from tests.system.test_roles_apart import CONFIG, Apart
from tests.system.test_secure import CONFIG as MASKED
from tests.system.test_secure import SecureBooks, terms_of, trust, trusted_process
from tests.system.test_signed_tasks import SignedWorld

_STEP_S = 240.0
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
        book = _over_an_upgrade(apart, last, CONFIG)
        _check(Books(installation.data, CONFIG.task), book, apart)


@pytest.mark.soak
@pytest.mark.parametrize("is_last_first", [False, True])
def test_state_on_postgresql_is_shared_by_both_versions(
    tmp_path: Path, is_last_first: bool
) -> None:
    """Selectors are replaced first and the coordinator last, or the other way round."""
    last = LastRelease(tmp_path / "last-release")
    with postgres().schema() as state, Installation(tmp_path) as installation:
        apart = Apart(installation, selectors=2, aggregators=2, shared={"state": state})
        book = _over_an_upgrade(apart, last, CONFIG, reverse=is_last_first)
        migrate(state, installation.data)
        _check(Books(installation.data, CONFIG.task), book, apart)


@pytest.mark.soak
@pytest.mark.parametrize("reverse", [False, True])
def test_a_secure_task_goes_on_with_the_tsa_of_the_last_release(
    tmp_path: Path, reverse: bool
) -> None:
    """The TSA is upgraded last: with evidence of software, aggregators of 0.4.0 name their own
    binary in the log, so they need a TSA of their version.
    """
    last = LastRelease(tmp_path / "last-release")
    with (
        trusted_process(tmp_path, last.packages) as tsa,
        Installation(tmp_path) as installation,
    ):
        apart = Apart(installation, selectors=2, aggregators=2, shared={"tsa": tsa})
        book = _over_an_upgrade(apart, last, MASKED, reverse=reverse)
        books = SecureBooks(installation.data, MASKED.task)
        _check(books, book, apart)
        assert books.dropped == []


@pytest.mark.soak
def test_a_secure_task_goes_on_with_a_tsa_of_the_next_version(tmp_path: Path) -> None:
    """Coordinators and selectors are of the last release and are replaced; the TSA is newer."""
    last = LastRelease(tmp_path / "last-release")
    with trusted_process(tmp_path) as tsa, Installation(tmp_path) as installation:
        apart = Apart(installation, selectors=2, aggregators=2, shared={"tsa": tsa})
        book = _over_an_upgrade(apart, last, MASKED, keep=apart.aggregators)
        books = SecureBooks(installation.data, MASKED.task)
        _check(books, book, apart)
        assert books.dropped == []


def test_commands_submit_and_change_tasks_at_a_server_of_the_last_release(tmp_path: Path) -> None:
    """It refuses settings that it does not know, so those with their defaults are not sent."""
    version = unpack_last_release(tmp_path / "last-release")
    with Installation(tmp_path) as installation:
        server = installation.add().start(tmp_path / "last-release")
        assert _version_of(server) == version
        world = SignedWorld(tmp_path, server, installation)
        run = world.task("submit", str(world.program))["task"]
        world.task("update", "opened", "--set", "stop.versions=500", "--set", "client.rate=0.02")
        world.task("renew", "opened")
        refused = world.refused("update", "opened", "--set", "stop.training_hours=2")
        assert "unknown field `training_hours`" in refused
        shown = run_to_the_end("task", "show", run, *world.place, "--format", "json")
        assert shown.returncode == 0, shown.stderr
        # It has the same defaults, so leaving them out changes nothing.
        stored = world.admin.get(f"/admin/tasks/{run}")["config"]
        received = msgspec.convert(stored, TaskConfig)
        assert received == TaskConfig(
            task=run,
            concurrency=12,
            model_length=2,
            regime=AsyncFL(aggregation_goal=6),
            participation_gap_s=0.0,
            stop=StopRule(versions=500),
            requirements=received.requirements,  # which the server has completed
        )


def _over_an_upgrade(
    apart: Apart,
    last: LastRelease,
    config: TaskConfig,
    *,
    reverse: bool = False,
    keep: Sequence[ServerProcess] = (),
) -> Book:
    """Replace each process but those of `keep` by the last release, and then back."""
    apart.start()
    apart.admin().submit(config)
    servers = [apart.coordinator, *apart.aggregators, *apart.selectors]
    servers = [server for server in servers if server not in keep]
    if reverse:
        servers.reverse()
    book = asyncio.run(_replace_all(apart, last, servers, is_secure=config.is_secure))
    assert set(apart.stop().values()) == {0}
    return book


def _check(books: Books, book: Book, apart: Apart) -> None:
    books.check(book.acknowledged)
    assert books.newest >= len(apart.installation.servers)


async def _replace_all(
    apart: Apart, last: LastRelease, servers: Sequence[ServerProcess], *, is_secure: bool
) -> Book:
    installation = apart.installation
    folder, token = installation.folder / "devices", installation.secret("device.token")
    believed = None
    if is_secure:
        believed = await asyncio.to_thread(trust, installation, apart.selectors[-1])
    async with fleet(
        folder,
        apart.urls(),
        token,
        _DEVICES,
        some_across_failures,
        trust=believed,
        terms=terms_of if is_secure else lambda task: None,
    ) as flying:
        book = flying.book
        await _more(book, _GOAL)
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
