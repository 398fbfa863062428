"""The state store in PostgreSQL: one compare-and-set transaction and one snapshot read.

The contract is that of `papaya/store/state.py`. One table holds keys and rows as bytes. A group of
transactions is one transaction of READ COMMITTED:

    1. advisory locks on the hashes of all its keys, in sorted order, so that nobody deadlocks
    2. read what is required, in a statement of its own: its snapshot must be newer than the locks
    3. compare here, then write what has changed, and the process's own counter; COMMIT

A lock on a row would not protect the absence of a row; these do. Each process writes through one
connection (`papaya/store/postgresql_session.py`).

Visible is not replicated: after a crash of its connection or its server, a transaction may be
visible that no standby has. So what was read counts only after a later commit of this process was
acknowledged. A group that is refused commits its counter too, and so does every read.

Outcomes: an error is never `refused`. A COMMIT that fails, whose connection is lost, or that
returns a warning (it was not replicated) is `unknown`, and the connection is given up. Only a
deadlock or a serialization failure is tried again here: such a transaction was rolled back.

The counter shows lost history: if it is lower after a reconnection than it was, commits are gone
(a restored backup, a promoted replica that was behind). Then LostHistory is raised, and a mark in
the database stops every process of the cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from threading import Lock
from typing import Any

import psycopg
from psycopg.errors import DeadlockDetected, SerializationFailure

from papaya.errors import LostHistory, OperatorError, StateUnreachable
from papaya.messages.storage import Outcome, Row, Transaction
from papaya.store.postgresql_session import TABLE, DatabaseSession, connection_string, failed
from papaya.store.rows import (
    AFTER_UTF8,
    EncodedTransaction,
    RawRows,
    decode_rows,
    is_same_row,
    new_cluster_id,
)

logger = logging.getLogger("papaya.store")

MOST_LOCKS = 512  # the server has room for some thousand locks
_ATTEMPTS = 5
_ROLLED_BACK = (SerializationFailure, DeadlockDetected)

_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_BEGIN_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# A group with too many keys excludes everybody. It takes no other lock, and the others take the
# shared one first, so nobody deadlocks.
_LOCK_SHARED = "SELECT pg_backend_pid() FROM pg_advisory_xact_lock_shared(%b)"
_LOCK_ALL = "SELECT pg_backend_pid() FROM pg_advisory_xact_lock(%b)"
_LOCK_KEYS = "SELECT count(pg_advisory_xact_lock(hash)) FROM unnest(%b::bigint[]) AS hash"
_FIND = f"SELECT key, row FROM {TABLE} WHERE key = ANY (%b)"
_RANGE = f"SELECT key, row FROM {TABLE} WHERE key >= %b AND key < %b"
_ANY = f"SELECT key FROM {TABLE} WHERE key < %b LIMIT 1"
_DELETE = f"DELETE FROM {TABLE} WHERE key = ANY (%b)"
_PUT = f"""
INSERT INTO {TABLE} SELECT * FROM unnest(%b::bytea[], %b::bytea[])
ON CONFLICT (key) DO UPDATE SET row = excluded.row
"""


class PostgresState:
    """Rows by key. Threads may share it; calls run one at a time."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        cluster: str | None = None,
        may_create: bool | None = None,
    ) -> None:
        """`name`: of this process, unique in the cluster.

        `cluster`: the id of the cluster that must be in the database; None takes any.
        `may_create`: whether an empty database may be filled; None: only if `cluster` is None.
        """
        self._conninfo = connection_string(url, name)
        self._name = name
        self._lock = Lock()
        self._is_closed = False
        if may_create is None:
            may_create = cluster is None
        self._session: DatabaseSession | None = DatabaseSession(
            self._conninfo,
            name,
            cluster=cluster,
            new_cluster=(cluster or new_cluster_id()) if may_create else None,
        )
        self.cluster = self._session.cluster
        self._acknowledged = self._session.commits

    def __str__(self) -> str:
        return f"the database of cluster {self.cluster}"

    def transact(self, transaction: Transaction) -> Outcome:
        """If all of `require` holds, apply all of `delete` and `put`, durably."""
        [outcome] = self.transact_all([transaction])
        return outcome

    def transact_all(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        """Apply them in order, with one commit. After an error, all outcomes are unknown.

        Raises StateUnreachable if nothing was sent, and LostHistory.
        """
        encoded = [EncodedTransaction(transaction) for transaction in transactions]
        with self._lock:
            try:
                return self._commit_group(encoded)
            except (LostHistory, StateUnreachable):
                raise
            except OperatorError as error:
                logger.error("%s; hint: %s", error, error.hint)
                return ["unknown"] * len(encoded)

    def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        """All rows under the prefixes: one snapshot, ordered by key. Raises OperatorError."""
        with self._lock:
            found = self._read(prefixes)
        return decode_rows(found, self)

    def raw_rows(self) -> RawRows:
        """Every row as it is stored: one snapshot. Raises OperatorError."""
        with self._lock:
            return self._read(("",))

    def require_empty(self) -> None:
        """Raises OperatorError."""
        if self.raw_rows():
            raise _holds_state()

    def fill(self, rows: RawRows) -> None:
        """Put rows as they were stored elsewhere, in the transaction that finds no row before.

        Raises OperatorError.
        """
        with self._lock, self._use() as session:
            self._lock_and_find(session, [], [], everything=True)
            if _execute(session.connection, _ANY, (AFTER_UTF8,)).fetchone() is not None:
                raise _holds_state()
            self._write(session, dict(rows))

    def others(self) -> int:
        """How many other processes of the cluster are connected. Raises OperatorError."""
        with self._lock, self._use() as session:
            return session.others()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._give_up()

    # -- transactions -----------------------------------------------------------------------------

    def _commit_group(self, group: list[EncodedTransaction]) -> list[Outcome]:
        for attempt in range(_ATTEMPTS):
            try:
                with self._use() as session:
                    return self._apply(session, group)
            except _RolledBack as error:
                logger.warning("attempt %d was rolled back: %s", attempt + 1, error)
        raise OperatorError(f"PostgreSQL rolled a transaction back {_ATTEMPTS} times")

    def _apply(self, session: DatabaseSession, group: list[EncodedTransaction]) -> list[Outcome]:
        required = {key for change in group for key, _ in change.require}
        written = {key for change in group for key, _ in change.put}
        written.update(key for change in group for key in change.delete)
        locks = sorted({_hash64(key) for key in required | written})
        everything = len(locks) > MOST_LOCKS
        rows = self._lock_and_find(session, locks, list(required), everything)
        changed: dict[bytes, bytes | None] = {}
        outcomes: list[Outcome] = []
        for change in group:
            holds = all(
                is_same_row(changed[key] if key in changed else rows.get(key), expected)
                for key, expected in change.require
            )
            if holds:
                changed.update(dict.fromkeys(change.delete))
                changed.update(change.put)
            outcomes.append("committed" if holds else "refused")
        self._write(session, changed)
        return outcomes

    def _lock_and_find(
        self, session: DatabaseSession, locks: list[int], required: list[bytes], everything: bool
    ) -> RawRows:
        """Two statements: one that both locks and compares would see rows as before the lock."""
        connection = session.connection
        with connection.pipeline():
            _execute(connection, _BEGIN)
            pid = _execute(connection, _LOCK_ALL if everything else _LOCK_SHARED, (_EVERYTHING,))
            if not everything:
                _execute(connection, _LOCK_KEYS, (locks,))
            found = _execute(connection, _FIND, (required,)) if required else None
        if pid.fetchone() != (session.backend_pid,):
            raise OperatorError(
                "a connection pooler has changed the connection to PostgreSQL",
                hint="connect to the server itself; each process needs one connection only",
            )
        return {} if found is None else dict(found.fetchall())

    def _write(self, session: DatabaseSession, changed: dict[bytes, bytes | None]) -> None:
        """Write, raise the counter and commit. Returns when it is durable and replicated."""
        connection = session.connection
        deleted = [key for key, row in changed.items() if row is None]
        put = {key: row for key, row in changed.items() if row is not None}
        put[session.commits_key] = str(session.commits + 1).encode()
        session.warnings.clear()
        with connection.pipeline():
            if deleted:
                _execute(connection, _DELETE, (deleted,))
            _execute(connection, _PUT, (list(put), list(put.values())))
            end = _execute(connection, "COMMIT")
        if end.statusmessage != "COMMIT" or session.warnings:
            said = "; ".join(session.warnings) or end.statusmessage
            raise OperatorError(
                f"PostgreSQL did not complete a commit: {said}",
                hint="check the synchronous standby; nothing is lost, the rows are read again",
            )
        session.commits += 1
        self._acknowledged = session.commits

    def _read(self, prefixes: tuple[str, ...]) -> RawRows:
        found: RawRows = {}
        with self._use() as session:
            connection = session.connection
            with connection.pipeline():
                _execute(connection, _BEGIN_SNAPSHOT)
                answers = [
                    _execute(connection, _RANGE, (prefix, prefix + AFTER_UTF8))
                    for prefix in map(str.encode, prefixes)
                ]
                _execute(connection, "COMMIT")
                _execute(connection, _BEGIN)
            for answer in answers:
                found.update(answer.fetchall())
            self._write(session, {})
        return found

    # -- the connection ---------------------------------------------------------------------------

    @contextmanager
    def _use(self) -> Iterator[DatabaseSession]:
        """The session for one operation. After any error it is given up: its state is not known."""
        session = self._connected()
        try:
            yield session
        except BaseException as error:
            self._give_up()
            if isinstance(error, _ROLLED_BACK):
                raise _RolledBack(str(error)) from error
            if isinstance(error, psycopg.Error):
                raise failed(error) from error
            raise

    def _connected(self) -> DatabaseSession:
        if self._is_closed:
            raise OperatorError("the state store is closed")
        if self._session is not None and self._session.is_lost():
            self._give_up()
        if self._session is None:
            self._session = self._reconnected()
        return self._session

    def _reconnected(self) -> DatabaseSession:
        try:
            session = DatabaseSession(
                self._conninfo, self._name, cluster=self.cluster, is_again=True
            )
        except LostHistory:
            raise
        except OperatorError as error:
            raise StateUnreachable(str(error), hint=error.hint) from error
        if session.commits < self._acknowledged:
            self._halt(session)
        return session

    def _halt(self, session: DatabaseSession) -> None:
        why = (
            f"history was lost: {self._name} had {self._acknowledged} commits, the database has "
            f"{session.commits} of them"
        )
        try:
            session.halt(why)
        finally:
            session.close()
        raise LostHistory(why)

    def _give_up(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _holds_state() -> OperatorError:
    return OperatorError(
        "the database already holds state",
        hint="create an empty one and name it instead: createdb --owner USER DATABASE",
    )


class _RolledBack(Exception):
    """The server has undone the transaction for certain."""


def _execute(
    connection: psycopg.Connection[tuple[Any, ...]], statement: str, values: tuple[Any, ...] = ()
) -> psycopg.Cursor[tuple[Any, ...]]:
    return connection.execute(statement, values, prepare=True, binary=True)


def _hash64(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big", signed=True)


_EVERYTHING = _hash64(AFTER_UTF8)
