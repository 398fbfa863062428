"""The device's own limits on what a server may choose for it.

A server sends timeouts, heartbeat intervals, waiting times and sizes. A device follows them within
bounds that its owner set: no server can make it hold a session for a day, wait for a year, send
heartbeats in a tight loop, download more than it has room for, or exclude a task forever: after
`max_exclusion_s` the device asks again (`papaya/client/history.py`).
"""

from __future__ import annotations

import math

from msgspec import Struct, structs

from papaya.config.checks import require, require_count, require_positive_s
from papaya.messages.base import Message
from papaya.messages.participation import Joined, Retry, UploadGranted
from papaya.messages.selection import Rejected


class DeviceLimits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds on the values that a server sends; values within them are used as they are."""

    max_training_s: float = 600.0
    max_upload_s: float = 600.0
    min_heartbeat_s: float = 0.2
    max_heartbeat_s: float = 300.0
    max_retry_after_s: float = 60.0
    max_rejected_s: float = 86400.0
    max_exclusion_s: float = 30 * 86400.0
    max_model_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for field in self.__struct_fields__[:-1]:
            require_positive_s(field, getattr(self, field))
        require_count("max_model_bytes", self.max_model_bytes)

    def bounded(self, answer: Message) -> Message:
        """The same answer, with its values bounded by these limits."""
        match answer:
            case Joined():
                heartbeat_s = max(self.min_heartbeat_s, answer.heartbeat_s)
                return structs.replace(
                    answer,
                    heartbeat_s=_at_most(self.max_heartbeat_s, heartbeat_s),
                    training_timeout_s=_at_most(self.max_training_s, answer.training_timeout_s),
                )
            case UploadGranted():
                timeout_s = _at_most(self.max_upload_s, answer.upload_timeout_s)
                return structs.replace(answer, upload_timeout_s=timeout_s)
            case Retry():
                return structs.replace(
                    answer,
                    after_s=_at_most(self.max_retry_after_s, answer.after_s),
                    keep_s=_at_most(self.max_upload_s, answer.keep_s),
                )
            case Rejected():
                return structs.replace(
                    answer,
                    retry_from_s=_at_most(self.max_rejected_s, answer.retry_from_s),
                    retry_until_s=_at_most(self.max_rejected_s, answer.retry_until_s),
                )
        return answer


class CheckInPacing(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The device's own intervals: between visits, and when it stops."""

    pause_s: float = 60.0
    backoff_s: float = 5.0
    max_backoff_s: float = 600.0
    eligibility_poll_s: float = 30.0
    sweep_s: float = 300.0
    leave_s: float = 2.0
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.pause_s) and self.pause_s >= 0,
            "pause_s",
            self.pause_s,
            "must be finite and not negative",
            "use 60, or 0 in a demonstration",
        )
        for field in self.__struct_fields__[1:]:
            require_positive_s(field, getattr(self, field))


def _at_most(limit: float, value: float) -> float:
    return value if value <= limit else limit
