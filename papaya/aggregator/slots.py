"""The slots of a task at its holder (paper, "Enforcing Max Concurrency").

A task has C slots. Active clients have some of them. Others are kept: for clients that the
Coordinator may have assigned, and for those of earlier holders that are still expected. The demand
for clients is what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from papaya.aggregator import regime
from papaya.aggregator.leases import Confirmations, Promises
from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.sessions import Sessions
from papaya.messages.base import SessionId

_NEVER = float("inf")


class Slots:
    """The free slots of one task, and those that are kept. `papaya/sim/slot_checks.py` checks that
    active and assigned clients stay within C.
    """

    def __init__(
        self,
        seq: int,
        epoch: int,
        leases: Sequence[SessionId],
        predecessors_active: int | None,
        sessions: Sessions,
    ) -> None:
        """`leases`: made under earlier holders. `predecessors_active`: their active clients, None
        if unknown.
        """
        self._sessions = sessions
        # Set by each load.
        self._pipeline: Pipeline

        # Slots that leased clients may be coming for.
        self.promises = Promises(seq, epoch, leases)
        # Joins that the Coordinator still has to hear of.
        self.confirmations = Confirmations()
        # The number of active clients of earlier holders, and how many of them have come. None if
        # unknown; the first load then sets it to the concurrency.
        self._predecessors_active = 0 if seq == 1 else predecessors_active
        self._have_come = 0
        # Until then room is kept for the clients of earlier holders that are still expected.
        # Infinite until the task is served for the first time.
        self.adopts_until = _NEVER

        # Demand may have risen since the last report: the aggregator checks after each event.
        self.may_want_more = False
        # The demand in the last report.
        self.reported_demand = 0

    def load(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        if self._predecessors_active is None:
            self._predecessors_active = pipeline.config.concurrency

    def open(self, now: float, wait_s: float) -> None:
        """The task is served for the first time. A client of an earlier holder that has not come
        within `wait_s` counts as dead.
        """
        if self._pipeline.ledger.follows_rollback:  # what those clients train is void
            self._predecessors_active = 0
        self.adopts_until = now + (wait_s if self.expected > 0 else 0.0)

    # -- how many are free ------------------------------------------------------------------

    @property
    def client_demand(self) -> int:
        """By the rule of the regime, whether or not it is reported yet."""
        pipeline = self._pipeline
        if pipeline.has_all_updates:
            return 0
        return regime.client_demand(
            pipeline.config,
            len(self._sessions.active),
            pipeline.completed,
            pipeline.current.is_full,
        )

    @property
    def room(self) -> int:
        """Free slots that are not kept for a lease: an adopted client may take one."""
        return self.client_demand - self.promises.count - self.promises.inherited

    @property
    def admits_joins(self) -> bool:
        """No further client may join a round of an earlier manifest."""
        pipeline = self._pipeline
        is_closing = pipeline.current.is_full or pipeline.is_current_earlier
        return regime.admits_joins(pipeline.config, is_closing)

    @property
    def expected(self) -> int:
        """Clients of earlier holders that may still come, with or without a lease."""
        return self.awaited + self.promises.inherited

    @property
    def awaited(self) -> int:
        """Clients of earlier holders whose leases have ended; 0 while their number is unknown."""
        return max(0, (self._predecessors_active or 0) - self._have_come)

    def wanted(self, now: float) -> int:
        """Client demand without the room that is kept for clients of earlier holders."""
        kept = self.expected if now < self.adopts_until else 0
        return max(0, self.client_demand - kept)

    # -- who takes them ---------------------------------------------------------------------

    def promise(self, demand: int) -> None:
        """Reported demand is promised: clients that are assigned because of it find their slots."""
        self.promises.offer(demand)
        self.reported_demand = demand

    def take(self, session: SessionId, *, is_leased: bool) -> None:
        """A client with a lease takes the slot that is kept for it, any other one that is not."""
        self.confirmations.add(session)
        if is_leased:
            self.promises.keep(session)
        else:
            self._have_come += 1

    def use_up(self, session: SessionId, *, is_leased: bool) -> None:
        """The session ends as it begins. Its lease ends too: otherwise each such join would keep a
        slot free.
        """
        self.confirmations.add(session)
        if is_leased:
            self.promises.keep(session)
        self.may_want_more = True
