"""What the Coordinator knows about servers, from their reports alone.

Paper: "the Coordinator pools together information from all Aggregators into a consolidated view of
client demand for every task in the system." Reports tell which servers are alive. Which aggregator
holds a task is decided by the fence rows, not here.

Reports also tell the time at their sender. A server whose clock is too far from the leader's would
refuse clients too early or too late, so its reports are refused: it counts as dead until it starts
again with another clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Final

from papaya.messages.base import Boot, NodeId, TaskId
from papaya.messages.control import AggregatorReport, SelectorReport, TaskReport
from papaya.messages.selection import DeviceClass

_FORGET_S: Final = 86_400.0


class PeerClock:
    """How far the clock of one boot of a server is ahead of the leader's; negative if behind.

    A report that took long to arrive looks like a clock that is behind. So the largest value of
    this window and the last one counts: some report of the two was fast.
    """

    def __init__(self, boot: Boot, window_s: float) -> None:
        self.boot = boot
        self._window_s = window_s
        self.heard_at = -math.inf
        self._since = -math.inf
        self._last_s = self._current_s = -math.inf

    @property
    def ahead_s(self) -> float:
        return max(self._last_s, self._current_s)

    def hear(self, now: float, at: float) -> None:
        """A report that was sent `at`, by the clock of its sender, arrived now."""
        self.heard_at = now
        if now >= self._since + self._window_s:
            self._since, self._last_s, self._current_s = now, self._current_s, -math.inf
        self._current_s = max(self._current_s, at - now)


class AggregatorView:
    """One boot of one aggregator, as its last report describes it."""

    def __init__(self, boot: Boot) -> None:
        self.boot = boot
        # The number of the last report, when it arrived, and the epoch of the leader it was for.
        self.number = -1
        self.heard_at = 0.0
        self.epoch = 0
        # Its process is about to stop.
        self.is_draining = False
        # Consecutive heartbeats with a load above 1.
        self.overloaded_beats = 0
        self.tasks: dict[TaskId, TaskReport] = {}
        # Sessions that end per second, and the counts at the last heartbeat that this comes from.
        self.ended_per_s: dict[TaskId, float] = {}
        self._ended_at_beat: dict[TaskId, tuple[float, int]] = {}

    def update(self, now: float, report: AggregatorReport) -> None:
        self.number = report.number
        self.heard_at = now
        self.epoch = report.epoch
        self.is_draining = report.draining
        self.tasks = {task.task: task for task in report.tasks}
        if report.heartbeat:
            self.overloaded_beats = self.overloaded_beats + 1 if report.load > 1 else 0
            self._measure(now, report)

    def _measure(self, now: float, report: AggregatorReport) -> None:
        """Measure how fast sessions end; pace steering expects the same rate to continue."""
        before = self._ended_at_beat
        self._ended_at_beat = {task.task: (now, task.ended) for task in report.tasks}
        self.ended_per_s = {}
        for task in report.tasks:
            then, ended = before.get(task.task, (now, task.ended))
            self.ended_per_s[task.task] = (
                max(0, task.ended - ended) / (now - then) if now > then else 0.0
            )


class SelectorView:
    """One boot of one selector: the check-ins it holds, less those already assigned."""

    def __init__(self, boot: Boot) -> None:
        self.boot = boot
        self.number = -1
        self.heard_at = 0.0
        self.held: dict[DeviceClass, int] = {}
        # How many of them may still be assigned.
        self.available = 0
        # The number of the catalogue that it has, by its last report.
        self.catalogue = 0
        self.check_ins_per_s = 0.0
        self._in_flight: dict[int, dict[DeviceClass, int]] = {}

    def update(self, now: float, report: SelectorReport) -> None:
        self.number = report.number
        self.heard_at = now
        self.catalogue = report.catalogue
        self.check_ins_per_s = report.check_ins_per_s
        for order in [number for number in self._in_flight if number <= report.acked]:
            del self._in_flight[order]
        self.held = {entry.device_class: entry.count for entry in report.held}
        for forwarded in self._in_flight.values():
            for device_class, count in forwarded.items():
                if device_class in self.held:
                    self.held[device_class] -= count
        self.available = sum(count for count in self.held.values() if count > 0)

    def forward(self, order: int, device_class: DeviceClass, count: int) -> None:
        """Count these clients as gone, also in later reports, until the order is acknowledged."""
        self.held[device_class] = self.held.get(device_class, 0) - count
        self.available -= count
        forwarded = self._in_flight.setdefault(order, {})
        forwarded[device_class] = forwarded.get(device_class, 0) + count


class Fleet:
    """All servers that have reported."""

    def __init__(self, dead_after_s: float, max_clock_difference_s: float) -> None:
        self._dead_after_s = dead_after_s
        self.max_clock_difference_s = max_clock_difference_s
        # Since when reports are processed here.
        self.listens_since = 0.0
        self._clocks: dict[NodeId, PeerClock] = {}
        self.aggregators: dict[NodeId, AggregatorView] = {}
        self.selectors: dict[NodeId, SelectorView] = {}

    def heard_aggregator(self, now: float, report: AggregatorReport) -> bool:
        """Take in a report. False if it is refused or older than one already seen."""
        if self._refuses(now, report):
            return False
        view = self.aggregators.get(report.node)
        if view is None or report.boot > view.boot:
            view = self.aggregators[report.node] = AggregatorView(report.boot)
        if report.boot < view.boot or report.number <= view.number:
            return False
        view.update(now, report)
        return True

    def heard_selector(self, now: float, report: SelectorReport) -> bool:
        """Take in a report. False if it is refused or older than one already seen."""
        if self._refuses(now, report):
            return False
        view = self.selectors.get(report.node)
        if view is None or report.boot > view.boot:
            view = self.selectors[report.node] = SelectorView(report.boot)
        if report.boot < view.boot or report.number <= view.number:
            return False
        view.update(now, report)
        return True

    def _refuses(self, now: float, report: AggregatorReport | SelectorReport) -> bool:
        """Is the sender's clock too far from this one?"""
        clock = self._clocks.get(report.node)
        if clock is None or report.boot > clock.boot:
            clock = self._clocks[report.node] = PeerClock(report.boot, self._dead_after_s)
        if report.boot == clock.boot:
            clock.hear(now, report.at)
        return abs(clock.ahead_s) >= self.max_clock_difference_s

    def clocks(self, now: float) -> dict[NodeId, float]:
        """How far the clock of each server that reports is ahead."""
        limit = now - self._dead_after_s
        known = self._clocks.items()
        return {node: clock.ahead_s for node, clock in known if clock.heard_at > limit}

    def held(self, rng: Random) -> Iterator[tuple[NodeId, DeviceClass, int]]:
        """Held check-ins, starting at a random selector so that no selector is always first."""
        names = list(self.selectors)
        start = int(rng.random() * len(names)) if len(names) > 1 else 0
        for name in names[start:] + names[:start]:
            if self.selectors[name].available > 0:
                for device_class, count in self.selectors[name].held.items():
                    yield name, device_class, count

    def live_aggregators(self, now: float) -> dict[NodeId, AggregatorView]:
        """Aggregators that do not count as dead."""
        return {node: view for node, view in self.aggregators.items() if self._is_live(now, view)}

    def open_aggregators(self, now: float) -> dict[NodeId, AggregatorView]:
        """Aggregators that may be given a task."""
        return {node: view for node, view in self.aggregators.items() if self._is_open(now, view)}

    def has_other_than(self, now: float, node: NodeId) -> bool:
        """Is there another aggregator that may be given a task?"""
        views = self.aggregators.items()
        return any(other != node and self._is_open(now, view) for other, view in views)

    def _is_live(self, now: float, view: AggregatorView) -> bool:
        """Silence only counts from `listens_since`: before that, reports were not processed."""
        return max(view.heard_at, self.listens_since) > now - self._dead_after_s

    def _is_open(self, now: float, view: AggregatorView) -> bool:
        """Has it reported lately, and is it not about to stop?

        If this process was stopped, an aggregator that has not reported since may be dead.
        """
        return view.heard_at > now - self._dead_after_s and not view.is_draining

    def is_draining(self, node: NodeId) -> bool:
        view = self.aggregators.get(node)
        return view is not None and view.is_draining

    def may_leave(self, node: NodeId, task: TaskId, seq: int) -> bool:
        """Whether this holder of a task is about to stop and has made its last record."""
        view = self.aggregators.get(node)
        if view is None or not view.is_draining:
            return False
        report = view.tasks.get(task)
        return report is None or report.seq != seq or report.drained

    def boot_of(self, now: float, node: NodeId) -> Boot | None:
        """The boot that a node runs; None if it counts as dead."""
        view = self.aggregators.get(node)
        return view.boot if view is not None and self._is_live(now, view) else None

    def silent_s(self, now: float, node: NodeId) -> float:
        """For how long a server has not reported; silence counts from `listens_since`."""
        view = self.aggregators.get(node) or self.selectors.get(node)
        if view is None:
            return self._dead_after_s  # it was forgotten
        return now - max(view.heard_at, self.listens_since)

    def forget_silent(self, now: float) -> None:
        """Forget dead selectors, and other servers after a day: their names may never come back."""
        for node in list(self.selectors):
            if self.silent_s(now, node) >= self._dead_after_s:
                del self.selectors[node]
        for node in list(self.aggregators):
            if self.silent_s(now, node) >= _FORGET_S:
                del self.aggregators[node]
        for node, clock in list(self._clocks.items()):
            if now - clock.heard_at >= _FORGET_S:
                del self._clocks[node]
