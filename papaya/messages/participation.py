"""Participation (paper, "Client Independence"): download, train, report, upload.

    device            SELECTOR                AGGREGATOR of the task
      │ Join ───────────▶ │ ──────────────────────▶ │ takes the assignment ticket
      │ ◀───────────────────────────────── Joined ── │ a session ticket and what to download
      │ Heartbeat ──────────────────────────────────▶ │ Alive
      │ Report ─────────────────────────────────────▶ │ staleness is frozen here
      │ ◀────────────────────────── UploadGranted ── │ an upload ticket
      │ Chunk 0..n ─────────────────────────────────▶ │ ChunkReceived
      │ Complete ───────────────────────────────────▶ │ answered when the update is durable
      │ ◀────────────────────────────── Completed ── │ counted, or discarded and why
      │ Leave ──────────────────────────────────────▶ │ Left: the slot is free at once

Any request may be answered Aborted or Refused (this session is over) or Retry (try again, maybe
through another selector). Any request may be repeated: the same answer comes back. "All stages
happen within a virtual session": a stage does not need the connection or the server of the last.
Chunk and Complete may go directly to the aggregator, if it has given its `upload_url`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from papaya.messages.base import (
    BlobKey,
    Count,
    Crc32,
    Message,
    Name,
    SealedSeed,
    SealedTicket,
    Seconds,
    SessionId,
    ShortText,
    TaskId,
)

MAX_CHUNKS = 4096
MAX_EXTRA_S = 900.0
"""How far `Retry.keep_s` may move the deadlines of one session, in all."""

AbortReason = Literal[
    "stale",
    "round_over",
    "timed_out",
    "silent",
    "left",
    "full",
    "task_over",
    "replaced",
    "revoked",
    "revised",
]
DiscardReason = Literal[
    "round_over",
    "wrong_size",
    "not_finite",
    "over_norm",
    "seed_refused",
    "trusted_party_lost",
    "already_counted",
    "revised",
]
LeaveReason = Literal[
    "stopped",
    "timed_out",
    "no_parameters",
    "no_program",
    "mismatch",
    "no_examples",
    "diverged",
    "training_failed",
    "out_of_memory",
    "crashed",
    "unavailable",
    "declined",
    "untrusted",
    "storage",
    "protocol",
    "other",
]
"""`declined`: the device's policies, history or budgets do not allow it; does not say which.
`papaya/messages/reasons.py` describes all reasons.
"""
ChunkIndex = Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]


class Join(Message, frozen=True):
    ticket: SealedTicket


class Joined(Message, frozen=True):
    """`evaluates`: do not train, but evaluate these parameters on held-out data.

    `norms`: train, and upload the bin of the norm of the update (docs/privacy.md); `evaluates` is
    set too.

    `upload_bits`: in how many bits to upload a number of an update
    (`papaya/learning/compression.py`).

    `secure`: the update must be masked; the answer to the report carries an offer of the TSA.
    """

    ticket: SealedTicket
    task: TaskId
    session: SessionId
    version: Count
    parameters: BlobKey
    model_length: Count
    update_length: Count
    evaluates: bool
    heartbeat_s: Seconds
    training_timeout_s: Seconds
    participation_gap_s: Seconds
    max_participations: Count | None
    secure: bool = False
    norms: bool = False
    upload_bits: Literal[8, 16, 32] = 32


class Heartbeat(Message, frozen=True):
    ticket: SealedTicket


class Alive(Message, frozen=True):
    pass


class Report(Message, frozen=True):
    """Training is finished; `examples` is how many the client trained on.

    Under secure aggregation it is always 1: the weight is part of the masked update.
    """

    ticket: SealedTicket
    examples: Annotated[int, Meta(ge=1, le=2**31)]


class SecureOffer(Struct, frozen=True, gc=False):
    """An offer of the TSA, and everything that a device needs to verify it.

    `parameters` are the encoded public parameters, `offer` the signed initial message,
    `evidence` and `collateral` the platform's quote and what verifies it, `leaf` the record of the
    TSA binary in the public log.
    """

    parameters: Annotated[bytes, Meta(max_length=1024)]
    offer: Annotated[bytes, Meta(min_length=112, max_length=112)]
    identity: Annotated[bytes, Meta(min_length=32, max_length=32)]
    platform: Name
    evidence: Annotated[bytes, Meta(max_length=1 << 14)]
    collateral: Annotated[bytes, Meta(max_length=1 << 18)]
    leaf: Annotated[int, Meta(ge=-1, le=2**53)]


class UploadGranted(Message, frozen=True):
    """`version` is the server's current one. Staleness is its distance from the initial version.

    `upload_url`: where the aggregator itself takes chunks and Complete, without a selector in
    between; empty if it does not. The path through selectors always remains.
    """

    ticket: SealedTicket
    version: Count
    chunk_bytes: Annotated[int, Meta(ge=1)]
    upload_timeout_s: Seconds
    secure: SecureOffer | None = None
    upload_url: Annotated[str, Meta(max_length=512)] = ""


class Chunk(Message, frozen=True):
    """`upload` is a random id chosen by the client. A new id starts again with chunk 0."""

    ticket: SealedTicket
    upload: ShortText
    index: ChunkIndex
    crc32: Crc32
    data: bytes
    """In a running server, a view of the pooled buffer that the bytes were received into."""


class ChunkOffer(Message, frozen=True):
    """Sent by the driver before it reads the body of a chunk. No answer means: read it."""

    ticket: SealedTicket
    upload: ShortText
    index: ChunkIndex
    length: Count


class ChunkReceived(Message, frozen=True):
    upload: ShortText
    index: ChunkIndex


class Complete(Message, frozen=True):
    """`sealed` is the seed of the mask, which only the TSA can read."""

    ticket: SealedTicket
    upload: ShortText
    sealed: SealedSeed = b""


class Incomplete(Message, frozen=True):
    """The server does not have these chunks: send them and complete again."""

    missing: tuple[ChunkIndex, ...]


class Completed(Message, frozen=True):
    """The update was processed. `discarded` says why it is not counted; None means counted."""

    discarded: DiscardReason | None = None


class Leave(Message, frozen=True):
    """`reason` is a `LeaveReason`. Text of earlier clients is counted as "other", never kept."""

    ticket: SealedTicket
    reason: ShortText


class Left(Message, frozen=True):
    pass


class Aborted(Message, frozen=True):
    """The server ended the session; its slot is already free."""

    reason: AbortReason


class Refused(Message, frozen=True):
    """The request is invalid (forged, expired or against the protocol). Do not repeat it."""

    reason: ShortText
    hint: ShortText = ""


class Retry(Message, frozen=True):
    """Send the same request again after `after_s`, maybe through another selector.

    `keep_s`: the server keeps the session for at least this time, even past its deadline, because
    the client did not cause the delay.
    `ticket`: if not empty, use it from now on, also in this request. It proves
    `keep_s` to other servers.
    `elsewhere`: this server cannot answer the request. A client that sent it to an `upload_url`
    sends it through a selector at once, and the rest of the upload too.
    """

    reason: ShortText
    after_s: Seconds
    keep_s: Seconds = 0.0
    ticket: SealedTicket = b""
    elsewhere: bool = False


Request = Join | Heartbeat | Report | Chunk | Complete | Leave
Ticketed = Request | ChunkOffer
"""Requests that are routed by their ticket."""
Answer = (
    Joined
    | Alive
    | UploadGranted
    | ChunkReceived
    | Incomplete
    | Completed
    | Left
    | Aborted
    | Refused
    | Retry
)
