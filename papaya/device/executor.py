"""The interface between a device and an engine that trains: jobs, results, failures.

It is the executor of the paper's "Client Runtime", without any engine. A job names one of the
device's own task files, or the program of a bundle whose owner the device has pinned. The
parameters are the blob as it was downloaded.

A job that fails raises `JobFailed` with a reason for the log; the device goes on with its session,
which reports the failure.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

from msgspec import Struct

from papaya.bundle.manifest import TaskManifest
from papaya.config import TaskConfig
from papaya.learning.definition import Examples
from papaya.messages.base import TaskId

LOADER: Final = "load_examples"
"""The optional function of a task file that makes examples from a text."""

FailureKind = Literal["timeout", "memory", "crashed", "refused", "unavailable"]


class TaskTerms(Struct, frozen=True):
    """The privacy settings of a task, which the device compares with the server's."""

    secure: bool
    model_length: int
    max_examples: int
    max_staleness: int
    clip: float | None
    threshold: int | None

    @classmethod
    def signed(cls, manifest: TaskManifest) -> TaskTerms:
        return cls(
            secure=manifest.secure is not None,
            model_length=manifest.model_length,
            max_examples=manifest.client.max_examples,
            max_staleness=manifest.max_staleness,
            clip=manifest.clip,
            threshold=None if manifest.secure is None else manifest.secure.threshold,
        )

    @classmethod
    def of(cls, config: TaskConfig) -> TaskTerms:
        return cls(
            secure=config.is_secure,
            model_length=config.model_length,
            max_examples=config.max_examples,
            max_staleness=config.max_staleness,
            clip=config.clip,
            threshold=config.threshold,
        )


class TaskFile(Struct, frozen=True):
    """A task file: one of this device, as its executor has loaded it, or one of a bundle.

    `manifest`: the encoded manifest of the bundle, which replaces the settings in the file; empty
    for a file of this device. The code of a bundle is read in the confined job and nowhere else.
    """

    path: str
    task: str
    module_hash: str
    terms: TaskTerms
    examples: Examples
    manifest: bytes = b""

    @property
    def model_length(self) -> int:
        return self.terms.model_length

    @property
    def max_examples(self) -> int:
        return self.terms.max_examples


class Job(Struct, frozen=True):
    """Train or evaluate with one task file, by its path, or with a bundle, by its run.

    `volume`: how many examples the device could train on.

    "load" calls the file's `load_examples` on the texts in `examples`.
    """

    kind: Literal["train", "evaluate", "load"]
    task_file: str
    parameters: bytes
    examples: tuple[bytes, ...]
    seed: int = 0
    volume: int = 0


class JobResult(Struct, frozen=True):
    """Bytes to upload, and the weight: the examples trained on, or 1 for an evaluation.

    For "load": the examples of each text, as MessagePack, and their number.
    """

    update: bytes
    examples: int


class JobFailed(Exception):
    """A job without a result. `kind` is for counters, the message for people."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class Executor(Protocol):
    """Runs jobs, possibly many at a time."""

    @property
    def tasks(self) -> tuple[TaskFile, ...]:
        """The task files that it can run."""
        ...

    def add_bundle(self, run: TaskId, file: TaskFile) -> None:
        """Jobs may name this run from now on. OperatorError if code of bundles cannot be run."""
        ...

    async def run(self, job: Job, timeout_s: float) -> JobResult:
        """Return the result, or raise JobFailed within the timeout."""
        ...
