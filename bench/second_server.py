"""Claim: a second selector, and a second aggregator, each add at least 0.9 of the first.

Each process of the role that is measured has the same small CPU quota, by a cgroup of its own
(version 1 or 2; needs root), so that the role is the bottleneck on a machine with two cores. All
processes share one data folder on one disk. Devices train two tasks of 20 MiB, without training
time, and every update is acknowledged. Compared are the updates per second, with one process of the
role and with two.

The inputs follow from these rules:

- Quota: two selectors with 0.12 of a core each carry about 20 updates per second, for which all
  processes and devices together need about one of two cores. With twice the quota the machine
  would be the bottleneck.
- Period of the quota: 100 ms, the kernel's default, which container CPU limits use.
- Devices: a device sends its next chunk when the last one is answered, so about one per period if
  a process waits for its next share. A selector passes on about 20 chunks in its share. So 60
  places in tasks, 30 for each of two processes, keep it busy. 72 devices compete for them, so that
  free places are filled at once.
- Devices start one after the other, so that they do not finish in waves, and the first round of
  trips is a warm-up. Then updates are timed, as many in both arrangements. What is counted is their
  chunks: an update that is under way counts in part. Each task makes one version meanwhile.
- A run is invalid, and has no value, if any process of the role has used less than 95 % of its
  quota while updates were counted: something else was the bottleneck then.

The case `no-quota` has no target. It compares one aggregator and 24 devices with two aggregators,
and with 48 devices. Every case shows how long a device spent in each phase of a trip, the CPU per
update of each process and of all devices, and how busy the disk was. Run as
`python bench/second_server.py`, or with `aggregator`, `selector` or `no-quota`; takes about four
minutes and prints one JSON line per case.
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
from typing import Any, NamedTuple

import msgspec
import numpy as np
from _devices import Device, Encoded
from _servers import Servers, report, running, wait_until
from data_plane import MODEL_LENGTH, TASK

from papaya.config import ServerConfig

QUOTA, PERIOD_US = 0.12, 100_000  # of a core, for each process of the role
WEIGHT = 10  # times the usual: other work on the machine must not take the quota
SATURATED = 0.95  # of the quota
DEVICES, FEW_DEVICES = 72, 24
START_S = 10.0  # about a trip
WARM_UP, UPDATES = 72, 240
UPLOAD_MEMORY_MB = 2048  # all uploads fit into one aggregator
ADDS = 0.9
MOUNT = Path("/sys/fs/cgroup")
TASKS = ("one", "two")
# A request may wait for seconds: its client must not count as dead.
SERVER = ServerConfig(heartbeat_s=3.0)


class Sample(NamedTuple):
    """At one moment: the time, chunks that devices have sent, CPU seconds by process, and for how
    long each disk was busy.
    """

    at_s: float
    chunks: int
    cpu_s: dict[str, float]
    disk_ms: dict[str, int]

    @classmethod
    def of(cls, servers: Servers, devices: list[Device]) -> Sample:
        chunks = sum(device.chunks for device in devices)
        cpu_s = servers.cpu_s() | {"devices": time.process_time()}
        return cls(time.monotonic(), chunks, cpu_s, disk_busy_ms())


class Rate(NamedTuple):
    """While updates were counted: updates per second, the cores that each server process and all
    devices used, and the share of the time that the busiest disk was busy. Of all trips: the mean
    seconds of each phase.
    """

    per_s: float
    cores: dict[str, float]
    disk_busy: float
    phases_s: dict[str, float]

    def cpu_ms(self) -> dict[str, float]:
        """Per update, by process."""
        return {name: round(1e3 * cores / self.per_s, 1) for name, cores in self.cores.items()}


def main(cases: list[str]) -> None:
    pattern = np.ones(MODEL_LENGTH, np.float32)
    update = Encoded.of(pattern.tobytes(), SERVER.chunk_bytes)
    for case in cases or ("aggregator", "selector", "no-quota"):
        if case == "no-quota":
            compare_without_quota(update)
        else:
            compare(case, update)


def compare(role: str, update: Encoded) -> None:
    one, two = (rate(role, processes, DEVICES, update, QUOTA) for processes in (1, 2))
    adds = two.per_s / one.per_s - 1
    used = [
        [round(cores, 3) for name, cores in each.cores.items() if name.startswith(role)]
        for each in (one, two)
    ]
    is_valid = all(cores >= SATURATED * QUOTA for cores in (*used[0], *used[1]))
    say = f"a second {role} adds, of the first, with {QUOTA} of a core each"
    report(
        "second_server",
        say,
        adds if is_valid else None,
        ADDS,
        is_valid and adds >= ADDS,
        valid=is_valid,
        role_cores=used,
        **details(one, two),
    )


def compare_without_quota(update: Encoded) -> None:
    one, two, more_devices = (
        rate("aggregator", processes, devices, update, None)
        for processes, devices in ((1, FEW_DEVICES), (2, FEW_DEVICES), (1, 2 * FEW_DEVICES))
    )
    report(
        "second_server",
        "a second aggregator adds, of the first, with no quota",
        two.per_s / one.per_s - 1,
        None,
        passed=True,
        twice_the_devices_add=round(more_devices.per_s / one.per_s - 1, 2),
        **details(one, two, more_devices),
    )


def details(*rates: Rate) -> dict[str, object]:
    return {
        "per_s": [round(each.per_s, 2) for each in rates],
        "cpu_ms": [each.cpu_ms() for each in rates],
        "disk_busy": [round(each.disk_busy, 2) for each in rates],
        "phases_s": [each.phases_s for each in rates],
    }


def rate(role: str, processes: int, devices: int, update: Encoded, quota: float | None) -> Rate:
    numbers: dict[str, Any] = {"selectors": 1, "aggregators": 1} | {f"{role}s": processes}
    with running(SERVER, apart=True, upload_memory_mb=UPLOAD_MEMORY_MB, **numbers) as servers:
        for task in TASKS:
            places = devices * 5 // 6 // len(TASKS)
            config = msgspec.structs.replace(TASK, task=task, concurrency=places)
            servers.add_task(config, np.zeros(MODEL_LENGTH, np.float32))
        wait_until(lambda: are_served(servers, len(TASKS), numbers["aggregators"]), "two tasks")
        measured = [pid for name, pid in servers.pids.items() if name.startswith(role)]
        with limited(measured, quota) if quota is not None else nullcontext():
            before, after, phases_s = timed(servers, devices, update)
    passed_s = after.at_s - before.at_s
    cores = {name: (after.cpu_s[name] - before.cpu_s[name]) / passed_s for name in after.cpu_s}
    busy_ms = max(ms - before.disk_ms.get(name, 0) for name, ms in after.disk_ms.items())
    updates = (after.chunks - before.chunks) / len(update.chunks)
    return Rate(updates / passed_s, cores, busy_ms / 1e3 / passed_s, phases_s)


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


def timed(
    servers: Servers, devices: int, update: Encoded
) -> tuple[Sample, Sample, dict[str, float]]:
    """Before and after the updates that count, and the mean seconds of each phase of a trip."""
    ids, acknowledged = count(), count(1)
    doors, fleet = servers.doors(), list[Device]()
    samples: list[Sample] = []

    def live(number: int) -> int:
        time.sleep(START_S * number / devices)
        trips = 0
        with closing(Device(doors[number % len(doors)], servers.token())) as device:
            fleet.append(device)
            while len(samples) < 2:
                device.trip(lambda _: update, f"u{next(ids)}")
                trips += 1
                if next(acknowledged) in (WARM_UP, WARM_UP + UPDATES):
                    samples.append(Sample.of(servers, fleet))
        return trips

    with ThreadPoolExecutor(devices) as threads:
        trips = sum(threads.map(live, range(devices)))
    phases_s = {
        phase: round(sum(device.spent_s[phase] for device in fleet) / trips, 2)
        for phase in fleet[0].spent_s
    }
    return samples[0], samples[1], phases_s


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
            limits = (
                {
                    "cpu.cfs_period_us": PERIOD_US,
                    "cpu.cfs_quota_us": quota_us,
                    "cpu.shares": 1024 * WEIGHT,
                }
                if old
                else {"cpu.max": f"{quota_us} {PERIOD_US}", "cpu.weight": 100 * WEIGHT}
            )
            for name, value in limits.items():
                (group / name).write_text(str(value), encoding="ascii")
            (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
        yield
    finally:
        for pid, group in zip(pids, groups, strict=True):
            with suppress(OSError):
                (top / "cgroup.procs").write_text(str(pid), encoding="ascii")
                group.rmdir()


if __name__ == "__main__":
    main(sys.argv[1:])
