"""What orders say: the task list, the assignment map, and what each aggregator holds.

Paper, appendix "Failure Recovery": "assignment maps (model training task to corresponding
aggregator identity) refreshed from coordinator on every report". Read off the rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from papaya.coordinator.assignment import Leases
from papaya.coordinator.fleet import AggregatorView
from papaya.messages.base import NodeId, TaskId
from papaya.messages.control import Advertised, Placement, Route
from papaya.messages.storage import FenceRow, TaskRow

# Longer than clients go on asking; a ticket of a task that nobody remembers is answered Retry.
_OVER_IS_TOLD_S = 3600.0
_MAX_OVER = 256

Tasks = Mapping[TaskId, TaskRow]
Fences = Mapping[TaskId, FenceRow]


def advertised(tasks: Tasks) -> tuple[Advertised, ...]:
    """The tasks that selectors may offer to devices."""
    return tuple(
        Advertised(task, row.config.requirements)
        for task, row in tasks.items()
        if row.state == "running"
    )


def assignment_map(tasks: Tasks, fences: Fences) -> tuple[Route, ...]:
    """A paused task keeps its route: its clients finish what they began."""
    return tuple(
        Route(task, fence.aggregator, fence.seq)
        for task, fence in fences.items()
        if task in tasks and fence.aggregator
    )


def over(tasks: Tasks, now: float) -> tuple[TaskId, ...]:
    """Tasks whose clients may still come: told, so that they stop looking for a holder."""
    return tuple(
        task for task, row in tasks.items() if row.is_over and now < row.ended + _OVER_IS_TOLD_S
    )[-_MAX_OVER:]


def placements(
    node: NodeId, view: AggregatorView, tasks: Tasks, fences: Fences, leases: Leases
) -> tuple[Placement, ...]:
    """All that the rows give to this boot of an aggregator.

    Leases are named until the aggregator reports on the task: from then on it knows of them.
    """
    given = []
    for task, fence in fences.items():
        if task in tasks and fence.aggregator == node and fence.boot == view.boot:
            report = view.tasks.get(task)
            is_known = report is not None and report.seq == fence.seq
            expected = () if is_known else leases.sessions(task)
            given.append(Placement(task, fence.seq, expected))
    return tuple(given)
