"""Leadership: the lease, its epoch, and the recovery period (paper, appendix "Failure Recovery").

    "After the leader election coordinator enters the recovery period (typically 30s) to rebuild
    the current assignment map from aggregator reports and then resumes assignments."

No clock is compared with another: a candidate takes over when it has seen the leader row unchanged
for a whole lease by its own clock; a leader stops when no renewal that it *sent* within a lease
was confirmed. The new leader then waits a recovery period, which outlasts every assignment that
the old one can have made. Decides nothing about tasks or clients.
"""

from __future__ import annotations

from papaya.config import ServerConfig
from papaya.messages.base import NodeId
from papaya.messages.storage import (
    EPOCH_KEY,
    LEADER_KEY,
    EpochRow,
    LeaderRow,
    Transaction,
)


class Leadership:
    """One candidate's view of the lease."""

    def __init__(self, node: NodeId, boot: float, config: ServerConfig) -> None:
        self._node = node
        self._boot = boot
        self._config = config
        self._row: LeaderRow | None = None
        self._row_seen_at: float | None = None
        self._attempt: LeaderRow | None = None
        self._attempted_at = 0.0
        self._attempts = 0
        self._leads_until = 0.0
        self.epoch = 0
        self.recovers_until = 0.0

    def leads(self, now: float) -> bool:
        return self.epoch > 0 and now < self._leads_until

    def is_led(self, now: float) -> bool:
        """Whether some coordinator leads, as far as this one can tell: the row was renewed."""
        if self.leads(now):
            return True
        if self._row is None or self._row_seen_at is None:
            return False
        return now - self._row_seen_at < self._config.leader_lease_s

    def recovers(self, now: float) -> bool:
        return now < self.recovers_until

    def observe(self, now: float, row: LeaderRow | None) -> None:
        """What the store says now. It settles an attempt whose outcome was unknown."""
        if self._attempt is not None and row == self._attempt:
            self.confirm(now)
            return
        if self._row_seen_at is None or row != self._row:
            self._row, self._row_seen_at = row, now
        if self.epoch > 0 and not self._is_mine(row):
            self._abdicate()

    def next_attempt(self, now: float) -> Transaction | None:
        """A renewal for the leader, a claim for a candidate whose time has come, else nothing."""
        if self._row_seen_at is None:
            return None
        if self.epoch > 0:
            return self._renewal(now)
        if self._may_claim(now):
            return self._claim(now)
        return None

    def confirm(self, now: float) -> bool:
        """The attempt is in the store. True when it made this candidate the leader."""
        assert self._attempt is not None
        elected = self.epoch != self._attempt.epoch
        if elected:
            self.epoch = self._attempt.epoch
            has_predecessor = self._row is not None
            self.recovers_until = now + self._config.recovery_s if has_predecessor else now
        # Counted from the sending: the row may have been written any time after that.
        self._leads_until = self._attempted_at + self._config.leader_lease_s
        self._row, self._row_seen_at = self._attempt, now
        self._attempt = None
        return elected

    def _may_claim(self, now: float) -> bool:
        if self._row is None or self._row.holder == self._node:
            return True  # nobody led yet, or this very node did: an earlier boot, or a late claim
        assert self._row_seen_at is not None
        return now - self._row_seen_at >= self._config.leader_lease_s

    def _claim(self, now: float) -> Transaction:
        epoch = 1 if self._row is None else self._row.epoch + 1
        return self._attempt_row(now, epoch)

    def _renewal(self, now: float) -> Transaction:
        return self._attempt_row(now, self.epoch)

    def _attempt_row(self, now: float, epoch: int) -> Transaction:
        """No two attempts write the same row: one applied late must not pass for a later one."""
        self._attempts += 1
        row = LeaderRow(self._node, self._boot, epoch, self._attempts)
        self._attempt, self._attempted_at = row, now
        return Transaction(
            require=((LEADER_KEY, self._row),),
            put=((LEADER_KEY, row), (EPOCH_KEY, EpochRow(row.epoch))),
        )

    def _is_mine(self, row: LeaderRow | None) -> bool:
        return (
            row is not None
            and row.holder == self._node
            and row.boot == self._boot
            and row.epoch == self.epoch
        )

    def _abdicate(self) -> None:
        self.epoch = 0
        self._leads_until = 0.0
        self._attempt = None
