"""Claim: with state on PostgreSQL an acknowledged 20 MiB update costs at most 1.5 x the CPU.

Twenty devices at a time upload to a one-process server, without TLS; K = 100. Two servers run: one
with SQLite, one with PostgreSQL on a Unix socket. They take turns, because the machine may be
shared. CPU is user and system of the server, and for the second also of all processes of the
database. Both sync every commit. Updates of 4 KiB show the store alone; they have no target. The
number of versions is asserted. Run as `python bench/state_on_postgresql.py` from the root of the
repository; prints one JSON line per case.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
from _devices import Device, Encoded
from _servers import Servers, report, running, wait_until

from papaya.config import AsyncFL, ServerConfig, TaskConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import postgresql

GOAL, DEVICES, STRETCHES = 100, 20, 4
TARGET = 1.5
SERVER = ServerConfig(heartbeat_s=1.0)
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    for name, length, updates, target in (
        ("20 MiB", 5_242_880, 100, TARGET),
        ("4 KiB", 1024, 200, None),
    ):
        with (
            postgresql.running() as database,
            running(SERVER, apart=False) as sqlite,
            running(SERVER, apart=False, state=database.url()) as postgres,
        ):
            one, other = Uploads(sqlite, length), Uploads(postgres, length)
            spent = {"sqlite": 0.0, "server": 0.0, "database": 0.0}
            took = {"sqlite": 0.0, "postgresql": 0.0}
            for stretch in range(1 + STRETCHES):
                began_at = time.monotonic()
                sqlite_s = spending(lambda: _cpu_s(sqlite), one, updates)
                between = time.monotonic()
                before = _tree_cpu_s(database)
                server_s = spending(lambda: _cpu_s(postgres), other, updates)
                if stretch:  # the first one warms up
                    spent["sqlite"] += sqlite_s
                    spent["server"] += server_s
                    spent["database"] += _tree_cpu_s(database) - before
                    took["sqlite"] += between - began_at
                    took["postgresql"] += time.monotonic() - between
        measured = STRETCHES * updates
        ratio = (spent["server"] + spent["database"]) / spent["sqlite"]
        more = {f"{part}_cpu_ms": round(s / measured * 1e3, 2) for part, s in spent.items()}
        more |= {f"{part}_per_s": round(measured / s, 1) for part, s in took.items()}
        case = f"CPU with PostgreSQL ÷ CPU with SQLite, {name}, K = {GOAL}"
        passed = target is None or ratio <= target
        report("state_on_postgresql", case, ratio, target, passed, **more)


class Uploads:
    """The devices of one server."""

    def __init__(self, servers: Servers, length: int) -> None:
        self._servers = servers
        self._done = 0
        self._ids = count()
        self._update = Encoded.of(np.ones(length, np.float32).tobytes(), SERVER.chunk_bytes)
        task = TaskConfig(
            task="bench",
            concurrency=32,
            model_length=length,
            regime=AsyncFL(GOAL),
            clip=1e4,
            participation_gap_s=0.0,
        )
        servers.submit(task, np.zeros(length, np.float32))

    def upload(self, updates: int) -> None:
        with ThreadPoolExecutor(DEVICES) as threads:
            list(threads.map(self._trips, [updates // DEVICES] * DEVICES))
        self._done += updates
        version = self._done // GOAL
        made = f"version {version}"
        wait_until(lambda: self._servers.metric("papaya_task_version") == version, made)

    def _trips(self, number: int) -> None:
        with closing(Device(self._servers.devices, self._servers.token())) as device:
            for _ in range(number):
                device.trip(lambda _: self._update, f"u{next(self._ids)}")


def spending(cpu_s: Callable[[], float], uploads: Uploads, updates: int) -> float:
    before = cpu_s()
    uploads.upload(updates)
    return cpu_s() - before


def _cpu_s(servers: Servers) -> float:
    return sum(servers.cpu_s().values())


def _tree_cpu_s(database: postgresql.Postgres) -> float:
    """Of the server, its running backends, and its backends that have ended."""
    total = 0
    for pid in database.pids:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
        total += sum(map(int, stat[11:15]))
    return total * _TICK_S


if __name__ == "__main__":
    main()
