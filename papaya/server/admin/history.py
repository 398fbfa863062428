"""The history of a task: one point per version, kept when the version is deleted.

A point is written once, when a version is first seen, from its row and its members. The result of
an evaluation is added later. Several processes may write: a point that exists is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from papaya.messages.base import TaskId
from papaya.messages.storage import (
    ConsumedRow,
    Member,
    PointRow,
    Row,
    TaskRow,
    Transaction,
    VersionRow,
    consumed_key,
    point_key,
    task_key,
)
from papaya.server.state_thread import AsyncState

_AT_ONCE = 64


class TaskHistory:
    """Points by task and version, cached after the first read of a task."""

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

    def newest_evaluated(self) -> dict[TaskId, PointRow]:
        """By task, the newest cached point with the result of an evaluation."""
        found = {}
        for task, points in self._points.items():
            evaluated = [version for version, each in points.items() if each.loss is not None]
            if evaluated:
                found[task] = points[max(evaluated)]
        return found

    def forget(self, task: TaskId) -> None:
        """Drop the cached points of a task that another process may have written."""
        self._points.pop(task, None)

    def forget_all_but(self, tasks: Mapping[TaskId, object]) -> None:
        self._points = {task: found for task, found in self._points.items() if task in tasks}

    async def record(self, row: TaskRow, versions: Mapping[int, VersionRow]) -> None:
        """Write the points of versions that have none, unless the task has changed or is gone."""
        task = row.config.task
        known = await self.points(task)
        new = sorted(version for version in versions if version not in known)
        for start in range(0, len(new), _AT_ONCE):
            batch = new[start : start + _AT_ONCE]
            consumed = await self._state.read(tuple(consumed_key(task, v) for v in batch))
            points = [point(versions[v], consumed.get(consumed_key(task, v))) for v in batch]
            keys = [point_key(task, v) for v in batch]
            change = Transaction(
                require=((task_key(task), row), *((key, None) for key in keys)),
                put=tuple(zip(keys, points, strict=True)),
            )
            if await self._state.transact(change) != "committed":
                self.forget(task)
                return
            known |= {found.version: found for found in points}


def point(version: VersionRow, consumed: Row | None) -> PointRow:
    """The point of a version. A version made by a roll-back has no members: they were dropped."""
    members: tuple[Member, ...] = ()
    if isinstance(consumed, ConsumedRow) and not version.restarts:
        members = consumed.members
    staleness = sum(member.staleness for member in members) / max(1, len(members))
    examples = sum(member.examples for member in members)
    return PointRow(version.version, version.created, len(members), examples, staleness)
