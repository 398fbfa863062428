"""The process that jobs are forked from: it imports torch and the device's task files once.

`papaya/device/sandbox.py` starts it. Forking is fast because the engine is imported once. It has
one thread and never runs a backward pass itself: torch refuses gradients in a child whose parent
has computed some. It checks the digests of program files but does not load programs: a malformed
one can end the process that loads it.

A job is a fork with its own process group, low priority, limits on memory, processor time and
files, and no file descriptor except the socket on which it gets its work; it is confined by the
kernel (`papaya/device/confinement.py`) before it reads from there, and killed when this process
ends. This process reports the end of every job. It ends with its sandbox (EOF), and kills its jobs
and the processes that they started. Only if it is killed itself may such processes remain.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import os
import random
import resource
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NoReturn, cast

import msgspec
from msgspec import structs

from papaya.bundle.compiled import signed_program
from papaya.bundle.manifest import TaskManifest
from papaya.bundle.owner import decode as decode_statement
from papaya.device import confinement, frames
from papaya.device.executor import (
    LOADER,
    EngineName,
    FailureKind,
    Job,
    JobResult,
    TaskFile,
    TrainingEngine,
    UnfitExample,
)
from papaya.device.frames import Ended, JobProblem, Kill, Ready, Start, StepsDone, Unloadable
from papaya.errors import Diverged, OperatorError
from papaya.learning.client_training import StepDone
from papaya.learning.definition import TaskTerms
from papaya.learning.example_fields import DoesNotFit
from papaya.learning.executorch.program_file import (
    EXECUTORCH_VERSION,
    frozen_beside,
    read_program,
)
from papaya.learning.frozen_file import FrozenTensor, map_frozen
from papaya.learning.parameters import decode

_CHECKED_TOGETHER: Final = 64
_PR_SET_PDEATHSIG: Final = 1


class JobLimits(msgspec.Struct, frozen=True):
    """`memory_mb` is address space beyond that of this process when it forks.

    `report_interval_s`: between two reports of a job's progress; a shorter job sends none.
    """

    memory_mb: int
    niceness: int
    report_interval_s: float
    confined: bool


class Child(msgspec.Struct, frozen=True):
    """A running job. `handle` becomes readable when it ends."""

    id: int
    pid: int
    handle: int


class ForkServer:
    """Forks a child for each job and reports its end."""

    def __init__(self, host: socket.socket, engines: dict[str, TrainingEngine], limits: JobLimits):
        self._host = host
        self._engines = engines
        self._limits = limits
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(host, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until the host closes its end."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._finish(key.data)
                    elif not self._on_packet():
                        return
        finally:
            for child in list(self._children.values()):
                self._reap(child)

    def _on_packet(self) -> bool:
        """Do what the host asks; False if it is gone."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._host, frames.PACKET_BYTES, 1)
        except ConnectionError:
            return False
        if not packet:
            return False
        match frames.orders.decode(packet):
            case Start() as order:
                self._start(order, descriptors[0])
            case Kill(id=id_) if id_ in self._children:
                self._finish(self._children[id_])
        return True

    def _start(self, order: Start, channel: int) -> None:
        engine = self._engines.get(order.task_file)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            problem = JobProblem("unavailable", f"cannot fork: {error.strerror}")
            _write(channel, frames.frame(problem))
            os.close(channel)
            self._answer(Ended(order.id, 0))
            return
        if pid == 0:
            _be_a_job(channel, order, engine, self._limits, parent)
        os.close(channel)
        with contextlib.suppress(OSError):  # the child does it too; either may be first
            os.setpgid(pid, pid)
        child = Child(order.id, pid, os.pidfd_open(pid))
        self._children[order.id] = child
        self._selector.register(child.handle, selectors.EVENT_READ, child)

    def _finish(self, child: Child) -> None:
        if child.id in self._children:  # not killed in the same round of events
            self._answer(Ended(child.id, self._reap(child)))

    def _reap(self, child: Child) -> int:
        # This does not change the status of a job that has ended, and it reaches processes that
        # the job has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        self._selector.unregister(child.handle)
        os.close(child.handle)
        del self._children[child.id]
        return os.waitpid(child.pid, 0)[1]

    def _answer(self, answer: frames.ForkServerReply) -> None:
        self._host.sendall(frames.packet(answer))


# --- Inside the child ---------------------------------------------------------------------------


def _be_a_job(
    channel: int, order: Start, engine: TrainingEngine | None, limits: JobLimits, parent: int
) -> NoReturn:
    try:
        try:
            if order.memory_mb is not None:
                memory_mb = min(limits.memory_mb, order.memory_mb)
                limits = structs.replace(limits, memory_mb=memory_mb)
            _limit(channel, order.cpu_s, limits, parent)
            path = Path(order.task_file)
            program = path.parent if order.is_bundle else path
            frozen = Path(order.frozen) if order.frozen else None
            if limits.confined:
                readable = (program,) if frozen is None else (program, frozen)
                confinement.confine((*confinement.engine_paths(), *readable))
            job = _read_job(channel)
            if engine is None:
                engine = _load_bundle(path, job.manifest, frozen, limits)
            step_done = _reporting(channel, limits.report_interval_s)
            data = frames.frame(frames.Success(_run(job, engine, step_done)))
        except BaseException as error:
            data = frames.frame(_problem(error))
        _write(channel, data)
    finally:
        os._exit(0)  # skip clean-up of the parent's objects, and never return to its loop


def _limit(channel: int, cpu_s: int, limits: JobLimits, parent: int) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the signal was set up
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, channel)
    os.closerange(channel + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with contextlib.suppress(OSError):  # the kernel kills this process first when memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.nice(limits.niceness)
    for kind, limit in (
        (resource.RLIMIT_AS, _address_space_bytes() + (limits.memory_mb << 20)),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # The soft limit of processor time sends a distinct signal; the hard limit does not.
        resource.setrlimit(kind, (soft, hard if kind == resource.RLIMIT_CPU else soft))


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _reporting(channel: int, interval_s: float) -> StepDone:
    """Reports the progress of the job to the sandbox from time to time."""
    reported_at = time.monotonic()

    def step_done(done: int, steps: int) -> None:
        nonlocal reported_at
        if time.monotonic() >= reported_at + interval_s:
            reported_at = time.monotonic()
            _write(channel, frames.frame(StepsDone(done, steps)))

    return step_done


def _run(job: Job, engine: TrainingEngine, step_done: StepDone) -> JobResult:
    random.seed(job.seed)
    if job.kind == "load":
        return _load_examples(job)
    if job.kind == "check":
        return _check_examples(job.examples, engine)
    if job.kind == "try":
        engine.try_program()
        return JobResult(b"", 0, keeps_tensors=engine.keeps_state)
    parameters = decode(job.parameters, engine.manifest.length)
    engine.device_state = job.device_state
    if job.kind == "train":
        update, examples = engine.train(
            parameters, job.examples, job.seed, step_done, is_clipped=job.is_clipped
        )
        return JobResult(update, examples, engine.device_state)
    return JobResult(engine.evaluate(parameters, job.examples, job.volume, step_done), 1)


def _load_examples(job: Job) -> JobResult:
    loader = runpy.run_path(job.task_file)[LOADER]
    loaded = [list(loader(text.decode())) for text in job.examples]
    for example in chain.from_iterable(loaded):
        if not isinstance(example, bytes):
            raise TypeError(f"it returned a {type(example).__name__}, expected bytes")
    return JobResult(msgspec.msgpack.encode(loaded), sum(map(len, loaded)))


def _check_examples(examples: Sequence[bytes], engine: TrainingEngine) -> JobResult:
    """Check many at a time; if that fails, one by one, because valid examples may not fit together
    into one batch.
    """
    for start in range(0, len(examples), _CHECKED_TOGETHER):
        together = examples[start : start + _CHECKED_TOGETHER]
        try:
            engine.check(together)
        except Exception:
            for index, example in enumerate(together, start):
                try:
                    engine.check([example])
                except Exception as error:
                    unfit = UnfitExample(index, _problem(error).reason)
                    return JobResult(msgspec.msgpack.encode(unfit), 0)
    return JobResult(b"", len(examples))


def _problem(error: BaseException) -> JobProblem:
    text = f"{type(error).__name__}: {error}"[: frames.MAX_REASON]
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return JobProblem("memory", f"exceeded its memory limit: {text}")
    if isinstance(error, OperatorError):
        kind: FailureKind = "diverged" if isinstance(error, Diverged) else "refused"
        return JobProblem(kind, str(error), error.quote if isinstance(error, DoesNotFit) else "")
    raised = "".join(traceback.format_exception(error))
    return JobProblem("refused", text, raised[-frames.MAX_TRACEBACK :])


def _load_bundle(
    path: Path, encoded: bytes, frozen: Path | None, limits: JobLimits
) -> TrainingEngine:
    """Run the code of a bundle, in this confined job. The manifest replaces its settings."""
    if not limits.confined:
        raise OperatorError("the code of a bundle runs only in a confined job", hint="")
    manifest = decode_statement(TaskManifest, encoded)
    if manifest.engine == "executorch":
        from papaya.learning.executorch.engine import ExecuTorchEngine

        program = signed_program(read_program(path), manifest)
        return ExecuTorchEngine(program, partial(_mapped, frozen))
    from papaya.learning.task import load_task
    from papaya.learning.torch.engine import TorchEngine

    sys.path.insert(0, str(path.parent))  # a program may have several files
    loaded = load_task(path, frozen)
    if (loaded.task.frozen is None) != (frozen is None):
        raise OperatorError("the task file and the manifest differ on frozen tensors", hint="")
    if loaded.manifest.tensors != manifest.layout:
        raise OperatorError("the model does not have the layout in the manifest", hint="")
    if (loaded.frozen.hex() or None) != manifest.frozen:
        raise OperatorError("the model does not have the frozen tensors in the manifest", hint="")
    if loaded.task.metric_bounds != manifest.metric_bounds:
        raise OperatorError("the task does not have the metrics in the manifest", hint="")
    task = structs.replace(loaded.task, client=manifest.client, clip=manifest.clip, privacy=None)
    return TorchEngine(dataclasses.replace(loaded, task=task))


def _mapped(path: Path | None) -> dict[str, FrozenTensor]:
    return {} if path is None else map_frozen(path)


def _read_job(channel: int) -> Job:
    header = _read(channel, frames.HEADER_BYTES)
    return frames.jobs.decode(_read(channel, frames.length(header)))


def _read(channel: int, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = os.readv(channel, [view])
        if not got:
            raise OperatorError("the device has aborted the job", hint="")
        view = view[got:]
    return data


def _write(channel: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(channel, view) :]


# --- The process --------------------------------------------------------------------------------


def _load_task(path: str) -> tuple[TrainingEngine, TaskFile]:
    from papaya.learning.task import load_task

    loaded = load_task(Path(path))
    from papaya.learning.torch.engine import TorchEngine

    task = loaded.task
    terms = structs.replace(
        TaskTerms.of(loaded.config()),
        collection=task.examples.collection,
        task=task.name,
        keeps_tensors=task.keeps_tensors,
    )
    file = TaskFile(path, task.name, loaded.module_hash, terms, task.examples)
    return TorchEngine(loaded), file


def _load_program(path: str) -> tuple[TrainingEngine, TaskFile]:
    from papaya.learning.executorch.engine import ExecuTorchEngine

    program = read_program(Path(path))
    header = program.header
    frozen = frozen_beside(Path(path)) if header.file_names else None
    if frozen is not None:
        _require_digest(frozen, header.frozen_sha256)
    terms = structs.replace(
        header.terms,
        collection=header.examples.collection,
        task=header.task,
        keeps_tensors=bool(header.personal),
    )
    file = TaskFile(
        *(path, header.task, program.name, terms, header.examples),
        frozen="" if frozen is None else str(frozen),
    )
    return ExecuTorchEngine(program, partial(_mapped, frozen)), file


def _require_digest(path: Path, digest: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise OperatorError(
            f"cannot read the frozen tensors of the program: {error}",
            hint="copy them beside the program file",
        ) from error
    if found != digest:
        raise OperatorError(f"{path} is not the file that the program needs", hint="copy it again")


def _start_engine(engine: EngineName) -> str:
    """Import the engine once, for all later jobs. Return its version."""
    import numpy.random  # noqa: F401 - numpy imports it at its first use, which would be in a job

    if engine == "torch":
        import torch

        import papaya.learning.torch.engine

        return str(torch.__version__)
    import papaya.learning.executorch.engine  # noqa: F401
    from papaya.learning.executorch.runtime import library
    from papaya.learning.executorch.shim import shim_library

    library(shim_library())
    return EXECUTORCH_VERSION


def _load(
    engine: EngineName, paths: list[str]
) -> tuple[dict[str, TrainingEngine], tuple[TaskFile, ...]]:
    load = _load_task if engine == "torch" else _load_program
    loaded = {path: load(path) for path in paths}
    engines = {path: ready for path, (ready, _) in loaded.items()}
    return engines, tuple(file for _, file in loaded.values())


def main(arguments: list[str]) -> None:
    """`fork_server <socket> <engine> <memory_mb> <niceness> <report_interval_s> <confined> <task
    file>...`
    """
    name = cast(EngineName, arguments[1])
    host = socket.socket(fileno=int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sandbox decides, and closes the socket
    with host, contextlib.suppress(ConnectionError):
        try:
            version = _start_engine(name)
            engines, tasks = _load(name, arguments[6:])
        except OperatorError as error:
            host.sendall(frames.packet(Unloadable(str(error), error.hint)))
            return
        except ModuleNotFoundError as error:  # in the package for devices alone
            hint = "pip install 'papaya-fl[device,torch]', or --engine executorch"
            host.sendall(frames.packet(Unloadable(f"cannot load engine {name}: {error}", hint)))
            return
        unconfined = (
            confinement.missing() or "" if arguments[5] == "yes" else "confinement is disabled"
        )
        gc.collect()
        gc.freeze()  # collections in children then leave these pages shared
        host.sendall(frames.packet(Ready(tasks, unconfined, version)))
        numbers = int(arguments[2]), int(arguments[3]), float(arguments[4])
        limits = JobLimits(*numbers, not unconfined)
        ForkServer(host, engines, limits).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
