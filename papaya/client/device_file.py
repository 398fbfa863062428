"""The device's one SQLite file, which holds its examples and its history.

Private (mode 0600), durable (synchronous=FULL), and forgetful: `secure_delete` overwrites what is
deleted with zeros, the rollback journal is gone with its commit, and the file shrinks at once. With
a write-ahead log, deleted bytes would stay in it until no reader of another process is left.

May be called from any thread; one call at a time does its work. Whatever SQLite or the disk refuses
is an OperatorError.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

from papaya.errors import OperatorError

StrPath: TypeAlias = str | os.PathLike[str]

_BUSY_TIMEOUT_S = 10.0
_PRAGMAS = ("auto_vacuum=FULL", "secure_delete=ON", "journal_mode=DELETE", "synchronous=FULL")
_IN_MEMORY = ":memory:"


class DeviceFile:
    """One connection. `schema` is run at each opening, so it says IF NOT EXISTS."""

    def __init__(self, path: StrPath, schema: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._explained():
            if path != _IN_MEMORY:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
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
