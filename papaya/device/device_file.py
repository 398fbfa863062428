"""The device's one SQLite file, which holds its examples and its history.

Private (mode 0600), durable (synchronous=FULL), and able to forget: `scrub` rewrites the file from
the rows that are left. `secure_delete` alone is not enough: it zeroes a row where it lies, but not
the copies that stay behind when rows move between pages. There is no write-ahead log, which would
keep old pages for as long as another process reads.

May be called from any thread; one call at a time does its work. Whatever SQLite or the disk refuses
is an OperatorError.
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
    """One connection. `schema` is run at each opening, so it says IF NOT EXISTS."""

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
        """All of it or nothing; durable when it is over. Only inside one may the rest be called."""
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
        """Rows that must leave the file, too, at the next `scrub`."""
        if self.change(statement, *values):
            self.change(f"PRAGMA user_version={_DELETED}")

    def scrub(self) -> None:
        """Nothing of what was deleted is in the file when it returns."""
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
                f"the device's file {self.path} cannot be used: {error}",
                hint="check its folder, its permissions and the free space",
            ) from error


def _make_private(path: Path) -> None:
    """A new file that only its owner may read; one that is there stays as its owner has it.

    It is linked into place and never opened here: to close any descriptor of a database drops the
    locks that this process holds on it, which several connections of a device do.
    """
    if path.exists():
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was faster
    finally:
        os.unlink(temporary)
