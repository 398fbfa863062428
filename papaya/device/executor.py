"""What a device asks of whatever trains for it, and what comes back. Knows no engine.

Paper, "Client Runtime": "The Executor [...] executes the training or evaluation job". A device
names one of its own task files, never a program that came over the network. The parameters are the
blob as it was downloaded.

Everything that goes wrong inside a job is `JobFailed` with a reason for the log; the device goes
on with its session, which reports the failure.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

from msgspec import Struct

from papaya.config import TaskConfig
from papaya.learning.definition import Examples

LOADER: Final = "load_examples"
"""The function of a task file that makes examples of a text, if there is one."""

FailureKind = Literal["timeout", "memory", "crashed", "refused", "unavailable"]


class TaskTerms(Struct, frozen=True):
    """What a task file says about privacy, for the device to compare with what a server says."""

    secure: bool
    model_length: int
    max_examples: int
    max_staleness: int
    clip: float | None
    threshold: int | None

    @classmethod
    def of(cls, config: TaskConfig) -> TaskTerms:
        return cls(
            secure=config.secure_aggregation is not None,
            model_length=config.model_length,
            max_examples=config.max_examples,
            max_staleness=config.max_staleness,
            clip=config.clip,
            threshold=config.threshold,
        )


class TaskFile(Struct, frozen=True):
    """A task file that this device has, as its executor has found it."""

    path: str
    task: str
    module_hash: str
    terms: TaskTerms
    examples: Examples

    @property
    def model_length(self) -> int:
        return self.terms.model_length

    @property
    def max_examples(self) -> int:
        return self.terms.max_examples


class Job(Struct, frozen=True):
    """Train or evaluate by one task file. `volume`: how many examples the device could train on.

    "load" has the file's `load_examples` make examples of texts, which `examples` holds.
    """

    kind: Literal["train", "evaluate", "load"]
    task_file: str
    parameters: bytes
    examples: tuple[bytes, ...]
    seed: int = 0
    volume: int = 0


class JobResult(Struct, frozen=True):
    """Bytes to upload, and the weight: the examples trained on, or 1 for an evaluation.

    Of "load": the examples of each text, as MessagePack, and how many they are.
    """

    update: bytes
    examples: int


class JobFailed(Exception):
    """A job that gave no result. `kind` is for counters, the message for people."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class Executor(Protocol):
    """Runs jobs, possibly many at a time."""

    @property
    def tasks(self) -> tuple[TaskFile, ...]:
        """What it can run."""
        ...

    async def run(self, job: Job, timeout_s: float) -> JobResult:
        """The result, or JobFailed within the timeout."""
        ...
