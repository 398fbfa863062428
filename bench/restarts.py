"""Claim: a rolling restart loses no trained work, and a killed server loses little.

Two coordinators, two selectors and three aggregators as processes of their own on loopback, three
tasks of 32 clients each, and 160 devices that never drop out. The heartbeat is 2 s; devices have
their default settings. Case `rolling`: each process in turn is stopped with SIGTERM and started
again. Case `kills`: ten times a process drawn from the seed is killed with SIGKILL and started
again at once, after one heartbeat or after four. A session is lost if it joined and ended in any
other way than `counted`; `full` and `silent` are the usual ones. The result is their share of the
sessions that were in progress at the faults, counted in the same run. Which process is killed and
how long each training takes follow from the seed; what the kernel makes of it does not, so that
the counts of two runs differ by some. Run as `python bench/restarts.py`; takes about three minutes
and prints one JSON line per case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

import numpy as np
import uvloop
from _restart_devices import Log, visiting
from _servers import Servers, deployment_toml, report, require

from papaya.config import AsyncFL, Deployment, DeviceConfig, ServerConfig, TaskConfig

SEED = 1
HEARTBEAT_S = 2.0
SERVER = ServerConfig(
    heartbeat_s=HEARTBEAT_S, hold_s=4.0, held_report_interval_s=0.1, min_retry_s=1.0
)
CONCURRENCY, DEVICES, MEAN_TRAINING_S = 32, 160, 4.0
DEVICE = DeviceConfig(participation_floor_s=0.0)
TASKS = tuple(
    TaskConfig(
        task=f"task-{number}",
        concurrency=CONCURRENCY,
        model_length=64,
        regime=AsyncFL(8, max_staleness=1000),
        participation_gap_s=0.0,
        training_timeout_s=120.0,
    )
    for number in range(3)
)
COORDINATORS, SELECTORS, AGGREGATORS = 2, 2, 3
KILLS, DOWN_BEATS = 10, (0, 1, 4)
SETTLE_S, PATIENCE_S = 2 * HEARTBEAT_S, 60.0


class Process:
    """One `papaya serve`, which keeps its addresses when it is started again."""

    def __init__(self, folder: Path, role: str, number: int, deployment: Deployment) -> None:
        self.name = f"{role}-{number}"
        settings, self._log = folder / f"{self.name}.toml", folder / f"{self.name}.log"
        settings.write_text(deployment_toml(deployment), encoding="utf-8")
        serve = [sys.executable, "-m", "papaya", "serve", role]
        self._command = [*serve, "--config", str(settings), "--format", "json"]
        self._process: subprocess.Popen[bytes] | None = None
        self.addresses: dict[str, str] = {}

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        require(bool(line), f"{self.name} did not start: {self._log.read_text()}")
        self.addresses = json.loads(line)["addresses"]

    def end(self, number: signal.Signals) -> float:
        """Returns how many seconds it took."""
        if self._process is None:
            return 0.0
        process, self._process, started = self._process, None, time.monotonic()
        process.send_signal(number)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            require(False, f"{self.name} did not stop within {PATIENCE_S:g} s")
        assert process.stdout is not None
        process.stdout.close()
        return time.monotonic() - started


class Installation:
    """All processes on one data folder. The ports stay reserved while a process is down."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="papaya-bench-"))
        self.folder = Path(folder)
        candidates = tuple(self._reserve() for _ in range(COORDINATORS))
        self.coordinators = [
            self._add("coordinator", number, candidates, where)
            for number, where in enumerate(candidates)
        ]
        self.selectors = [
            self._add("selector", number, candidates, self._reserve())
            for number in range(SELECTORS)
        ]
        self.aggregators = [
            self._add("aggregator", number, candidates, self._reserve())
            for number in range(AGGREGATORS)
        ]
        self.servers = Servers(self.folder / "data", ())

    @property
    def processes(self) -> list[Process]:
        return [*self.aggregators, *self.selectors, *self.coordinators]

    def _add(self, role: str, number: int, candidates: tuple[str, ...], where: str) -> Process:
        deployment = Deployment(
            data=str(self.folder / "data"),
            devices=self._reserve(),
            admin=self._reserve(),
            servers=where,
            coordinators=candidates,
            server=SERVER,
            max_connections_per_address=10 * DEVICES,
        )
        return Process(self.folder, role, number, deployment)

    def _reserve(self) -> str:
        """An address of which only a process that listens with SO_REUSEADDR can make use."""
        held = self._stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{held.getsockname()[1]}"

    def __enter__(self) -> Self:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Process.start, self.processes))
        self.servers.addresses["coordinator"] = self.coordinators[0].addresses
        for task in TASKS:
            self.servers.add_task(task, np.zeros(task.model_length, np.float32))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self.processes:
            process.end(signal.SIGKILL)
        self._stack.close()


Details = dict[str, object]
Fault = Callable[[Installation, Random, Log], Awaitable[Details]]


async def rolling(installation: Installation, rng: Random, log: Log) -> Details:
    """Stop and start every process, one after the other."""
    longest_s = 0.0
    for process in installation.processes:
        log.note_fault()
        longest_s = max(longest_s, await asyncio.to_thread(process.end, signal.SIGTERM))
        await asyncio.to_thread(process.start)
        await asyncio.sleep(SETTLE_S)
    return {"restarts": len(installation.processes), "longest_stop_s": round(longest_s, 1)}


async def kills(installation: Installation, rng: Random, log: Log) -> Details:
    """Every process is drawn before one is drawn again."""
    order: list[Process] = []
    for _ in range(KILLS):
        if not order:
            order = rng.sample(installation.processes, len(installation.processes))
        process, beats = order.pop(), rng.choice(DOWN_BEATS)
        log.note_fault()
        await asyncio.to_thread(process.end, signal.SIGKILL)
        await asyncio.sleep(beats * HEARTBEAT_S)
        await asyncio.to_thread(process.start)
        await asyncio.sleep(SETTLE_S)
    return {"kills": KILLS}


CASES: dict[str, Fault] = {"rolling": rolling, "kills": kills}
# After kills: half of what was lost before tasks were handed over and room was kept, which were 24
# sessions in ten kills, with all slots of the three tasks taken.
TARGETS = {"rolling": 0.0, "kills": 12 / (KILLS * len(TASKS) * CONCURRENCY)}


async def measure(installation: Installation, fault: Fault, seed: int, log: Log) -> Details:
    folder, token = installation.folder / "devices", installation.servers.token()
    urls = [f"http://{selector.addresses['devices']}" for selector in installation.selectors]
    settings = (DEVICES, DEVICE, MEAN_TRAINING_S, log, seed)
    async with visiting(folder, urls, token, *settings) as devices:
        async with asyncio.timeout(PATIENCE_S):
            while log.endings["counted"] < sum(task.concurrency for task in TASKS):
                await asyncio.sleep(HEARTBEAT_S / 10)
        more = await fault(installation, Random(seed), log)
        await asyncio.sleep(SERVER.dead_after_s)
        await devices.go_home(PATIENCE_S)
    return more


def main() -> None:
    parser = argparse.ArgumentParser(description="Count what restarts and kills lose.")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    for name in options.cases or CASES:
        with Installation() as installation:
            log = Log()
            more = uvloop.run(measure(installation, CASES[name], options.seed, log))
        require(log.endings["counted"] > 100, f"too little happened: {log.endings}")
        more |= {"seed": options.seed, "joins": log.joins, "endings": dict(log.endings)}
        more |= {"turned_away_at_join": dict(log.turned_away)}
        more |= {"lost": log.lost, "in_progress_at_faults": log.in_progress_at_faults}
        share, target = log.lost / log.in_progress_at_faults, TARGETS[name]
        case = f"{name}: lost sessions ÷ those in progress at the faults"
        report("restarts", case, share, round(target, 4), share <= target, **more)


if __name__ == "__main__":
    main()
