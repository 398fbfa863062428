"""Selection (paper, "Client Independence"): a device looks for a task with positive client demand.

    device                      SELECTOR
      │ CheckIn ────────────────▶ │   held while a compatible task has demand, or soon will
      │ ◀──────────── Accepted ── │   an assignment ticket for one task
      │ ◀──────────── Rejected ── │   come back within a window (pace steering)

"a client can complete the selection phase with either acceptance (client is accepted for
participation) or rejection (client will try to participate at another time)."
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from papaya.config import Requirements
from papaya.config.versions import is_at_least
from papaya.messages.base import (
    BlobKey,
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
    Url,
)

MAX_LACKS = 8


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
    owners: Names = ()
    """The ids of owners that the device has pinned."""
    engine_version: Name = ""
    upload_bits: Annotated[int, Meta(ge=1, le=32)] = 32
    """The fewest bits in which it can upload a number of an update."""


class DeviceClass(Struct, frozen=True, gc=False):
    """Devices that are equal for the Coordinator."""

    capabilities: Capabilities
    excluded: Excluded = ()

    def fits(self, task: TaskId, requirements: Requirements, is_secure: bool) -> bool:
        """Is it "compatible with its requirements (e.g., can train the model of the task)"?"""
        device = self.capabilities
        if requirements.owner is None:
            has_program = requirements.module is None or requirements.module in device.modules
        else:
            has_program = requirements.owner in device.owners
        return (
            task not in self.excluded
            and (not requirements.bundle or refused(task, requirements.bundle) not in self.excluded)
            and (device.trust_policy or not is_secure)
            and requirements.engine in (None, device.engine)
            and is_at_least(device.engine_version, requirements.engine_version)
            and has_program
            and requirements.min_memory_mb <= device.memory_mb
            and all(label in device.labels for label in requirements.labels)
            and device.upload_bits <= requirements.upload_bits
        )


def refused(task: TaskId, bundle: BlobKey) -> str:
    """The name by which a device excludes a bundle that it has refused, until it changes."""
    return f"{task}@{bundle[-8:]}"


class CheckIn(Message, frozen=True):
    """`excluded`: tasks that the participation history forbids for now, and refused bundles."""

    protocol: Count
    capabilities: Capabilities
    excluded: Excluded = ()


class IdentifiedCheckIn(Message, frozen=True):
    """Sent by the driver instead of a check-in whose token identifies the device."""

    device: str
    check_in: CheckIn


class Gone(Message, frozen=True):
    """Sent by the driver, for the handle of a check-in: the device has hung up."""


class JoinDecided(Message, frozen=True):
    """Sent by the driver when a join that the selector passed on gets an answer other than Retry.

    `ticket` is that of the join. After a Retry the slot stays reserved for the client.
    """

    ticket: SealedTicket


class Accepted(Message, frozen=True):
    """`bundle` is the key of what the task's owner has signed; empty without an owner."""

    ticket: SealedTicket
    task: TaskId
    session: SessionId
    bundle: BlobKey = ""


class Lack(Struct, frozen=True, gc=False):
    """What keeps a device out of a task: a code, and what the task needs.

    engine         another engine, `needs`           label     the label `needs`
    memory         `needs` MB of memory              frozen    a file with other frozen tensors
    trust_policy   a trust policy: it is secure      no_demand nothing: it has enough clients
    """

    task: TaskId
    code: Name
    needs: ShortText = ""


class Located(Message, frozen=True):
    """The answer to a request for the place of a blob that devices may download."""

    url: Url


class Rejected(Message, frozen=True):
    """Come back at a time drawn uniformly from the window.

    `lacks` names only tasks of owners that the device has pinned, and tasks whose file it has.
    """

    reason: ShortText
    retry_from_s: Seconds
    retry_until_s: Seconds
    lacks: Annotated[tuple[Lack, ...], Meta(max_length=MAX_LACKS)] = ()
