"""The process that jobs are forked from: it imports the engine and the device's task files once.

`papaya/device/sandbox.py` starts it. Forking is fast because the engine is imported once. It has
one thread and never runs a backward pass itself: torch refuses gradients in a child whose parent
has computed some. It checks the digests of program files but does not load programs: a malformed
one can end the process that loads it.

A job is a fork with its own process group, low priority, limits on memory, processor time and
files, and no file descriptor except the pipe for its result; it is killed when this process ends.
This process answers for every job, however the job ends. It ends with its sandbox (EOF), and kills
its jobs and the processes that they started. Only if it is killed itself may such processes remain.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import resource
import runpy
import selectors
import signal
import socket
import sys
from itertools import chain
from pathlib import Path
from typing import Final, NoReturn, cast

import msgspec

from papaya.device import frames
from papaya.device.executor import LOADER, EngineName, Job, JobResult, TaskFile, TrainingEngine
from papaya.device.frames import (
    Done,
    Failed,
    JobOutcome,
    JobProblem,
    Kill,
    Ready,
    Start,
    Unloadable,
)
from papaya.errors import OperatorError
from papaya.learning.definition import TaskTerms
from papaya.learning.evaluation import EVALUATION_LENGTH
from papaya.learning.executorch.program_file import read_program
from papaya.learning.parameters import decode

_READ_BYTES: Final = 1 << 20
_MAX_REASON: Final = 500
_SPARE_BYTES: Final = 1 << 16  # of a result's frame beside the update
_LOADED_BYTES: Final = 256 << 20  # the examples of one "load"
_PR_SET_PDEATHSIG: Final = 1


class JobLimits(msgspec.Struct, frozen=True):
    """`memory_mb` is address space beyond that of this process when it forks."""

    memory_mb: int
    niceness: int


class Child(msgspec.Struct):
    """A running job and its output so far. A size of None allows a result of any size."""

    id: int
    pid: int
    pipe: int
    max_bytes: int
    update_bytes: int | None
    written: bytearray

    @property
    def is_complete(self) -> bool:
        return len(self.written) >= frames.HEADER_BYTES + frames.length(self.written)


class ForkServer:
    """Forks a child for each job and reports its result."""

    def __init__(
        self,
        host: socket.socket,
        engines: dict[str, TrainingEngine],
        limits: JobLimits,
        has_loaders: bool,
    ) -> None:
        self._host = host
        self._engines = engines
        self._has_loaders = has_loaders
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
                        self._on_output(key.data)
                    elif (order := _receive(self._host)) is not None:
                        self._on_order(order)
                    else:
                        return
        finally:
            for child in list(self._children.values()):
                self._reap(child)

    def _on_order(self, order: frames.Order) -> None:
        match order:
            case Start(id=id_, job=job) if job.task_file not in self._engines:
                reason = f"{job.task_file} is not a task file of this device"
                self._answer(Failed(id_, JobProblem("refused", reason)))
            case Start(id=id_, job=job) if job.kind == "load" and not self._has_loaders:
                reason = f"{job.task_file} is a program, which has no {LOADER}"
                self._answer(Failed(id_, JobProblem("refused", reason)))
            case Start():
                self._start(order)
            case Kill(id=id_) if id_ in self._children:
                self._finish(self._children[id_], JobProblem("timeout", "was ended"))

    def _start(self, order: Start) -> None:
        job = order.job
        engine = self._engines[job.task_file]
        update_bytes = _update_bytes(job, engine)
        output, pipe = os.pipe()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(output)
            os.close(pipe)
            reason = f"cannot fork: {error.strerror}"
            self._answer(Failed(order.id, JobProblem("unavailable", reason)))
            return
        if pid == 0:
            _be_a_job(pipe, order, engine, self._limits, parent)
        os.close(pipe)
        with contextlib.suppress(OSError):  # the child does it too; either may be first
            os.setpgid(pid, pid)
        most = (_LOADED_BYTES if update_bytes is None else update_bytes) + _SPARE_BYTES
        child = Child(order.id, pid, output, most, update_bytes, bytearray())
        self._children[order.id] = child
        self._selector.register(output, selectors.EVENT_READ, child)

    def _on_output(self, child: Child) -> None:
        if child.id not in self._children:
            return  # it was killed in the same round of events
        data = os.read(child.pipe, _READ_BYTES)
        child.written += data
        if len(child.written) > child.max_bytes:
            self._finish(child, JobProblem("crashed", "wrote more data than a result"))
        elif child.is_complete:
            self._finish(child, _outcome(child))
        elif not data:
            self._finish(child, None)

    def _finish(self, child: Child, outcome: JobOutcome | None) -> None:
        """Kill what is left of it and tell the host. Without an outcome, use the exit status."""
        status = self._reap(child)
        match outcome or _obituary(status):
            case frames.Success(result=result):
                self._answer(Done(child.id, result))
            case JobProblem() as problem:
                self._answer(Failed(child.id, problem))

    def _reap(self, child: Child) -> int:
        # This does not change the status of a job that has ended, and it reaches processes that
        # the job has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.id]
        return os.waitpid(child.pid, 0)[1]

    def _answer(self, answer: frames.ForkServerReply) -> None:
        self._host.sendall(frames.frame(answer))


def _update_bytes(job: Job, engine: TrainingEngine) -> int | None:
    match job.kind:
        case "train":
            return 4 * engine.manifest.length
        case "evaluate":
            return 4 * EVALUATION_LENGTH
        case "load":
            return None


def _outcome(child: Child) -> JobOutcome:
    try:
        outcome: JobOutcome = frames.outcomes.decode(
            memoryview(child.written)[frames.HEADER_BYTES :]
        )
    except (msgspec.DecodeError, UnicodeDecodeError):
        return JobProblem("crashed", "wrote an invalid result")
    if isinstance(outcome, frames.Success) and child.update_bytes not in (
        None,
        len(outcome.result.update),
    ):
        return JobProblem("crashed", "wrote an update of another size")
    return outcome


def _obituary(status: int) -> JobProblem:
    if not os.WIFSIGNALED(status):
        code = os.waitstatus_to_exitcode(status)
        return JobProblem("crashed", f"ended with status {code} and without a result")
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return JobProblem("timeout", "exceeded its CPU time limit")
    return JobProblem("crashed", f"was killed by {signal.Signals(number).name}")


# --- Inside the child ---------------------------------------------------------------------------


def _be_a_job(
    pipe: int, order: Start, engine: TrainingEngine, limits: JobLimits, parent: int
) -> NoReturn:
    try:
        try:
            _confine(pipe, order.cpu_s, limits, parent)
            data = frames.frame(frames.Success(_run(order.job, engine)))
        except BaseException as error:
            data = frames.frame(_problem(error))
        _write(pipe, data)
    finally:
        os._exit(0)  # skip clean-up of the parent's objects, and never return to its loop


def _confine(pipe: int, cpu_s: int, limits: JobLimits, parent: int) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the signal was set up
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
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


def _run(job: Job, engine: TrainingEngine) -> JobResult:
    random.seed(job.seed)
    if job.kind == "load":
        return _load_examples(job)
    parameters = decode(job.parameters, engine.manifest.length)
    if job.kind == "train":
        return JobResult(*engine.train(parameters, job.examples, job.seed))
    return JobResult(engine.evaluate(parameters, job.examples, job.volume), 1)


def _load_examples(job: Job) -> JobResult:
    loader = runpy.run_path(job.task_file)[LOADER]
    loaded = [list(loader(text.decode())) for text in job.examples]
    for example in chain.from_iterable(loaded):
        if not isinstance(example, bytes):
            raise TypeError(f"it returned a {type(example).__name__}, expected bytes")
    return JobResult(msgspec.msgpack.encode(loaded), sum(map(len, loaded)))


def _problem(error: BaseException) -> JobProblem:
    text = f"{type(error).__name__}: {error}"[:_MAX_REASON]
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return JobProblem("memory", f"exceeded its memory limit: {text}")
    return JobProblem("refused", str(error) if isinstance(error, OperatorError) else text)


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


# --- The process --------------------------------------------------------------------------------


def _receive(host: socket.socket) -> frames.Order | None:
    header = _exactly(host, frames.HEADER_BYTES)
    body = _exactly(host, frames.length(header)) if header else None
    return frames.orders.decode(body) if body else None


def _exactly(host: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            got = host.recv_into(view)
        except ConnectionError:
            got = 0
        if not got:
            return None
        view = view[got:]
    return data


def _load_task(path: str) -> tuple[TrainingEngine, TaskFile]:
    from papaya.learning.task import load_task

    loaded = load_task(Path(path))
    from papaya.learning.torch.engine import TorchEngine

    terms, task = TaskTerms.of(loaded.config()), loaded.task
    file = TaskFile(path, task.name, loaded.module_hash, terms, task.examples)
    return TorchEngine(loaded), file


def _load_program(path: str) -> tuple[TrainingEngine, TaskFile]:
    from papaya.learning.executorch.engine import ExecuTorchEngine

    program = read_program(Path(path))
    header = program.header
    file = TaskFile(path, header.task, program.name, header.terms, header.examples)
    return ExecuTorchEngine(program), file


def _load(
    engine: EngineName, paths: list[str]
) -> tuple[dict[str, TrainingEngine], tuple[TaskFile, ...]]:
    load = _load_task if engine == "torch" else _load_program
    loaded = {path: load(path) for path in paths}
    engines = {path: ready for path, (ready, _) in loaded.items()}
    return engines, tuple(file for _, file in loaded.values())


def main(arguments: list[str]) -> None:
    """`fork_server <socket> <engine> <memory_mb> <niceness> <task file>...`"""
    name = cast(EngineName, arguments[1])
    host = socket.socket(fileno=int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sandbox decides, and closes the socket
    with host, contextlib.suppress(ConnectionError):
        try:
            engines, tasks = _load(name, arguments[4:])
        except OperatorError as error:
            host.sendall(frames.frame(Unloadable(str(error), error.hint)))
            return
        except ModuleNotFoundError as error:  # in the package for devices alone
            hint = "pip install 'papaya-fl[device,torch]', or --engine executorch"
            host.sendall(frames.frame(Unloadable(f"no engine {name}: {error}", hint)))
            return
        gc.collect()
        gc.freeze()  # collections in children then leave these pages shared
        host.sendall(frames.frame(Ready(tasks)))
        limits = JobLimits(int(arguments[2]), int(arguments[3]))
        ForkServer(host, engines, limits, has_loaders=name == "torch").serve()


if __name__ == "__main__":
    main(sys.argv[1:])
