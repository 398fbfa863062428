"""Messages between a sandbox, its fork-server and its jobs.

sandbox ── Start + one end of a socket pair ──▶ fork-server ── fork ──▶ job
   │    ◀── Ready | Unloadable, once; Ended ──                           │
   └───────────── Job ──▶   ◀── Success | JobProblem ────────────────────┘

Orders and answers of the fork-server are packets, one message in MessagePack each. A job and its
result travel on the job's own socket pair, as frames: eight bytes of length, little-endian, and one
message. So examples and updates never enter the fork-server, whose memory every later job inherits.

Nothing is pickled. The job is not trusted: the sandbox bounds what it reads from it and decodes it
into `JobOutcome` only.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from papaya.device.executor import FailureKind, Job, JobResult, TaskFile

HEADER_BYTES: Final = 8
PACKET_BYTES: Final = 1 << 17
"""No packet is longer."""


class Start(Struct, frozen=True, tag=True):
    """Fork a job for this task file, on the socket that comes with the packet.

    `manifest`: of the bundle that the file belongs to; empty for a file of this device.
    """

    id: int
    task_file: str
    cpu_s: int
    manifest: bytes = b""


class Kill(Struct, frozen=True, tag=True):
    id: int


class Ready(Struct, frozen=True, tag=True):
    """`unconfined`: why jobs are not confined; empty if they are."""

    tasks: tuple[TaskFile, ...]
    unconfined: str


class Unloadable(Struct, frozen=True, tag=True):
    message: str
    hint: str


class Ended(Struct, frozen=True, tag=True):
    """The job and all that it started are gone. `status` is that of waitpid."""

    id: int
    status: int


class Success(Struct, frozen=True, tag=True):
    result: JobResult


class JobProblem(Struct, frozen=True, tag=True):
    kind: FailureKind
    reason: str
    traceback: str = ""


Order = Start | Kill
ForkServerReply = Ready | Unloadable | Ended
JobOutcome = Success | JobProblem

packet: Final = msgspec.msgpack.Encoder().encode
orders: Final = msgspec.msgpack.Decoder(Order)
answers: Final = msgspec.msgpack.Decoder(ForkServerReply)
jobs: Final = msgspec.msgpack.Decoder(Job)
outcomes: Final = msgspec.msgpack.Decoder(JobOutcome)


def frame(message: Job | JobOutcome) -> bytes:
    """The bytes of one frame."""
    buffer = bytearray(HEADER_BYTES)
    msgspec.msgpack.Encoder().encode_into(message, buffer, HEADER_BYTES)
    buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
    return bytes(buffer)


def length(header: bytes | bytearray) -> int:
    """How many bytes follow this header."""
    return int.from_bytes(header[:HEADER_BYTES], "little")
