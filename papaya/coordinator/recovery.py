"""Leadership: the lease, its epoch, and the recovery period (paper, appendix "Failure Recovery").

    "After the leader election coordinator enters the recovery period (typically 30s) to rebuild
    the current assignment map from aggregator reports and then resumes assignments."

Clocks of different servers are never compared. A candidate takes over when it has seen the leader
row unchanged for a whole lease by its own clock. Only time in which its reads succeed counts: while
the state store is unreachable, the leader cannot renew either. A leader stops when no renewal that
it *sent* within a lease was confirmed. In the recovery period of a new leader, holders that have
not reported yet do not count as dead. Tasks and clients are not decided here.
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

    def __init__(self, node: NodeId, boot: int, config: ServerConfig) -> None:
        self._node = node
        self._boot = boot
        self._config = config
        # The leader row as last read, and when it was first seen with this value; None before the
        # first read.
        self._row: LeaderRow | None = None
        self._row_seen_at: float | None = None
        # The time of the last read, and the time without reads since the row was first seen.
        self._read_at = 0.0
        self._unread_s = 0.0
        # The row that a transaction on its way would write, when it was sent, and how many there
        # have been.
        self._attempt: LeaderRow | None = None
        self._attempted_at = 0.0
        self._attempts = 0
        # The epoch that this candidate leads, 0 while it does not, and the end of its lease.
        self.epoch = 0
        self._leads_until = 0.0
        self.recovers_until = 0.0
        # Why this candidate claimed the lease, for its operator.
        self.claimed_because = ""

    def leads(self, now: float) -> bool:
        return self.epoch > 0 and now < self._leads_until

    def is_led(self, now: float) -> bool:
        """Whether some coordinator leads, as far as this one can tell: the row was renewed."""
        if self.leads(now):
            return True
        if self._row is None or self._row_seen_at is None:
            return False
        return now - self._row_seen_at < self._config.leader_lease_s

    @property
    def last_leader(self) -> NodeId:
        """The leader that the row named when it was last read; empty if there was none."""
        return "" if self._row is None else self._row.holder

    def recovers(self, now: float) -> bool:
        return now < self.recovers_until

    def observe(self, now: float, row: LeaderRow | None) -> None:
        """Take in the leader row as just read. Settles an attempt whose outcome was unknown."""
        if self._attempt is not None and row == self._attempt:
            self.confirm(now)
            return
        if self._row_seen_at is None or row != self._row:
            self._see(now, row)
        # Reads may be a little late.
        self._unread_s += max(0.0, now - self._read_at - 2 * self._config.leader_read_s)
        self._read_at = now
        if self.epoch > 0 and not self._is_mine(row):
            self._abdicate()

    def next_attempt(self, now: float) -> Transaction | None:
        """A renewal if this candidate leads, a claim if the lease has run out, else None."""
        if self._row_seen_at is None:
            return None
        if self.epoch > 0:
            return self._renewal(now)
        if self._may_claim(now):
            return self._claim(now)
        return None

    def confirm(self, now: float) -> bool:
        """The attempt was committed. True if this candidate is now the leader of a new epoch."""
        assert self._attempt is not None
        elected = self.epoch != self._attempt.epoch
        if elected:
            self.epoch = self._attempt.epoch
            has_predecessor = self._row is not None
            self.recovers_until = now + self._config.recovery_s if has_predecessor else now
        # The lease starts when the attempt was sent: the row may have been written right then.
        self._leads_until = self._attempted_at + self._config.leader_lease_s
        self._see(now, self._attempt)
        self._attempt = None
        return elected

    def _see(self, now: float, row: LeaderRow | None) -> None:
        self._row, self._row_seen_at = row, now
        self._read_at, self._unread_s = now, 0.0

    def _may_claim(self, now: float) -> bool:
        if self._row is None or self._row.holder == self._node:
            return True  # no leader yet, or this node itself: an earlier boot, or a late claim
        assert self._row_seen_at is not None
        return now - self._row_seen_at - self._unread_s >= self._config.leader_lease_s

    def _claim(self, now: float) -> Transaction:
        if self._row is None:
            self.claimed_because = "there was no leader"
            return self._attempt_row(now, 1)
        is_own = self._row.holder == self._node
        self.claimed_because = (
            "an earlier start of this coordinator led"
            if is_own
            else f"{self._row.holder} did not renew its lease"
        )
        return self._attempt_row(now, self._row.epoch + 1)

    def _renewal(self, now: float) -> Transaction:
        return self._attempt_row(now, self.epoch)

    def _attempt_row(self, now: float, epoch: int) -> Transaction:
        """Every attempt writes a different row, so a late one cannot be mistaken for a newer."""
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
