"""Runs a device's jobs in child processes with limits; the device's process survives all of them.

Jobs are forked from one fork-server that imported the engine once
(`papaya/device/fork_server.py`). This side imports no engine, so a process with many devices
stays small. The fork-server is a new program, not a fork of this process, which has threads and
sockets.

A job cannot outlive its timeout or this process, exceed its memory limit, write files, or block
this process or the next job. If the fork-server dies, its jobs fail, and it is started again for
the next job, at most every few seconds.

This is no boundary against hostile code. A task file runs with the rights of the user who started
the device: it can read that user's files and open sockets, and a flaw in torch's native code is a
flaw in a process of that user. Run only task files that you have read, as a user with few rights.
A program file computes with examples and parameters and can do nothing else, unless it exploits a
flaw in the runtime's native code. Environment variables that start with PAPAYA_ (tokens) are not
passed on.
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

from papaya.device import frames
from papaya.device.executor import EngineName, Job, JobFailed, JobResult, TaskFile
from papaya.device.frames import Done, Failed, Kill, Order, Ready, Start, Unloadable
from papaya.errors import OperatorError

_KILL_GRACE_S: Final = 5.0
_RESTART_INTERVAL_S: Final = 5.0
_MAX_CPU_S: Final = 1e6  # a timeout may be any finite number
_PACKAGES: Final = str(Path(__file__).resolve().parents[2])
_GONE: Final = "the sandbox is closed"


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
        restart_interval_s: float = _RESTART_INTERVAL_S,
    ) -> None:
        files = [str(path) for path in dict.fromkeys(task_files)]
        self._arguments = [engine, str(memory_mb), str(niceness), *files]
        self._slots = asyncio.Semaphore(max_parallel or len(os.sched_getaffinity(0)))
        self._restart_interval_s = restart_interval_s
        self._starting = asyncio.Lock()
        self._server: _ForkServer | None = None
        self._next_start = -math.inf
        self._closed = False
        self._tasks: tuple[TaskFile, ...] = ()

    @property
    def tasks(self) -> tuple[TaskFile, ...]:
        """The loaded task files."""
        return self._tasks

    async def start(self) -> None:
        """Load the task files, or raise OperatorError."""
        server = await self._alive()
        self._tasks = server.tasks

    async def run(self, job: Job, timeout_s: float) -> JobResult:
        """Run a job. Waiting for a free place counts towards the timeout."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            raise JobFailed(
                "timeout", f"no training slot was free within {timeout_s:g} s"
            ) from None
        try:
            async with asyncio.timeout_at(deadline):
                server = await self._alive()
                return await server.run(job, cpu_s=math.ceil(min(timeout_s, _MAX_CPU_S)) + 1)
        except TimeoutError:
            raise JobFailed("timeout", f"training did not finish within {timeout_s:g} s") from None
        except OperatorError as error:
            raise JobFailed("unavailable", str(error)) from error
        finally:
            self._slots.release()

    async def close(self) -> None:
        """End all jobs and the fork-server."""
        self._closed = True
        async with self._starting:
            if self._server is not None:
                await self._server.close()

    async def _alive(self) -> _ForkServer:
        async with self._starting:
            if self._closed:
                raise JobFailed("unavailable", _GONE)
            if self._server is None or self._server.is_dead:
                if self._server is not None:
                    await self._server.close()
                self._server = await self._start_server()
            return self._server

    async def _start_server(self) -> _ForkServer:
        clock = asyncio.get_running_loop()
        if (wait_s := self._next_start - clock.time()) > 0:
            await asyncio.sleep(wait_s)
        self._next_start = clock.time() + self._restart_interval_s
        server = await _ForkServer.start(self._arguments)
        try:
            await server.load()
            if self._tasks and server.tasks != self._tasks:
                raise OperatorError(
                    "a task file, or a file that its model loads, has changed since this device "
                    "started",
                    hint="restart the device",
                )
        except BaseException:
            await server.close()
            raise
        return server


class _ForkServer:
    """The fork-server process and its jobs."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.tasks: tuple[TaskFile, ...] = ()
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._running: dict[int, asyncio.Future[JobResult]] = {}
        self._loaded: asyncio.Future[Ready | Unloadable] = asyncio.Future()
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, arguments: list[str]) -> _ForkServer:
        ours, theirs = socket.socketpair()
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
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def is_dead(self) -> bool:
        return self._listener.done()

    async def load(self) -> None:
        answer = await asyncio.shield(self._loaded)
        if isinstance(answer, Unloadable):
            raise OperatorError(answer.message, hint=answer.hint)
        self.tasks = answer.tasks

    async def run(self, job: Job, cpu_s: int) -> JobResult:
        id_ = next(self._ids)
        result: asyncio.Future[JobResult] = asyncio.Future()
        self._running[id_] = result
        try:
            await self._send(Start(id_, job, cpu_s))
            return await asyncio.shield(result)
        finally:
            if not result.done():
                await self._kill(id_, result)

    async def _kill(self, id_: int, result: asyncio.Future[JobResult]) -> None:
        """Kill a job and wait for its end; its place is free only then."""
        if self.is_dead:
            return
        await self._send(Kill(id_))
        done, _ = await asyncio.wait([result], timeout=_KILL_GRACE_S)
        if not done:
            self._process.kill()
            await asyncio.wait([result])
        result.exception()  # expected: it was killed

    async def _send(self, order: Order) -> None:
        self._writer.write(frames.frame(order))
        with contextlib.suppress(ConnectionError):  # the listener fails every job
            await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _KILL_GRACE_S)
        except TimeoutError:
            self._process.kill()
        await self._listener
        if self._loaded.done() and not self._loaded.cancelled():
            self._loaded.exception()

    async def _listen(self) -> None:
        try:
            while True:
                header = await self._reader.readexactly(frames.HEADER_BYTES)
                body = await self._reader.readexactly(frames.length(header))
                self._on_answer(frames.answers.decode(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writer.close()
        status = await self._process.wait()
        self._fail_all(f"the training process {_ending(status)}")

    def _on_answer(self, answer: frames.ForkServerReply) -> None:
        match answer:
            case Ready() | Unloadable():
                self._loaded.set_result(answer)
            case Done(id=id_, result=result):
                self._running.pop(id_).set_result(result)
            case Failed(id=id_, problem=problem):
                failure = JobFailed(problem.kind, problem.reason)
                self._running.pop(id_).set_exception(failure)

    def _fail_all(self, reason: str) -> None:
        if not self._loaded.done():
            hint = "check its messages on stderr"
            self._loaded.set_exception(OperatorError(f"{reason} before it was ready", hint=hint))
        for result in self._running.values():
            result.set_exception(JobFailed("unavailable", reason))
        self._running.clear()


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _environment() -> dict[str, str]:
    """One thread per library, the same Papaya on the path, and no tokens."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAPAYA_")}
    paths = [_PACKAGES, kept.get("PYTHONPATH", "")]
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    )
    return {**kept, **threads, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
