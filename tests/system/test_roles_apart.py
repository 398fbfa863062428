"""Each role in a process of its own: whichever is killed, clients go on and count exactly once."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random

import pytest

from papaya.config import AsyncFL, OptimizerConfig, TaskConfig
from papaya.store.clusters import state_file
from tests.chaos.faults import Stalls
from tests.system.admin import Admin
from tests.system.fleet import Book, briefly, fleet, some_across_failures
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess, Toml, run_to_the_end
from tests.system.tls import make_certificates

_STEP_S = 240.0
_LONG_HEARTBEAT_S = 10.0  # a session ends after three without a request
_POLL_S = 0.05
_GOAL = 4
CONFIG = TaskConfig(
    task="apart",
    concurrency=8,
    model_length=48,
    regime=AsyncFL(aggregation_goal=_GOAL),
    optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
    participation_gap_s=0.0,
    commit_interval_s=0.02,
    keep_versions=100_000,
    training_timeout_s=3600.0,
)


# A successor adopts clients for three heartbeats.
_HEARTBEAT_S = 0.8
_SERVER: dict[str, Toml] = {"heartbeat_s": _HEARTBEAT_S}
_MOST_KILLS = 5


def url(selector: ServerProcess, scheme: str = "http") -> str:
    return f"{scheme}://{selector.addresses['devices']}"


class Apart:
    """As many coordinators, selectors and aggregators as asked for."""

    def __init__(
        self,
        installation: Installation,
        selectors: int,
        aggregators: int,
        shared: Mapping[str, Toml] | None = None,
        coordinators: int = 1,
        server: Mapping[str, Toml] | None = None,
        direct: str = "",
    ) -> None:
        """`direct`: the scheme at which devices may upload to aggregators; empty: they may not."""
        self.installation = installation
        self._server = server or _SERVER
        candidates = [installation.reserve() for _ in range(coordinators)]
        self._shared: dict[str, Toml] = {"coordinators": candidates, **(shared or {})}
        self.coordinators = [
            self._add("coordinator", i, servers=where) for i, where in enumerate(candidates)
        ]
        self.coordinator = self.coordinators[0]
        self.upload_urls = [
            f"{direct}://{installation.reserve()}" if direct else "" for _ in range(aggregators)
        ]
        self.selectors = [self._add("selector", i, **self._door(i)) for i in range(selectors)]
        self.aggregators = [
            self._add("aggregator", i, **self._uploads(url))
            for i, url in enumerate(self.upload_urls)
        ]

    def _door(self, number: int) -> dict[str, Toml]:
        """Settings of one selector."""
        return {}

    def _uploads(self, url: str) -> dict[str, Toml]:
        """The last release knows no `upload_url`, so it is named only if there is one."""
        return {"upload_url": url, "devices": url.rpartition("/")[2]} if url else {}

    def _add(self, role: str, number: int = 0, **own: Toml) -> ServerProcess:
        deployment = {**self._shared, **own}
        name = f"{role}-{number}"
        return self.installation.add(name, role, deployment=deployment, server=self._server)

    def start(self) -> None:
        """All at once, on a folder that is empty: nobody comes first."""
        with ThreadPoolExecutor() as threads:
            list(threads.map(ServerProcess.start, self.installation.servers))

    def admin(self, tls: ssl.SSLContext | None = None) -> Admin:
        token = self.installation.secret("admin.token")
        return Admin(self.coordinator.addresses["admin"], token, tls)

    def leader(self) -> ServerProcess:
        """The coordinator that leads, by its own word; there is at most one."""
        ends_at = time.monotonic() + _STEP_S
        while time.monotonic() < ends_at:
            found = [(self._epoch(each), each) for each in self.coordinators if each.is_running]
            leading = sorted((epoch, each.name, each) for epoch, each in found if epoch)
            if len(leading) == 1:
                return leading[0][2]
            if leading:  # the lead may have changed between the two answers
                epoch, _, deposed = leading[0]
                assert self._epoch(deposed) != epoch, "two coordinators say that they lead"
            time.sleep(_POLL_S)
        raise AssertionError(f"nobody leads after {_STEP_S:g} s")

    def _epoch(self, coordinator: ServerProcess) -> int:
        """The epoch that it leads; 0 if it does not."""
        token = self.installation.secret("admin.token")
        status = Admin(coordinator.addresses["admin"], token).get("/admin/status")
        return int(status["epoch"]) if status["leads"] else 0

    def holder(self) -> ServerProcess:
        """The aggregator that holds the task, by the fence row."""
        node = self.admin().until_task(CONFIG.task, lambda line: line["holder"], _STEP_S)["holder"]
        return self.aggregator(node)

    def aggregator(self, node: str) -> ServerProcess:
        [found] = [a for a in self.aggregators if node == self._node(a)]
        return found

    def until_moved(self, holder: ServerProcess) -> None:
        """Until another aggregator holds the task. Answers that were on their way when the holder
        was killed may arrive before.
        """
        node = self._node(holder)
        self.admin().until_task(CONFIG.task, lambda line: line["holder"] not in ("", node), _STEP_S)

    def _node(self, aggregator: ServerProcess) -> str:
        return f"aggregator@{aggregator.addresses['servers']}"

    def urls(self, scheme: str = "http") -> list[str]:
        return [url(selector, scheme) for selector in self.selectors]

    def stop(self) -> dict[str, int]:
        with ThreadPoolExecutor() as threads:
            running = [server for server in self.installation.servers if server.is_running]
            codes = threads.map(ServerProcess.stop, running)
            return dict(zip([server.name for server in running], codes, strict=True))


def test_any_role_may_be_killed(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        apart = Apart(installation, selectors=2, aggregators=2)
        apart.start()
        apart.admin().submit(CONFIG)
        book = asyncio.run(_kill_one_after_the_other(apart))
        assert set(apart.stop().values()) == {0}
        books = Books(installation.data, CONFIG.task)
        books.check(book.acknowledged)
        assert books.newest >= 4


async def _kill_one_after_the_other(apart: Apart) -> Book:
    folder, token = apart.installation.folder / "devices", apart.installation.secret("device.token")
    async with fleet(folder, apart.urls(), token, 14, some_across_failures) as flying:
        book = flying.book
        await _more(book, _GOAL)
        assert set(book.asked) == set(apart.urls()), "devices use both selectors"
        await _kill_the_holder(apart, book)
        await _freeze_the_holder(apart, book)
        await _kill_the_coordinator(apart, book)
        await _kill_a_selector(apart, book)
        await flying.go_home(_STEP_S)
    return book


async def _kill_the_holder(apart: Apart, book: Book) -> None:
    """The successor counts clients of the holder that was killed. On a slow machine all of them may
    come too late; then this kills the successor too, and looks at the next one.
    """
    for _ in range(_MOST_KILLS):
        before, era = len(book.across_failures), book.era
        with Stalls(_HEARTBEAT_S, lambda: _pids(apart)) as stalls:
            holder = await asyncio.to_thread(apart.holder)
            await _until_mid_upload(book)
            holder.kill()
            book.next_era()
            await asyncio.to_thread(apart.until_moved, holder)
            await book.until(partial(_are_over, book, era), _STEP_S, "earlier clients are told")
        await _more(book, _GOAL)
        await asyncio.to_thread(holder.start)
        if len(book.across_failures) > before:
            return
        assert stalls.is_long, "no adopted client was counted"
    raise AssertionError(f"no adopted client was counted after {_MOST_KILLS} kills")


def _are_over(book: Book, era: int) -> bool:
    """Whether all clients that joined up to this era know how their participation ended."""
    return all(session in book.ended for session, at in book.joined.items() if at <= era)


async def _freeze_the_holder(apart: Apart, book: Book) -> None:
    """It comes back when another holds the task, and finds that it may write nothing."""
    holder = await asyncio.to_thread(apart.holder)
    await _until_mid_upload(book)
    await asyncio.to_thread(_freeze_between_commits, holder, state_file(apart.installation.data))
    book.next_era()
    await asyncio.to_thread(apart.until_moved, holder)
    await _more(book, 2 * _GOAL)
    holder.send(signal.SIGCONT)
    await _more(book, 2 * _GOAL)


def _freeze_between_commits(server: ServerProcess, state: Path) -> None:
    """In the middle of a commit it would hold the lock of the database until it goes on."""
    while True:
        server.send(signal.SIGSTOP)
        with closing(sqlite3.connect(state, timeout=1.0, isolation_level=None)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
                database.execute("ROLLBACK")
                return
            except sqlite3.OperationalError:
                server.send(signal.SIGCONT)


async def _kill_the_coordinator(apart: Apart, book: Book) -> None:
    """Who takes part goes on without it; who wants to waits until it is back."""
    await _until_mid_upload(book)
    apart.coordinator.kill()
    book.next_era()
    await _more(book, 1)
    await asyncio.to_thread(apart.coordinator.start)
    joined = len(book.joined)
    await book.until(lambda: len(book.joined) > joined, _STEP_S, "new clients are assigned")
    await _more(book, _GOAL)


async def _kill_a_selector(apart: Apart, book: Book) -> None:
    gone, other = apart.selectors
    await _until_mid_upload(book)
    gone.kill()
    book.next_era()
    joined, asked = len(book.joined), book.asked[url(other)]
    await book.until(lambda: len(book.joined) > joined, _STEP_S, "new clients are assigned")
    await _more(book, _GOAL)
    assert book.asked[url(other)] > asked


def _pids(apart: Apart) -> list[int]:
    return [each.process.pid for each in apart.installation.servers if each.is_running]


def _has_joined_more(book: Book, than: int) -> bool:
    return len(book.joined) > than


async def _more(book: Book, count: int) -> None:
    await book.more(count, _STEP_S)


async def _until_mid_upload(book: Book) -> None:
    chunks = book.chunks + 10
    await book.until(
        lambda: book.chunks >= chunks and bool(book.in_mid_upload), _STEP_S, "an upload half-way"
    )


def test_another_coordinator_leads_when_the_leader_is_killed(tmp_path: Path) -> None:
    """The standby takes over by itself; the killed one comes back as the standby."""
    with Installation(tmp_path) as installation:
        apart = Apart(installation, selectors=1, aggregators=1, coordinators=2)
        apart.start()
        Admin(apart.leader().addresses["admin"], installation.secret("admin.token")).submit(CONFIG)
        book = asyncio.run(_change_the_leader_twice(apart))
        assert set(apart.stop().values()) == {0}
        books = Books(installation.data, CONFIG.task)
        books.check(book.acknowledged)
        assert books.newest >= 3


async def _change_the_leader_twice(apart: Apart) -> Book:
    folder, token = apart.installation.folder / "devices", apart.installation.secret("device.token")
    async with fleet(folder, apart.urls(), token, 14, briefly) as flying:
        book = flying.book
        await _more(book, _GOAL)
        for _ in range(2):
            killed = await asyncio.to_thread(apart.leader)
            killed.kill()
            book.next_era()
            successor = await asyncio.to_thread(apart.leader)
            assert successor is not killed
            joined = len(book.joined)
            await book.until(partial(_has_joined_more, book, joined), _STEP_S, "clients join")
            await _more(book, _GOAL)
            await asyncio.to_thread(killed.start)
        await flying.go_home(_STEP_S)
    return book


def test_all_listeners_with_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    with Installation(tmp_path) as installation:
        apart = Apart(installation, selectors=1, aggregators=1, shared=made.listeners())
        apart.start()
        tls = ssl.create_default_context(cafile=str(made.authority))
        apart.admin(tls).submit(CONFIG)
        book = asyncio.run(_count_some(apart, made.authority))
        assert set(apart.stop().values()) == {0}
        books = Books(installation.data, CONFIG.task)
        books.check(book.acknowledged)
        assert books.newest >= 2


async def _count_some(apart: Apart, authority: Path) -> Book:
    folder, token = apart.installation.folder / "devices", apart.installation.secret("device.token")
    urls = apart.urls("https")
    async with fleet(folder, urls, token, 10, briefly, certificates=authority) as flying:
        await _more(flying.book, 3 * _GOAL)
        await flying.go_home(_STEP_S)
    return flying.book


def test_a_clean_stop_of_an_aggregator_or_a_selector_costs_no_client_its_work(
    tmp_path: Path,
) -> None:
    with Installation(tmp_path) as installation:
        # Long enough to hand over, and for clients not to count as silent on a slow machine: a
        # device that asks a stopped selector first needs more time than one request.
        shared: dict[str, Toml] = {"drain_s": _STEP_S}
        calm: dict[str, Toml] = {"heartbeat_s": _LONG_HEARTBEAT_S}
        apart = Apart(installation, selectors=2, aggregators=2, shared=shared, server=calm)
        apart.start()
        apart.admin().submit(CONFIG)
        book = asyncio.run(_restart_cleanly(apart))
        assert set(apart.stop().values()) == {0}
        assert set(book.endings()) == {"counted"}
        assert len(book.across_failures) >= 2
        books = Books(installation.data, CONFIG.task)
        books.check(book.acknowledged)


async def _restart_cleanly(apart: Apart) -> Book:
    folder, token = apart.installation.folder / "devices", apart.installation.secret("device.token")
    async with fleet(folder, apart.urls(), token, 14, some_across_failures) as flying:
        book = flying.book
        await _more(book, _GOAL)
        for _ in range(2):
            holder = await asyncio.to_thread(apart.holder)
            await _until_mid_upload(book)
            assert await asyncio.to_thread(holder.stop) == 0
            assert await asyncio.to_thread(apart.holder) is not holder, "handed over before it ends"
            book.next_era()
            await asyncio.to_thread(holder.start)
            await _more(book, 2 * _GOAL)
        for selector in apart.selectors:
            assert await asyncio.to_thread(selector.stop) == 0
            await _more(book, 1)
            await asyncio.to_thread(selector.start)
        await flying.go_home(_STEP_S)
    return book


def test_every_role_answers_status(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        apart = Apart(installation, selectors=1, aggregators=1, coordinators=2)
        apart.start()
        apart.leader()
        token = installation.secret("admin.token")
        for server in installation.servers:
            _until_status(server, token, 0, server.name.partition("-")[0])
        for coordinator in apart.coordinators:
            coordinator.kill()
        for server in (*apart.selectors, *apart.aggregators):
            _until_status(server, token, 1, "no leader sends orders to this server")


def _until_status(server: ServerProcess, token: str, code: int, text: str) -> None:
    """`papaya status` exits with this code and says this, soon. Asking the API costs less."""
    admin = Admin(server.addresses["admin"], token)
    admin.until("/admin/status", lambda found: found["is_led"] == (code == 0), _STEP_S)
    token, ends_at = str(server.data / "admin.token"), time.monotonic() + _STEP_S
    address = f"http://{server.addresses['admin']}"
    while True:
        done = run_to_the_end("status", "--admin", address, "--token-file", token)
        if done.returncode == code and text in done.stdout + done.stderr:
            return
        assert time.monotonic() < ends_at, f"{server.name}: {done}"


@pytest.mark.soak
def test_minutes_of_kills_of_any_role(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        apart = Apart(installation, selectors=2, aggregators=3)
        apart.start()
        apart.admin().submit(CONFIG)
        book = asyncio.run(_kill_at_random(apart, kills=60))
        assert set(apart.stop().values()) == {0}
        books = Books(installation.data, CONFIG.task)
        books.check(book.acknowledged)
        assert len(book.across_failures) >= 60


async def _kill_at_random(apart: Apart, kills: int) -> Book:
    folder, token = apart.installation.folder / "devices", apart.installation.secret("device.token")
    rng = Random(1)
    async with fleet(folder, apart.urls(), token, 20, some_across_failures) as flying:
        book = flying.book
        for _ in range(kills):
            await _until_mid_upload(book)
            victims = rng.sample(apart.installation.servers, rng.choice((1, 1, 2)))
            await _hurt(book, victims, state_file(apart.installation.data), rng)
        book.last_era()
        await _more(book, 2 * _GOAL)
        await flying.go_home(_STEP_S)
    return book


async def _hurt(book: Book, victims: list[ServerProcess], state: Path, rng: Random) -> None:
    """Each is killed or frozen, and comes back."""
    frozen = [server for server in victims if rng.random() < 0.5]
    for server in victims:
        if server in frozen:
            await asyncio.to_thread(_freeze_between_commits, server, state)
        else:
            server.kill()
    book.next_era()
    for server in victims:
        if server not in frozen:
            await asyncio.to_thread(server.start)
    if frozen and len(victims) == 1:
        await _more(book, 1)  # without any one of them the others go on; without two, maybe not
    for server in frozen:
        server.send(signal.SIGCONT)
