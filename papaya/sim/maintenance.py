"""The operator of a simulated cluster stops all training now and then, and ends it again.

It writes the same transactions as `papaya maintenance`. The row is deleted before `until`, so that
training can go on after the faults.
"""

from __future__ import annotations

from functools import partial
from random import Random

from papaya.messages.storage import (
    FENCES,
    MAINTENANCE_KEY,
    FenceRow,
    MaintenanceRow,
    Outcome,
    Row,
    Transaction,
)
from papaya.sim.cluster import Cluster
from papaya.sim.revisions import tell
from papaya.sim.storage import OWNER

_MEAN_GAP_HEARTBEATS = 20.0
_MEAN_LENGTH_HEARTBEATS = 4.0


class MaintenanceOperator:
    """Begins a maintenance, ends it, and begins another one."""

    def __init__(self, cluster: Cluster, rng: Random, until: float) -> None:
        self._cluster = cluster
        self._rng = rng
        self._until = until
        self._after(_MEAN_GAP_HEARTBEATS)

    def _after(self, mean_heartbeats: float) -> None:
        mean_s = mean_heartbeats * self._cluster.config.server.heartbeat_s
        delay_s = min(self._rng.expovariate(1 / mean_s), self._until - self._cluster.engine.now)
        self._cluster.engine.after(max(0.0, delay_s), self._turn)

    def _turn(self) -> None:
        self._cluster.state.read((MAINTENANCE_KEY, FENCES), self._change)

    def _change(self, rows: dict[str, Row]) -> None:
        cluster, row = self._cluster, rows.get(MAINTENANCE_KEY)
        is_last = cluster.engine.now >= self._until
        if row is not None:
            change = Transaction(require=((MAINTENANCE_KEY, row),), delete=(MAINTENANCE_KEY,))
        elif is_last:
            return
        else:
            change = self._begun(rows)
        if not is_last:
            self._after(_MEAN_GAP_HEARTBEATS if row is not None else _MEAN_LENGTH_HEARTBEATS)
        cluster.state.transact(OWNER, change, partial(self._written, is_last))

    def _begun(self, rows: dict[str, Row]) -> Transaction:
        now, is_stopped = self._cluster.engine.now, self._rng.random() < 0.5
        row = MaintenanceRow(now, 0.0, is_stopped, "operator", "")
        fences = {key: fence for key, fence in rows.items() if isinstance(fence, FenceRow)}
        if not is_stopped:
            fences = {}
        released = [(key, FenceRow(fence.seq + 1, "", 0)) for key, fence in fences.items()]
        return Transaction(
            require=((MAINTENANCE_KEY, None), *fences.items()),
            put=((MAINTENANCE_KEY, row), *released),
        )

    def _written(self, is_last: bool, outcome: Outcome) -> None:
        if is_last and outcome != "committed":
            self._turn()  # training must go on in the end
        tell(self._cluster, self._rng, outcome)
