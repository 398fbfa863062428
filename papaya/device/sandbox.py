"""Runs a device's jobs in child processes with limits; the device's process survives all of them.

Jobs are forked from a fork-server that imported the engine once (`papaya/device/fork_server.py`).
This side imports no engine, so a process with many devices stays small. A fork-server is a new
program, not a fork of this process, which has threads and sockets.

A job inherits the memory of its fork-server. So there are two: one imports the device's own task
files; the other imports only the engine, and jobs of bundles are forked from it. The code and the
manifest of a bundle are read only in its job, so all owners can share the second fork-server. The
first job of a bundle starts it; a device without task files of its own has only this one.

A job cannot outlive its timeout or this process, exceed its memory limit, write files, or block
this process or the next job. If the fork-server dies, its jobs fail, and it is started again for
the next job, at most every few seconds.

The kernel confines jobs (`papaya/device/confinement.py`): they can read the engine and their task
file, and open no sockets. A job never has the data of another job in its memory. On a machine that
cannot confine, jobs have the rights of the user who started the device, and `unconfined` says why.
A task file's top level runs in the fork-server, with the rights of that user: load only task files
that you have read. A program file computes with examples and parameters and can do nothing else.
Only environment variables that the engine needs are passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from papaya.device import frames
from papaya.device.executor import LOADER, EngineName, Job, JobFailed, JobResult, TaskFile
from papaya.device.frames import (
    Ended,
    JobMessage,
    JobOutcome,
    JobProblem,
    Kill,
    Order,
    Ready,
    Start,
    StepsDone,
    Success,
    Unloadable,
)
from papaya.errors import OperatorError
from papaya.learning.client_training import StepDone, unwatched
from papaya.learning.device_state import MAX_STATE_BYTES
from papaya.learning.evaluation import evaluation_length

_KILL_GRACE_S: Final = 30.0  # a loaded machine may stop a process for seconds
_RESTART_INTERVAL_S: Final = 5.0
_REPORT_INTERVAL_S: Final = 5.0
_MAX_CPU_S: Final = 1e6  # a timeout may be any finite number
_PACKAGES: Final = str(Path(__file__).resolve().parents[2])
_GONE: Final = "the sandbox is closed"
_PASSED_ON: Final = (
    *("PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
    *("VIRTUAL_ENV", "XDG_CACHE_HOME"),
)
_PASSED_ON_PREFIXES: Final = ("LC_", "PYTHON", "TORCH", "HF_", "OMP_", "MKL_")
_SPARE_BYTES: Final = 1 << 16  # of a result's frame beside the update
_LOADED_BYTES: Final = 256 << 20  # the examples of one "load"
_MAX_REPORTS: Final = 10_000  # progress reports of a job; a correct job sends one every few seconds


class Sandbox:
    """An executor that forks. `memory_mb` is per job, in addition to the shared engine."""

    def __init__(
        self,
        task_files: Sequence[Path],
        *,
        engine: EngineName = "torch",
        memory_mb: int = 1024,
        max_parallel: int | None = None,
        niceness: int = 10,
        confined: bool = True,
        restart_interval_s: float = _RESTART_INTERVAL_S,
        report_interval_s: float = _REPORT_INTERVAL_S,
    ) -> None:
        """`confined=False` is INSECURE: then jobs have all the rights of this user."""
        files = [str(path) for path in dict.fromkeys(task_files)]
        limits = [str(memory_mb), str(niceness), str(report_interval_s)]
        settings = [engine, *limits, "yes" if confined else "no"]
        self._engine = engine
        self._slots = asyncio.Semaphore(max_parallel or len(os.sched_getaffinity(0)))
        self._own = _ForkServerKeeper([*settings, *files], restart_interval_s)
        # The memory of a bundle's jobs must contain nothing of a task file.
        self._for_bundles = _ForkServerKeeper(settings, restart_interval_s) if files else self._own
        # Programs of bundles, by the names under which they were added.
        self._bundled: dict[str, TaskFile] = {}
        # Why jobs are not confined, once started; empty if they are.
        self.unconfined = ""
        # The version of the engine, once started.
        self.engine_version = ""

    @property
    def tasks(self) -> tuple[TaskFile, ...]:
        """The loaded task files."""
        return self._own.tasks

    async def start(self) -> None:
        """Load the task files, or raise OperatorError."""
        server = await self._own.alive()
        self.unconfined, self.engine_version = server.unconfined, server.engine_version

    def add_bundle(self, name: str, file: TaskFile) -> None:
        """From now on jobs may name this program, until it is removed."""
        if self.unconfined:
            raise OperatorError(
                f"this device does not run the code of bundles: {self.unconfined}",
                hint="use Linux 5.13 or newer on x86-64, with Landlock enabled",
            )
        self._bundled[name] = file

    def remove_bundle(self, name: str) -> None:
        """No new job may name it; those that were started before go on."""
        self._bundled.pop(name, None)

    async def run(self, job: Job, timeout_s: float, step_done: StepDone = unwatched) -> JobResult:
        """Run a job. Waiting for a free place counts towards the timeout, except for a trial: other
        trainings may last longer than that, and the program is not at fault.
        """
        bundled = self._bundled.get(job.task_file)  # it may be removed while this job waits
        clock, is_trial = asyncio.get_running_loop(), job.kind == "try"
        deadline = clock.time() + timeout_s
        try:
            async with asyncio.timeout_at(None if is_trial else deadline):
                await self._slots.acquire()
        except TimeoutError:
            raise JobFailed(
                "timeout", f"no training slot was free within {timeout_s:g} s"
            ) from None
        if is_trial:
            deadline = clock.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                server = await (self._for_bundles if bundled else self._own).alive()
                file = bundled or self._own_file(job)
                cpu_s = math.ceil(min(timeout_s, _MAX_CPU_S)) + 1
                return await server.run(job, file, cpu_s, step_done)
        except TimeoutError:
            raise JobFailed("timeout", f"training did not finish within {timeout_s:g} s") from None
        except OperatorError as error:
            raise JobFailed("unavailable", str(error)) from error
        finally:
            self._slots.release()

    def _own_file(self, job: Job) -> TaskFile:
        files = {file.path: file for file in self.tasks}
        if job.task_file not in files:
            raise JobFailed("refused", f"{job.task_file} is not a task file of this device")
        if job.kind == "load" and self._engine != "torch":
            raise JobFailed("refused", f"{job.task_file} is a program, which has no {LOADER}")
        return files[job.task_file]

    async def close(self) -> None:
        """End all jobs and the fork-servers."""
        await self._own.close()
        await self._for_bundles.close()


class _ForkServerKeeper:
    """Starts a fork-server when it is needed, and again if it died, but not too often."""

    def __init__(self, arguments: list[str], restart_interval_s: float) -> None:
        # The task files that it loaded when it was first started.
        self.tasks: tuple[TaskFile, ...] = ()
        self._arguments = arguments
        self._restart_interval_s = restart_interval_s
        # The start in progress or done; and the fork-server itself, which may have died.
        self._starting: asyncio.Task[_ForkServer] | None = None
        self._server: _ForkServer | None = None
        self._next_start = -math.inf
        self._closed = False

    async def alive(self) -> _ForkServer:
        """The running fork-server. OperatorError if it cannot be started.

        A start continues after the job that needed it has ended: the import may take longer.
        """
        if self._closed:
            raise JobFailed("unavailable", _GONE)
        if self._starting is None or _is_over(self._starting):
            self._starting = asyncio.create_task(self._start())
        try:
            return await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._starting.cancelled():  # by `close`, not by the caller
                raise JobFailed("unavailable", _GONE) from None
            raise

    async def close(self) -> None:
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._server is not None:
            await self._server.close()

    async def _start(self) -> _ForkServer:
        if self._server is not None:
            await self._server.close()
        clock = asyncio.get_running_loop()
        if (wait_s := self._next_start - clock.time()) > 0:
            await asyncio.sleep(wait_s)
        self._next_start = clock.time() + self._restart_interval_s
        server = await _ForkServer.start(self._arguments)
        try:
            await server.load()
            if self.tasks and server.tasks != self.tasks:
                raise OperatorError(
                    "a task file, or a file that its model loads, has changed since this device "
                    "started",
                    hint="restart the device",
                )
        except BaseException:
            await server.close()
            raise
        self.tasks, self._server = server.tasks, server
        return server


def _is_over(starting: asyncio.Task[_ForkServer]) -> bool:
    """Did it fail, or is the fork-server that it started dead?"""
    if not starting.done():
        return False
    return starting.cancelled() or starting.exception() is not None or starting.result().is_dead


class _ForkServer:
    """The fork-server process and its jobs."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.tasks: tuple[TaskFile, ...] = ()
        self.unconfined = ""
        self.engine_version = ""
        self._process = process
        self._control = control
        self._ids = itertools.count(1)
        self._running: dict[int, asyncio.Future[int]] = {}
        self._loaded: asyncio.Future[Ready | Unloadable] = asyncio.Future()
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, arguments: list[str]) -> _ForkServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = [sys.executable, "-P", "-m", "papaya.device.fork_server"]
            process = await asyncio.create_subprocess_exec(
                *program,
                str(theirs.fileno()),
                *arguments,
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(),
            )
        ours.setblocking(False)
        return cls(process, ours)

    @property
    def is_dead(self) -> bool:
        return self._listener.done()

    async def load(self) -> None:
        answer = await asyncio.shield(self._loaded)
        if isinstance(answer, Unloadable):
            raise OperatorError(answer.message, hint=answer.hint)
        self.tasks, self.unconfined = answer.tasks, answer.unconfined
        self.engine_version = answer.engine_version

    async def run(self, job: Job, file: TaskFile, cpu_s: int, step_done: StepDone) -> JobResult:
        id_ = next(self._ids)
        ended: asyncio.Future[int] = asyncio.Future()
        self._running[id_] = ended
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with ours:
                with theirs:
                    bounds = (cpu_s, bool(file.manifest), file.frozen, file.memory_mb)
                    self._send(Start(id_, file.path, *bounds), theirs)
                work = structs.replace(job, manifest=file.manifest)
                outcome = await _converse(ours, work, _update_bytes(job, file), step_done)
        finally:
            await self._end(id_, ended)
        match outcome or _obituary(ended.result()):
            case Success(result=result):
                return result
            case JobProblem(kind=kind, reason=reason, traceback=traceback):
                raise JobFailed(kind, reason, traceback)

    async def _end(self, id_: int, ended: asyncio.Future[int]) -> None:
        """Kill what is left of a job and wait for its end; its place is free only then."""
        if not self.is_dead and not ended.done():
            self._send(Kill(id_))
            done, _ = await asyncio.wait([ended], timeout=_KILL_GRACE_S)
            if not done:
                self._process.kill()
        await asyncio.wait([ended])

    def _send(self, order: Order, channel: socket.socket | None = None) -> None:
        descriptors = [] if channel is None else [channel.fileno()]
        with contextlib.suppress(OSError):  # it is gone: the listener fails every job
            socket.send_fds(self._control, [frames.packet(order)], descriptors)

    async def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end may be gone
            self._control.shutdown(socket.SHUT_RDWR)
        if not self._loaded.done():  # it has no jobs, and would end only after its imports
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        try:
            await asyncio.wait_for(self._process.wait(), _KILL_GRACE_S)
        except TimeoutError:
            self._process.kill()
        await self._listener
        if self._loaded.done() and not self._loaded.cancelled():
            self._loaded.exception()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        with self._control, contextlib.suppress(ConnectionError):
            while packet := await loop.sock_recv(self._control, frames.PACKET_BYTES):
                self._on_answer(frames.answers.decode(packet))
        status = await self._process.wait()
        self._fail_all(f"the training process {_ending(status)}")

    def _on_answer(self, answer: frames.ForkServerReply) -> None:
        match answer:
            case Ready() | Unloadable():
                self._loaded.set_result(answer)
            case Ended(id=id_, status=status):
                self._running.pop(id_).set_result(status)

    def _fail_all(self, reason: str) -> None:
        if not self._loaded.done():
            hint = "check its messages on stderr"
            self._loaded.set_exception(OperatorError(f"{reason} before it was ready", hint=hint))
        for ended in self._running.values():
            ended.set_exception(JobFailed("unavailable", reason))
            ended.exception()  # mark it as retrieved: the caller may have been cancelled
        self._running.clear()


async def _converse(
    channel: socket.socket, job: Job, update_bytes: int | None, step_done: StepDone
) -> JobOutcome | None:
    """Give a job its work and return its result; None if it ends without one."""
    loop = asyncio.get_running_loop()
    kept_bytes = MAX_STATE_BYTES if job.kind == "train" else 0
    most = (_LOADED_BYTES if update_bytes is None else update_bytes) + kept_bytes + _SPARE_BYTES
    try:
        await loop.sock_sendall(channel, frames.frame(job))
        for _ in range(_MAX_REPORTS):
            header = await _received(channel, frames.HEADER_BYTES)
            if frames.length(header) > most:
                return JobProblem("crashed", "wrote more data than a result can have")
            message: JobMessage = frames.job_messages.decode(
                await _received(channel, frames.length(header))
            )
            if not isinstance(message, StepsDone):
                return _checked(message, update_bytes, kept_bytes)
            step_done(message.done, message.steps)
    except (ConnectionError, EOFError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return JobProblem("crashed", "wrote an invalid result")
    return JobProblem("crashed", f"reported its progress {_MAX_REPORTS} times")


def _checked(outcome: JobOutcome, update_bytes: int | None, kept_bytes: int) -> JobOutcome:
    """The job is not trusted: not with the size of a text, nor to say that no job can run."""
    match outcome:
        case JobProblem(kind=kind, reason=reason, traceback=traceback):
            return JobProblem(
                "crashed" if kind == "unavailable" else kind,
                reason[: frames.MAX_REASON],
                traceback[-frames.MAX_TRACEBACK :],
            )
        case Success(result=result) if update_bytes not in (None, len(result.update)):
            return JobProblem("crashed", "wrote an update of the wrong size")
        case Success(result=result) if len(result.device_state) > kept_bytes:
            return JobProblem("crashed", "wrote too much to be kept on the device")
    return outcome


async def _received(channel: socket.socket, size: int) -> bytearray:
    loop = asyncio.get_running_loop()
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = await loop.sock_recv_into(channel, view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


def _update_bytes(job: Job, file: TaskFile) -> int | None:
    """How long the update of a job must be; None if that is not known."""
    match job.kind:
        case "train":
            return 4 * file.model_length
        case "evaluate":
            return 4 * evaluation_length(len(file.terms.metric_bounds))
        case "load" | "check":
            return None
        case "try":
            return 0


def _obituary(status: int) -> JobProblem:
    if not os.WIFSIGNALED(status):
        code = os.waitstatus_to_exitcode(status)
        return JobProblem("crashed", f"ended with status {code} and without a result")
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return JobProblem("timeout", "exceeded its CPU time limit")
    return JobProblem("crashed", f"was killed by {signal.Signals(number).name}")


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _is_passed_on(name: str) -> bool:
    """Names that Python, its packages and the loader need. Others may hold secrets."""
    is_secret = any(word in name.upper() for word in ("TOKEN", "SECRET", "PASSWORD", "KEY"))
    return not is_secret and (name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES))


def _environment() -> dict[str, str]:
    """One thread per library, the same Papaya on the path, and no secrets of this user."""
    kept = {name: value for name, value in os.environ.items() if _is_passed_on(name)}
    paths = [_PACKAGES, kept.get("PYTHONPATH", "")]
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    )
    return {**kept, **threads, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
