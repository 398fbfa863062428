"""Claims: at K = 1 the server writes a model and the optimizer's state per version, nothing else of
that size, and keeps at least a tenth of the bandwidth of bare write and fsync busy.

K = 1, so every update is made into a version (docs/adr/0062): the parameters and the state of the
optimizer are written and synced, and one transaction commits. Versions per second times the bytes
that the server sent to storage for each, against a loop that writes and syncs files of the same
sizes on the same disk before and after. Cases: models of 20 MiB with FedAdam (60 MiB per version)
and FedAvg (20 MiB), and of 1 MiB with FedAdam, one-process server. Devices scale their updates
against the damping of staleness, so that the final model is known, and it is asserted. Run as
`python bench/commit_rate.py`; prints one JSON line per case.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
from _devices import Device, Encoded
from _servers import Servers, report, require, running, wait_until

from papaya.config import AsyncFL, OptimizerConfig, ServerConfig, TaskConfig
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import staleness_weight

DEVICES, WARM_UP, VALUES = 8, 8, 5
SERVER = ServerConfig(heartbeat_s=1.0)
SHARE = 0.1  # a floor: hashing, encoding and the step take their turns with the disk
OVERHEAD = 1.05  # rows, and the database's log of them
FEDADAM, FEDAVG = OptimizerConfig(), OptimizerConfig(kind="fedavg", rate=1.0)
CASES = (
    ("20 MiB, FedAdam", FEDADAM, 5_242_880, 40),
    ("20 MiB, FedAvg", FEDAVG, 5_242_880, 40),
    ("1 MiB, FedAdam", FEDADAM, 262_144, 200),
)


def main() -> None:
    for name, optimizer, length, versions in CASES:
        # The parameters, and the two moments of the optimizer.
        sizes = (4 * length, 8 * length) if optimizer == FEDADAM else (4 * length,)
        bare = bare_bytes_per_s(sizes, versions)
        with running(SERVER, apart=False) as servers:
            bytes_each, each_s, cpu_s = versions_s(servers, optimizer, length, versions)
        bare = (bare + bare_bytes_per_s(sizes, versions)) / 2
        share = bytes_each / each_s / bare
        writes = bytes_each / sum(sizes)
        case = f"bytes written per version / model and optimizer state, K = 1, {name}"
        report("commit_rate", case, writes, OVERHEAD, writes <= OVERHEAD)
        more = {
            "versions_per_s": round(1 / each_s, 2),
            "mib_per_version": round(bytes_each / 2**20, 2),
            "bare_mib_per_s": round(bare / 2**20, 1),
            "cpu_ms_per_version": round(cpu_s * 1e3, 1),
        }
        case = f"share of the store's write bandwidth, K = 1, {name}"
        report("commit_rate", case, share, SHARE, share >= SHARE, **more)


def versions_s(
    servers: Servers, optimizer: OptimizerConfig, length: int, versions: int
) -> tuple[float, float, float]:
    """Bytes written, wall seconds and CPU seconds, all per version."""
    pattern = (np.arange(length) % VALUES + 1).astype(np.float32)
    task = TaskConfig(
        task="bench",
        concurrency=DEVICES,
        model_length=length,
        regime=AsyncFL(1),
        optimizer=optimizer,
        participation_gap_s=0.0,
    )
    servers.submit(task, np.zeros(length, np.float32))
    token, ids = servers.token(), count()

    @cache
    def update_of(staleness: int) -> Encoded:
        undamped = pattern / np.float32(staleness_weight(staleness))
        return Encoded.of(undamped.tobytes(), SERVER.chunk_bytes)

    def trips(number: int) -> None:
        with closing(Device(servers.devices, token)) as device:
            for _ in range(number):
                device.trip(update_of, f"u{next(ids)}")

    def make(more: int) -> None:
        made = servers.metric("papaya_task_version") + more
        list(threads.map(trips, [more // DEVICES] * DEVICES))
        wait_until(lambda: servers.metric("papaya_task_version") == made, f"version {made}")

    with ThreadPoolExecutor(DEVICES) as threads:
        make(WARM_UP)
        bytes_before, cpu_before = servers.written_bytes(), sum(servers.cpu_s().values())
        began_at = time.monotonic()
        make(versions)
        wall_s = time.monotonic() - began_at
    written = servers.written_bytes() - bytes_before
    cpu_s = sum(servers.cpu_s().values()) - cpu_before
    check(servers, optimizer, length, WARM_UP + versions)
    return written / versions, wall_s / versions, cpu_s / versions


def check(servers: Servers, config: OptimizerConfig, length: int, versions: int) -> None:
    """Every version moved by the same mean, so a model of a few values tells the rest."""
    optimizer = server_optimizer(config)
    few = np.arange(1, VALUES + 1, dtype=np.float32)
    expected, state = np.zeros(VALUES, np.float32), optimizer.initial_state(VALUES)
    for _ in range(versions):
        expected, state = optimizer.step(expected, few, state)
    version, found = servers.newest("bench", length)
    require(version == versions, f"{versions} updates made version {version}")
    require(np.allclose(found, np.resize(expected, length), rtol=1e-4), "the model is wrong")


def bare_bytes_per_s(sizes: tuple[int, ...], times: int) -> float:
    """Files of these sizes, written and synced one after the other."""
    data = [os.urandom(size) for size in sizes]
    with tempfile.TemporaryDirectory(prefix="papaya-bench-") as folder:
        began_at = time.monotonic()
        for number in range(times):
            for index, piece in enumerate(data):
                path = Path(folder) / f"{number % 2}-{index}"
                with path.open("wb") as file:
                    file.write(piece)
                    os.fsync(file.fileno())
        took_s = time.monotonic() - began_at
    return times * sum(sizes) / took_s


if __name__ == "__main__":
    main()
