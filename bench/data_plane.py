"""Claim: a 20 MiB update costs the servers at most 4 x the CPU that its bytes alone cost.

Twenty devices at a time upload over loopback, without TLS: once through a Selector and an
Aggregator that are processes of their own, with a Coordinator beside them, and once through the
one-process server. All checks are on: tokens, tickets, crc32, size, finiteness, norm. Each update
is durable when it is answered (group commit), and every hundredth makes a version with the default
optimizer. CPU is user and system of all server processes together.

The peer is one process that receives the same bytes from as many devices into memory and adds them
to a float32 sum (`_bare_add.py`). The two take turns, because the machine may be shared: whatever
disturbs one disturbs the other. Downloads are left out: parameters are immutable files that a CDN
serves. The final model is asserted. Run as `python bench/data_plane.py`; prints one JSON line per
case.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
from _devices import Device, Encoded
from _servers import Servers, report, require, running, wait_until

from papaya.config import AsyncFL, OptimizerConfig, ServerConfig, TaskConfig
from papaya.learning.parameters import Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import staleness_weight

MODEL_LENGTH = 5_242_880
# What is measured holds one version for each hundred updates, no more and no less.
GOAL, DEVICES, WARM_UP, STRETCH, STRETCHES = 100, 20, 40, 40, 5
UPDATES = WARM_UP + STRETCHES * STRETCH
RATIO = 4.0
SERVER = ServerConfig(heartbeat_s=1.0)
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
    update = Encoded.of(pattern.tobytes(), SERVER.chunk_bytes)
    for case, apart in (("selector and aggregator", True), ("one process", False)):
        with running(SERVER, apart=apart) as servers:
            used_s, wall_s, bare_s = measure(
                servers, update, pattern, lambda threads: bare_cpu_s(threads, update, pattern)
            )
        each_s = sum(used_s.values())
        shares = {f"{name}_ms": round(s * 1e3, 1) for name, s in used_s.items()}
        shares |= {
            "per_cpu_s": round(1 / each_s, 1),
            "per_wall_s": round(1 / wall_s, 1),
            "bare_ms": round(bare_s * 1e3, 1),
        }
        say, ratio = f"CPU ÷ bare receive and add, {case}", each_s / bare_s
        report("data_plane", say, ratio, RATIO, ratio <= RATIO, **shares)


def measure(
    servers: Servers,
    update: Encoded,
    pattern: Vector,
    bare_cpu_s: Callable[[ThreadPoolExecutor], float],
) -> tuple[dict[str, float], float, float]:
    """Per update: CPU seconds of each process, wall seconds, and CPU seconds of the bare peer.

    `bare_cpu_s`: CPU seconds of the peer for a stretch.
    """
    servers.submit(TASK, np.zeros(MODEL_LENGTH, np.float32))
    token, ids = servers.token(), count()

    def trips(number: int) -> list[int]:
        with closing(Device(servers.devices, token, servers.context)) as device:
            return [device.trip(lambda _: update, f"u{next(ids)}") for _ in range(number)]

    def upload(updates: int) -> None:
        for found in threads.map(trips, [updates // DEVICES] * DEVICES):
            staleness.extend(found)
        version = len(staleness) // GOAL
        wait_until(lambda: servers.metric("papaya_task_version") == version, f"version {version}")

    staleness: list[int] = []
    used_s, wall_s, bare_s = dict.fromkeys(servers.pids, 0.0), 0.0, 0.0
    with ThreadPoolExecutor(DEVICES) as threads:
        upload(WARM_UP)
        for _ in range(STRETCHES):
            before, began_at = servers.cpu_s(), time.monotonic()
            upload(STRETCH)
            wall_s += time.monotonic() - began_at
            for name, s in servers.cpu_s().items():
                used_s[name] += s - before[name]
            bare_s += bare_cpu_s(threads)
    check(servers, pattern, staleness)
    measured = STRETCHES * STRETCH
    return {n: s / measured for n, s in used_s.items()}, wall_s / measured, bare_s / measured


def check(servers: Servers, pattern: Vector, staleness: list[int]) -> None:
    """Which version holds whom is not known, but nothing in the first of the two is stale.

    What came after the second is in no version yet.
    """
    _, found = servers.newest(TASK.task, MODEL_LENGTH)
    weight = sum(staleness_weight(stale) for stale in staleness[: 2 * GOAL])
    optimizer = server_optimizer(OptimizerConfig())
    expected, state = np.zeros(MODEL_LENGTH, np.float32), optimizer.initial_state(MODEL_LENGTH)
    for mean in (1.0, (weight - GOAL) / GOAL):
        expected, state = optimizer.step(expected, pattern * np.float32(mean), state)
    require(np.allclose(found, expected, rtol=1e-4), "the model is not what was uploaded")
    require(len(staleness) == UPDATES, f"{len(staleness)} updates were counted")


def bare_cpu_s(threads: ThreadPoolExecutor, update: Encoded, pattern: Vector) -> float:
    """CPU seconds, for a stretch, of a process that does nothing but receive and add."""
    program = str(Path(__file__).with_name("_bare_add.py"))
    sizes = (MODEL_LENGTH, SERVER.chunk_bytes, DEVICES)
    command = [sys.executable, program, *map(str, sizes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = ("127.0.0.1", int(process.stdout.readline()))

        def send(updates: int) -> None:
            with socket.create_connection(address) as connection:
                for piece, _ in update.chunks * updates:
                    connection.sendall(piece)
                    require(connection.recv(1) == b"k", "the bare process hung up")

        list(threads.map(send, [STRETCH // DEVICES] * DEVICES))
        used_s, total = map(float, process.stdout.readline().split())
    require(total == STRETCH * float(pattern.sum(dtype=np.float64)), "the bare sum is wrong")
    return used_s


if __name__ == "__main__":
    main()
