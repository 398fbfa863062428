"""Heavy work of an aggregator: effects that take a model's worth of bytes, and what comes back.

    GetOffers    initial messages of the TSA               → Offered
    Keep         a chunk's bytes into the upload's slot
    Fold         check a complete upload, add it to the buffer     → Folded
    Snapshot     cut all shards at once, write the sum as a blob    → Snapshotted
    Restore      load the sums of durable records                   → Restored
    Step         apply the server optimizer, write a version        → Stepped or StepFailed
    Drop         forget an upload's bytes or a task's buffers
    Forget       the TSA has no more to do for a task
    (any of them                                                    → Lost: a blob is missing)
    DeleteBlobs  after the row that named them is gone

The driver runs them on threads (`net`) or in virtual time (`sim`); both use `shards.py` for the
arithmetic. Work of one task runs in the order given. A blob's key begins with `task/seq/`, so a
deposed holder cannot delete what its successor wrote.
"""

from __future__ import annotations

from papaya.config import TaskConfig
from papaya.machine import Effect
from papaya.messages.base import BlobKey, Message, SessionId, TaskId
from papaya.messages.participation import DiscardReason, SecureOffer
from papaya.messages.storage import RecordRow, VersionRow


class Keep(Effect, frozen=True):
    task: TaskId
    session: SessionId
    offset: int
    data: bytes
    model_bytes: int


class StockedOffer(Message, frozen=True):
    """One initial message of the TSA."""

    index: int
    expires: float
    message: bytes


class GetOffers(Effect, frozen=True):
    config: TaskConfig
    seq: int
    count: int


class Offered(Message, frozen=True):
    """`terms` is what goes with every one of the offers; None when there are none, and why."""

    task: TaskId
    seq: int
    offers: tuple[StockedOffer, ...] = ()
    terms: SecureOffer | None = None
    problem: str = ""


class Fold(Effect, frozen=True):
    """Adds examples x staleness weight x update to the sum, and examples to its weight.

    Under secure aggregation the TSA takes the sealed seed into the group of the target
    version first; then the masked vector is added as it is.
    """

    config: TaskConfig
    seq: int
    target: int
    session: SessionId
    examples: int
    staleness: int
    offer: int = -1
    sealed: bytes = b""


class Folded(Message, frozen=True):
    task: TaskId
    seq: int
    target: int
    session: SessionId
    refused: DiscardReason | None = None
    seed_group: int | None = None
    """The version whose group has this very seed, if that is another one than `target`."""


class Snapshot(Effect, frozen=True):
    task: TaskId
    seq: int
    targets: tuple[int, ...]


class Sum(Message, frozen=True):
    """What one snapshot holds: exactly these sessions, in the order in which they were folded."""

    target: int
    blob: BlobKey
    sessions: tuple[SessionId, ...]
    weight: float


class Snapshotted(Message, frozen=True):
    task: TaskId
    seq: int
    sums: tuple[Sum, ...]


class Restore(Effect, frozen=True):
    config: TaskConfig
    seq: int
    records: tuple[RecordRow, ...]
    garbage_except: tuple[BlobKey, ...]


class Restored(Message, frozen=True):
    task: TaskId
    seq: int


class Step(Effect, frozen=True):
    """From version `base` with its optimizer state and a closed record to the next version.

    Under secure aggregation the TSA releases the masks of exactly the record's members.
    """

    config: TaskConfig
    seq: int
    base: VersionRow
    optimizer: BlobKey
    record: RecordRow


UNREACHABLE = "trusted_party_unreachable"
FAILED = "trusted_party_failed"


class Stepped(Message, frozen=True):
    task: TaskId
    seq: int
    version: int
    parameters: BlobKey
    optimizer: BlobKey
    dropped: str = ""
    """Why the masked buffer could not be used: then the version is its predecessor again. If the
    TSA is UNREACHABLE, or FAILED for some reason of its own, the step may be tried again.
    """


class StepFailed(Message, frozen=True):
    """The step would not give a finite model."""

    task: TaskId
    seq: int
    reason: str


class Lost(Message, frozen=True):
    """A blob that the rows named when they were read is gone: perhaps a successor deleted it."""

    task: TaskId
    seq: int
    reason: str


class Arriving(Message, frozen=True):
    """Bytes of a chunk whose offer was taken have come, and more are to come. It may be left out;
    a driver tells it a few times per heartbeat, for chunks that take longer than that.
    """

    task: TaskId
    session: SessionId


class Drop(Effect, frozen=True):
    """What is kept of an upload, and what arrives: its slot is gone.

    Without a session: everything of the task under this sequence number.
    """

    task: TaskId
    seq: int
    session: SessionId | None = None


class Forget(Effect, frozen=True):
    """A secure task is over: what the TSA still holds for it is of no use to anyone."""

    config: TaskConfig


class DeleteBlobs(Effect, frozen=True):
    blobs: tuple[BlobKey, ...]
