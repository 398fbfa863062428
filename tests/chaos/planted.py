"""`papaya`, with a bug that the oracle must find: PAPAYA_PLANTED=BUG python -m tests.chaos.planted

Only this entry point reads the variable; no server does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Final

from papaya.cli.main import main
from papaya.messages.storage import Outcome, RecordRow, Transaction
from papaya.store.postgresql import PostgresState

VARIABLE: Final = "PAPAYA_PLANTED"
_LATE_S = 5.0

_transact_all = PostgresState.transact_all
_read = PostgresState.read


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


def _is_record(transaction: Transaction) -> bool:
    return bool(transaction.put) and all(isinstance(row, RecordRow) for _, row in transaction.put)


def _patch(target: type, **changes: object) -> None:
    for name, value in changes.items():
        setattr(target, name, value)


BUGS: Final[dict[str, Callable[[], None]]] = {
    "acknowledged-before-commit": _acknowledged_before_commit,
}


if __name__ == "__main__":
    BUGS[os.environ[VARIABLE]]()
    sys.exit(main())
