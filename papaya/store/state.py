"""The state store in SQLite: one compare-and-set transaction and one snapshot read.

It is what `papaya/messages/storage.py` asks of a back end, and no more: it compares encoded rows
and knows no rule. WAL with synchronous=FULL: a transaction is on the disk before it is `committed`.
Several processes on one machine may share the file.

Outcomes. `refused` says that the rows were compared and differ, so an error is never `refused`:
whoever submits a task would be told that it exists when the disk is full. Every error is `unknown`:

    SQLITE_BUSY     another process kept the write lock for longer than `busy_timeout_s`. It comes
                    from BEGIN IMMEDIATE, before anything is written: nothing will be applied.
    SQLITE_FULL,    before COMMIT: rolled back, nothing will be applied. At COMMIT: this process
    SQLITE_IOERR    rolled back, but the frames may be whole in the WAL although their sync failed.
                    The next transaction overwrites them; a crash before it may bring them to life.

That is the late application which machines expect of an unknown outcome (docs/adr/0005): it can
only come before every later transaction. What went wrong is in the log `papaya.store`, with a hint.

It refuses a file of another version or of another program, and changes nothing in it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from papaya.errors import OperatorError, ProtocolError
from papaya.messages import wire
from papaya.messages.storage import Outcome, Row, Transaction
from papaya.store.folders import make_folder, sync_folder, unusable

logger = logging.getLogger("papaya.store")

SCHEMA_VERSION = 1
APPLICATION_ID = 0x50415059  # "PAPY", in the header of the file
BUSY_TIMEOUT_S = 5.0
_RETRY_S = 0.01

# Not WITHOUT ROWID: a record names thousands of members, too much for the inner nodes of a tree.
_CREATE = (
    "CREATE TABLE rows (key BLOB PRIMARY KEY NOT NULL, row BLOB NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_FIND = "SELECT row FROM rows WHERE key = ?"
_RANGE = "SELECT key, row FROM rows WHERE key >= ? AND key < ?"
_DELETE = "DELETE FROM rows WHERE key = ?"
_PUT = "INSERT INTO rows VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET row = excluded.row"
_AFTER_UTF8 = b"\xff"  # a byte that UTF-8 never uses and that sorts behind all that it uses

_HINTS = {
    sqlite3.SQLITE_FULL: "free space on the disk of {path}: nothing is committed until then",
    sqlite3.SQLITE_BUSY: "another process keeps {path} locked: see who with `fuser -v {path}`",
    sqlite3.SQLITE_IOERR: "check the disk of {path} (dmesg, free space, quota, file size limit)",
    sqlite3.SQLITE_READONLY: "let this user write {path} and its folder",
    sqlite3.SQLITE_CANTOPEN: "let this user read and write {path}, a file, and its folder",
    sqlite3.SQLITE_NOTADB: "{path} is something else: move it away, or name another data directory",
    sqlite3.SQLITE_CORRUPT: "restore {path} and the blobs from the same backup",
}
_OTHER_HINT = "see https://sqlite.org/rescode.html for the code; the file is {path}"


class SqliteState:
    """Rows by key. Threads may share it: one call at a time."""

    def __init__(self, path: Path | str, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self.path = Path(path).resolve()
        self._busy_timeout_s = busy_timeout_s
        self._lock = Lock()
        make_folder(self.path.parent)
        try:
            _make_private(self.path)
            self._connection = sqlite3.connect(
                self.path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
            )
        except OSError as error:
            raise unusable(self.path.parent, error) from error
        except sqlite3.Error as error:
            raise self._failed("opened", error) from error
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._connection.close()
            raise self._failed("opened", error) from error
        except BaseException:
            self._connection.close()
            raise

    def transact(self, transaction: Transaction) -> Outcome:
        """If all of `require` holds: all of `delete` and `put`, durably."""
        [outcome] = self.transact_all([transaction])
        return outcome

    def transact_all(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        """One after the other, with one sync. An error makes the outcome of all of them unknown."""
        encoded = [_Encoded(transaction) for transaction in transactions]
        with self._lock:
            try:
                return self._apply(encoded)
            except sqlite3.Error as error:
                failure = self._failed("written", error)
                logger.error("%s; hint: %s", failure, failure.hint)
                return ["unknown"] * len(encoded)

    def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        """All rows under the prefixes: one snapshot, ordered by key. Raises OperatorError."""
        with self._lock:
            try:
                found = self._snapshot(prefixes)
            except sqlite3.Error as error:
                raise self._failed("read", error) from error
        return {key.decode(): self._decode(key, found[key]) for key in sorted(found)}

    def close(self) -> None:
        """The last process to close moves everything out of the WAL and removes it."""
        with self._lock:
            self._connection.close()

    def _apply(self, transactions: list[_Encoded]) -> list[Outcome]:
        with self._transaction("BEGIN IMMEDIATE"):
            return [self._apply_one(transaction) for transaction in transactions]

    def _apply_one(self, transaction: _Encoded) -> Outcome:
        # All comparisons come before the first change: to refuse, nothing has to be undone.
        for key, expected in transaction.require:
            found = self._connection.execute(_FIND, (key,)).fetchone()
            if (None if found is None else found[0]) != expected:
                return "refused"
        self._connection.executemany(_DELETE, transaction.delete)
        self._connection.executemany(_PUT, transaction.put)
        return "committed"

    def _snapshot(self, prefixes: tuple[str, ...]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        with self._transaction("BEGIN"):
            for prefix in map(str.encode, prefixes):
                rows = self._connection.execute(_RANGE, (prefix, prefix + _AFTER_UTF8))
                found.update(rows.fetchall())
        return found

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        self._connection.execute(begin)
        try:
            yield
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _decode(self, key: bytes, row: bytes) -> Row:
        try:
            return wire.decode_row(row)
        except ProtocolError as error:
            raise OperatorError(
                f"the row {key.decode()} of {self.path} is damaged: {error}",
                hint=_HINTS[sqlite3.SQLITE_CORRUPT].format(path=self.path),
            ) from error

    def _prepare(self) -> None:
        with self._transaction("BEGIN"):
            version = self._known_version()
        self._use_wal()
        self._connection.execute("PRAGMA synchronous = FULL")
        if version == SCHEMA_VERSION:
            return
        with self._transaction("BEGIN IMMEDIATE"):
            if self._known_version() == 0:  # another process may have been faster
                for statement in _CREATE:
                    self._connection.execute(statement)
        sync_folder(self.path.parent)

    def _known_version(self) -> int:
        """0 when the file is empty."""
        version = self._pragma("user_version")
        application = self._pragma("application_id")
        if (application, version) == (APPLICATION_ID, SCHEMA_VERSION):
            return SCHEMA_VERSION
        if application == APPLICATION_ID:
            raise OperatorError(
                f"{self.path} has schema version {version}, this Papaya knows {SCHEMA_VERSION}",
                hint="run the version of Papaya that wrote it, or name another data directory",
            )
        [tables] = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application or version or tables:
            raise OperatorError(
                f"{self.path} is the database of another program",
                hint=_HINTS[sqlite3.SQLITE_NOTADB].format(path=self.path),
            )
        return 0

    def _use_wal(self) -> None:
        # SQLite does not wait for a lock here: two processes that start at once meet.
        give_up = time.monotonic() + self._busy_timeout_s
        mode = None
        while mode is None:
            try:
                mode = self._pragma("journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if _primary(error) != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                    raise
                time.sleep(_RETRY_S)
        if mode != "wal":
            raise OperatorError(
                f"{self.path} is on a file system without shared memory: no WAL there",
                hint="put the data directory on a local disk",
            )

    def _pragma(self, pragma: str) -> object:
        [value] = self._connection.execute(f"PRAGMA {pragma}").fetchone()
        return value

    def _failed(self, what: str, error: sqlite3.Error) -> OperatorError:
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        hint = _HINTS.get(_primary(error), _OTHER_HINT)
        return OperatorError(
            f"the state store {self.path} could not be {what}: {error} ({name})",
            hint=hint.format(path=self.path),
        )


class _Encoded:
    """A transaction as bytes, made before the write lock is taken."""

    __slots__ = ("delete", "put", "require")

    def __init__(self, transaction: Transaction) -> None:
        self.require = [
            (key.encode(), None if row is None else wire.encode_row(row))
            for key, row in transaction.require
        ]
        self.put = [(key.encode(), wire.encode_row(row)) for key, row in transaction.put]
        self.delete = [(key.encode(),) for key in transaction.delete]


def _primary(error: sqlite3.Error) -> int:
    """The code without its extension; 0 when the error is not SQLite's own."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _make_private(path: Path) -> None:
    """A file that only we may read, for it holds keys: made so, or narrowed.

    It is linked into place and never opened here: to close any descriptor of a database drops the
    locks that this process holds on it.
    """
    if not path.exists():
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        os.close(handle)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # another process was faster
        finally:
            os.unlink(temporary)
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if file.is_file() and file.stat().st_mode & 0o077:
            file.chmod(0o600)
