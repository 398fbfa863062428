"""Configuration of servers and devices.

Paper, appendix "Failure Recovery": failures are detected "after several missed heartbeats", and the
recovery period is "typically 30s". Only the heartbeat interval is configured; the other times
follow from it, so they are always consistent.
"""

from __future__ import annotations

import math

from msgspec import Struct

from papaya.config.checks import require, require_count, require_positive_s

MAX_CHUNK_BYTES = 2 << 20


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The heartbeat interval, and limits on what a server holds."""

    heartbeat_s: float = 10.0
    hold_s: float = 20.0
    min_report_interval_s: float = 0.02
    held_report_interval_s: float = 0.5
    max_held: int = 10_000
    chunk_bytes: int = 1 << 20
    pace: float = 1.5
    min_retry_s: float = 5.0
    max_retry_s: float = 86400.0
    max_members_mb: int = 16_384

    def __post_init__(self) -> None:
        for field in (
            "heartbeat_s",
            "hold_s",
            "min_report_interval_s",
            "held_report_interval_s",
            "min_retry_s",
            "max_retry_s",
        ):
            require_positive_s(field, getattr(self, field))
        for field in ("max_held", "chunk_bytes", "max_members_mb"):
            require_count(field, getattr(self, field))
        require(
            self.chunk_bytes <= MAX_CHUNK_BYTES,
            "chunk_bytes",
            self.chunk_bytes,
            f"is above the limit of {MAX_CHUNK_BYTES}",
            "use 1048576",
        )
        require(
            self.chunk_bytes % 4 == 0,
            "chunk_bytes",
            self.chunk_bytes,
            "must be a multiple of 4, because a chunk contains whole float32 numbers",
            "use 1048576",
        )
        require(
            math.isfinite(self.pace) and self.pace > 0,
            "pace",
            self.pace,
            "must be finite and above zero",
            "use 1.5",
        )
        require(
            self.min_retry_s <= self.max_retry_s,
            "min_retry_s",
            self.min_retry_s,
            f"is above max_retry_s = {self.max_retry_s:g}",
            "lower min_retry_s",
        )

    @property
    def dead_after_s(self) -> float:
        """How long a client or an aggregator may be silent before it counts as dead."""
        return 3 * self.heartbeat_s

    @property
    def confirm_by_s(self) -> float:
        """How long an accepted client may take to join."""
        return 3 * self.heartbeat_s

    @property
    def leader_lease_s(self) -> float:
        """How long the leader row must stay unchanged before a candidate takes over."""
        return 3 * self.heartbeat_s

    @property
    def leader_read_s(self) -> float:
        """How often a candidate reads the leader row."""
        return self.heartbeat_s / 4

    @property
    def max_clock_difference_s(self) -> float:
        """A leader refuses the reports of a server whose clock differs by this much or more."""
        return 3 * self.heartbeat_s

    @property
    def recovery_s(self) -> float:
        """How long a new leader waits for a silent holder before it moves its tasks."""
        return 3 * self.heartbeat_s


class DeviceConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a device talks to selectors.

    `participation_floor_s` is the device's own minimum gap between participations in a task; a task
    may ask for a longer one.
    """

    request_timeout_s: float = 10.0
    check_in_timeout_s: float = 30.0
    backoff_s: float = 0.5
    max_backoff_s: float = 5.0
    give_up_s: float = 60.0
    participation_floor_s: float = 3600.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__[:-1]:
            require_positive_s(field, getattr(self, field))
        require(
            math.isfinite(self.participation_floor_s) and self.participation_floor_s >= 0,
            "participation_floor_s",
            self.participation_floor_s,
            "must be finite and not negative",
            "use 3600, or 0 in a demonstration",
        )
