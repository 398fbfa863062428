"""Trainers: the interface, one that runs an executor, and one that trains nothing (for tests).

Paper, "Client Runtime": the executor trains on local data. A trainer decides which tasks it knows;
a device leaves a task that its trainer does not know by name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Protocol

from msgspec import Struct, msgpack, structs

from papaya.bundle.errors import BundleError
from papaya.bundle.head import PROGRAM_FILES
from papaya.client.work import Trained
from papaya.config.versions import is_at_least
from papaya.device.bundles import Bundle
from papaya.device.example_store import ExampleStore, Split
from papaya.device.executor import (
    LOADER,
    EngineName,
    Executor,
    FailureKind,
    GivenUp,
    Job,
    JobFailed,
    TaskFile,
    UnfitExample,
)
from papaya.device.sandbox import Sandbox
from papaya.errors import ConfigError, OperatorError
from papaya.learning.client_training import StepDone, unwatched
from papaya.learning.definition import TaskTerms
from papaya.learning.evaluation import evaluation_vector, metric_count
from papaya.messages.base import SessionId, TaskId
from papaya.messages.participation import LeaveReason

logger = logging.getLogger("papaya.device")

_CODES: dict[FailureKind, LeaveReason] = {
    "timeout": "timed_out",
    "memory": "out_of_memory",
    "crashed": "crashed",
    "diverged": "diverged",
    "refused": "training_failed",
    "unavailable": "unavailable",
}
_LOAD_S = 600.0
_LOAD_BYTES = 8 << 20  # of text per job
_MAX_CHECK_S = 120.0  # to load the program of a bundle


class TrainingRequest(Struct, frozen=True):
    """What a visit asks of a trainer.

    `program` names the task whose model this is: `task` itself, or the one that `task` evaluates.
    `parameters` is a safetensors file whose hash was checked; its content was not. A trainer that
    takes long calls `step_done` from time to time, for the device's log. `is_clipped`: false if the
    device needs the norm of the whole update; such an update is not uploaded. `device_state` is
    what the device keeps of this task.
    """

    task: TaskId
    program: TaskId
    session: SessionId
    parameters: bytes
    model_length: int
    update_length: int
    evaluates: bool
    secure: bool
    timeout_s: float
    step_done: StepDone = unwatched
    is_clipped: bool = True
    device_state: bytes = b""


class Trainer(Protocol):
    @property
    def engine(self) -> str: ...

    @property
    def engine_version(self) -> str:
        """Empty if it is unknown; then the device gets no task that needs a version."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """The hashes of this device's task files."""
        ...

    @property
    def secure_modules(self) -> tuple[str, ...]:
        """Those of `modules` that need secure aggregation."""
        ...

    async def add_bundle(self, bundle: Bundle) -> None:
        """Make this bundle trainable. Raises BundleError if this device cannot train it, and
        GivenUp if that cannot be found out now.
        """
        ...

    def knows(self, program: TaskId) -> bool: ...

    def terms(self, program: TaskId) -> TaskTerms | None:
        """The privacy settings of the device's own task file or bundle; None without one."""
        ...

    async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
        """Train. Raises PapayaError on failure; stops when it is cancelled.

        The server learns the code of a `GivenUp`, and "training_failed" for any other error.
        """
        ...


class ExecutorTrainer:
    """Runs this device's task files on the examples that their policies allow.

    `aliases` are more names of tasks, for owners who submit a file under another name. An
    evaluation uses the validation examples, not the test examples: its results stop tasks and
    choose versions.
    """

    def __init__(
        self,
        executor: Executor,
        now: Callable[[], float],
        rng: Random,
        aliases: Mapping[TaskId, TaskId] | None = None,
        engine: EngineName = "torch",
        engine_version: str = "",
    ) -> None:
        self.engine = engine
        self.engine_version = engine_version
        self.modules = tuple(dict.fromkeys(file.module_hash for file in executor.tasks))
        secure = (file.module_hash for file in executor.tasks if file.terms.secure)
        self.secure_modules = tuple(dict.fromkeys(secure))
        self._executor = executor
        self._files = {file.task: file for file in executor.tasks}
        for name, task in (aliases or {}).items():
            if task not in self._files:
                raise ConfigError.of(
                    "alias",
                    f"{name}={task}",
                    f"no task file for {task!r}, only for {', '.join(self._files)}",
                    "write NEW-NAME=NAME-IN-THE-FILE",
                )
            self._files[name] = self._files[task]
        self._now = now
        self._rng = rng

    @property
    def tasks(self) -> tuple[TaskId, ...]:
        return tuple(self._files)

    async def add_bundle(self, bundle: Bundle) -> None:
        """Load the program once, in a job, before the device takes a slot."""
        manifest, run = bundle.manifest, bundle.run
        has_engine = manifest.engine == self.engine
        if not (has_engine and is_at_least(self.engine_version, manifest.engine_version)):
            raise BundleError(
                "engine",
                f"{manifest.task}: needs {manifest.engine} {manifest.engine_version} or newer, "
                f"this device has {self.engine} {self.engine_version}",
                hint="update this device, or start it with another --engine",
            )
        file = TaskFile(
            path=str(bundle.program / PROGRAM_FILES[manifest.engine]),
            task=manifest.task,
            module_hash="",
            terms=bundle.terms,
            examples=manifest.examples,
            manifest=manifest.encode(),
            frozen="" if bundle.frozen is None else str(bundle.frozen),
            memory_mb=bundle.memory_mb,
        )
        keeps = await self._try(run, file, min(manifest.training_timeout_s, _MAX_CHECK_S))
        file = structs.replace(file, terms=structs.replace(file.terms, keeps_tensors=keeps))
        replaced, self._files[run] = self._files.get(run, file), file
        if _job_name(run, replaced) != _job_name(run, file):
            self._executor.remove_bundle(_job_name(run, replaced))

    async def _try(self, run: TaskId, file: TaskFile, timeout_s: float) -> bool:
        """Whether its devices keep tensors. Only the trial can name the file before it is
        accepted.
        """
        name, known = _job_name(run, file), self._files.get(run)
        # What an earlier trial has found out is in the terms too.
        is_accepted = known is not None and structs.replace(known, terms=file.terms) == file
        try:
            self._executor.add_bundle(name, file)
            tried = await self._executor.run(Job("try", name, b"", ()), timeout_s)
        except BaseException as error:
            if not is_accepted:
                self._executor.remove_bundle(name)
            if isinstance(error, JobFailed) and error.kind == "unavailable":
                raise GivenUp("unavailable", f"{file.task}: {error.reason}") from error
            if isinstance(error, JobFailed | OperatorError):
                raise BundleError("engine", f"{file.task}: {error}") from error
            raise
        return tried.keeps_tensors

    def knows(self, program: TaskId) -> bool:
        return program in self._files

    def terms(self, program: TaskId) -> TaskTerms | None:
        return self._files[program].terms

    async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
        file = self._files[assignment.program]
        if file.model_length != assignment.model_length:
            raise GivenUp(
                "mismatch",
                f"the server's model has {assignment.model_length} parameters, "
                f"that of {file.path} has {file.model_length}",
            )
        split: Split = "validation" if assignment.evaluates else "train"
        collection = file.examples.collection
        try:
            examples, volume = await asyncio.to_thread(
                self._examples, assignment.program, file, split, store
            )
        except ConfigError as error:  # there is no such collection
            raise GivenUp("no_examples", str(error), hint=error.hint) from error
        if not examples:
            raise GivenUp(
                "no_examples",
                f"there are no {split} examples for {assignment.program!r}",
                hint=f"add some to collection {collection!r}: papaya client --import "
                f"{collection}=PATH",
            )
        if self._files[assignment.program] != file:
            raise GivenUp("mismatch", f"{file.task}: the owner has replaced this revision")
        job = Job(
            kind="evaluate" if assignment.evaluates else "train",
            task_file=_job_name(assignment.program, file),
            parameters=assignment.parameters,
            examples=tuple(examples),
            seed=self._rng.getrandbits(63),
            # In a masked sum a bucket with few clients would reveal too much: use one for all.
            volume=0 if assignment.secure else volume,
            is_clipped=assignment.is_clipped,
            device_state=assignment.device_state,
        )
        try:
            result = await self._executor.run(job, assignment.timeout_s, assignment.step_done)
        except JobFailed as error:
            told = f"{error.kind}: {error.reason}"
            raise GivenUp(_CODES[error.kind], told, traceback=error.traceback) from error
        return Trained(result.update, result.examples, result.device_state)

    async def load_examples(self, task_file: Path, texts: Sequence[str]) -> list[list[bytes]]:
        """The examples that the file's `load_examples` makes of each text, in a child process."""
        loaded: list[list[bytes]] = []
        for lot in _lots([text.encode() for text in texts]):
            try:
                result = await self._executor.run(Job("load", str(task_file), b"", lot), _LOAD_S)
            except JobFailed as error:
                raise OperatorError(
                    f"{LOADER} of {task_file} failed: {error.reason}",
                    hint="load_examples is called with the text of a file and must return a list "
                    "of bytes",
                ) from error
            loaded += msgpack.decode(result.update, type=list[list[bytes]])
        return loaded

    @property
    def collections(self) -> dict[TaskId, str]:
        """The collection that each task uses."""
        return {task: file.examples.collection for task, file in self._files.items()}

    async def first_unfit(
        self, collection: str, examples: Sequence[bytes]
    ) -> tuple[TaskId, UnfitExample] | None:
        """The first example that a task file of this collection cannot use.

        It is found in a child process.
        """
        for task, file in self._files.items():
            if file.examples.collection != collection:
                continue
            checked = 0
            for lot in _lots(examples):
                try:
                    result = await self._executor.run(Job("check", file.path, b"", lot), _LOAD_S)
                except JobFailed as error:
                    raise OperatorError(
                        f"cannot check the examples with {file.path}: {error.reason}",
                        hint="check the function `batch` of the task file",
                    ) from error
                if result.update:
                    unfit = msgpack.decode(result.update, type=UnfitExample)
                    return task, UnfitExample(checked + unfit.index, unfit.problem)
                checked += len(lot)
        return None

    def _examples(
        self, program: TaskId, file: TaskFile, split: Split, store: ExampleStore
    ) -> tuple[list[bytes], int]:
        asked, now = file.examples, self._now()
        limit = min(asked.limit or file.max_examples, file.max_examples)
        task = file.task if file.manifest else program
        found = store.query(asked.collection, task, split, limit, asked.newest_first, now)
        return found, store.counts(asked.collection, now)["train"]


def _job_name(program: TaskId, file: TaskFile) -> str:
    """How jobs name a file. Each revision of a run has a name of its own: a job must not run
    another revision than the one whose terms were checked.
    """
    return f"{program}@{file.terms.manifest}" if file.manifest else file.path


def _lots(texts: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    """Split texts into groups of limited size."""
    lot: list[bytes] = []
    size = 0
    for text in texts:
        lot.append(text)
        size += len(text)
        if size >= _LOAD_BYTES:
            yield tuple(lot)
            lot, size = [], 0
    if lot:
        yield tuple(lot)


@asynccontextmanager
async def sandboxed(
    task_files: Sequence[Path],
    now: Callable[[], float],
    *,
    engine: EngineName = "torch",
    aliases: Mapping[TaskId, TaskId] | None = None,
    memory_mb: int = 1024,
    max_parallel: int | None = None,
) -> AsyncIterator[ExecutorTrainer]:
    """A trainer for these task files or programs, in child processes with limits."""
    sandbox = Sandbox(task_files, engine=engine, memory_mb=memory_mb, max_parallel=max_parallel)
    try:
        await sandbox.start()
        if sandbox.unconfined:
            logger.warning(
                "INSECURE: training jobs are not confined (%s); they have the rights of this user",
                sandbox.unconfined,
            )
        yield ExecutorTrainer(sandbox, now, Random(), aliases, engine, sandbox.engine_version)
    finally:
        await sandbox.close()


class ProtocolTrainer:
    """Waits as long as training would, then uploads `update(session, length)`.

    For load and chaos tests. `seconds` and `examples` draw the duration and the number of
    examples. Every evaluation has a loss of 1 and metrics at
    their lower bounds.
    """

    engine = "torch"
    engine_version = "9999"  # it trains nothing, so it can train everything

    def __init__(
        self,
        update: Callable[[SessionId, int], bytes],
        seconds: Callable[[], float],
        examples: Callable[[], int] = lambda: 1,
        modules: tuple[str, ...] = (),
    ) -> None:
        self.modules = modules
        self.secure_modules: tuple[str, ...] = ()
        self._update = update
        self._seconds = seconds
        self._examples = examples

    async def add_bundle(self, bundle: Bundle) -> None:
        """It trains nothing, so it needs no program."""

    def knows(self, program: TaskId) -> bool:
        return True

    def terms(self, program: TaskId) -> TaskTerms | None:
        return None

    async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
        await asyncio.sleep(self._seconds())
        if assignment.evaluates:
            metrics = [0.0] * metric_count(assignment.update_length)
            return Trained(evaluation_vector(1, 1.0, 1, metrics).tobytes(), 1)
        update = self._update(assignment.session, assignment.update_length)
        return Trained(update, self._examples())
