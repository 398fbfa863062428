"""A whole server that starts with a wrong clock, and devices that replay what was counted.

The server reads the clock when it starts. Each test starts it three times on the same data folder.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from papaya.clock import Clock
from papaya.messages.storage import ConsumedRow
from papaya.store.state import SqliteState
from tests.hostile.running_server import MODEL_LENGTH, PatientConfig, RunningServer

HOUR_S = 3600.0
UPDATE = bytes(4 * MODEL_LENGTH)


def a_server(folder: Path, clock_ahead_s: float) -> RunningServer:
    clock = Clock(wall=lambda: time.time() + clock_ahead_s)
    return RunningServer(folder, clock=clock, server=PatientConfig(silent_s=15.0))


def make_version(server: RunningServer) -> str:
    """One client makes one version; its upload ticket."""
    before = server.version()
    ticket = str(server.report()["ticket"])
    assert server.send_all(ticket, UPDATE).message["discarded"] is None
    server.until(server.version, lambda version: version == before + 1)
    return ticket


def counted_sessions(folder: Path) -> int:
    store = SqliteState(folder / "data" / "state.db")
    try:
        rows = store.read(("consumed/",)).values()
        return sum(len(row.members) for row in rows if isinstance(row, ConsumedRow))
    finally:
        store.close()


@pytest.mark.parametrize(
    ("first_s", "second_s", "third_s"),
    [(0.0, HOUR_S, 0.0), (-HOUR_S, 0.0, -HOUR_S)],
    ids=["ahead", "behind"],
)
def test_a_replayed_upload_is_counted_once_whatever_the_clocks_show(
    tmp_path: Path, first_s: float, second_s: float, third_s: float
) -> None:
    """A suspended server is one that is behind: its clock stood still."""
    with a_server(tmp_path, first_s) as server:
        server.submit(aggregation_goal=1, training_timeout_s=600.0)
        ticket = make_version(server)
        make_version(server)
    with a_server(tmp_path, second_s) as server:
        make_version(server)
    assert counted_sessions(tmp_path) < 3, "the second clock deleted nothing: nothing is shown"
    with a_server(tmp_path, third_s) as server:
        answer = server.until(
            lambda: server.chunk(ticket, 0, UPDATE[:64]),
            lambda answer: answer.kind != "Retry",
        )
        assert answer.message == {"type": "Aborted", "reason": "stale"}
        assert server.version() == 3
