"""What this process knows right now: live servers, client demand, active clients.

Read from the machines between two events. The leader knows all of it. Another coordinator knows
which servers report. A selector or an aggregator knows itself, and whether a leader sends orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from msgspec import Struct

from papaya.aggregator.aggregator import Aggregator
from papaya.config import ServerConfig
from papaya.coordinator.coordinator import Coordinator
from papaya.messages.base import NodeId, TaskId
from papaya.messages.control import AggregatorReport, SelectorReport
from papaya.messages.storage import TaskRow
from papaya.selector.selector import Selector
from papaya.server.admin.views import AggregatorStatus, ClockStatus, SelectorStatus

# From this share of the refused difference on, a clock is reported: one heartbeat.
_REPORTED_SHARE = 1 / 3
# A report is missing after this share of the time until a server counts as dead.
_MISSING_SHARE = 1 / 2


class LiveTask(Struct, frozen=True):
    """`demand` excludes clients that are assigned but not yet confirmed. `silent_s`: since when the
    holder has been silent, if it should have reported again; the numbers are from its last report.
    """

    holder: NodeId
    active: int
    demand: int
    held: int
    halted: str
    silent_s: float = 0.0


class Live(Protocol):
    """Roles of this process, and what it knows."""

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
        self,
        coordinator: Coordinator,
        now: Callable[[], float],
        roles: tuple[str, ...],
        dead_after_s: float,
    ) -> None:
        self.roles = roles
        self._coordinator = coordinator
        self._now = now
        self._dead_after_s = dead_after_s

    def leads(self) -> bool:
        return self._coordinator.leadership.leads(self._now())

    def is_led(self) -> bool:
        return self._coordinator.leadership.is_led(self._now())

    def recovers(self) -> bool:
        return self.leads() and self._coordinator.recovers(self._now())

    def task(self, row: TaskRow) -> LiveTask | None:
        coordinator, task = self._coordinator, row.config.task
        fence = coordinator.rows.fences.get(task)
        if not self.leads() or fence is None or task not in coordinator.rows.tasks:
            return None
        view = coordinator.fleet.aggregators.get(fence.aggregator)
        report = None if view is None or view.boot != fence.boot else view.tasks.get(task)
        if report is None or report.seq != fence.seq:
            return LiveTask(fence.aggregator, 0, 0, self._held(row), "")
        return LiveTask(
            fence.aggregator,
            report.active,
            max(0, coordinator.demand.of(task)),
            self._held(row),
            report.halted,
            0.0 if view is None else self._silent_s(view.heard_at),
        )

    def _silent_s(self, heard_at: float) -> float:
        """0 unless a report is missing: a server counts as dead after three heartbeats."""
        silent_s = self._now() - heard_at
        return silent_s if silent_s > _MISSING_SHARE * self._dead_after_s else 0.0

    def _held(self, row: TaskRow) -> int:
        config = row.config
        counts = [
            count
            for selector in self._coordinator.fleet.selectors.values()
            for device_class, count in selector.held.items()
            if device_class.fits(config.task, config.requirements, config.is_secure)
        ]
        return max(0, sum(counts))

    def endings(self) -> dict[TaskId, tuple[int, dict[str, int]]]:
        """What holders reported of ended sessions, by task, with the holder's sequence number."""
        found: dict[TaskId, tuple[int, dict[str, int]]] = {}
        for view in self._coordinator.fleet.aggregators.values() if self.leads() else ():
            for task, report in view.tasks.items():
                if report.seq >= found.get(task, (0, {}))[0]:
                    found[task] = (report.seq, dict(report.endings))
        return found

    def aggregators(self) -> tuple[AggregatorStatus, ...]:
        now = self._now()
        if not self.leads():
            return tuple(
                AggregatorStatus(report.node, ago_s, len(report.tasks), report.load > 1)
                for ago_s, report in self._unanswered(now)
                if isinstance(report, AggregatorReport)
            )
        return tuple(
            AggregatorStatus(
                node, max(0.0, now - view.heard_at), len(view.tasks), view.overloaded_beats > 0
            )
            for node, view in sorted(self._coordinator.fleet.live_aggregators(now).items())
        )

    def selectors(self) -> tuple[SelectorStatus, ...]:
        now = self._now()
        if not self.leads():
            return tuple(
                SelectorStatus(
                    report.node,
                    ago_s,
                    sum(entry.count for entry in report.held),
                    report.check_ins_per_s,
                )
                for ago_s, report in self._unanswered(now)
                if isinstance(report, SelectorReport)
            )
        return tuple(
            SelectorStatus(
                node,
                max(0.0, now - view.heard_at),
                max(0, sum(view.held.values())),
                view.check_ins_per_s,
            )
            for node, view in sorted(self._coordinator.fleet.selectors.items())
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

    def _unanswered(self, now: float) -> Iterator[tuple[float, AggregatorReport | SelectorReport]]:
        """Reports that reached a coordinator that does not lead, unless too old, with their age."""
        for _, (heard_at, report) in sorted(self._coordinator.unanswered.items()):
            if now - heard_at < self._dead_after_s:
                yield max(0.0, now - heard_at), report


class RoleLive:
    """The view of a process without a coordinator: itself."""

    def __init__(
        self,
        machine: Selector | Aggregator,
        now: Callable[[], float],
        roles: tuple[str, ...],
        server: ServerConfig,
    ) -> None:
        self.roles = roles
        self._machine = machine
        self._now = now
        self._lease_s = server.leader_lease_s

    def leads(self) -> bool:
        return False

    def is_led(self) -> bool:
        """Whether orders of a leader arrive; true for a while after the start."""
        return self._now() - self._machine.led_at < self._lease_s

    def recovers(self) -> bool:
        return False

    def task(self, row: TaskRow) -> LiveTask | None:
        if not isinstance(self._machine, Aggregator):
            return None
        held = self._machine.tasks.get(row.config.task)
        if held is None or not (held.has_served or held.problem):
            return None
        active, demand = len(held.sessions.active), held.demand(self._now())
        return LiveTask(self._machine.node, active, demand, 0, held.problem)

    def aggregators(self) -> tuple[AggregatorStatus, ...]:
        if not isinstance(self._machine, Aggregator):
            return ()
        return (AggregatorStatus(self._machine.node, 0.0, len(self._machine.tasks), False),)

    def selectors(self) -> tuple[SelectorStatus, ...]:
        if not isinstance(self._machine, Selector):
            return ()
        own = self._machine
        return (SelectorStatus(own.node, 0.0, len(own.held), own.check_ins_per_s),)

    def clocks(self) -> tuple[ClockStatus, ...]:
        return ()
