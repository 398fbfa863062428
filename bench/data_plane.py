"""Claim: 20 MiB updates cost at most 40 ms of server CPU each, and at most 4 x what the bytes cost.

Devices upload through real sockets, without TLS: once through a Selector and an Aggregator that are
processes of their own, with a Coordinator beside them, and once through the one-process server. All
checks are on: tickets, crc32, size, finiteness, norm; every update is durable when it is answered
(group commit), and 200 updates make two versions with the default optimizer. The peer is a bare
process that receives the same bytes into memory and adds them to a float32 sum. Downloads of
parameters are left out: they are immutable files that a CDN serves. CPU is user and system of all
server processes. The final model is asserted. Run as `python bench/data_plane.py`; one JSON line
per case, and a slow result is only reported.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np

from papaya.config import AsyncFL, OptimizerConfig, ServerConfig, TaskConfig
from papaya.learning.parameters import Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import staleness_weight

from _devices import Device, Encoded, Trip
from _servers import Servers, report, require, running, wait_until

MODEL_LENGTH = 5_242_880
GOAL, UPDATES, WARM_UP, DEVICES = 100, 200, 24, 16
UPDATES_PER_CPU_S, RATIO = 25.0, 4.0
TASK = TaskConfig(
    task="bench",
    concurrency=32,
    model_length=MODEL_LENGTH,
    regime=AsyncFL(GOAL),
    clip=1e4,
    participation_gap_s=0.0,
)


def main() -> None:
    pattern = np.arange(MODEL_LENGTH, dtype=np.float32) % 5 + 1
    bare_s = bare_cpu_s(pattern)
    for case, apart in (("selector and aggregator", True), ("one process", False)):
        with running(ServerConfig(heartbeat_s=1.0), apart=apart) as servers:
            used = upload_all(servers, pattern)
        bare_s = min(bare_s, bare_cpu_s(pattern))
        each_s = sum(used.values())
        shares = {f"{name}_ms": round(s * 1e3, 1) for name, s in used.items()}
        speed = 1 / each_s
        say = f"20 MiB updates per CPU-second, {case}"
        report("data_plane", say, speed, UPDATES_PER_CPU_S, speed >= UPDATES_PER_CPU_S, **shares)
        ratio = each_s / bare_s
        say = f"CPU ÷ bare receive and add, {case}"
        report("data_plane", say, ratio, RATIO, ratio <= RATIO, bare_ms=round(bare_s * 1e3, 1))


def upload_all(servers: Servers, pattern: Vector) -> dict[str, float]:
    """CPU seconds of each process by updates, after the first few."""
    servers.submit(TASK, np.zeros(MODEL_LENGTH, np.float32))
    update = Encoded.of(pattern.tobytes(), ServerConfig().chunk_bytes)
    token = servers.token()
    ids = count()

    def trips(number: int) -> list[Trip]:
        with closing(Device(servers.devices, token)) as device:
            return [device.trip(update, f"u{next(ids)}") for _ in range(number)]

    with ThreadPoolExecutor(DEVICES) as threads:
        found = trips(WARM_UP)
        before = servers.cpu_s()
        for more in threads.map(trips, [(UPDATES - WARM_UP) // DEVICES] * DEVICES):
            found += more
        last = UPDATES // GOAL
        wait_until(lambda: servers.metric("papaya_task_version") == last, f"version {last}")
        after = servers.cpu_s()
    check(servers, pattern, found)
    return {name: (after[name] - before[name]) / (UPDATES - WARM_UP) for name in after}


def check(servers: Servers, pattern: Vector, trips: list[Trip]) -> None:
    """Whom a version holds is not known, but the first holds none that is stale."""
    version, found = servers.newest(TASK.task, MODEL_LENGTH)
    require(version == UPDATES // GOAL, f"{UPDATES} updates made version {version}")
    weight = sum(staleness_weight(trip.staleness) for trip in trips)
    optimizer = server_optimizer(OptimizerConfig())
    expected, state = np.zeros(MODEL_LENGTH, np.float32), optimizer.initial_state(MODEL_LENGTH)
    for mean in (1.0, (weight - GOAL) / GOAL):
        expected, state = optimizer.step(expected, pattern * np.float32(mean), state)
    require(np.allclose(found, expected, rtol=1e-4), "the model is not what was uploaded")
    require(servers.metric("papaya_task_updates_discarded_total") == 0, "updates were discarded")


def bare_cpu_s(pattern: Vector) -> float:
    """CPU seconds per update of a process that does nothing but receive and add."""
    updates = UPDATES // 2
    command = [sys.executable, str(Path(__file__).with_name("_bare_add.py")), str(MODEL_LENGTH)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for _ in range(updates):
                connection.sendall(memoryview(pattern).cast("B"))
            connection.shutdown(socket.SHUT_WR)
            used_s, total = map(float, process.stdout.readline().split())
    require(total == updates * float(pattern.sum(dtype=np.float64)), "the bare sum is wrong")
    return used_s


if __name__ == "__main__":
    main()
