"""The state store in SQLite: one compare-and-set transaction and one snapshot read.

It implements the primitive of `papaya/messages/storage.py`: it compares encoded rows and knows no
rules of the protocol. With WAL and synchronous=FULL, a transaction is on disk before it is
`committed`. Several processes on one machine may share the file.

Outcomes: `refused` means that the rows were compared and differ. An error is never `refused`:
otherwise a full disk would look as if a submitted task already existed. Every error is `unknown`:

    SQLITE_BUSY     another process held the write lock for longer than `busy_timeout_s`. BEGIN
                    IMMEDIATE fails before anything is written, so nothing is applied.
    SQLITE_FULL,    before COMMIT: rolled back, nothing is applied. At COMMIT: this process rolled
    SQLITE_IOERR    back, but the WAL may hold complete frames although their sync failed. The next
                    transaction overwrites them; after a crash before that they may be applied.

Machines expect such a late application after an unknown outcome (docs/adr/0005). It can only happen
before any later transaction. The cause is written to the log `papaya.store`, with a hint.

A file of schema version 1 (Papaya 0.3.0) is upgraded when it is opened, in one transaction. A file
of a later version or of another program is refused and not changed.
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

from papaya.errors import OperatorError
from papaya.messages.storage import Outcome, Row, Transaction
from papaya.store.folders import make_folder, sync_folder, unusable
from papaya.store.rows import (
    AFTER_UTF8,
    CLUSTER_ID_KEY,
    EncodedTransaction,
    RawRows,
    decode_rows,
    is_same_row,
    new_cluster_id,
)

logger = logging.getLogger("papaya.store")

SCHEMA_VERSION = 2
APPLICATION_ID = 0x50415059  # "PAPY", in the header of the file
BUSY_TIMEOUT_S = 5.0
_RETRY_S = 0.01

# Not WITHOUT ROWID: a record with thousands of members is too large for inner nodes of the tree.
_CREATE = (
    "CREATE TABLE rows (key BLOB PRIMARY KEY NOT NULL, row BLOB NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
)
_FIND = "SELECT row FROM rows WHERE key = ?"
_RANGE = "SELECT key, row FROM rows WHERE key >= ? AND key < ?"
_ANY = "SELECT key FROM rows WHERE key < ? LIMIT 1"
_DELETE = "DELETE FROM rows WHERE key = ?"
_PUT = "INSERT INTO rows VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET row = excluded.row"

_HINTS = {
    sqlite3.SQLITE_FULL: "free space on the disk of {path}: nothing can be committed until then",
    sqlite3.SQLITE_BUSY: "another process holds a lock on {path}; find it with: fuser -v {path}",
    sqlite3.SQLITE_IOERR: "check the disk of {path} (dmesg, free space, quota, file size limit)",
    sqlite3.SQLITE_READONLY: "give this user write access to {path} and its folder",
    sqlite3.SQLITE_CANTOPEN: "{path} must be a file, and this user must have access to its folder",
    sqlite3.SQLITE_NOTADB: "{path} is another file: move it away, or use another data folder",
    sqlite3.SQLITE_CORRUPT: "restore {path} and the blobs from the same backup",
}
_OTHER_HINT = "look up the code at https://sqlite.org/rescode.html; the file is {path}"


class SqliteState:
    """Rows by key. Threads may share it; calls run one at a time."""

    def __init__(
        self,
        path: Path | str,
        *,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        cluster: str | None = None,
    ) -> None:
        """`cluster`: the id that a new file gets; None means a random one."""
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
            self._prepare(cluster or new_cluster_id())
            self.cluster = self._cluster()
        except sqlite3.Error as error:
            self._connection.close()
            raise self._failed("opened", error) from error
        except BaseException:
            self._connection.close()
            raise

    def transact(self, transaction: Transaction) -> Outcome:
        """If all of `require` holds, apply all of `delete` and `put`, durably."""
        [outcome] = self.transact_all([transaction])
        return outcome

    def transact_all(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        """Apply them in order, with one sync. After an error, all outcomes are unknown."""
        encoded = [EncodedTransaction(transaction) for transaction in transactions]
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
        return decode_rows(found, self.path)

    def raw_rows(self) -> RawRows:
        """Every row as it is stored: one snapshot. Raises OperatorError."""
        with self._lock:
            try:
                return self._snapshot(("",))
            except sqlite3.Error as error:
                raise self._failed("read", error) from error

    def fill(self, rows: RawRows) -> None:
        """Put rows as they were stored elsewhere, in the transaction that finds no row before.

        Raises OperatorError.
        """
        with self._lock:
            try:
                with self._transaction("BEGIN IMMEDIATE"):
                    if self._connection.execute(_ANY, (AFTER_UTF8,)).fetchone() is not None:
                        raise OperatorError(
                            f"{self.path} already holds state",
                            hint=f"move {self.path} away, or give another folder",
                        )
                    self._connection.executemany(_PUT, rows.items())
            except sqlite3.Error as error:
                raise self._failed("written", error) from error

    def close(self) -> None:
        """When the last process closes the file, SQLite empties and removes the WAL."""
        with self._lock:
            self._connection.close()

    def _apply(self, transactions: list[EncodedTransaction]) -> list[Outcome]:
        with self._transaction("BEGIN IMMEDIATE"):
            return [self._apply_one(transaction) for transaction in transactions]

    def _apply_one(self, transaction: EncodedTransaction) -> Outcome:
        # Compare everything before the first change, so that a refusal has nothing to undo.
        for key, expected in transaction.require:
            found = self._connection.execute(_FIND, (key,)).fetchone()
            if not is_same_row(None if found is None else found[0], expected):
                return "refused"
        self._connection.executemany(_DELETE, [(key,) for key in transaction.delete])
        self._connection.executemany(_PUT, transaction.put)
        return "committed"

    def _snapshot(self, prefixes: tuple[str, ...]) -> RawRows:
        found: RawRows = {}
        with self._transaction("BEGIN"):
            for prefix in map(str.encode, prefixes):
                rows = self._connection.execute(_RANGE, (prefix, prefix + AFTER_UTF8))
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

    def _prepare(self, cluster: str) -> None:
        with self._transaction("BEGIN"):
            version = self._known_version()
        self._use_wal()
        self._connection.execute("PRAGMA synchronous = FULL")
        if version == SCHEMA_VERSION:
            return
        with self._transaction("BEGIN IMMEDIATE"):
            self._upgrade(self._known_version(), cluster)
        sync_folder(self.path.parent)

    def _upgrade(self, version: int, cluster: str) -> None:
        """From `version` to the current one; another process may have done so meanwhile."""
        if version < 1:
            for statement in _CREATE:
                self._connection.execute(statement)
        if version < 2:
            # 0.3.0 must not open it any more: it would drop `settled` from rows that it rewrites.
            self._connection.execute(_PUT, (CLUSTER_ID_KEY, cluster.encode()))
        self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _cluster(self) -> str:
        [row] = self._connection.execute(_FIND, (CLUSTER_ID_KEY,)).fetchone()
        return bytes(row).decode()

    def _known_version(self) -> int:
        """0 when the file is empty."""
        [version], [application] = (
            self._connection.execute(f"PRAGMA {pragma}").fetchone()
            for pragma in ("user_version", "application_id")
        )
        if application == APPLICATION_ID:
            if not 1 <= version <= SCHEMA_VERSION:
                raise OperatorError(
                    f"{self.path} has schema version {version}, this Papaya supports up to "
                    f"{SCHEMA_VERSION}",
                    hint="run the version of Papaya that wrote it, or use another data folder",
                )
            return int(version)
        [tables] = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application or version or tables:
            raise OperatorError(
                f"{self.path} is the database of another program",
                hint=_HINTS[sqlite3.SQLITE_NOTADB].format(path=self.path),
            )
        return 0

    def _use_wal(self) -> None:
        # SQLite does not wait for a lock here, so two processes that start at once may collide.
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
                f"SQLite cannot use WAL for {self.path}: the file system has no shared memory",
                hint="put the data folder on a local disk",
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


def _primary(error: sqlite3.Error) -> int:
    """The primary result code; 0 if the error has none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _make_private(path: Path) -> None:
    """Create the file so that only this user can read it, or restrict its mode: it holds keys.

    The file is linked into place and not opened here, because closing any descriptor of a database
    drops the locks that this process holds on it.
    """
    if not path.exists():
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        os.close(handle)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # another process has created it
        finally:
            os.unlink(temporary)
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if file.is_file() and file.stat().st_mode & 0o077:
            file.chmod(0o600)
