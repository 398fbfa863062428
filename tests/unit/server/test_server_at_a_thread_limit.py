"""A server that can start no more threads: a pids cgroup, TasksMax or ulimit -u is full."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import cast

import pytest

from papaya.config import Deployment
from papaya.messages.events import TaskHalted
from papaya.server import public_log, upkeep
from papaya.server import server as server_module
from papaya.server.logs import log
from papaya.server.node_names import NodeNames
from papaya.server.resources import Resources
from papaya.server.server import Server
from papaya.server.tsa_fleet import TsaFleet
from papaya.server.upkeep import Upkeep
from papaya.server.webhooks import Webhook
from papaya.store.s3_blobs import S3Blobs

PATIENCE_S = 120.0


class ThreadLimit:
    """Once `reach` has been called, no thread starts, and no thread of the executor is idle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = 0
        self._is_reached = False
        self._may_go_on = Event()
        start = Thread.start

        def start_below_limit(thread: Thread) -> None:
            if self._is_reached:
                self.refused += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(Thread, "start", start_below_limit)

    def reach(self) -> None:
        self._is_reached = True
        self._may_go_on.clear()
        loop = asyncio.get_running_loop()
        with suppress(RuntimeError):
            for _ in range(64):  # more threads than an executor has
                loop.run_in_executor(None, self._may_go_on.wait)
        self.refused = 0

    def end(self) -> None:
        self._is_reached = False
        self._may_go_on.set()


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> ThreadLimit:
    return ThreadLimit(monkeypatch)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def on_a_server(
    folder: Path, limit: ThreadLimit, test: Callable[[Server], Awaitable[None]], **changes: object
) -> Server:
    anywhere = dict.fromkeys(("devices", "admin", "servers"), "127.0.0.1:0")
    deployment = Deployment(data=str(folder / "data"), **anywhere, **changes)  # type: ignore[arg-type]

    async def run() -> Server:
        server = Server(deployment)
        await server.start()
        try:
            await test(server)
            await asyncio.wait_for(server.stop(), PATIENCE_S)
        finally:
            limit.end()
        return server

    return asyncio.run(run())


def test_a_server_ends_its_tsas_and_closes_everything(
    tmp_path: Path, limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor queues a call before it tries to start a thread. The queued call is not made when
    one of its threads becomes free.
    """
    closed: list[TsaFleet] = []
    close = TsaFleet.close

    def count_and_close(fleet: TsaFleet) -> None:
        closed.append(fleet)
        close(fleet)

    monkeypatch.setattr(TsaFleet, "close", count_and_close)

    async def test(server: Server) -> None:
        limit.reach()

    server = on_a_server(tmp_path, limit, test)
    assert closed == [server._tsas]
    with (tmp_path / "data" / "server.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_server_goes_on_if_it_cannot_call_a_webhook(
    tmp_path: Path, limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[bytes] = []

    def post(hook: Webhook, body: bytes, delivery: str) -> int:
        posted.append(body)
        return 200

    monkeypatch.setattr(Webhook, "_post", post)
    monkeypatch.setattr(server_module, "Webhook", partial(Webhook, first_retry_s=0.001))
    key = tmp_path / "key"
    key.write_text(16 * "k")
    key.chmod(0o600)

    async def test(server: Server) -> None:
        limit.reach()
        log(TaskHalted("digits", 3, "the model is not finite"))
        await until(lambda: server.failed.is_set() or limit.refused >= 2)
        assert not server.failed.is_set()
        limit.end()
        await until(lambda: posted)

    on_a_server(tmp_path, limit, test, webhooks=("http://127.0.0.1:1/",), webhook_key=str(key))
    assert b"digits" in posted[0]


class Bucket:
    """Counts how often it was tidied."""

    def __init__(self) -> None:
        self.tidied = 0

    def remove_expired(self, keep_s: float) -> int:
        self.tidied += 1
        return 0


@pytest.mark.parametrize("work", ["remove deleted blobs", "publish the log"])
def test_upkeep_of_a_bucket_is_repeated(
    work: str, tmp_path: Path, limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_REMOVE_EVERY_S", 0.001)
    monkeypatch.setattr(upkeep, "_PUBLISH_EVERY_S", 0.001)
    bucket = Bucket()
    monkeypatch.setattr(public_log, "publish", lambda *_: bucket.remove_expired(0.0))
    tidying = Upkeep(Deployment(), cast(NodeNames, None), cast(Resources, None), {})

    async def run() -> None:
        limit.reach()
        given = cast(S3Blobs, bucket)
        again = (
            tidying.remove_deleted(given)
            if work == "remove deleted blobs"
            else tidying.publish_log(given, tmp_path)
        )
        running = asyncio.create_task(again)
        await until(lambda: running.done() or limit.refused >= 2)
        assert (bucket.tidied, running.done()) == (0, False)
        limit.end()
        await until(lambda: bucket.tidied)
        running.cancel()

    asyncio.run(run())
