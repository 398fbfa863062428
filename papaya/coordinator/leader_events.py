"""Events of a candidate for the log: who leads, who holds each task, which servers are alive.

Each is logged once, although rows and reports repeat (docs/adr/0066).
"""

from __future__ import annotations

from papaya.coordinator.fleet import Fleet
from papaya.coordinator.recovery import Leadership
from papaya.messages.base import Boot, NodeId, TaskId
from papaya.messages.control import AggregatorReport, SelectorReport
from papaya.messages.events import (
    LeadershipGained,
    LeadershipLost,
    ServerEvent,
    ServerSeen,
    ServerSilent,
    TaskFound,
    TaskMoved,
    TaskPlaced,
    TaskReleased,
)
from papaya.messages.storage import FenceRow


class LeaderEvents:
    """What the operator was told, and what is new."""

    def __init__(self) -> None:
        self._events: list[ServerEvent] = []
        # The epoch that the operator was told this candidate leads, 0 if it does not, and the last
        # one that it led.
        self._told_epoch = 0
        self._last_epoch = 0
        # Why the last move of a task was decided, with its sequence number.
        self._moved_because: dict[TaskId, tuple[int, str]] = {}
        # What the operator was told: the fence of each task, and the boots of live servers.
        self._told_fences: dict[TaskId, FenceRow] = {}
        self._told_servers: dict[NodeId, Boot] = {}

    def begin_epoch(self) -> None:
        """A new leader tells what it finds."""
        self._told_fences.clear()
        self._told_servers.clear()

    def take(self) -> list[ServerEvent]:
        """The new events; each is taken once."""
        events, self._events = self._events, []
        return events

    def leadership(self, now: float, own: Leadership) -> None:
        """One event each time this candidate begins or ceases to lead, before all others."""
        leads, told = own.leads(now), self._told_epoch
        news: list[ServerEvent] = []
        if told and not (leads and own.epoch == told):
            is_late = own.epoch == told
            why = (
                "no renewal of its lease was confirmed in time"
                if is_late
                else f"{own.last_leader or 'nobody'} leads now"
            )
            news.append(LeadershipLost(told, why))
            self._told_epoch = 0
        if leads and not self._told_epoch:
            is_again = own.epoch == self._last_epoch
            why = "its lease was renewed late" if is_again else own.claimed_because
            news.append(LeadershipGained(own.epoch, why))
            self._told_epoch = self._last_epoch = own.epoch
        self._events[:0] = news

    def decided(self, task: TaskId, seq: int, why: str) -> None:
        """A move is on its way to the state store."""
        self._moved_because[task] = (seq, why)

    def fence(self, task: TaskId, run: int, fence: FenceRow) -> None:
        """One event for each fence that this leader writes or finds changed."""
        old = self._told_fences.get(task)
        if old is not None and fence.seq <= old.seq:
            return
        self._told_fences[task] = fence
        if old is not None and not old.aggregator and not fence.aggregator:
            return  # nobody held it, and nobody does
        seq, holder = fence.seq, fence.aggregator
        decided, why = self._moved_because.pop(task, (0, ""))
        if decided != seq:
            why = "an earlier leader decided it"
        if old is None:
            event: ServerEvent = TaskFound(task, run, seq, holder)
        elif not holder:
            event = TaskReleased(task, run, seq, old.aggregator)
        elif not old.aggregator:
            event = TaskPlaced(task, run, seq, holder, "no aggregator held it")
        else:
            event = TaskMoved(task, run, seq, holder, old.aggregator, why)
        self._events.append(event)

    def placed(self, task: TaskId, run: int, old: FenceRow | None, new: FenceRow) -> None:
        """A placement of this leader was committed."""
        if old is not None:
            self._told_fences.setdefault(task, old)
        self.fence(task, run, new)

    def seen(self, report: AggregatorReport | SelectorReport) -> None:
        if self._told_servers.get(report.node) != report.boot:
            self._told_servers[report.node] = report.boot
            self._events.append(ServerSeen(report.node, report.boot))

    def silent(self, now: float, fleet: Fleet, dead_after_s: float) -> None:
        """Servers that were alive and count as dead now."""
        for node in list(self._told_servers):
            silent_s = fleet.silent_s(now, node)
            if silent_s >= dead_after_s:
                del self._told_servers[node]
                self._events.append(ServerSilent(node, round(silent_s, 1)))
