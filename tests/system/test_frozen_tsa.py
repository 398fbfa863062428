"""A TSA that stops answering while a task in the clear and a secure task run in one server.

It is not lost: it holds its seeds, and answers again later. So the task in the clear goes on as if
nothing had happened, the secure task waits, and no update that a device trained is discarded.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

from msgspec import structs

from papaya.config import TaskConfig
from papaya.tsa.client import CONNECT_S
from tests.chaos.faults import Stalls
from tests.system.admin import Admin
from tests.system.fleet import Book, briefly, fleet
from tests.system.oracle import Books
from tests.system.processes import CALM, CALM_HEARTBEAT_S, Installation, ServerProcess
from tests.system.test_secure import (
    CONFIG,
    GOAL,
    STEP_S,
    SecureBooks,
    admin_of,
    children,
    ended_at_last,
    terms_of,
    trust,
    until,
    url,
)

PLAIN: TaskConfig = structs.replace(CONFIG, task="plain", secure_aggregation=None)
DEVICES = 20
UNREACHABLE_S = "papaya_tsa_unreachable_seconds"
# Into an outage: the next call comes a second after the first, and cannot connect.
SECOND_CALL_S = 1.0 + CONNECT_S + 1.0


def test_a_frozen_tsa_stops_only_its_own_task_and_costs_no_update(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add(server=CALM).start()
        admin = admin_of(installation, server)
        admin.submit(CONFIG)
        admin.submit(PLAIN)
        stalls = Stalls(CALM_HEARTBEAT_S, lambda: [server.process.pid])
        with ended_at_last(installation), stalls:
            book = asyncio.run(_over_a_freeze(installation, server, admin))
            assert server.stop() == 0
        secure = SecureBooks(installation.data, CONFIG.task)
        secure.check(book.of(CONFIG.task))
        assert secure.dropped == []
        Books(installation.data, PLAIN.task).check(book.of(PLAIN.task))
        # On a busy machine a device may be silent for too long.
        may_be_silent = {"silent"} if stalls.is_long else set()
        assert _endings(book, CONFIG.task) - may_be_silent == {"counted"}
        # The outage is told once, although many calls failed. On a busy machine the TSA may also
        # answer late at another time.
        outages = [line for line in server.log if "tsa_unreachable" in line]
        ends = [line for line in server.log if "tsa_back" in line]
        assert len(outages) == len(ends) >= 1, (outages, ends)


async def _over_a_freeze(installation: Installation, server: ServerProcess, admin: Admin) -> Book:
    believed = await asyncio.to_thread(trust, installation, server)
    folder, token = installation.folder / "devices", installation.secret("device.token")
    async with fleet(
        folder, [url(server)], token, DEVICES, briefly, trust=believed, terms=terms_of
    ) as flying:
        book = flying.book
        await _counted(book, CONFIG.task, 2 * GOAL)
        await _counted(book, PLAIN.task, 2 * GOAL)
        [child] = await asyncio.to_thread(children, server)
        os.kill(child, signal.SIGSTOP)
        try:
            await asyncio.to_thread(server.until_logged, "unreachable", STEP_S)
            await _counted(book, PLAIN.task, len(book.of(PLAIN.task)) + 10 * GOAL)
            line = await asyncio.to_thread(
                admin.until_task, CONFIG.task, lambda line: line["halted"], STEP_S
            )
            assert "TSA" in line["halted"]
            async with asyncio.timeout(STEP_S):
                while await asyncio.to_thread(_unreachable_s, admin) <= SECOND_CALL_S:
                    await asyncio.sleep(0.25)
            waiting = len(book.of(CONFIG.task))
        finally:
            os.kill(child, signal.SIGCONT)
        await asyncio.to_thread(server.until_logged, "tsa_back", STEP_S)
        await _counted(book, CONFIG.task, waiting + 5 * GOAL)
        await asyncio.to_thread(
            admin.until_task, CONFIG.task, lambda line: not line["halted"], STEP_S
        )
        await asyncio.to_thread(until, lambda: _unreachable_s(admin) == 0, "the TSA is back")
        await flying.go_home(STEP_S)
    return book


async def _counted(book: Book, task: str, count: int) -> None:
    await book.until(lambda: len(book.of(task)) >= count, STEP_S, f"{count} of {task} count")


def _endings(book: Book, task: str) -> set[str]:
    """How the sessions of a task ended; `open` if one did not."""
    return {book.ended.get(s, "open") for s in book.joined if book.task_of[s] == task}


def _unreachable_s(admin: Admin) -> float:
    _, metrics = admin.ask("GET", "/metrics")
    [found] = re.findall(rf"^{UNREACHABLE_S} (\S+)$", metrics.decode(), re.MULTILINE)
    return float(found)
