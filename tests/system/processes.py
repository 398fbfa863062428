"""Real `papaya serve` processes: started, killed, stopped; their logs go into a failure's report.

A server keeps its addresses over a restart, so the test reserves them: a bound socket that never
listens keeps the port from everybody else, and with SO_REUSEADDR the server can still have it. (It
also keeps a device that knocks at a port where nobody listens from being connected to itself.)
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from types import TracebackType
from typing import Self

PAPAYA = (sys.executable, "-m", "papaya")
START_S = 300.0
STOP_S = 300.0
_LOGGED_LINES = 4000
Toml = str | int | float | Sequence[str] | Mapping[str, str]

# One heartbeat decides how long a failure takes to be noticed. Shorter ones take a busy machine
# for a dead one.
SERVER: dict[str, Toml] = {
    "heartbeat_s": 0.5,
    "hold_s": 1.0,
    "chunk_bytes": 16,
    "min_retry_s": 0.05,
    "max_retry_s": 0.3,
    "held_report_interval_s": 0.05,
}
# For tests that fail if the server ends a session because its client was silent.
CALM_HEARTBEAT_S = 3.0
CALM: dict[str, Toml] = {"heartbeat_s": CALM_HEARTBEAT_S}


class ServerProcess:
    """One `papaya serve` with a file of settings; `start` again after it was killed or stopped."""

    def __init__(
        self,
        name: str,
        role: str | None,
        folder: Path,
        deployment: dict[str, Toml],
        server: dict[str, Toml],
        environment: dict[str, str],
        program: Sequence[str] = PAPAYA,
    ) -> None:
        self.name = name
        self._environment = environment
        self.data = Path(str(deployment["data"]))
        self.addresses: dict[str, str] = {}
        self.log: deque[str] = deque(maxlen=_LOGGED_LINES)
        self._logged = Condition()
        file = folder / f"{name}.toml"
        file.write_text(toml(deployment, server), encoding="utf-8")
        settings = ["--config", str(file), "--format", "json"]
        self._command = [*program, "serve", *([] if role is None else [role]), *settings]
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: Thread | None = None

    def use(self, *arguments: str) -> None:
        """More arguments of the command."""
        self._command += arguments

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, packages: Path | None = None) -> Self:
        """Returns when every listener answers. `packages`: a folder with another Papaya."""
        assert not self.is_running, f"{self.name} runs already"
        self._note(f"-- {self.name} starts")
        environment = dict(self._environment)
        if packages is not None:
            first = environment.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (first, str(packages))))
            environment["PYTHONSAFEPATH"] = "1"  # not the Papaya in the current folder
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        self._reader = Thread(target=self._read_log, args=(self._process,), daemon=True)
        self._reader.start()
        line = self._first_line(self._process)
        if line is None:
            self.kill()
            raise AssertionError(f"{self.name} did not start; its log:\n{self.text()}")
        self.addresses = json.loads(line)["addresses"]
        return self

    def kill(self) -> None:
        """SIGKILL: nothing is said, nothing is finished."""
        self._end(signal.SIGKILL)
        self._note(f"-- {self.name} was killed")

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        code = self._end(signal.SIGTERM)
        self._note(f"-- {self.name} has stopped: {code}")
        return code

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        """For the end of a test, however it ends."""
        if self._process is not None:
            self._end(signal.SIGKILL)

    def until_logged(self, text: str, seconds: float, after: int = 0) -> str:
        """The first line with `text` behind the first `after` lines that have it."""

        def found() -> list[str]:
            return [line for line in self.log if text in line][after:]

        with self._logged:
            assert self._logged.wait_for(found, seconds), f"{text!r} is not in the log"
            return found()[0]

    def text(self) -> str:
        with self._logged:
            return "\n".join(self.log)

    def _end(self, number: signal.Signals) -> int:
        process = self.process
        if process.poll() is None:
            process.send_signal(number)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{self.name} did not end in {STOP_S:g} s") from None
        finally:
            if self._reader is not None:
                self._reader.join()
            assert process.stdout is not None
            process.stdout.close()
        return code

    def _first_line(self, process: subprocess.Popen[bytes]) -> bytes | None:
        assert process.stdout is not None
        line, ends_at = b"", time.monotonic() + START_S
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], ends_at - time.monotonic())
            piece = os.read(process.stdout.fileno(), 4096) if ready else b""
            if not piece:
                return None
            line += piece
        return line

    def _read_log(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self._note(line.decode(errors="replace").rstrip("\n"))

    def _note(self, line: str) -> None:
        with self._logged:
            self.log.append(line)
            self._logged.notify_all()


class Installation:
    """The servers of one data folder. Use it with `with`: nothing outlives the test.

    Numba costs more than all the rest of a start. It is hidden from servers that start often,
    unless `compiled`; what it compiles has tests of its own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        compiled: bool = False,
        program: Sequence[str] = PAPAYA,
        **variables: str,
    ) -> None:
        self.folder = folder
        self._program = program
        self.data = folder / "data"
        self.servers: list[ServerProcess] = []
        self._environment = environment() | variables
        if not compiled:
            hiding = folder / "without-numba"
            hiding.mkdir()
            (hiding / "numba.py").write_text("raise ImportError\n", encoding="ascii")
            found = self._environment.get("PYTHONPATH")
            self._environment["PYTHONPATH"] = f"{hiding}:{found}" if found else str(hiding)
        self._reserved: list[socket.socket] = []

    def add(
        self,
        name: str = "server",
        role: str | None = None,
        *,
        deployment: Mapping[str, Toml] | None = None,
        server: Mapping[str, Toml] | None = None,
    ) -> ServerProcess:
        """A server that is not started yet, with addresses of its own."""
        own: dict[str, Toml] = {"data": str(self.data)}
        own |= {listener: self.reserve() for listener in ("devices", "admin", "servers")}
        own |= deployment or {}
        rest = {**SERVER, **(server or {})}
        added = ServerProcess(name, role, self.folder, own, rest, self._environment, self._program)
        self.servers.append(added)
        return added

    def reserve(self, host: str = "127.0.0.1") -> str:
        """An address that nobody else gets."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        self._reserved.append(held)
        return f"{host}:{held.getsockname()[1]}"

    def secret(self, name: str) -> str:
        return (self.data / name).read_text(encoding="ascii").strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for server in self.servers:
            server.close()
        self._end_tsa()
        for held in self._reserved:
            held.close()
        if error is not None:
            for server in self.servers:
                error.add_note(f"===== log of {server.name} =====\n{server.text()}")

    def _end_tsa(self) -> None:
        """The TSA of a server that was killed goes on."""
        with suppress(OSError, ValueError):  # there is none
            process = int((self.data / "tsa-child.pid").read_text())
            if str(self.data).encode() in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGKILL)


def toml(deployment: dict[str, Toml], server: dict[str, Toml]) -> str:
    lines = [f"{key} = {_value(value)}" for key, value in deployment.items()]
    lines += ["[server]", *(f"{key} = {_value(value)}" for key, value in server.items())]
    return "\n".join(lines) + "\n"


def _value(value: Toml) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{json.dumps(k)} = {json.dumps(v)}' for k, v in value.items())} }}"
    return json.dumps(value)


def environment() -> dict[str, str]:
    """Warnings of a server are errors too, and its log is not held back."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "error::ResourceWarning"}


def run_to_the_end(*arguments: str, seconds: float = START_S) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    return subprocess.run(
        [*PAPAYA, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment(),
        check=False,
    )
