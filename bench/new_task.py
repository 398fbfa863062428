"""Claim: a new task has its first client within one heartbeat, with the default settings.

One server process and 16 devices that check in, are rejected because no task wants clients, and
come back when they are told to. After half a minute a task is submitted; the time until the first
device has joined it counts. In a second case the task is submitted right after the first start.
Three servers per case, one after the other. The longest time counts, as a multiple of the heartbeat
(10 s by default), which the protocol waits for on any machine. Run as `python bench/new_task.py`;
takes about four minutes and prints one JSON line per case.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import uvloop
from _restart_devices import Log, visiting
from _servers import Servers, report, running

from papaya.config import AsyncFL, DeviceConfig, ServerConfig, TaskConfig

SEEDS = (1, 2, 3)
DEVICES, PATIENCE_S = 16, 120.0
SERVER = ServerConfig()
TARGET_BEATS = 1.0
# How long the server has been running.
CASES = {"a running server": 30.0, "a server that has just started": 0.0}
TASK = TaskConfig(
    task="bench",
    concurrency=8,
    model_length=64,
    regime=AsyncFL(4),
    participation_gap_s=0.0,
)
DEVICE = DeviceConfig(participation_floor_s=0.0)


async def measure(servers: Servers, folder: Path, idle_s: float, seed: int) -> float:
    """Seconds from the submission to the first join."""
    log = Log()
    url = "http://{}:{}".format(*servers.devices)
    settings = (DEVICES, DEVICE, 1.0, log, seed)
    async with visiting(folder, [url], servers.token(), *settings) as devices:
        await asyncio.sleep(idle_s)
        submitted_at = time.monotonic()
        await asyncio.to_thread(servers.add_task, TASK, np.zeros(TASK.model_length, np.float32))
        async with asyncio.timeout(PATIENCE_S):
            while not log.joined_at[TASK.task]:
                await asyncio.sleep(0.01)
        await devices.go_home(0.0)
    return log.joined_at[TASK.task][0] - submitted_at


def main() -> None:
    for name, idle_s in CASES.items():
        waits_s = []
        for seed in SEEDS:
            with TemporaryDirectory() as folder, running(SERVER, apart=False) as servers:
                devices = Path(folder) / "devices"
                waits_s.append(uvloop.run(measure(servers, devices, idle_s, seed)))
        beats = max(waits_s) / SERVER.heartbeat_s
        more = {"all_s": [round(wait_s, 1) for wait_s in waits_s], "seeds": SEEDS}
        case = f"heartbeats from submission to the first client, {name}"
        report("new_task", case, beats, TARGET_BEATS, beats <= TARGET_BEATS, **more)


if __name__ == "__main__":
    main()
