"""Hosts as network namespaces: each has an address, programs, and a network that can fail.

Needs root. A switch (a bridge in a namespace of its own) connects them; nothing of it is visible
outside. `Network` removes everything that it made.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_PREFIX = "papaya-chaos"
_SWITCH = f"{_PREFIX}-switch"
_CLONE_NEWNET = 0x40000000
_STEP_S = 90.0
_RESTART_S = 0.5


def sh(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_STEP_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
    return done.stdout


def until(is_so: Callable[[], bool], what: str, seconds: float = _STEP_S) -> None:
    ends_at = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < ends_at, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in sh("ip", "netns", "pids", namespace).split()]


def _remove_leftovers() -> None:
    """Namespaces of a run that was killed."""
    found = [name for name in sh("ip", "netns", "list").split() if name.startswith(_PREFIX)]
    for name in found:
        assert not _pids(name), f"processes run in the namespace {name}; end them first"
        sh("ip", "netns", "del", name)


class Program:
    """A process on a host, with a log file; it may be killed and started again."""

    def __init__(
        self,
        host: Host,
        name: str,
        command: Sequence[str],
        folder: Path,
        variables: Mapping[str, str],
        is_ready: Callable[[], bool] | None = None,
    ) -> None:
        """`is_ready`: None means when it has written a line to stdout."""
        self.name = name
        self._host = host
        self._command = [*host.inside, *command]
        self._out, self.log = folder / f"{name}.out", folder / f"{name}.log"
        self._variables = variables
        self._is_ready = is_ready or self._has_spoken
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """None if it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self, **variables: str) -> Self:
        """Returns when it is ready. If it ends before, it is started again, as systemd does: what
        it needs may be away.
        """
        ends_at = time.monotonic() + _STEP_S
        while True:
            self.begin(**variables)
            until(self._ready_or_dead, f"{self.name} is ready")
            if self.is_running:
                return self
            assert time.monotonic() < ends_at, f"{self.name} did not start: {self.tail()}"
            time.sleep(_RESTART_S)

    def begin(self, **variables: str) -> None:
        assert not self.is_running, f"{self.name} runs already"
        with self._out.open("wb") as out, self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**self._variables, **variables},
            )

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(_STEP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"{self.name} did not end: {self.tail()}") from None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def output(self) -> str:
        return self._out.read_text(encoding="utf-8")

    def tail(self, lines: int = 30) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _ready_or_dead(self) -> bool:
        return self._is_ready() or not self.is_running

    def _has_spoken(self) -> bool:
        return self._out.stat().st_size > 0


class Host:
    """One machine. Faults are named after what happens to a real one."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._namespace = f"{_PREFIX}-{name}"
        self.inside = ("ip", "netns", "exec", self._namespace)
        self.programs: list[Program] = []

    def run(self, *command: str) -> str:
        return sh(*self.inside, *command)

    def pids(self) -> list[int]:
        return [pid for pid in _pids(self._namespace) if pid != os.getpid()]

    def send(self, number: signal.Signals) -> None:
        """To everything that runs on it."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def lose_power(self) -> None:
        self.send(signal.SIGKILL)
        for program in self.programs:
            program.kill()

    def boot(self, **variables: str) -> None:
        for program in self.programs:
            program.start(**variables)

    def ignore(self, other: Host, port: int | None = None) -> None:
        """Packets from `other` do not arrive; with `port`, only those from this port."""
        self.run("iptables", "-w", "-A", "INPUT", *_dropped(other, port))

    def hear(self, other: Host, port: int | None = None) -> None:
        self.run("iptables", "-w", "-D", "INPUT", *_dropped(other, port))

    def slow_down(self, kbit: int) -> None:
        """What it sends leaves at this rate."""
        limits = ("rate", f"{kbit}kbit", "burst", "16kb", "latency", "400ms")
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limits)

    def speed_up(self) -> None:
        self.run("tc", "qdisc", "del", "dev", "eth0", "root")


def _dropped(source: Host, port: int | None) -> tuple[str, ...]:
    from_port = () if port is None else ("-p", "tcp", "--sport", str(port))
    return ("-s", source.address, *from_port, "-j", "DROP")


class Network:
    """Use it with `with`."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        _remove_leftovers()
        sh("ip", "netns", "add", _SWITCH)
        sh("ip", "-n", _SWITCH, "link", "add", "switch", "type", "bridge")
        sh("ip", "-n", _SWITCH, "link", "set", "switch", "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for host in self.hosts:
            with suppress(AssertionError):
                host.send(signal.SIGKILL)
            for program in host.programs:
                program.kill()
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", f"{_PREFIX}-{host.name}"], check=False)
        subprocess.run(["ip", "netns", "del", _SWITCH], check=False)

    def add(self, name: str, number: int) -> Host:
        host = Host(name, f"10.77.0.{number}")
        namespace = f"{_PREFIX}-{name}"
        sh("ip", "netns", "add", namespace)
        self.hosts.append(host)
        port = ("link", "add", f"port{number}", "type", "veth")
        sh("ip", "-n", _SWITCH, *port, "peer", "name", "eth0", "netns", namespace)
        sh("ip", "-n", _SWITCH, "link", "set", f"port{number}", "master", "switch", "up")
        sh("ip", "-n", namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            sh("ip", "-n", namespace, "link", "set", device, "up")
        return host


def move_into(host: Host) -> None:
    """Move this process to a host; threads and children that it starts later are there too."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/var/run/netns/{_PREFIX}-{host.name}").open("rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
