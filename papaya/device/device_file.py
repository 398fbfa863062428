"""The device's one SQLite file, which holds its examples and its history.

The file is private (mode 0600) and durable (synchronous=EXTRA). `scrub` removes deleted data by
rewriting the file. `secure_delete` alone is not enough: it overwrites a deleted row, but not the
copies that remain when rows move between pages. There is no write-ahead log, because it would keep
old pages for as long as another process reads.

`DeviceHistory` keeps participations (`papaya/client/history.py`) across restarts.

Thread-safe: calls run one at a time. Errors of SQLite or the disk are OperatorErrors.
"""

from __future__ import annotations

import math
import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self, TypeAlias

from papaya.client.history import History, Participated
from papaya.errors import OperatorError
from papaya.messages.base import TaskId

StrPath: TypeAlias = str | os.PathLike[str]

_BUSY_TIMEOUT_S = 10.0
# EXTRA syncs the folder after a commit too: otherwise a power failure can bring the journal back,
# which rolls back a charge although its update was sent.
_PRAGMAS = ("secure_delete=ON", "journal_mode=DELETE", "synchronous=EXTRA")
# The file's user_version: has anything been deleted since the last scrub? 0.4.0 knows no others.
_CLEAN, _DELETED = 0, 1
_IN_MEMORY = ":memory:"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS participation (
    task TEXT PRIMARY KEY,
    count INTEGER NOT NULL,
    last_at REAL NOT NULL,
    gap_s REAL NOT NULL,
    max_count INTEGER
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS declined (
    task TEXT PRIMARY KEY,
    at REAL NOT NULL
) STRICT, WITHOUT ROWID;
"""
# A participation makes an earlier declined join void. 0.4.0 does not know the second table, and
# deletes nothing there.
_SELECT = """
SELECT participation.task, count, last_at, gap_s, max_count, at FROM participation
LEFT JOIN declined ON declined.task = participation.task AND at > last_at
"""
_FIRST = """
INSERT OR IGNORE INTO participation (count, last_at, gap_s, max_count, task) VALUES (?, ?, ?, ?, ?)
"""
_NEXT = """
UPDATE participation SET count = ?, last_at = ?, gap_s = ?, max_count = ?
WHERE task = ? AND count = ?
"""


class DeviceFile:
    """One connection. `schema` runs at each opening, so it must say IF NOT EXISTS."""

    def __init__(self, path: StrPath, schema: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._explained():
            if path != _IN_MEMORY:
                _make_private(Path(path))
            self._database = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            try:
                for pragma in _PRAGMAS:
                    self._database.execute(f"PRAGMA {pragma}").close()
                self._database.executescript(schema).close()
            except BaseException:
                self._database.close()
                raise

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """An atomic transaction, durable at its end. Call the methods below only inside one."""
        with self._lock, self._explained(), self._atomic():
            yield

    def rows(self, select: str, *values: object) -> list[tuple[Any, ...]]:
        with closing(self._database.execute(select, values)) as cursor:
            return cursor.fetchall()

    def change(self, statement: str, *values: object) -> int:
        """Returns how many rows it changed."""
        with closing(self._database.execute(statement, values)) as cursor:
            return cursor.rowcount

    def delete(self, statement: str, *values: object) -> None:
        """Delete rows; the next `scrub` removes their bytes from the file."""
        if self.change(statement, *values):
            self.change(f"PRAGMA user_version={_DELETED}")

    def scrub(self) -> None:
        """Remove the bytes of deleted rows from the file."""
        with self._lock, self._explained():
            if self.rows("PRAGMA user_version") == [(_CLEAN,)]:
                return
            before = self.rows("PRAGMA data_version")  # commits of other connections change it
            self.change("VACUUM")
            with self._atomic():
                if self.rows("PRAGMA data_version") == before:  # or more may be deleted now
                    self.change(f"PRAGMA user_version={_CLEAN}")

    def insert(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._database.executemany(statement, rows).close()

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE").close()
        try:
            yield
            self._database.execute("COMMIT").close()
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK").close()
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise OperatorError(
                f"cannot use the device's file {self.path}: {error}",
                hint="check its folder, its permissions and the free space",
            ) from error


def _make_private(path: Path) -> None:
    """Create the file with mode 0600; the mode of an existing file is not changed.

    The file is linked into place and never opened here: closing any descriptor of a database
    releases the locks that this process has on it through other connections.
    """
    if path.exists():
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process has created it
    finally:
        os.unlink(temporary)


class DeviceHistory:
    """One device's participations, in the same file as its examples.

    A participation is durable before the first byte of an update leaves the device. It is written
    by a compare-and-set: a second process on the same file that read an older history is refused
    and sends nothing. So a participation may be lost, but never counted twice.
    """

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
        with self._file.transaction():
            entries = {task: Participated(*entry) for task, *entry in self._file.rows(_SELECT)}
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
            if changed == 1:  # times do not tell which was first: the clock may have been ahead
                self._file.change("DELETE FROM declined WHERE task = ?", task)
        if changed != 1:
            raise OperatorError(
                f"another process used the history {self._file.path} for task {task}",
                hint="run one process per device",
            )

    def remember_declined(self, task: TaskId, at: float) -> None:
        """Write durably that the device declined a join of the task at this time."""
        with self._file.transaction():
            self._file.change("INSERT OR REPLACE INTO declined (task, at) VALUES (?, ?)", task, at)
