"""The device's one SQLite file, which holds its examples and its history.

The file is private (mode 0600) and durable (synchronous=FULL). `scrub` removes deleted data by
rewriting the file. `secure_delete` alone is not enough: it overwrites a deleted row, but not the
copies that remain when rows move between pages. There is no write-ahead log, because it would keep
old pages for as long as another process reads.

Thread-safe: calls run one at a time. Errors of SQLite or the disk are OperatorErrors.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from papaya.errors import OperatorError

StrPath: TypeAlias = str | os.PathLike[str]

_BUSY_TIMEOUT_S = 10.0
_PRAGMAS = ("secure_delete=ON", "journal_mode=DELETE", "synchronous=FULL")
_CLEAN, _DELETED = 0, 1  # the file's user_version: has anything been deleted since the last scrub?
_IN_MEMORY = ":memory:"


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
        with self._lock, self._explained():
            self._database.execute("BEGIN IMMEDIATE").close()
            try:
                yield
                self._database.execute("COMMIT").close()
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK").close()
                raise

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
            [[state]] = self.rows("PRAGMA user_version")
            if state == _DELETED:
                self.change("VACUUM")
                self.change(f"PRAGMA user_version={_CLEAN}")

    def insert(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._database.executemany(statement, rows).close()

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
