"""Slots that a lease may be on its way to (paper: clients "assigned to a task, but [...] not yet
confirmed").

Whatever demand was reported may have been leased, and a predecessor's leases may still arrive. So
active + promised never exceeds C, and an adopted client takes only a slot that nobody was promised.
"""

from __future__ import annotations

from collections.abc import Iterable

from papaya.messages.base import SessionId
from papaya.messages.tickets import AssignmentTicket


class Promises:
    """An upper bound of the leases that the Coordinator holds for one task."""

    def __init__(self, seq: int, leases: Iterable[SessionId]) -> None:
        self._seq = seq
        self._inherited = dict.fromkeys(leases)
        self.count = len(self._inherited)

    def offer(self, demand: int) -> None:
        """Reported demand: from now on it may be leased."""
        self.count = max(self.count, demand)

    def cover(self, assignment: AssignmentTicket) -> bool:
        """Is a slot promised to it? One that a predecessor gave may have been used up there."""
        return assignment.seq == self._seq or assignment.session in self._inherited

    def keep(self, session: SessionId) -> None:
        self._inherited.pop(session, None)
        self.count = max(0, self.count - 1)
