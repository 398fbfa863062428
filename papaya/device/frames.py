"""Messages between a sandbox and its fork-server, over one socket pair.

sandbox → Start → fork-server ─fork→ job        Ready | Unloadable, once, after the files are loaded
        ← Done | Failed ←─────────pipe─┘        Kill ends a job; its answer is Failed

A frame is eight bytes of length, little-endian, and one message in MessagePack. Nothing is
pickled. The child is not trusted: the fork-server bounds what it reads from the pipe and
decodes it into `JobOutcome` only.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from papaya.device.executor import FailureKind, Job, JobResult, TaskFile

HEADER_BYTES: Final = 8


class Start(Struct, frozen=True, tag=True):
    id: int
    job: Job
    cpu_s: int


class Kill(Struct, frozen=True, tag=True):
    id: int


class Ready(Struct, frozen=True, tag=True):
    tasks: tuple[TaskFile, ...]


class Unloadable(Struct, frozen=True, tag=True):
    message: str
    hint: str


class JobProblem(Struct, frozen=True, tag=True):
    """A failure that the job reports itself."""

    kind: FailureKind
    reason: str


class Done(Struct, frozen=True, tag=True):
    id: int
    result: JobResult


class Failed(Struct, frozen=True, tag=True):
    id: int
    problem: JobProblem


class Success(Struct, frozen=True, tag=True):
    """A result that the job reports itself."""

    result: JobResult


Order = Start | Kill
ForkServerReply = Ready | Unloadable | Done | Failed
JobOutcome = Success | JobProblem

orders: Final = msgspec.msgpack.Decoder(Order)
answers: Final = msgspec.msgpack.Decoder(ForkServerReply)
outcomes: Final = msgspec.msgpack.Decoder(JobOutcome)


def frame(message: Order | ForkServerReply | JobOutcome) -> bytes:
    """The bytes of one frame."""
    buffer = bytearray(HEADER_BYTES)
    msgspec.msgpack.Encoder().encode_into(message, buffer, HEADER_BYTES)
    buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
    return bytes(buffer)


def length(header: bytes | bytearray) -> int:
    """How many bytes follow this header."""
    return int.from_bytes(header[:HEADER_BYTES], "little")
