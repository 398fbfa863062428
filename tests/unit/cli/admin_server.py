"""The real admin API on a real port, in a thread, for commands that are run in the test's own."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

from papaya.cli import audit_trail, keys, maintenance, status, token
from papaya.cli.main import CommandParser
from papaya.cli.task import task
from papaya.credentials.token_files import Secret
from papaya.http.listener import serve
from papaya.server.admin.accounts import Identities
from papaya.server.admin.routes import AdminRoutes
from tests.unit.http.loopback import PATIENT
from tests.unit.server.admin.builders import System

T = TypeVar("T")
TOKEN = "0123456789abcdef-test"


class AdminServer:
    """A running one. `call` runs a coroutine on its loop."""

    def __init__(self, system: System, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.system = system
        self.url = url
        self._loop = loop

    def call(self, coroutine: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=300)


@contextmanager
def admin_server(folder: Path) -> Iterator[AdminServer]:
    started = Event()
    found: list[AdminServer] = []
    stop: list[Callable[[], object]] = []

    async def run() -> None:
        system = System(folder)
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        identities = Identities(system.state, Secret(TOKEN), system.now)
        routes = AdminRoutes(system.service, identities).routes()
        listening = await serve(routes, "127.0.0.1", 0, limits=PATIENT)
        url = f"http://127.0.0.1:{listening.port}"
        found.append(AdminServer(system, loop, url))
        stop.append(lambda: loop.call_soon_threadsafe(stopping.set))
        started.set()
        await stopping.wait()
        await listening.drain(1.0)
        system.store.close()

    thread = Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert started.wait(timeout=300)
        (folder / "admin.token").write_text(f"{TOKEN}\n", encoding="ascii")
        yield found[0]
    finally:
        for end in stop:
            end()
        thread.join(timeout=300)


def papaya(*arguments: str) -> int:
    """`papaya …`, with errors as exceptions."""
    parser = CommandParser(prog="papaya")
    commands = parser.add_subparsers(required=True)
    for command in (task, status, token, audit_trail, maintenance, keys):
        command.add_to(commands)
    options: argparse.Namespace = parser.parse_args(arguments)
    return int(options.run(options))
