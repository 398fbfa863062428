"""The participation history on disk (`papaya/client/history.py`), kept across restarts.

A participation is durable before the first byte of an update leaves the device. It is written by a
compare-and-set: a second process on the same file that read an older history is refused and sends
nothing. So a participation may be lost, but never counted twice.
"""

from __future__ import annotations

import math
from typing import Self

from papaya.client.history import History, Participated
from papaya.device.device_file import DeviceFile, StrPath
from papaya.errors import OperatorError
from papaya.messages.base import TaskId

_SCHEMA = """
CREATE TABLE IF NOT EXISTS participation (
    task TEXT PRIMARY KEY,
    count INTEGER NOT NULL,
    last_at REAL NOT NULL,
    gap_s REAL NOT NULL,
    max_count INTEGER
) STRICT, WITHOUT ROWID;
"""
_FIRST = """
INSERT OR IGNORE INTO participation (count, last_at, gap_s, max_count, task) VALUES (?, ?, ?, ?, ?)
"""
_NEXT = """
UPDATE participation SET count = ?, last_at = ?, gap_s = ?, max_count = ?
WHERE task = ? AND count = ?
"""


class DeviceHistory:
    """One device's participations, in the same file as its examples."""

    def __init__(self, path: StrPath) -> None:
        self._file = DeviceFile(path, _SCHEMA)
        self._evaluations: dict[TaskId, TaskId] = {}  # the tasks that this process has recorded

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, floor_s: float, ceiling_s: float = math.inf) -> History:
        """The current history; both bounds are the device's own."""
        select = "SELECT task, count, last_at, gap_s, max_count FROM participation"
        with self._file.transaction():
            entries = {task: Participated(*entry) for task, *entry in self._file.rows(select)}
        return History(floor_s, entries, self._evaluations, ceiling_s)

    def remember(self, task: TaskId, participated: Participated) -> None:
        """Write a participation durably. Raises if it is not the next one after the last."""
        new = participated
        values = (new.count, new.last_at, new.gap_s, new.limit, task)
        with self._file.transaction():
            if new.count == 1:
                changed = self._file.change(_FIRST, *values)
            else:
                changed = self._file.change(_NEXT, *values, new.count - 1)
        if changed != 1:
            raise OperatorError(
                f"another process used the history {self._file.path} for task {task}",
                hint="run one process per device",
            )
