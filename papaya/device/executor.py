"""The interface between a device and an engine that trains: jobs, results, failures.

It is the executor of the paper's "Client Runtime", without any engine. A job names one of the
device's own task files, or the program of a bundle whose owner the device has pinned. The
parameters are the blob as it was downloaded.

A job that fails raises `JobFailed` with a reason for the log; the device goes on with its session,
which reports the failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol

from msgspec import Struct

from papaya.errors import OperatorError
from papaya.learning.client_training import StepDone, unwatched
from papaya.learning.definition import Examples, TaskTerms
from papaya.learning.parameters import Manifest, Vector
from papaya.messages.participation import LeaveReason

LOADER: Final = "load_examples"
"""The optional function of a task file that makes examples from a text."""

EngineName = Literal["torch", "executorch"]
"""What a device trains with: task files in Python, or compiled programs."""

FailureKind = Literal["timeout", "memory", "crashed", "diverged", "refused", "unavailable"]
"""refused: the code of the task raised an error, or it must not be run."""


class TaskFile(Struct, frozen=True):
    """A task file or a program file of this device, as its executor has loaded it, or the task file
    of a bundle.

    `manifest`: the encoded manifest of the bundle, which replaces the settings in the file; empty
    for a file of this device. The code of a bundle is read in the confined job and nowhere else.
    `frozen`: the path of its file of frozen tensors, if it has one. `memory_mb`: the limit that the
    device has set for the owner of the bundle, besides that of the executor.
    """

    path: str
    task: str
    module_hash: str
    terms: TaskTerms
    examples: Examples
    manifest: bytes = b""
    frozen: str = ""
    memory_mb: int | None = None

    @property
    def model_length(self) -> int:
        return self.terms.model_length

    @property
    def max_examples(self) -> int:
        return self.terms.max_examples


class Job(Struct, frozen=True):
    """Train or evaluate with one task file, by its path, or with a bundle, by the name under which
    the executor was given it.

    `volume`: how many examples the device could train on. `manifest`: the one of the bundle; the
    executor sets it. `is_clipped`: is the update clipped to the task's clip? `device_state`: what
    the device keeps of the task.

    "load" calls the file's `load_examples` on the texts in `examples`. "check" looks for the first
    example that the task cannot use. "try" only loads the program, to find out whether it can be
    trained here.
    """

    kind: Literal["train", "evaluate", "load", "check", "try"]
    task_file: str
    parameters: bytes
    examples: tuple[bytes, ...]
    seed: int = 0
    volume: int = 0
    manifest: bytes = b""
    is_clipped: bool = True
    device_state: bytes = b""


class JobResult(Struct, frozen=True):
    """Bytes to upload, and the weight: the examples trained on, or 1 for an evaluation.
    `device_state`: what the device keeps after training, if the task has personal tensors.

    For "load": the examples of each text, as MessagePack, and their number. For "check": the
    `UnfitExample` as MessagePack, or nothing. `keeps_tensors`, for "try": whether devices keep
    tensors of the model, as far as the program says so.
    """

    update: bytes
    examples: int
    device_state: bytes = b""
    keeps_tensors: bool = False


class UnfitExample(Struct, frozen=True):
    """An example that a task cannot use: its index in the list, and the problem."""

    index: int
    problem: str


class JobFailed(Exception):
    """A job without a result. `kind` is for counters, the message for people.

    `traceback`: of the code of the task, if it raised an error.
    """

    def __init__(self, kind: FailureKind, reason: str, traceback: str = "") -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.traceback = traceback


class GivenUp(OperatorError):
    """Why a device leaves a visit. `code` is all that the server learns of it."""

    def __init__(
        self, code: LeaveReason, message: str, *, hint: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.traceback = traceback


class TrainingEngine(Protocol):
    """One task file, ready to train. It runs in a job's own process.

    `device_state`: what the device keeps of the task. Set it before a job; training replaces it.
    """

    device_state: bytes

    @property
    def manifest(self) -> Manifest: ...

    @property
    def keeps_state(self) -> bool:
        """Whether the task has personal tensors."""
        ...

    def check(self, examples: Sequence[bytes]) -> None:
        """Raises if the task cannot make a batch of these examples."""
        ...

    def train(
        self,
        parameters: Vector,
        examples: Sequence[bytes],
        seed: int,
        step_done: StepDone,
        *,
        is_clipped: bool,
    ) -> tuple[bytes, int]:
        """The update and the number of examples."""
        ...

    def evaluate(
        self, parameters: Vector, examples: Sequence[bytes], volume: int, step_done: StepDone
    ) -> bytes:
        """The evaluation vector of a device with `volume` training examples."""
        ...

    def try_program(self) -> None:
        """Raise OperatorError if the program cannot be trained here, with any examples."""
        ...


class Executor(Protocol):
    """Runs jobs, possibly many at a time."""

    @property
    def tasks(self) -> tuple[TaskFile, ...]:
        """The task files that it can run."""
        ...

    def add_bundle(self, name: str, file: TaskFile) -> None:
        """Jobs may name this program from now on. OperatorError if code of bundles cannot be
        run.
        """
        ...

    def remove_bundle(self, name: str) -> None:
        """No new job may name it; those that were started before go on."""
        ...

    async def run(self, job: Job, timeout_s: float, step_done: StepDone = unwatched) -> JobResult:
        """Return the result, or raise JobFailed within the timeout. The time of a "try" starts when
        it has a slot.

        If the job takes long, `step_done` is called from time to time.
        """
        ...
