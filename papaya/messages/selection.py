"""Selection (paper, "Client Independence"): a device looks for a task with positive client demand.

    device                      SELECTOR
      │ CheckIn ────────────────▶ │   held while a compatible task has demand, or soon will
      │ ◀──────────── Accepted ── │   an assignment ticket for one task
      │ ◀──────────── Rejected ── │   come back within a window (pace steering)

"a client can complete the selection phase with either acceptance (client is accepted for
participation) or rejection (client will try to participate at another time)."
"""

from __future__ import annotations

from msgspec import Struct

from papaya.config import Requirements
from papaya.messages.base import (
    Count,
    Excluded,
    Message,
    Name,
    Names,
    SealedTicket,
    Seconds,
    SessionId,
    ShortText,
    TaskId,
)


class Capabilities(Struct, frozen=True, gc=False):
    """What a device declares. Coarse on purpose, so that many devices are equal.

    A device that says nothing about a trust policy is assumed to have one: its protocol is older
    than the field.
    """

    engine: Name = "torch"
    modules: Names = ()
    memory_mb: Count = 0
    labels: Names = ()
    trust_policy: bool = True


class DeviceClass(Struct, frozen=True, gc=False):
    """Devices that are equal for the Coordinator."""

    capabilities: Capabilities
    excluded: Excluded = ()

    def fits(self, task: TaskId, requirements: Requirements, is_secure: bool) -> bool:
        """Is it "compatible with its requirements (e.g., can train the model of the task)"?"""
        device = self.capabilities
        return (
            task not in self.excluded
            and (device.trust_policy or not is_secure)
            and requirements.engine in (None, device.engine)
            and (requirements.module is None or requirements.module in device.modules)
            and requirements.min_memory_mb <= device.memory_mb
            and all(label in device.labels for label in requirements.labels)
        )


class CheckIn(Message, frozen=True):
    """`excluded` are the tasks that the participation history forbids for now."""

    protocol: Count
    capabilities: Capabilities
    excluded: Excluded = ()


class IdentifiedCheckIn(Message, frozen=True):
    """Sent by the driver instead of a check-in whose token identifies the device."""

    device: str
    check_in: CheckIn


class Gone(Message, frozen=True):
    """Sent by the driver, for the handle of a check-in: the device has hung up."""


class Accepted(Message, frozen=True):
    ticket: SealedTicket
    task: TaskId
    session: SessionId


class Rejected(Message, frozen=True):
    """Come back at a time drawn uniformly from the window."""

    reason: ShortText
    retry_from_s: Seconds
    retry_until_s: Seconds
