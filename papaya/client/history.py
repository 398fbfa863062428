"""Participation history on the device (paper: "tracks prior participation history to enable
fair and unbiased client selection").

At most one participation per task within its gap, never below the device's own floor, and at most
the task's maximum. Evaluations of one program count together, apart from its training: each of them
is a task of its own, and the floor would mean nothing if a server could start another. It survives
restarts: a threshold or a privacy budget counts devices only because of it. Recorded before the
first byte of an update leaves the device.
"""

from __future__ import annotations

import math

from msgspec import Struct

from papaya.messages.base import MAX_EXCLUDED, BlobKey, TaskId

_EVALUATE = "/evaluate"  # no task is called so
_MAX_EVALUATIONS = MAX_EXCLUDED


def evaluations_of(parameters: BlobKey) -> TaskId:
    """What evaluations of the program that these parameters belong to are remembered as."""
    return parameters.partition("/")[0] + _EVALUATE


class Participated(Struct, frozen=True, gc=False):
    """What a device remembers of one task."""

    count: int
    last_at: float
    gap_s: float
    limit: int | None


class History(Struct, gc=False):
    """The rule, over entries that the driver keeps durable. `evaluations`: what `learn` was told.

    `ceiling_s`: a task is named at check-in for at most so long after a participation, whatever
    gap and limit its server sent. Otherwise one answer of a rogue server would bar the device from
    the task forever.

    `gc=False`: none can come to hold itself, and a simulated fleet has millions.
    """

    floor_s: float
    entries: dict[TaskId, Participated] = {}
    evaluations: dict[TaskId, TaskId] = {}
    ceiling_s: float = math.inf

    def __post_init__(self) -> None:
        self.entries = dict(self.entries)  # what it was made from does not change with it

    def learn(self, task: TaskId, together: TaskId) -> None:
        """A task that the device met is an evaluation: barred for as long as the others are."""
        self.evaluations.pop(task, None)
        self.evaluations[task] = together
        while len(self.evaluations) > _MAX_EVALUATIONS:
            del self.evaluations[next(iter(self.evaluations))]

    def allows(self, now: float, task: TaskId, gap_s: float, limit: int | None) -> bool:
        entry = self.entries.get(task)
        if entry is None:
            return True
        gap_s = max(gap_s, self.floor_s)
        return now >= entry.last_at + gap_s and (limit is None or entry.count < limit)

    def excluded(self, now: float) -> tuple[TaskId, ...]:
        """Tasks to name at check-in, newest first; `allows` is asked again after joining."""
        if not self.entries:
            return ()
        barred = {
            task: -entry.last_at
            for task, entry in self.entries.items()
            if now < entry.last_at + self.ceiling_s
            and not self.allows(now, task, entry.gap_s, entry.limit)
        }
        named = [(since, task) for task, since in barred.items() if not task.endswith(_EVALUATE)]
        named += [
            (barred[together], task)
            for task, together in self.evaluations.items()
            if together in barred
        ]
        return tuple(task for _, task in sorted(named)[:MAX_EXCLUDED])

    def record(self, now: float, task: TaskId, gap_s: float, limit: int | None) -> Participated:
        before = self.entries.get(task)
        count = 1 if before is None else before.count + 1
        entry = self.entries[task] = Participated(count, now, gap_s, limit)
        return entry
