"""What an aggregator tells the Coordinator of one task (paper, "High Client Utilization")."""

from __future__ import annotations

from papaya.aggregator.held_task import HeldTask
from papaya.messages.control import TaskReport


def task_report(held: HeldTask, now: float, number: int) -> TaskReport:
    """Demand that is told is promised: the clients who come for it will find their slots."""
    demand = held.demand(now)
    waits = "" if held.offers is None else held.offers.problem
    held.promises.offer(demand)
    return TaskReport(
        task=held.task,
        seq=held.fence.seq,
        active=len(held.sessions.active),
        demand=demand,
        halted=held.halted_because or waits,
        ended=held.sessions.ended_count,
        joined=held.confirmations.name_in(number),
    )
