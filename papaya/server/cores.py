"""How many cores this process may use: its CPU affinity, and the quota of its cgroup.

A container with a quota of two cores sees all cores of its machine. Threads for all of them would
wait for each other's share of the quota, and each has a sum as large as the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OWN_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def usable_cores(own_groups: Path = _OWN_GROUPS, mount: Path = _MOUNT) -> int:
    """At least 1. A quota of one and a half cores counts as two."""
    allowed = [len(os.sched_getaffinity(0))]
    with suppress(OSError):
        for line in own_groups.read_text(encoding="utf-8").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            allowed += [max(1, math.ceil(cores)) for cores in _quotas(controllers, path, mount)]
    return min(allowed)


def _quotas(controllers: str, path: str, mount: Path) -> Iterator[float]:
    """Cores, of the group and those around it: the smallest counts."""
    if controllers and "cpu" not in controllers.split(","):
        return
    # Version 2 has one tree and names no controllers. In a container, the root is its own group.
    tops = [mount, mount / "unified"] if not controllers else [mount / controllers, mount / "cpu"]
    for top in tops:
        inside = top / path.strip("/")
        for group in (inside, *inside.parents):
            if not group.is_relative_to(top):
                break
            if (quota := _quota(group)) is not None:
                yield quota


def _quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            most, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            most = (group / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        return None if most in ("max", "-1") else int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such controller, or nonsense
        return None
