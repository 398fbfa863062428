"""`pip install` with one line of progress instead of pip's own output; for the Makefile.

    python tools/install.py --constraint constraints.txt torch

All arguments are those of `pip install`. Errors and warnings of pip are shown as they come. Only
its warnings about packages of which not all dependencies are installed are left out: executorch is
installed without those that Papaya does not use. Needs nothing but the standard library and pip.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import deque
from queue import Empty, SimpleQueue
from shutil import get_terminal_size
from threading import Thread
from time import monotonic
from typing import IO, Final

_PIP: Final = (
    *(sys.executable, "-m", "pip", "install"),
    *("--disable-pip-version-check", "--no-warn-conflicts", "--progress-bar", "off"),
)
_LARGE_MB: Final = 20
_KEPT_LINES: Final = 30  # of pip's output, shown if it fails

_COLLECTING = re.compile(r"Collecting (?P<name>[\w.-]+)")
_DOWNLOADING = re.compile(r"\s*Downloading (?P<file>\S+?)(?:\.metadata)? \((?P<size>[^)]+)\)")
_INSTALLING = re.compile(r"Installing collected packages: (?P<names>.+)")


def step_in(line: str) -> str | None:
    """What pip does now, in words; None if this line of its output does not say."""
    if found := _COLLECTING.match(line):
        return f"looking up {found['name']}"
    if found := _DOWNLOADING.match(line):
        return f"downloading {found['file'].rpartition('/')[2]} ({found['size']})"
    if found := _INSTALLING.match(line):
        count = found["names"].count(",") + 1
        return f"installing {count} package{'' if count == 1 else 's'}"
    return None


def is_long(step: str) -> bool:
    """Whether the step is worth a line in a log."""
    size = re.search(r"\(([\d.]+) MB\)$", step)
    return step.startswith("installing") or (size is not None and float(size[1]) >= _LARGE_MB)


class Status:
    """One line that is rewritten on a terminal; elsewhere a line for each long step."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_live = stream.isatty()
        self._start = monotonic()
        self._step = "starting"

    def set(self, step: str) -> None:
        self._step = step
        if not self._is_live and is_long(step):
            self.say(f"  {step}")

    def draw(self) -> None:
        if self._is_live:
            line = f"  {monotonic() - self._start:.0f} s, {self._step}"
            fitting = line[: get_terminal_size().columns - 1]
            print(f"\r\x1b[K{fitting}", end="", file=self._stream, flush=True)

    def say(self, text: str) -> None:
        self.clear()
        print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        if self._is_live:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def install(arguments: list[str], stream: IO[str], command: tuple[str, ...] = _PIP) -> int:
    """Run pip with these arguments. Returns its exit code."""
    status, last = Status(stream), deque[str](maxlen=_KEPT_LINES)
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # the compiler of a package may print anything
    ) as process:
        _follow(process, status, last)
    status.clear()
    if process.returncode:
        status.say("\n".join(("the last lines of pip's output:", *last)))
    return process.returncode


def _follow(process: subprocess.Popen[str], status: Status, last: deque[str]) -> None:
    """Show what pip says until it ends; `last` takes the lines of its output."""
    lines: SimpleQueue[tuple[bool, str | None]] = SimpleQueue()
    sources = ((False, process.stdout), (True, process.stderr))
    for is_error, source in sources:
        Thread(target=_read, args=(source, is_error, lines), daemon=True).start()
    ended = 0
    while ended < len(sources):
        status.draw()
        try:
            is_error, line = lines.get(timeout=1.0)
        except Empty:
            continue
        if line is None:
            ended += 1
        elif is_error:
            status.say(line)
        else:
            last.append(line)
            if (step := step_in(line)) is not None:
                status.set(step)


def _read(
    source: IO[str] | None, is_error: bool, lines: SimpleQueue[tuple[bool, str | None]]
) -> None:
    for line in source or ():
        lines.put((is_error, line.rstrip("\n")))
    lines.put((is_error, None))


if __name__ == "__main__":
    try:
        sys.exit(install(sys.argv[1:], sys.stderr))
    except KeyboardInterrupt:  # pip got it too, and has ended
        sys.exit(130)
