"""A state store in memory: what every back end promises, in twenty lines."""

from __future__ import annotations

from typing import TypeVar

from papaya.messages.storage import Outcome, Row, Transaction

R = TypeVar("R", bound=Row)


class Store:
    """The state store: compare, then change everything or nothing."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def apply(self, transaction: Transaction) -> Outcome:
        if any(self.rows.get(key) != row for key, row in transaction.require):
            return "refused"
        for key in transaction.delete:
            self.rows.pop(key, None)
        self.rows.update(transaction.put)
        return "committed"

    def snapshot(self, prefixes: tuple[str, ...]) -> tuple[tuple[str, Row], ...]:
        return tuple((k, self.rows[k]) for k in sorted(self.rows) if k.startswith(prefixes))

    def all(self, kind: type[R]) -> list[R]:
        return [row for _, row in sorted(self.rows.items()) if isinstance(row, kind)]
