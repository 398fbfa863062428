"""What a client asks of its device, and what comes back.

SendRequest  send a request to a server                 → Moving, while a chunk is being sent;
                                                          then Answered or Unanswered
Download     get the parameters, from any cache         → Downloaded or WorkFailed
Train        train on local data                        → Trained or WorkFailed
Seal         verify the offer and mask the update       → Sealed or WorkFailed
Remember     write the participation history durably, before the next effect
RememberDeclined     write durably when a join was declined, before the next effect
DirectUploadFailed   tell the owner why the upload goes on through selectors
Finish       the visit is over; the driver decides when to check in again
"""

from __future__ import annotations

from typing import Literal

from papaya.client.history import Participated
from papaya.machine import Effect
from papaya.messages.base import BlobKey, Message, NodeId, SessionId, TaskId
from papaya.messages.participation import LeaveReason, SecureOffer

Ending = Literal[
    "rejected",
    "unprepared",
    "counted",
    "discarded",
    "aborted",
    "refused",
    "failed",
    "stopped",
    "gave_up",
]
"""unprepared: the device has to fetch a bundle first, whose key is the reason."""


class SendRequest(Effect, frozen=True):
    """`to`: a selector, or the `upload_url` of an aggregator."""

    to: NodeId
    attempt: int
    message: Message


class Answered(Message, frozen=True):
    attempt: int
    answer: Message


class Moving(Message, frozen=True):
    """A chunk is still being sent: the request is slow, not lost."""

    attempt: int


class Unanswered(Message, frozen=True):
    """No answer will come: the connection was refused or broken."""

    attempt: int


class Download(Effect, frozen=True):
    parameters: BlobKey
    model_length: int


class Downloaded(Message, frozen=True):
    pass


class Train(Effect, frozen=True):
    task: TaskId
    session: SessionId
    parameters: BlobKey
    timeout_s: float
    evaluates: bool = False


class Trained(Message, frozen=True):
    """`update` is the trained minus the initial model, little-endian float32 in manifest order.

    `device_state` stays on the device: the driver keeps it when it records the participation.
    """

    update: bytes
    examples: int
    device_state: bytes = b""


class Seal(Effect, frozen=True):
    """Under secure aggregation, once per update: check the offer, mask the update, seal its seed.

    `version` is the client's own initial version, `current` the server's; the device computes its
    weight from them and from `examples`.
    """

    task: TaskId
    offer: SecureOffer
    update: bytes
    examples: int
    version: int
    current: int


class Sealed(Message, frozen=True):
    """The masked update and its sealed seed. A retry sends the same bytes again."""

    update: bytes
    sealed: bytes


class WorkFailed(Message, frozen=True):
    """`reason` is all that the server learns."""

    reason: LeaveReason


class Stop(Message, frozen=True):
    """The device wants the visit to end. A second one ends it without waiting for an answer."""


DirectFailure = Literal["unanswered", "moved", "refused", "unexpected"]


class DirectUploadFailed(Effect, frozen=True):
    """The aggregator at `url` did not take the upload; the rest of it goes through selectors.

    `reason`: it did not answer; does not serve the task, or cannot now; refused the request;
    answered something that does not belong to the request.
    """

    url: str
    reason: DirectFailure


class Remember(Effect, frozen=True):
    task: TaskId
    participated: Participated


class RememberDeclined(Effect, frozen=True):
    """The device asked a server for its gap and limit again, and these forbid a participation.

    If this cannot be written, the device asks again at its next visit.
    """

    task: TaskId
    at: float


class Finish(Effect, frozen=True):
    """`reason` is a code for this kind of ending (`papaya/messages/reasons.py`), or the server's
    text if it refused or rejected the device. `detail` stays on the device.
    """

    ending: Ending
    reason: str
    retry_from_s: float = 0.0
    retry_until_s: float = 0.0
    detail: str = ""
