"""What commands share: options, tables and JSON on stdout, progress and notes on stderr.

Progress is a live display on a terminal and a plain line now and then anywhere else, so that a log
stays readable. `rich` is loaded only for the live display. What cannot be written is the operator's
to mend: an error with a hint, never a traceback.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import msgspec

from papaya.errors import OperatorError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Commands: TypeAlias = "argparse._SubParsersAction[Any]"

_PLAIN_STEP = 0.1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="what is printed on stdout"
    )


def whole(at_least: int) -> Callable[[str], int]:
    """An argparse type: an integer, which may be written 10_000 or 1e8, from `at_least` on."""

    def parse(text: str) -> int:
        try:
            value = _short(text) if "e" in text else int(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < at_least:
            raise argparse.ArgumentTypeError(f"{text} is below {at_least}")
        return value

    return parse


def positive(text: str) -> float:
    """An argparse type: a finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _short(text: str) -> int:
    number = float(text)
    if number != int(number):
        raise ValueError(text)
    return int(number)


def print_json(value: object) -> None:
    print_data(msgspec.json.encode(value).decode())


def print_data(text: str) -> None:
    """On stdout, at once: a full disk behind it is told here, not when Python exits."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        hint = "send the output somewhere else, or make room there"
        raise OperatorError(f"stdout cannot be written: {error.strerror}", hint=hint) from error


def silence_stdout() -> None:
    """What is left in its buffer goes nowhere, so that Python does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around whatever writes `path`."""
    try:
        yield
    except OSError as error:
        hint = "choose another folder with --output"
        if error.errno in _FULL:
            hint = "make room there, then run the same command again"
        problem = error.strerror or str(error)
        raise OperatorError(f"{path} cannot be written: {problem}", hint=hint) from error


@contextmanager
def resumable() -> Iterator[None]:
    """Around work that keeps what it has done, inside `writing`."""
    try:
        yield
    except (KeyboardInterrupt, OSError):
        note("runs that have ended are kept: the same command does the rest")
        raise


def make_folder(path: Path) -> Path:
    """Before a long run, so that its results find a place: a file is written, and gone again."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"probe")
    return path


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their titles: the first to the left, the others, numbers, to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        return "  ".join(cells).rstrip()

    ruler = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), ruler, *map(line, rows)])


class Progress(AbstractContextManager["Progress"]):
    """Several named pieces of work, each from 0 to 1, with a few words on how it stands."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = _rich_progress(self._stream) if self._stream.isatty() else None
        self._bars: dict[str, TaskID] = {}
        self._printed: dict[str, float] = {}

    def __enter__(self) -> Progress:
        (self._live or nullcontext()).__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exception)

    def update(self, name: str, done: float, words: str) -> None:
        if self._live is None:
            self._print(name, done, words)
            return
        if name not in self._bars:
            self._bars[name] = self._live.add_task(name, total=1.0, words="")
        self._live.update(self._bars[name], completed=done, words=words)

    def say(self, text: str) -> None:
        """A line that stays above the display."""
        if self._live is None:
            print(text, file=self._stream, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print(self, name: str, done: float, words: str) -> None:
        if name not in self._printed or done >= min(1.0, self._printed[name] + _PLAIN_STEP):
            self._printed[name] = done
            print(f"{name}: {100 * done:.0f} %, {words}", file=self._stream, flush=True)


def _rich_progress(stream: TextIO) -> RichProgress:
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
        )
    except ImportError as error:
        raise OperatorError(
            "the progress display needs rich, which is not installed",
            hint="pip install rich matplotlib",
        ) from error
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[words]}"),
        console=Console(file=stream),
    )
