"""The processes of `papaya demo`: the project's own commands, each with its log, all ended again.

They run in sessions of their own, so that Ctrl-C reaches the demo alone, and the demo ends them: by
SIGTERM, the server last, and by SIGKILL what is still there some seconds later or at a second
Ctrl-C. Only processes that were started here are touched, by their id. A demo that is killed itself
(SIGKILL) ends nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from papaya.errors import OperatorError, PapayaError

_STOP_S = 12.0  # a device leaves within 7, a server drains within 10
_SHOWN_LINES = 5
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Processes(AbstractContextManager["Processes"]):
    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_server(self, name: str, *arguments: str) -> dict[str, str]:
        """`papaya serve`, before all others; the addresses that it says it listens on."""
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
        """`papaya ARGUMENTS`, until it is stopped."""
        self._running[name] = self._open(name, arguments, subprocess.DEVNULL)

    def run(self, name: str, *arguments: str) -> None:
        """`papaya ARGUMENTS` to its end, or the error that it ended with."""
        self.start(name, *arguments)
        self.finish(name)

    def finish(self, name: str) -> None:
        status = self._running[name].wait()
        del self._running[name]
        if status:
            raise self._ended(name, status)

    def check(self) -> None:
        """Is everything that should run still running?"""
        for name, process in self._running.items():
            if (status := process.poll()) is not None:
                raise self._ended(name, status)

    def stop(self) -> None:
        """End them all, the server last; at once when this is interrupted."""
        running = list(self._running.values())
        try:
            for together in (running[1:], running[:1]):
                for process in together:
                    _signal(process, signal.SIGTERM)
                for process in together:
                    process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in running:
                _signal(process, signal.SIGKILL)
                process.wait()
            self._running.clear()

    def _open(self, name: str, arguments: tuple[str, ...], out: int) -> subprocess.Popen[str]:
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "papaya", *arguments],
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
            hint=f"all that it said is in {self._log(name)}",
        )

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """To it and to its helpers. Until it has been waited for, its id is nobody else's."""
    if process.poll() is None:
        os.killpg(process.pid, number)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM, or a terminal that is closed, ends a command as Ctrl-C does: it cleans up."""
    before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> Any:
    raise KeyboardInterrupt


def wait_s(processes: Processes, seconds: float) -> None:
    """Sleep, unless a process is gone."""
    processes.check()
    time.sleep(seconds)
