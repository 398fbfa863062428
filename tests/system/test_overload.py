"""An aggregator with too little memory for its tasks gives one away, once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from papaya.config import AsyncFL, OptimizerConfig, TaskConfig
from tests.system.admin import Admin
from tests.system.processes import PAPAYA, Installation, ServerProcess, Toml, environment
from tests.system.test_roles_apart import Apart
from tests.system.test_secure import STEP_S

_TASKS = [
    TaskConfig(
        task=name,
        concurrency=16,
        model_length=100_000,
        regime=AsyncFL(aggregation_goal=8),
        optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
        participation_gap_s=0.0,
    )
    for name in ("first", "second")
]
_HEARTBEAT_S = 0.8
_SERVER: dict[str, Toml] = {
    "heartbeat_s": _HEARTBEAT_S,
    "chunk_bytes": 64 << 10,
}
_OVERLOADED_BEATS = 10  # three are enough for a move


@pytest.mark.soak
def test_a_task_of_an_overloaded_aggregator_moves_once(tmp_path: Path) -> None:
    """Both tasks need six times the memory of an aggregator. So a move helps the first one, and
    the two are still overloaded after it; then no move would help, and none is made.
    """
    with Installation(tmp_path) as installation:
        shared: dict[str, Toml] = {"upload_memory_mb": 1, "log_format": "json"}
        apart = Apart(installation, selectors=1, aggregators=2, shared=shared, server=_SERVER)
        giver, taker = apart.aggregators
        for each in (apart.coordinator, apart.selectors[0], giver):
            each.start()
        admin = apart.admin()
        for config in _TASKS:
            admin.submit(config)
            admin.until_task(config.task, lambda line: line["holder"], STEP_S)
        taker.start()
        _until_reported(admin, 2)
        assert _moves(apart.coordinator) == [], "a new aggregator alone is no reason"
        with _load(apart):
            apart.coordinator.until_logged("its holder is overloaded", STEP_S)
            beats = _until_both_are_overloaded(admin, _OVERLOADED_BEATS)
        assert set(beats) == {f"aggregator@{each.addresses['servers']}" for each in (giver, taker)}
        [move] = _moves(apart.coordinator)
        assert move["why"] == "its holder is overloaded"
        assert move["before"] == f"aggregator@{giver.addresses['servers']}"
        assert move["holder"] == f"aggregator@{taker.addresses['servers']}"
        assert set(apart.stop().values()) == {0}


def _until_reported(admin: Admin, count: int) -> None:
    admin.until("/admin/status", lambda status: len(status["aggregators"]) == count, STEP_S)


def _until_both_are_overloaded(admin: Admin, beats: int) -> Counter[str]:
    """Until each was seen overloaded in so many heartbeats."""
    seen: Counter[str] = Counter()
    ends_at = time.monotonic() + 2 * STEP_S
    while len(seen) < 2 or min(seen.values()) < beats:
        assert time.monotonic() < ends_at, seen
        status = admin.get("/admin/status")
        seen.update(each["node"] for each in status["aggregators"] if each["is_overloaded"])
        time.sleep(_HEARTBEAT_S)
    return seen


def _moves(coordinator: ServerProcess) -> list[dict[str, str]]:
    lines = [
        msgspec.json.decode(line) for line in coordinator.text().splitlines() if line[:1] == "{"
    ]
    return [line for line in lines if line.get("event") == "task_moved"]


@contextmanager
def _load(apart: Apart) -> Iterator[None]:
    """More uploads at once than fit, until the block ends."""
    data = apart.installation.data
    command = [*PAPAYA, "load", "--server", ",".join(apart.urls()), "--devices", "32"]
    command += ["--admin", f"http://{apart.coordinator.addresses['admin']}"]
    command += ["--token-file", str(data / "admin.token"), "--training", "0.05"]
    command += ["--device-token-file", str(data / "device.token"), "--seconds", "3600"]
    command += [part for config in _TASKS for part in ("--task", config.task)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=sys.stderr, env=environment()
    ) as process:
        try:
            yield
        finally:
            process.kill()
