"""The history of a task: one point for each version, which stays when the version is deleted.

Points are written once, when a version is first seen, from its row and the members that it
consumed. What an evaluation finds is added to them later. Several processes may write: a point that
another was faster with is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from papaya.messages.base import TaskId
from papaya.messages.storage import (
    ConsumedRow,
    Member,
    PointRow,
    Row,
    Transaction,
    VersionRow,
    consumed_key,
    point_key,
)
from papaya.server.state_thread import AsyncState

_AT_ONCE = 64


class TaskHistory:
    """Points by task and version. Each task's are read once and then kept in step."""

    def __init__(self, state: AsyncState) -> None:
        self._state = state
        self._points: dict[TaskId, dict[int, PointRow]] = {}

    async def points(self, task: TaskId) -> dict[int, PointRow]:
        found = self._points.get(task)
        if found is None:
            rows = await self._state.read((f"point/{task}/",))
            found = {r.version: r for r in rows.values() if isinstance(r, PointRow)}
            self._points[task] = found
        return found

    def forget(self, task: TaskId) -> None:
        """Somebody else wrote, or may have written: read again when it is needed."""
        self._points.pop(task, None)

    def forget_all_but(self, tasks: Mapping[TaskId, object]) -> None:
        self._points = {task: found for task, found in self._points.items() if task in tasks}

    async def record(self, task: TaskId, versions: Mapping[int, VersionRow]) -> None:
        """Write the points of versions that have none."""
        known = await self.points(task)
        new = sorted(version for version in versions if version not in known)
        for start in range(0, len(new), _AT_ONCE):
            batch = new[start : start + _AT_ONCE]
            consumed = await self._state.read(tuple(consumed_key(task, v) for v in batch))
            points = [point(versions[v], consumed.get(consumed_key(task, v))) for v in batch]
            keys = [point_key(task, v) for v in batch]
            change = Transaction(
                require=tuple((key, None) for key in keys),
                put=tuple(zip(keys, points, strict=True)),
            )
            if await self._state.transact(change) != "committed":
                self.forget(task)
                return
            known |= {found.version: found for found in points}


def point(version: VersionRow, consumed: Row | None) -> PointRow:
    """What a version was made of. One at which the owner rolled back was made of nothing: what it
    consumed was given up.
    """
    members: tuple[Member, ...] = ()
    if isinstance(consumed, ConsumedRow) and not version.restarts:
        members = consumed.members
    staleness = sum(member.staleness for member in members) / max(1, len(members))
    examples = sum(member.examples for member in members)
    return PointRow(version.version, version.created, len(members), examples, staleness)
