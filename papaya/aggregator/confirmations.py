"""Joins that the Coordinator has not yet heard of: each confirms one of its leases.

Repeated in every report until one that named them is known to have arrived. A report that was made
while the task was being loaded named nothing, and acknowledges nothing.
"""

from __future__ import annotations

from papaya.messages.base import SessionId


class Confirmations:
    """Sessions by the number of the report that first named them."""

    def __init__(self) -> None:
        self._first_named: dict[SessionId, int | None] = {}

    def add(self, session: SessionId) -> None:
        self._first_named[session] = None

    def name_in(self, report: int) -> tuple[SessionId, ...]:
        for session, first_named in self._first_named.items():
            if first_named is None:
                self._first_named[session] = report
        return tuple(self._first_named)

    def acknowledge(self, report: int) -> None:
        self._first_named = {
            session: first_named
            for session, first_named in self._first_named.items()
            if first_named is None or first_named > report
        }
