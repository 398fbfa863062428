"""`pip install` with one line of progress instead of pip's own output; for the Makefile.

    python tools/install.py --venv .venv
    python tools/install.py --constraint constraints.txt torch

`--venv FOLDER` creates a virtual environment. All other arguments are those of `pip install`. A
terminal shows one line that changes every second; a log gets a line at least every 15 s. Errors and
warnings of pip are shown as they come. Only its warnings about packages of which not all
dependencies are installed are left out: executorch is installed without those that Papaya does not
use. Needs nothing but the standard library and pip.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection
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
_LINE_EVERY_S: Final = 15.0  # in a log
_KEPT_LINES: Final = 30  # of pip's output, shown if it fails

_COLLECTING = re.compile(r"Collecting (?P<name>[\w.-]+)")
_DOWNLOADING = re.compile(
    r"\s*(?P<how>Downloading|Using cached) (?P<file>\S+?)(?:\.metadata)? \((?P<size>[^)]+)\)"
)
_INSTALLING = re.compile(r"Installing collected packages: (?P<names>.+)")


def step_in(line: str, large: Collection[str] = ()) -> str | None:
    """What pip does now, in words; None if this line of its output does not say.

    `large`: the packages to name among those that are installed together.
    """
    if found := _COLLECTING.match(line):
        return f"looking up {found['name']}"
    if found := _DOWNLOADING.match(line):
        return f"{found['how'].lower()} {found['file'].rpartition('/')[2]} ({found['size']})"
    if found := _INSTALLING.match(line):
        names = found["names"].split(", ")
        # pip installs a package after its dependencies: the last one was asked for.
        shown = [name for name in names if _normalized(name) in large] or names[-1:]
        others = len(names) - len(shown)
        rest = f" and {others} other package{'' if others == 1 else 's'}" if others else ""
        return f"installing {', '.join(shown)}{rest}"
    return None


def large_package_in(line: str) -> str | None:
    """The package whose large file this line of pip's output names."""
    found = _DOWNLOADING.match(line)
    if found is None or not _is_large(found["size"]):
        return None
    return _normalized(found["file"].rpartition("/")[2].partition("-")[0])


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_large(size: str) -> bool:
    found = re.fullmatch(r"([\d.]+) (MB|GB)", size)
    return found is not None and (found[2] == "GB" or float(found[1]) >= _LARGE_MB)


def is_long(step: str) -> bool:
    """Whether the step is worth a line in a log."""
    size = re.search(r"\(([^)]+)\)$", step)
    return step.startswith(("creating", "installing")) or (size is not None and _is_large(size[1]))


class Status:
    """One line that is rewritten on a terminal; elsewhere a line for each long step, and one
    whenever nothing was printed for a while.
    """

    def __init__(self, stream: IO[str], step: str, now: Callable[[], float] = monotonic) -> None:
        self._stream = stream
        self._is_live = stream.isatty()
        self._now = now
        self._start = self._said_at = now()
        self.set(step)

    def set(self, step: str) -> None:
        self._step, self._step_start = step, self._now()
        if not self._is_live and is_long(step):
            self.say(f"  {step}")

    def draw(self) -> None:
        now = self._now()
        if self._is_live:
            line = f"  {now - self._start:.0f} s, {self._step}"
            fitting = line[: get_terminal_size().columns - 1]
            print(f"\r\x1b[K{fitting}", end="", file=self._stream, flush=True)
        elif now - self._said_at >= _LINE_EVERY_S:
            self.say(f"  {self._step}: {now - self._step_start:.0f} s so far")

    def say(self, text: str) -> None:
        self.clear()
        print(text, file=self._stream, flush=True)
        self._said_at = self._now()

    def clear(self) -> None:
        if self._is_live:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def create(folder: str, stream: IO[str]) -> int:
    """Create a virtual environment. Returns the exit code of venv."""
    command = [sys.executable, "-m", "venv", folder]
    return _run(command, Status(stream, f"creating {folder}"), "venv")


def install(arguments: list[str], stream: IO[str], command: tuple[str, ...] = _PIP) -> int:
    """Run pip with these arguments. Returns its exit code."""
    return _run([*command, *arguments], Status(stream, "starting pip"), "pip")


def _run(command: list[str], status: Status, name: str) -> int:
    last = deque[str](maxlen=_KEPT_LINES)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # the compiler of a package may print anything
    ) as process:
        _follow(process, status, last)
    status.clear()
    if process.returncode:
        status.say("\n".join((f"the last lines of {name}'s output:", *last)))
    return process.returncode


def _follow(process: subprocess.Popen[str], status: Status, last: deque[str]) -> None:
    """Show what the process says until it ends; `last` takes the lines of its output."""
    lines: SimpleQueue[tuple[bool, str | None]] = SimpleQueue()
    sources = ((False, process.stdout), (True, process.stderr))
    for is_error, source in sources:
        Thread(target=_read, args=(source, is_error, lines), daemon=True).start()
    ended, large = 0, set[str]()
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
            if (package := large_package_in(line)) is not None:
                large.add(package)
            if (step := step_in(line, large)) is not None:
                status.set(step)


def _read(
    source: IO[str] | None, is_error: bool, lines: SimpleQueue[tuple[bool, str | None]]
) -> None:
    for line in source or ():
        lines.put((is_error, line.rstrip("\n")))
    lines.put((is_error, None))


if __name__ == "__main__":
    try:
        if sys.argv[1] == "--venv":
            sys.exit(create(sys.argv[2], sys.stderr))
        sys.exit(install(sys.argv[1:], sys.stderr))
    except KeyboardInterrupt:  # pip got it too, and has ended
        sys.exit(130)
