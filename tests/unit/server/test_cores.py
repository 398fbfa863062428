"""The number of cores that a process may use follows its cgroup's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from papaya.server.cores import usable_cores

MACHINE = 64


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(MACHINE)))


def cores(folder: Path, own: str, **files: str) -> int:
    """`files`: contents by path, with __ for a slash and _dot_ for a dot."""
    (folder / "own").write_text(own, encoding="ascii")
    for name, text in files.items():
        path = folder / "mount" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return usable_cores(folder / "own", folder / "mount")


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", MACHINE), ("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1)],
)
def test_version_2(tmp_path: Path, quota: str, expected: int) -> None:
    assert cores(tmp_path, "0::/a/b\n", a__b__cpu_dot_max=quota) == expected


def test_the_smallest_quota_of_all_groups_around_counts(tmp_path: Path) -> None:
    around = {"a__cpu_dot_max": "300000 100000", "a__b__cpu_dot_max": "800000 100000"}
    assert cores(tmp_path, "0::/a/b\n", **around) == 3


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    assert cores(tmp_path, "0::/\n", cpu_dot_max="400000 100000") == 4


@pytest.mark.parametrize(("quota", "expected"), [("-1", MACHINE), ("250000", 3)])
def test_version_1(tmp_path: Path, quota: str, expected: int) -> None:
    own = "5:memory:/a\n2:cpu,cpuacct:/a\n"
    files = {
        "cpu,cpuacct__a__cpu_dot_cfs_quota_us": f"{quota}\n",
        "cpu,cpuacct__a__cpu_dot_cfs_period_us": "100000\n",
        "memory__a__cpu_dot_cfs_quota_us": "1\n",
    }
    assert cores(tmp_path, own, **files) == expected


@pytest.mark.parametrize("quota", ["", "many 100000", "1", "100000 0"])
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, quota: str) -> None:
    assert cores(tmp_path, "0::/a\nnonsense\n", a__cpu_dot_max=quota) == MACHINE
    assert usable_cores(tmp_path / "nothing", tmp_path) == MACHINE
