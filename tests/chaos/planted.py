"""`papaya`, with a bug that must be noticed: PAPAYA_PLANTED=BUG python -m tests.chaos.planted

Only this entry point reads the variable; no server does. The bugs break what the simulator has only
as twins: the database and the work of an aggregator. `papaya/sim/bugs.py` has the bugs of the
machines.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from papaya.aggregator.ledger import Ledger
from papaya.aggregator.shards import Shards
from papaya.cli.main import main
from papaya.messages.storage import Outcome, RecordRow, Transaction
from papaya.store.postgresql import PostgresState
from papaya.store.postgresql_session import DatabaseSession

VARIABLE: Final = "PAPAYA_PLANTED"
PLANTED: Final = (sys.executable, "-m", "tests.chaos.planted")
_VERSION_DELAY_S = 300.0  # longer than any run waits
_LATE_S = 5.0
_COMMIT_S = 0.03

_transact_all = PostgresState.transact_all
_read = PostgresState.read
_write: Callable[..., None] = PostgresState._write
_step: Callable[..., Any] = Shards.step


def _acknowledged_before_commit() -> None:
    """Records are called committed, and written a while later."""
    late: list[Transaction] = []
    lock = Lock()

    def flush(store: PostgresState) -> None:
        with lock:
            if late:
                _transact_all(store, late)
                late.clear()

    def flush_later(store: PostgresState) -> None:
        time.sleep(_LATE_S)
        flush(store)

    def transact_all(store: PostgresState, transactions: Sequence[Transaction]) -> list[Outcome]:
        if all(_is_record(transaction) for transaction in transactions):
            with lock:
                late.extend(transactions)
            Thread(target=flush_later, args=(store,), daemon=True).start()
            return ["committed"] * len(transactions)
        flush(store)
        return _transact_all(store, transactions)

    def read(store: PostgresState, prefixes: tuple[str, ...]) -> object:
        flush(store)
        return _read(store, prefixes)

    _patch(PostgresState, transact_all=transact_all, read=read)


def _unknown_transaction_repeated() -> None:
    """Records with an unknown outcome are written again, over those that were written since.

    Commits take longer, so that a database that dies meets one.
    """
    unknown: dict[str, RecordRow] = {}

    def transact_all(store: PostgresState, transactions: Sequence[Transaction]) -> list[Outcome]:
        outcomes = _transact_all(store, transactions)
        for transaction, outcome in zip(transactions, outcomes, strict=True):
            records = {k: row for k, row in transaction.put if isinstance(row, RecordRow)}
            if outcome == "unknown":
                unknown.update(records)
            elif outcome == "committed" and (again := records.keys() & unknown.keys()):
                put = tuple((key, unknown.pop(key)) for key in again)
                _transact_all(store, [replace(transaction, require=(), put=put, delete=())])
        return outcomes

    def write(store: PostgresState, *given: Any) -> None:
        time.sleep(_COMMIT_S)
        _write(store, *given)

    _patch(PostgresState, transact_all=transact_all, _write=write)


def _fence_skipped() -> None:
    """An aggregator writes rows without checking that it still holds the task."""
    _patch(Ledger, _fenced=lambda ledger: ("never-written", None))


def _unreplicated_row_read() -> None:
    """A read does not wait until what it has found is replicated."""

    def write(store: PostgresState, session: DatabaseSession, changed: dict[bytes, Any]) -> None:
        if changed:
            _write(store, session, changed)
        else:
            session.connection.execute("COMMIT")

    _patch(PostgresState, _write=write)


def _versions_delayed() -> None:
    """A full buffer waits before it becomes a version; updates are acknowledged meanwhile, until
    the next buffer is full too.
    """

    def step(shards: Shards, *given: Any) -> object:
        time.sleep(_VERSION_DELAY_S)
        return _step(shards, *given)

    _patch(Shards, step=step)


def _is_record(transaction: Transaction) -> bool:
    return bool(transaction.put) and all(isinstance(row, RecordRow) for _, row in transaction.put)


def _patch(target: type, **changes: object) -> None:
    for name, value in changes.items():
        setattr(target, name, value)


class PlantedBug(NamedTuple):
    """`shown_by`: the kinds of faults of tests/chaos/schedule.py that show it.

    `problem`: a regular expression for what a run must say then.
    """

    plant: Callable[[], None]
    shown_by: tuple[str, ...]
    problem: str


_LOST = r"told 'counted': counted 0 times"
_STRANGER = r"^aggregator@\S+ wrote \d+ rows of \S+, which aggregator@\S+ held"
_LATE = r"no version was made|not 1 updates were counted"

BUGS: Final = {
    "acknowledged-before-commit": PlantedBug(_acknowledged_before_commit, ("holder",), _LOST),
    "unknown-transaction-repeated": PlantedBug(
        _unknown_transaction_repeated, ("kill-database",), _LOST
    ),
    "fence-skipped": PlantedBug(_fence_skipped, ("split",), _STRANGER),
    "unreplicated-row-read": PlantedBug(_unreplicated_row_read, ("unreplicated",), _LOST),
    "versions-delayed": PlantedBug(_versions_delayed, ("holder",), _LATE),
}


if __name__ == "__main__":
    BUGS[os.environ[VARIABLE]].plant()
    sys.exit(main())
