"""Heavy work of an aggregator: effects on data as large as a model, and their results.

    GetOffers    get initial messages from the TSA                  → Offered
    Keep         store a chunk of an upload
    Fold         check a complete upload, add it to the buffer      → Folded
    Snapshot     cut all shards at once, write the sum as a blob    → Snapshotted
    Restore      load the sums of durable records                   → Restored
    Step         apply the server optimizer, write a version        → Stepped or StepFailed
    Drop         drop the bytes of an upload, or the buffers of a task
    Forget       tell the TSA that a task is over
    DeleteBlobs  delete blobs that no row names any more

Any of them may return Lost if a blob is missing. While a blob cannot be read or written, the driver
tries again, and returns Delayed after the third failed attempt and each later one. It runs work on
threads (`server`) or in virtual time (`sim`); both use `shards.py` for the arithmetic. The work of
one task runs in the order given. The key of a blob starts with `task/seq/`, so an earlier holder
cannot delete what a later one wrote.
"""

from __future__ import annotations

from typing import Literal

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
    """`terms` goes with each of the offers; None if there are none, and `problem` says why.

    `is_unanswered`: the TSA did not answer, so it may still have all its seeds.
    """

    task: TaskId
    seq: int
    offers: tuple[StockedOffer, ...] = ()
    terms: SecureOffer | None = None
    problem: str = ""
    is_unanswered: bool = False
    manifest: bytes = b""
    """From the settings that clients with these offers have agreed to."""


class Fold(Effect, frozen=True):
    """Adds examples x staleness weight x update to the sum, and examples to its weight.

    `config` has the settings under which the client trained: they weigh and clip its update. If the
    rule of the task needs single updates, the update is kept instead of being added.

    Under secure aggregation the TSA first accepts the sealed seed into the group of the target
    version; then the masked vector is added unchanged.
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
    """The version whose group already has this seed, if it is not `target`."""
    is_unanswered: bool = False
    """The TSA did not answer. The update was not added, but its seed may be in the group."""


class Snapshot(Effect, frozen=True):
    task: TaskId
    seq: int
    targets: tuple[int, ...]


class Sum(Message, frozen=True):
    """One sum of a snapshot. `sessions` are all it contains, in the order they were folded.

    If the rule of the task needs single updates, `updates` has their blobs, and `blob` is empty.
    """

    target: int
    blob: BlobKey
    sessions: tuple[SessionId, ...]
    weight: float
    updates: tuple[BlobKey, ...] = ()


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

    If the record names no blob, its members are not durable yet, and their sum is that of the
    buffer in memory. The version makes them durable.

    Under secure aggregation the TSA releases the masks of exactly the record's members. `agreed`
    has the settings that the members have agreed to; None if these are in `config`. If `given_up`
    is set, the buffer is dropped for this reason and the TSA is not asked.
    """

    config: TaskConfig
    seq: int
    base: VersionRow
    optimizer: BlobKey
    record: RecordRow
    agreed: TaskConfig | None = None
    given_up: str = ""


UNREACHABLE = "trusted_party_unreachable"
WAITS_FOR_TSA = "the TSA does not answer; updates wait for it"
FAILED = "trusted_party_failed"
REVISED = "revised"


class Stepped(Message, frozen=True):
    task: TaskId
    seq: int
    version: int
    parameters: BlobKey
    optimizer: BlobKey
    dropped: str = ""
    """Why the masked buffer could not be used; then the version is a copy of the previous one. If
    the TSA is UNREACHABLE or has FAILED internally, the step may be tried again.
    """


class StepFailed(Message, frozen=True):
    """The new model would not be finite, or an extension of the servers failed."""

    task: TaskId
    seq: int
    reason: str


class Lost(Message, frozen=True):
    """A blob that the rows named when they were read is gone. A new holder may have deleted it."""

    task: TaskId
    seq: int
    reason: str


class Delayed(Message, frozen=True):
    """A blob cannot be read or written, for example because the disk is full, or no thread can
    start. The driver tries again. An empty reason means that the delay is over. If blobs are the
    cause, the next result for `seq` other than Folded or Offered also ends it. Owners and
    viewers can read the reason.
    """

    task: TaskId
    # Of the newest holder that waits. The work that cannot be done may be an earlier holder's.
    seq: int
    reason: str
    cause: Literal["blobs", "threads"] = "blobs"


class Arriving(Message, frozen=True):
    """`count` more bytes of a chunk have arrived. The driver sends this a few times per heartbeat
    while a large chunk is being received, so that its client does not count as silent or slow. It
    may be left out.
    """

    task: TaskId
    session: SessionId
    count: int = 0


class Growing(Message, frozen=True):
    """More of an upload's first chunk has arrived than its starter holds: may it have a buffer?

    If not, the answer is a Drop of the upload.
    """

    task: TaskId
    session: SessionId


class Drop(Effect, frozen=True):
    """Drop what was received of an upload, and what still arrives.

    Without a session: everything of the task under this sequence number.
    """

    task: TaskId
    seq: int
    session: SessionId | None = None


class Forget(Effect, frozen=True):
    """A secure task is over: the TSA can drop what it holds for it."""

    config: TaskConfig


class DeleteBlobs(Effect, frozen=True):
    blobs: tuple[BlobKey, ...]
