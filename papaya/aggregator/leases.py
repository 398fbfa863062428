"""The leases of a task, as its holder knows them (paper, "Enforcing Max Concurrency").

The Coordinator leases slots by the demand that an aggregator reports. The holder therefore keeps
slots free for clients that may be on their way, and confirms those that have come.
"""

from __future__ import annotations

from collections.abc import Iterable

from papaya.messages.base import SessionId
from papaya.messages.tickets import AssignmentTicket


class Promises:
    """An upper bound on the leases that the Coordinator may hold for one task.

    The paper counts clients "assigned to a task, but [...] not yet confirmed". Any demand that was
    reported may have been leased, and leases made under an earlier holder may still arrive. Slots
    are kept free for both: an adopted client only gets a slot that is not promised, so active +
    promised + inherited never exceeds C.
    """

    def __init__(self, seq: int, epoch: int, leases: Iterable[SessionId]) -> None:
        self._seq = seq
        self._epoch = epoch
        # Leases under an earlier holder that have not come. Some may have joined there, unreported.
        self._inherited = dict.fromkeys(leases)
        # Demand that was reported and not taken yet.
        self.count = 0

    @property
    def inherited(self) -> int:
        return len(self._inherited)

    def offer(self, demand: int) -> None:
        """This demand is being reported, so it may be leased from now on."""
        self.count = max(self.count, demand)

    def inherits(self, session: SessionId) -> bool:
        """Is a slot kept for this session because its lease was made under an earlier holder?"""
        return session in self._inherited

    def begin_epoch(self, epoch: int) -> None:
        """A new leader does not know the earlier leases, so it may lease again all demand that is
        reported from now on. Earlier assignments therefore lose their claim to a slot.
        """
        self._epoch = epoch
        self.count = 0

    def cover(self, assignment: AssignmentTicket) -> bool:
        """Is a slot kept for this assignment?

        An assignment under an earlier holder is covered only if the Coordinator listed its lease:
        otherwise it may already have been used at that holder.
        """
        is_older = 0 < assignment.epoch < self._epoch
        is_own = assignment.seq == self._seq and not is_older
        return is_own or self.inherits(assignment.session)

    def keep(self, session: SessionId) -> None:
        """The session has come and takes the slot that was kept for it."""
        if session in self._inherited:
            del self._inherited[session]
        else:
            self.count = max(0, self.count - 1)

    def forget_inherited(self) -> None:
        """By now all of them have ended: none is longer than a window of adoption."""
        self._inherited.clear()


class Confirmations:
    """Joins that the Coordinator has not acknowledged yet; each confirms one of its leases.

    Every report repeats them until one that named them is acknowledged. So each session is kept
    with the number of the report that first named it: a report sent while the task was loading
    named nothing, and its acknowledgement confirms nothing.
    """

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
