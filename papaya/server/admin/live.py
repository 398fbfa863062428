"""The coordinator's current view: live servers, client demand, active clients.

Read from the machine between two events. A coordinator that does not lead gets no reports, so its
view is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from papaya.coordinator.coordinator import Coordinator
from papaya.messages.base import NodeId
from papaya.messages.storage import TaskRow
from papaya.server.admin.views import AggregatorStatus, ClockStatus, SelectorStatus

# From this share of the refused difference on, a clock is reported: one heartbeat.
_REPORTED_SHARE = 1 / 3


class LiveTask(Struct, frozen=True):
    """`demand` excludes clients that are assigned but not yet confirmed."""

    holder: NodeId
    active: int
    demand: int
    held: int
    halted: str


class Live(Protocol):
    """Roles of this process, and what its coordinator knows."""

    @property
    def roles(self) -> tuple[str, ...]: ...

    def leads(self) -> bool: ...

    def is_led(self) -> bool: ...

    def recovers(self) -> bool: ...

    def task(self, row: TaskRow) -> LiveTask | None: ...

    def aggregators(self) -> tuple[AggregatorStatus, ...]: ...

    def selectors(self) -> tuple[SelectorStatus, ...]: ...

    def clocks(self) -> tuple[ClockStatus, ...]: ...


class CoordinatorLive:
    """The view of the coordinator that runs in this process."""

    def __init__(
        self, coordinator: Coordinator, now: Callable[[], float], roles: tuple[str, ...]
    ) -> None:
        self.roles = roles
        self._coordinator = coordinator
        self._now = now

    def leads(self) -> bool:
        return self._coordinator.leadership.leads(self._now())

    def is_led(self) -> bool:
        return self._coordinator.leadership.is_led(self._now())

    def recovers(self) -> bool:
        return self.leads() and self._coordinator.leadership.recovers(self._now())

    def task(self, row: TaskRow) -> LiveTask | None:
        coordinator, task = self._coordinator, row.config.task
        fence = coordinator.fences.get(task)
        if not self.leads() or fence is None or task not in coordinator.tasks:
            return None
        view = coordinator.fleet.aggregators.get(fence.aggregator)
        report = None if view is None or view.boot != fence.boot else view.tasks.get(task)
        if report is None or report.seq != fence.seq:
            return LiveTask(fence.aggregator, 0, 0, self._held(row), "")
        demand = max(0, coordinator.demand(task))
        return LiveTask(fence.aggregator, report.active, demand, self._held(row), report.halted)

    def _held(self, row: TaskRow) -> int:
        config = row.config
        counts = [
            count
            for selector in self._coordinator.fleet.selectors.values()
            for device_class, count in selector.held.items()
            if device_class.fits(config.task, config.requirements, config.is_secure)
        ]
        return max(0, sum(counts))

    def aggregators(self) -> tuple[AggregatorStatus, ...]:
        now = self._now()
        return tuple(
            AggregatorStatus(
                node, max(0.0, now - view.heard_at), len(view.tasks), view.overloaded_beats > 0
            )
            for node, view in sorted(self._coordinator.fleet.live_aggregators(now).items())
            if self.leads()
        )

    def selectors(self) -> tuple[SelectorStatus, ...]:
        now = self._now()
        return tuple(
            SelectorStatus(node, max(0.0, now - view.heard_at), max(0, sum(view.held.values())))
            for node, view in sorted(self._coordinator.fleet.selectors.items())
            if self.leads()
        )

    def clocks(self) -> tuple[ClockStatus, ...]:
        """The clocks that should be corrected."""
        fleet = self._coordinator.fleet
        limit_s = fleet.max_clock_difference_s
        return tuple(
            ClockStatus(node, ahead_s, is_refused=abs(ahead_s) >= limit_s)
            for node, ahead_s in sorted(fleet.clocks(self._now()).items())
            if self.leads() and abs(ahead_s) >= _REPORTED_SHARE * limit_s
        )
