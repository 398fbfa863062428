"""Client demand of every task (paper, "High Client Utilization").

    "the Coordinator must explicitly account for clients that have been assigned to a task, but have
    not yet confirmed the assignment."

It follows from rows, reports and leases. Who gets the clients is decided in `assignment.py`.
"""

from __future__ import annotations

from papaya.config import ServerConfig
from papaya.coordinator.assignment import Leases
from papaya.coordinator.fleet import Fleet
from papaya.coordinator.known_rows import KnownRows
from papaya.coordinator.recovery import Leadership
from papaya.messages.base import TaskId
from papaya.messages.control import TaskReport

_NEVER = float("inf")


class ClientDemand:
    """The tasks that want clients, and how many.

    `refresh` keeps the results up to date, because a large fleet sends thousands of reports per
    second, each about one of a thousand tasks.
    """

    def __init__(
        self,
        config: ServerConfig,
        leadership: Leadership,
        rows: KnownRows,
        fleet: Fleet,
        leases: Leases,
    ) -> None:
        self._config = config
        self._leadership = leadership
        self._rows = rows
        self._fleet = fleet
        self._leases = leases
        # Tasks with positive demand.
        self.positive: dict[TaskId, int] = {}
        # A task has begun to want clients since all selectors were last told.
        self.has_new_wish = False
        # By task: whether it wants clients, and its share of the pace.
        self._wants: dict[TaskId, bool] = {}
        self._paces: dict[TaskId, float] = {}
        # The tasks that want clients; None if it has to be made again.
        self._wanting: tuple[TaskId, ...] | None = None

    def of(self, task: TaskId) -> int:
        """Client demand, less the clients assigned but not yet confirmed."""
        report = self.report_of(task)
        if report is None or self._rows.tasks[task].state != "running":
            return 0
        return report.demand - self._leases.count(task)

    def report_of(self, task: TaskId) -> TaskReport | None:
        """The last report on a task by the holder that its fence names, or None.

        Also None if that holder does not follow this leader yet: it still keeps slots for clients
        that an earlier leader has assigned.
        """
        fence = self._rows.fences.get(task)
        view = self._fleet.aggregators.get(fence.aggregator) if fence is not None else None
        if fence is None or view is None or view.boot != fence.boot:
            return None
        if view.epoch != self._leadership.epoch:
            return None
        report = view.tasks.get(task)
        return report if report is not None and report.seq == fence.seq else None

    def refresh(self, task: TaskId) -> None:
        """A row, a report or a lease of the task has changed."""
        if task not in self._rows.tasks:
            return
        demand, ended_per_s = self.of(task), self._ended_per_s(task)
        if demand > 0:
            self.positive[task] = demand
        else:
            self.positive.pop(task, None)
        self._paces[task] = ended_per_s + max(0, demand) / self._config.heartbeat_s
        # Is there demand now, or will there be while a check-in is held? Then a client is already
        # waiting when a slot becomes free.
        is_running = self._rows.tasks[task].state == "running"
        wants = demand > 0 or (ended_per_s * self._config.hold_s >= 1 and is_running)
        if wants is not self._wants.get(task):
            self._wants[task] = wants
            self._wanting = None
            self.has_new_wish |= wants

    def refresh_all(self) -> None:
        """The rows were read."""
        self._wanting = None
        for task in [task for task in self._wants if task not in self._rows.tasks]:
            del self._wants[task], self._paces[task]
            self.positive.pop(task, None)
        for task in self._rows.tasks:
            self.refresh(task)

    def wanting(self) -> tuple[TaskId, ...]:
        """The tasks for which selectors hold check-ins."""
        if self._wanting is None:
            self._wanting = tuple(task for task in self._rows.tasks if self._wants[task])
        return self._wanting

    @property
    def clients_per_s(self) -> float:
        """How many clients per second would meet the demand of all tasks."""
        return sum(self._paces.values())

    def _ended_per_s(self, task: TaskId) -> float:
        """Clients that end per second, whose slots become free."""
        view = self._fleet.aggregators.get(self._rows.fences[task].aggregator)
        report, last = self.report_of(task), self._rows.tasks[task].config.stop.versions
        if view is None or (report is not None and report.version >= (last or _NEVER)):
            return 0.0  # the last version exists, so no slot is filled again
        return view.ended_per_s.get(task, 0.0)
