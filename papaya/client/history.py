"""Participation history on the device (paper: "tracks prior participation history to enable
fair and unbiased client selection").

At most one participation per task within its gap, never below the device's own floor, and at most
the task's maximum. It survives restarts: a threshold or a privacy budget counts devices only
because of it. Recorded before the first byte of an update leaves the device.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from papaya.messages.base import MAX_EXCLUDED, TaskId


class Participated(Struct, frozen=True, gc=False):
    """What a device remembers of one task."""

    count: int
    last_at: float
    gap_s: float
    limit: int | None


class History:
    """The rule, over entries that the driver keeps durable."""

    def __init__(
        self, floor_s: float, entries: Mapping[TaskId, Participated] | None = None
    ) -> None:
        self._floor_s = floor_s
        self._entries = dict(entries or {})

    def allows(self, now: float, task: TaskId, gap_s: float, limit: int | None) -> bool:
        entry = self._entries.get(task)
        if entry is None:
            return True
        gap_s = max(gap_s, self._floor_s)
        return now >= entry.last_at + gap_s and (limit is None or entry.count < limit)

    def excluded(self, now: float) -> tuple[TaskId, ...]:
        """Tasks to name at check-in, newest first; `allows` is asked again after joining."""
        if not self._entries:
            return ()
        barred = [
            (-entry.last_at, task)
            for task, entry in self._entries.items()
            if not self.allows(now, task, entry.gap_s, entry.limit)
        ]
        return tuple(task for _, task in sorted(barred)[:MAX_EXCLUDED])

    def record(self, now: float, task: TaskId, gap_s: float, limit: int | None) -> Participated:
        before = self._entries.get(task)
        count = 1 if before is None else before.count + 1
        entry = self._entries[task] = Participated(count, now, gap_s, limit)
        return entry
