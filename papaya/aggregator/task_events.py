"""Events of a task for the log, while one aggregator holds it (docs/adr/0066)."""

from __future__ import annotations

from papaya.aggregator.ledger import Ledger
from papaya.messages.base import TaskId
from papaya.messages.events import (
    BufferDropped,
    ServerEvent,
    TaskHalted,
    TaskLeft,
    TaskResumed,
    TaskTaken,
    VersionPublished,
)


class TaskEvents:
    """Each version is logged once, although the rows are read many times."""

    def __init__(self, task: TaskId, seq: int, events: list[ServerEvent]) -> None:
        """`events`: where to add events for the log; the aggregator empties it."""
        self._task = task
        self._seq = seq
        self._events = events
        # The newest logged version, and why steps on their way to the state store drop their
        # buffers, by version.
        self._logged_version = 0
        self._drops: dict[int, str] = {}

    def taken(self, ledger: Ledger) -> None:
        """The task is served here for the first time."""
        updates = sum(len(record.members) for record in ledger.records.values())
        event = TaskTaken(self._task, ledger.run, self._seq, ledger.version, updates)
        self._events.append(event)

    def halted(self, reason: str) -> None:
        self._events.append(TaskHalted(self._task, self._seq, reason))

    def resumed(self, ledger: Ledger) -> None:
        self._events.append(TaskResumed(self._task, self._seq, ledger.version))

    def left(self, ledger: Ledger) -> None:
        self._events.append(TaskLeft(self._task, ledger.run, self._seq, ledger.version))

    def dropping(self, version: int, reason: str) -> None:
        """The step to this version drops its buffer; without a reason, it does not."""
        self._drops.pop(version, None)
        if reason:
            self._drops[version] = reason

    def versions(self, ledger: Ledger, *, has_served: bool) -> None:
        """Versions that this holder has committed, also if only the rows show that it has."""
        newest = ledger.version
        first = self._logged_version + 1 if has_served else newest + 1
        for version in range(first, newest + 1):
            consumed = ledger.consumed.get(version)
            updates = 0 if consumed is None else len(consumed.members)
            event: ServerEvent = VersionPublished(self._task, ledger.run, version, updates)
            if (why := self._drops.get(version)) is not None:
                event = BufferDropped(self._task, ledger.run, version, updates, why)
            self._events.append(event)
        self._logged_version = newest
        self._drops = {v: why for v, why in self._drops.items() if v > newest}
