"""Which aggregator holds which task (paper, "Fast Model Aggregation").

    "the Coordinator moves tasks between Aggregators only when it detects failed or overloaded
    Aggregators. The Coordinator evenly distributes tasks among available Aggregators using the
    estimated workload of a task [...] the task concurrency and model size."

These functions never move a task only to balance the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from papaya.messages.base import Boot, NodeId, TaskId
from papaya.messages.storage import FenceRow


def is_orphan(fence: FenceRow, live_boot: Boot | None, may_report: bool) -> bool:
    """Has the task no holder, or is the boot that holds it gone?

    `live_boot` is the boot that its node reports now. `may_report`: not every aggregator has had
    time to report yet.
    """
    if not fence.aggregator:
        return True
    if live_boot is not None and live_boot >= fence.boot:
        return live_boot > fence.boot  # restarted: the boot that held the task is gone
    # The holder is silent, or only a late report of an earlier boot has arrived. Neither is proof
    # while its report may still come.
    return not may_report


def workloads(
    live: Iterable[NodeId], holders: Mapping[TaskId, NodeId], work: Mapping[TaskId, float]
) -> dict[NodeId, float]:
    """Estimated work of each live aggregator."""
    total = dict.fromkeys(live, 0.0)
    for task, amount in work.items():
        if holders[task] in total:
            total[holders[task]] += amount
    return total


def least_loaded(workloads: Mapping[NodeId, float]) -> NodeId | None:
    """The aggregator with the least estimated work; among equals, the first by name."""
    return min(workloads, key=lambda node: (workloads[node], node), default=None)


def early_choices(workloads: Mapping[NodeId, float], former: NodeId) -> dict[NodeId, float]:
    """The aggregators that may be given a task while others may not have reported yet.

    One without work: none has less. And the former holder, if it was restarted: then the work stays
    distributed as it was.
    """
    return {node: work for node, work in workloads.items() if work == 0 or node == former}


def relieve(
    overloaded: NodeId,
    tasks: Mapping[TaskId, float],
    workloads: Mapping[NodeId, float],
) -> tuple[TaskId, NodeId] | None:
    """The move that best relieves an overloaded aggregator, or None if no move helps.

    `tasks` are the workloads of the overloaded aggregator's tasks. A move helps only if the
    receiver ends up with less work than the giver had; otherwise it would be overloaded next.
    """
    others = {node: work for node, work in workloads.items() if node != overloaded}
    target = least_loaded(others)
    if target is None:
        return None
    gap = workloads[overloaded] - others[target]
    helpful = {task: work for task, work in tasks.items() if 0 < work < gap}
    if not helpful:
        return None
    best = min(helpful, key=lambda task: (abs(gap / 2 - helpful[task]), task))
    return best, target
