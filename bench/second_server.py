"""Claim: a second selector, and a second aggregator, each add at least 0.9 of the first.

Every process of the role that is measured has the same small CPU quota, by a cgroup of its own
(version 1 or 2; needs root), so that it is the bottleneck on a machine with two cores. All
processes share one data folder on one disk. Two tasks of 20 MiB have as many devices as they take,
all the time, with one process of the role and with two. Compared are the updates per second that
were acknowledged. Run as `python bench/second_server.py`; takes about two minutes and prints one
JSON line per case.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
from _devices import Device, Encoded
from _servers import Servers, cpu_s, report, require, running, wait_until
from data_plane import MODEL_LENGTH, SERVER, TASK

QUOTA = 0.12  # of a core, for each process of the role
DEVICES, WARM_UP_S, MEASURE_S = 24, 5.0, 10.0
ADDS = 0.9
PERIOD_US = 20_000  # short, so that a process waits for its next share for a moment only
MOUNT = Path("/sys/fs/cgroup")


def main(roles: list[str]) -> None:
    pattern = np.ones(MODEL_LENGTH, np.float32)
    update = Encoded.of(pattern.tobytes(), SERVER.chunk_bytes)
    for role in roles or ("aggregator", "selector"):
        (one, one_busy), (two, two_busy) = (rate(role, count, update) for count in (1, 2))
        adds = two / one - 1
        more = {
            "one_per_s": round(one, 2),
            "two_per_s": round(two, 2),
            "quota_used": [round(one_busy, 3), round(two_busy, 3)],
        }
        case = f"a second {role} adds, of the first, with {QUOTA} of a core each"
        report("second_server", case, adds, ADDS, adds >= ADDS, **more)


def rate(role: str, processes: int, update: Encoded) -> tuple[float, float]:
    """Acknowledged updates per second, and how much of their quota the processes used."""
    numbers = {"selectors": 1, "aggregators": 1} | {f"{role}s": processes}
    with running(SERVER, apart=True, **numbers) as servers:
        tasks = ("one", "two")
        for task in tasks:
            config = msgspec.structs.replace(TASK, task=task, concurrency=DEVICES // 2)
            servers.add_task(config, np.zeros(MODEL_LENGTH, np.float32))
        wait_until(lambda: are_served(servers, len(tasks), numbers["aggregators"]), "two tasks")
        measured = [pid for name, pid in servers.pids.items() if name.startswith(role)]
        with limited(measured):
            before_s, began_at = sum(map(cpu_s, measured)), time.monotonic()
            found = acknowledged_per_s(servers, update)
            passed_s = time.monotonic() - began_at
            used_s = sum(map(cpu_s, measured)) - before_s
            return found, used_s / (QUOTA * processes * passed_s)


def are_served(servers: Servers, tasks: int, aggregators: int) -> bool:
    """By as many aggregators as there are."""
    each = [
        servers.metric("papaya_task_serving", name)
        for name in servers.pids
        if name.startswith("aggregator")
    ]
    return sum(each) == tasks and len(each) == aggregators and all(each)


def acknowledged_per_s(servers: Servers, update: Encoded) -> float:
    ids, done = count(), [0] * DEVICES
    doors, ends_at = servers.doors(), time.monotonic() + WARM_UP_S + MEASURE_S

    def live(number: int) -> None:
        with closing(Device(doors[number % len(doors)], servers.token())) as device:
            while time.monotonic() < ends_at:
                device.trip(lambda _: update, f"u{next(ids)}")
                done[number] += 1

    with ThreadPoolExecutor(DEVICES) as threads:
        living = [threads.submit(live, number) for number in range(DEVICES)]
        time.sleep(WARM_UP_S)
        before, began_at = sum(done), time.monotonic()
        time.sleep(MEASURE_S)
        found, passed_s = sum(done) - before, time.monotonic() - began_at
        for device in living:
            device.result()
    require(found > DEVICES, f"only {found} updates in {passed_s:.0f} s")
    return found / passed_s


@contextmanager
def limited(pids: list[int]) -> Iterator[None]:
    """Each process in a cgroup of its own, with the quota."""
    if os.geteuid() != 0:
        print("second_server.py needs root, to give processes a CPU quota", file=sys.stderr)
        sys.exit(2)
    old = (MOUNT / "cpu" / "cpu.cfs_period_us").exists()
    top = MOUNT / "cpu" if old else MOUNT
    groups = [top / f"papaya-bench-{pid}" for pid in pids]
    quota_us = int(QUOTA * PERIOD_US)
    try:
        for pid, group in zip(pids, groups, strict=True):
            group.mkdir()
            if old:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="ascii")
                (group / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")
            else:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}", encoding="ascii")
            (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
        yield
    finally:
        for pid, group in zip(pids, groups, strict=True):
            with suppress(OSError):
                (top / "cgroup.procs").write_text(str(pid), encoding="ascii")
                group.rmdir()


if __name__ == "__main__":
    main(sys.argv[1:])
