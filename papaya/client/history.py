"""Participation history on the device (paper: "tracks prior participation history to enable
fair and unbiased client selection").

A device takes part in a task at most once within the task's gap, which cannot be shorter than the
device's own floor, and at most as often as the task's limit. Evaluations of one program are counted
together and apart from its training: each is a task of its own, so without this rule a server could
avoid the floor by starting another one. The history survives restarts, so that a threshold or a
privacy budget counts devices. It is written before the first byte of an update leaves the device.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from papaya.messages.base import MAX_EXCLUDED, BlobKey, TaskId

_EVALUATE = "/evaluate"  # a task id has no slash, the name of a group has
_MAX_EVALUATIONS = MAX_EXCLUDED


def evaluations_of(parameters: BlobKey) -> TaskId:
    """The name under which evaluations of the program with these parameters are recorded."""
    return parameters.partition("/")[0] + _EVALUATE


class Participated(Struct, frozen=True, gc=False):
    """What a device remembers of one task."""

    count: int
    last_at: float
    gap_s: float
    limit: int | None
    # When the device asked the server again and declined the join, if it did since `last_at`.
    declined_at: float | None = None


class History(Struct, gc=False):
    """The rule, over entries that the driver stores.

    `evaluations` maps tasks that count together to the name under which they are recorded: the
    evaluations of a program, the runs of an owner's task.

    `ceiling_s`: so long after a participation the task is no longer excluded, whatever gap and
    limit its server sent, until the device has joined it and declined. Then it is excluded for
    another such period. Otherwise one answer of a rogue server would bar the device from the task
    forever. The gap and the limit that come with a join always apply.

    `gc=False` because a simulated fleet has millions of these, and none can refer to itself.
    """

    floor_s: float
    entries: dict[TaskId, Participated] = {}
    evaluations: dict[TaskId, TaskId] = {}
    ceiling_s: float = math.inf

    def __post_init__(self) -> None:
        self.entries = dict(self.entries)  # do not change the caller's dictionary

    def learn(self, task: TaskId, together: TaskId) -> None:
        """Exclude the task whenever those that count together with it are excluded."""
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
        """Tasks to exclude at check-in, newest first. The client checks `allows` after joining."""
        if not self.entries:
            return ()
        barred = {
            task: -entry.last_at
            for task, entry in self.entries.items()
            if not self._asks_again(now, entry)
            and not self.allows(now, task, entry.gap_s, entry.limit)
        }
        named = [(since, task) for task, since in barred.items() if "/" not in task]
        named += [
            (barred[together], task)
            for task, together in self.evaluations.items()
            if together in barred
        ]
        return tuple(task for _, task in sorted(named)[:MAX_EXCLUDED])

    def _asks_again(self, now: float, entry: Participated) -> bool:
        """Is it time to ask the server for the gap and the limit that apply now?"""
        since = entry.last_at
        # A time in the future comes from a wrong clock.
        if entry.declined_at is not None and entry.declined_at <= now:
            since = entry.declined_at
        return now >= since + self.ceiling_s

    def decline(self, now: float, task: TaskId) -> bool:
        """`allows` has forbidden a join. Does this have to be stored?

        Not if the server has assigned the device although the task is excluded: it could extend
        the exclusion again and again.
        """
        entry = self.entries[task]
        if not self._asks_again(now, entry):
            return False
        self.entries[task] = replace(entry, declined_at=now)
        return True

    def record(self, now: float, task: TaskId, gap_s: float, limit: int | None) -> Participated:
        before = self.entries.get(task)
        count = 1 if before is None else before.count + 1
        entry = self.entries[task] = Participated(count, now, gap_s, limit)
        return entry
