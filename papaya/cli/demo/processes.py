"""Starts and ends the processes of `papaya demo`: `papaya` commands, each with a log file.

They run in their own sessions, so that Ctrl-C reaches only the demo, which then ends them: with
SIGTERM, the server last, and with SIGKILL if they are still running a minute later or at a second
Ctrl-C. Only processes that were started here are signalled, by their id. If the demo itself
is killed, the kernel sends SIGTERM to them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from papaya.errors import OperatorError, PapayaError

# Devices need up to 7 s to leave, a server up to 10 s to drain, and both longer on a busy machine.
_STOP_S = 60.0
_SHOWN_LINES = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Runs `papaya ARGUMENTS` after asking the kernel for SIGTERM at the death of the demo, whose id is
# the first argument. (prctl in a `preexec_fn` would not be safe: the demo has threads.)
_LAUNCH = """
import ctypes, os, runpy, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv.pop(1)):
    raise SystemExit("the demo is gone")
runpy.run_module("papaya", run_name="__main__", alter_sys=True)
"""


class Processes(AbstractContextManager["Processes"]):
    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_server(self, name: str, *arguments: str) -> dict[str, str]:
        """Start `papaya serve`, before all others; returns the addresses that it listens on."""
        process = self._running[name] = self._open(
            name, ("serve", *arguments, "--format", "json"), subprocess.PIPE
        )
        assert process.stdout is not None
        with process.stdout as stdout:
            said = stdout.readline()
        if not said:
            process.wait()
            self.check()
        addresses: dict[str, str] = json.loads(said)["addresses"]
        return addresses

    def start(self, name: str, *arguments: str) -> None:
        """Start `papaya ARGUMENTS`."""
        self._running[name] = self._open(name, arguments, subprocess.DEVNULL)

    def run(self, name: str, *arguments: str) -> None:
        """Run `papaya ARGUMENTS` to its end; raises if it fails."""
        self.start(name, *arguments)
        self.finish(name)

    def finish(self, name: str) -> None:
        status = self._running[name].wait()
        del self._running[name]
        if status:
            raise self._ended(name, status)

    def check(self) -> None:
        """Raise if a process has ended."""
        for name, process in self._running.items():
            if (status := process.poll()) is not None:
                raise self._ended(name, status)

    def stop(self) -> None:
        """End all processes, the server last. If this is interrupted, kill them.

        A server that is killed leaves its TSA running, so it gets time to end even if other
        processes had to be killed.
        """
        running = list(self._running.values())
        try:
            for together in (running[1:], running[:1]):
                _end(together)
        finally:
            for process in running:
                _signal(process, signal.SIGKILL)
                process.wait()
            self._running.clear()

    def _open(self, name: str, arguments: tuple[str, ...], out: int) -> subprocess.Popen[str]:
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _LAUNCH, str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
                text=True,
            )

    def _ended(self, name: str, status: int) -> PapayaError:
        lines = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        last = "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:] if line)
        return OperatorError(
            f"{name} ended with status {status}" + (f":\n{last}" if last else ""),
            hint=f"its full output is in {self._log(name)}",
        )

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def _end(together: Sequence[subprocess.Popen[str]]) -> None:
    """Send SIGTERM, and SIGKILL to those that are still running after `_STOP_S`."""
    for process in together:
        _signal(process, signal.SIGTERM)
    ends_at = time.monotonic() + _STOP_S
    for process in together:
        try:
            process.wait(max(0.0, ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal the process and its children. Its id is not reused before it is waited for."""
    if process.poll() is None:
        os.killpg(process.pid, number)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt, so that the command cleans up.

    SIGINT is included because a shell starts background jobs with SIGINT ignored.
    """
    before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> Any:
    raise KeyboardInterrupt


def wait_s(processes: Processes, seconds: float) -> None:
    """Sleep; raises if a process has ended."""
    processes.check()
    time.sleep(seconds)
