"""Claim: a second selector, and a second aggregator, each add at least 0.9 of the first.

Every process of the role that is measured has the same small CPU quota, by a cgroup of its own
(version 1 or 2; needs root), so that it is the bottleneck on a machine with two cores. All
processes share one data folder on one disk. Two tasks of 20 MiB have as many devices as they take,
all the time, with one process of the role and with two. Compared are the updates per second that
were acknowledged. A last case has two aggregators without a quota, and no target: on two cores they
compete with the selector and the devices. Every case shows how long a device spent in each phase of
a trip, and how busy the disk was. Run as `python bench/second_server.py`, or with `aggregator`,
`selector` or `no-quota`; takes about three minutes and prints one JSON line per case.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

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


class Rate(NamedTuple):
    """Acknowledged updates per second; cores that the processes of the role used, and all server
    processes; how busy the disks were, at most; and the mean seconds of each phase of a trip.
    """

    per_s: float
    role_cores: float
    cores: float
    disk_busy: float
    phases_s: dict[str, float]


def main(cases: list[str]) -> None:
    pattern = np.ones(MODEL_LENGTH, np.float32)
    update = Encoded.of(pattern.tobytes(), SERVER.chunk_bytes)
    for case in cases or ("aggregator", "selector", "no-quota"):
        role, quota = ("aggregator", None) if case == "no-quota" else (case, QUOTA)
        one, two = (rate(role, count, update, quota) for count in (1, 2))
        adds = two.per_s / one.per_s - 1
        more: dict[str, object] = {
            "per_s": [round(each.per_s, 2) for each in (one, two)],
            "role_cores": [round(each.role_cores, 3) for each in (one, two)],
            "cores": [round(each.cores, 2) for each in (one, two)],
            "disk_busy": [round(each.disk_busy, 2) for each in (one, two)],
            "phases_s": [one.phases_s, two.phases_s],
        }
        each = "no quota" if quota is None else f"{quota} of a core each"
        say = f"a second {role} adds, of the first, with {each}"
        target = None if quota is None else ADDS
        report("second_server", say, adds, target, target is None or adds >= target, **more)


def rate(role: str, processes: int, update: Encoded, quota: float | None) -> Rate:
    numbers = {"selectors": 1, "aggregators": 1} | {f"{role}s": processes}
    with running(SERVER, apart=True, **numbers) as servers:
        tasks = ("one", "two")
        for task in tasks:
            config = msgspec.structs.replace(TASK, task=task, concurrency=DEVICES // 2)
            servers.add_task(config, np.zeros(MODEL_LENGTH, np.float32))
        wait_until(lambda: are_served(servers, len(tasks), numbers["aggregators"]), "two tasks")
        measured = [pid for name, pid in servers.pids.items() if name.startswith(role)]
        with limited(measured, quota) if quota is not None else nullcontext():
            before_s, began_at = sum(map(cpu_s, measured)), time.monotonic()
            all_before_s, disk_before_ms = sum(servers.cpu_s().values()), disk_busy_ms()
            per_s, phases_s = acknowledged_per_s(servers, update)
            passed_s = time.monotonic() - began_at
            used_s = sum(map(cpu_s, measured)) - before_s
            all_used_s = sum(servers.cpu_s().values()) - all_before_s
            now_ms = disk_busy_ms()
            busy_ms = max(now_ms[name] - disk_before_ms.get(name, 0) for name in now_ms)
            busy = busy_ms / 1e3 / passed_s
            return Rate(per_s, used_s / passed_s, all_used_s / passed_s, busy, phases_s)


def disk_busy_ms() -> dict[str, int]:
    """By device, for how long it has had requests."""
    lines = Path("/proc/diskstats").read_text(encoding="ascii").splitlines()
    return {fields[2]: int(fields[12]) for fields in map(str.split, lines)}


def are_served(servers: Servers, tasks: int, aggregators: int) -> bool:
    """By as many aggregators as there are."""
    each = [
        servers.metric("papaya_task_serving", name)
        for name in servers.pids
        if name.startswith("aggregator")
    ]
    return sum(each) == tasks and len(each) == aggregators and all(each)


def acknowledged_per_s(servers: Servers, update: Encoded) -> tuple[float, dict[str, float]]:
    """And the mean seconds that a trip spent in each phase."""
    ids, done = count(), [0] * DEVICES
    spent: list[dict[str, float]] = []
    doors, ends_at = servers.doors(), time.monotonic() + WARM_UP_S + MEASURE_S

    def live(number: int) -> None:
        with closing(Device(doors[number % len(doors)], servers.token())) as device:
            while time.monotonic() < ends_at:
                device.trip(lambda _: update, f"u{next(ids)}")
                done[number] += 1
            spent.append(device.spent_s)

    with ThreadPoolExecutor(DEVICES) as threads:
        living = [threads.submit(live, number) for number in range(DEVICES)]
        time.sleep(WARM_UP_S)
        before, began_at = sum(done), time.monotonic()
        time.sleep(MEASURE_S)
        found, passed_s = sum(done) - before, time.monotonic() - began_at
        for device in living:
            device.result()
    require(found > DEVICES, f"only {found} updates in {passed_s:.0f} s")
    trips = sum(done)
    phases_s = {phase: round(sum(each[phase] for each in spent) / trips, 2) for phase in spent[0]}
    return found / passed_s, phases_s


@contextmanager
def limited(pids: list[int], quota: float) -> Iterator[None]:
    """Each process in a cgroup of its own, with the quota."""
    if os.geteuid() != 0:
        print("second_server.py needs root, to give processes a CPU quota", file=sys.stderr)
        sys.exit(2)
    old = (MOUNT / "cpu" / "cpu.cfs_period_us").exists()
    top = MOUNT / "cpu" if old else MOUNT
    groups = [top / f"papaya-bench-{pid}" for pid in pids]
    quota_us = int(quota * PERIOD_US)
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
