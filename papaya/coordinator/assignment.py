"""Which client goes to which task (paper, "High Client Utilization").

    "A task is eligible if the client is compatible with its requirements [...], and if the task has
    positive client demand. [...] the Coordinator randomly assigns the client to an eligible task."
    "the Coordinator must explicitly account for clients that have been assigned to a task, but have
    not yet confirmed the assignment."

Bookkeeping and one random choice. An operator may give tasks weights and priorities: a client goes
to one of the eligible tasks with the highest priority, with a probability in proportion to the
weights. With equal shares this is the paper's uniform choice, from the same random numbers. Which
servers are alive is not its concern.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from random import Random

from papaya.messages.base import NodeId, SessionId, TaskId
from papaya.messages.selection import DeviceClass
from papaya.messages.storage import ShareRow


class Leases:
    """Assignments not yet confirmed, per task.

    A lease ends when a report confirms it, when its selector returns it unfilled, or when the
    holder sends a report *after* the lease's deadline: the holder admits no client after it. Ending
    a lease by the Coordinator's own clock could free a slot whose client has joined, while the
    report that says so is still on its way.
    """

    def __init__(self) -> None:
        self._deadlines: dict[TaskId, dict[SessionId, float]] = {}
        self._tasks: dict[SessionId, TaskId] = {}

    def grant(self, session: SessionId, task: TaskId, deadline: float) -> None:
        self._deadlines.setdefault(task, {})[session] = deadline
        self._tasks[session] = task

    def end(self, session: SessionId) -> TaskId | None:
        """The lease was confirmed or returned unfilled: of this task, or None if it had ended."""
        task = self._tasks.pop(session, None)
        if task is not None:
            del self._deadlines[task][session]
        return task

    def expire(self, task: TaskId, reported_at: float) -> None:
        """End leases whose deadline lies before a report that the holder sent at `reported_at`."""
        deadlines = self._deadlines.get(task, {})
        while deadlines:
            session = next(iter(deadlines))
            if deadlines[session] >= reported_at:
                return
            self.end(session)

    def sessions(self, task: TaskId) -> tuple[SessionId, ...]:
        return tuple(self._deadlines.get(task, ()))

    def count(self, task: TaskId) -> int:
        return len(self._deadlines.get(task, ()))


_EQUAL = ShareRow()
_NO_SHARES: Mapping[TaskId, ShareRow] = {}


def assign(
    held: Iterable[tuple[NodeId, DeviceClass, int]],
    wanted: dict[TaskId, int],
    compatible: Callable[[DeviceClass], Container[TaskId]],
    rng: Random,
    shares: Mapping[TaskId, ShareRow] = _NO_SHARES,
) -> dict[tuple[NodeId, DeviceClass, TaskId], int]:
    """Give each held client one of its eligible tasks at random, and reduce `wanted` by it."""
    chosen: dict[tuple[NodeId, DeviceClass, TaskId], int] = {}
    left = sum(wanted.values())
    for selector, device_class, count in held:
        if left == 0:
            break
        if count <= 0:
            continue
        suitable = compatible(device_class)
        eligible = [task for task, number in wanted.items() if number > 0 and task in suitable]
        first = _first(eligible, shares)
        while count > 0 and eligible:
            task = _drawn(first, shares, rng.random())
            key = (selector, device_class, task)
            chosen[key] = chosen.get(key, 0) + 1
            count -= 1
            left -= 1
            wanted[task] -= 1
            if wanted[task] == 0:
                eligible.remove(task)
                first = _first(eligible, shares)
    return chosen


def _first(eligible: list[TaskId], shares: Mapping[TaskId, ShareRow]) -> list[TaskId]:
    """The tasks with the highest priority, in the same order."""
    if not shares or not eligible:
        return eligible
    highest = max(shares.get(task, _EQUAL).priority for task in eligible)
    return [task for task in eligible if shares.get(task, _EQUAL).priority == highest]


def _drawn(tasks: list[TaskId], shares: Mapping[TaskId, ShareRow], at: float) -> TaskId:
    """One of the tasks, by a number from [0, 1)."""
    weights = [shares.get(task, _EQUAL).weight for task in tasks] if shares else []
    if not shares or weights.count(weights[0]) == len(weights):
        return tasks[int(at * len(tasks))]
    left = at * sum(weights)
    for task, weight in zip(tasks, weights, strict=True):
        left -= weight
        if left < 0:
            return task
    return tasks[-1]  # rounding
