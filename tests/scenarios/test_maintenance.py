"""A simulated cluster is stopped and goes on: nothing is lost, and nothing is made meanwhile."""

from __future__ import annotations

import pytest

from papaya.messages.storage import (
    MAINTENANCE_KEY,
    FenceRow,
    MaintenanceRow,
    Transaction,
    fence_key,
)
from papaya.sim.checkers import Auditor
from papaya.sim.cluster import Cluster
from papaya.sim.storage import OWNER
from tests.scenarios.test_restarts import CONFIG, TASKS, H


def begin(cluster: Cluster, *, is_stopped: bool) -> None:
    now = cluster.engine.now
    row = MaintenanceRow(now, now + 20 * H, is_stopped, "admin", "")
    released = []
    for task in TASKS if is_stopped else ():
        fence = cluster.state.rows[fence_key(task.task)]
        assert isinstance(fence, FenceRow)
        released.append((fence_key(task.task), FenceRow(fence.seq + 1, "", 0)))
    cluster.state.apply(OWNER, Transaction(put=((MAINTENANCE_KEY, row), *released)))


@pytest.mark.parametrize("is_stopped", [False, True])
def test_training_stops_and_goes_on(is_stopped: bool) -> None:
    """The auditor checks every promise; in maintenance, clients that train are still counted."""
    auditor = Auditor()
    cluster = Cluster(CONFIG, seed=1, observers=(auditor,))

    def versions() -> int:
        return sum(books.version for books in auditor.books.values())

    cluster.run(20 * H)
    begin(cluster, is_stopped=is_stopped)
    before, counted = versions(), auditor.endings["counted"]
    cluster.run(22 * H)  # assignments that were on their way have arrived
    assigned = sum(len(books.assigned) for books in auditor.books.values())
    cluster.run(40 * H)
    assert sum(len(books.assigned) for books in auditor.books.values()) == assigned
    if is_stopped:
        assert versions() == before
    else:
        assert auditor.endings["counted"] > counted
    stopped = versions()
    cluster.state.apply(OWNER, Transaction(delete=(MAINTENANCE_KEY,)))
    cluster.run(80 * H)
    assert versions() > stopped + len(TASKS)
    auditor.check_acknowledged()
