"""Messages between a sandbox, its fork-server and its jobs.

sandbox ── Start + one end of a socket pair ──▶ fork-server ── fork ──▶ job
   │    ◀── Ready | Unloadable, once; Ended ──                           │
   └───────────── Job ──▶   ◀── StepsDone, … , Success | JobProblem ─────┘

Orders and answers of the fork-server are packets, one message in MessagePack each. A job and its
result travel on the job's own socket pair, as frames: eight bytes of length, little-endian, and one
message. So examples, manifests of bundles and updates never enter the fork-server, whose memory
every later job inherits.

Nothing is pickled. The job is not trusted: the sandbox bounds what it reads from it and decodes it
into `JobMessage` only.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from papaya.device.executor import FailureKind, Job, JobResult, TaskFile

HEADER_BYTES: Final = 8
PACKET_BYTES: Final = 1 << 17
"""No packet is longer."""

MAX_REASON: Final = 500
MAX_TRACEBACK: Final = 8000
"""How much of the text of a problem is kept."""

StepCount = Annotated[int, Meta(ge=0, le=2**53)]


class Start(Struct, frozen=True, tag=True):
    """Fork a job for this task file, on the socket that comes with the packet.

    `is_bundle`: the file is the program of a bundle, whose manifest comes with the job. `frozen`
    and `memory_mb` are those of the task file.
    """

    id: int
    task_file: str
    cpu_s: int
    is_bundle: bool
    frozen: str = ""
    memory_mb: int | None = None


class Kill(Struct, frozen=True, tag=True):
    id: int


class Ready(Struct, frozen=True, tag=True):
    """`unconfined`: why jobs are not confined; empty if they are."""

    tasks: tuple[TaskFile, ...]
    unconfined: str
    engine_version: str


class Unloadable(Struct, frozen=True, tag=True):
    message: str
    hint: str


class Ended(Struct, frozen=True, tag=True):
    """The job and all that it started are gone. `status` is that of waitpid."""

    id: int
    status: int


class StepsDone(Struct, frozen=True, tag=True):
    """Progress of a long job. Numbers only, so that nothing of the examples reaches the log."""

    done: StepCount
    steps: StepCount


class Success(Struct, frozen=True, tag=True):
    result: JobResult


class JobProblem(Struct, frozen=True, tag=True):
    kind: FailureKind
    reason: str
    traceback: str = ""


Order = Start | Kill
ForkServerReply = Ready | Unloadable | Ended
JobOutcome = Success | JobProblem
JobMessage = StepsDone | JobOutcome

packet: Final = msgspec.msgpack.Encoder().encode
orders: Final = msgspec.msgpack.Decoder(Order)
answers: Final = msgspec.msgpack.Decoder(ForkServerReply)
jobs: Final = msgspec.msgpack.Decoder(Job)
job_messages: Final = msgspec.msgpack.Decoder(JobMessage)


def frame(message: Job | JobMessage) -> bytes:
    """The bytes of one frame."""
    buffer = bytearray(HEADER_BYTES)
    msgspec.msgpack.Encoder().encode_into(message, buffer, HEADER_BYTES)
    buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
    return bytes(buffer)


def length(header: bytes | bytearray) -> int:
    """How many bytes follow this header."""
    return int.from_bytes(header[:HEADER_BYTES], "little")
