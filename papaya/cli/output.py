"""What commands share: typed options, tables and JSON on stdout, progress and notes on stderr.

A command declares its options as a frozen dataclass, with their defaults, and describes them to
argparse; `bind` connects the two. Text is escaped before it is printed, because some of it comes
from servers. If a file cannot be written, the error says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, TypeVar

import msgspec

from papaya.errors import OperatorError, PapayaError
from papaya.progress import Progress, plural

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)

__all__ = [
    "Commands", "FormatOptions", "Progress", "Terminated", "add_format", "bind", "make_folder",
    "note", "plural", "positive", "print_data", "print_json", "printable", "resumable",
    "silence_stdout", "table", "whole", "writing",
]  # fmt: skip

Commands: TypeAlias = "argparse._SubParsersAction[Any]"

_LONG = 10_000  # from here on, digits of defaults are grouped
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# -- options --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatOptions:
    format: Literal["text", "json"] = "text"

    @property
    def is_json(self) -> bool:
        return self.format == "json"

    def repeated(self, text: str) -> str:
        """The text, with the given connection options added to the commands in it."""
        return text


def bind(
    parser: argparse.ArgumentParser, kind: type[Options], run: Callable[[Options], int]
) -> None:
    """Make `parser` fill a `kind` and call `run` with it. To be called after all `add_argument`.

    An option that is not given keeps the default of `kind`. Help texts name that default, unless
    the text names one itself. A parser and a dataclass that differ are an error.
    """
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    defaults = {field.name: _default(field) for field in dataclasses.fields(kind)}
    actions = [action for action in parser._actions if action.dest != "help"]
    if differing := {action.dest for action in actions} ^ fields.keys():
        raise TypeError(f"{parser.prog} and {kind.__name__} differ in {sorted(differing)}")
    for action in actions:
        if action.help is not None and "default" not in action.help:
            takes_value = bool(action.option_strings) and action.nargs != 0
            action.help += _shown_default(defaults[action.dest], takes_value)
        if action.nargs != argparse.OPTIONAL:  # argparse would parse SUPPRESS as a given value
            action.default = argparse.SUPPRESS

    def call(found: argparse.Namespace) -> int:
        options = kind(**{name: getattr(found, name) for name in fields if hasattr(found, name)})
        try:
            return run(options)
        except PapayaError as error:
            if isinstance(options, FormatOptions):
                error.hint = options.repeated(error.hint)
            raise

    parser.set_defaults(run=call)


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _shown_default(value: object, takes_value: bool) -> str:
    if value is dataclasses.MISSING:
        return ""
    if value is None or value is False or value in ("", ()):
        return " (default: none)" if takes_value else ""
    if isinstance(value, float):
        return f" (default: {value:g})"
    if isinstance(value, int) and value >= _LONG:
        return f" (default: {value:_})"
    return f" (default: {value})"


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), help="format of the output on stdout")


def whole(at_least: int) -> Callable[[str], int]:
    """An argparse type: an integer of `at_least` or more, which may be written 10_000 or 1e8."""

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
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def not_negative(text: str) -> float:
    """An argparse type: a finite number, zero or above."""
    value = _finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def _short(text: str) -> int:
    number = float(text)
    if number != int(number):
        raise ValueError(text)
    return int(number)


# -- text and data --------------------------------------------------------------------------------


def printable(text: str, keep: str = "") -> str:
    """Escape control characters: text from a server must not move the cursor or fake a line."""
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )


def print_json(value: object) -> None:
    text = msgspec.json.encode(value).decode()
    if not text.isprintable():  # U+0080 to U+009F, or right-to-left marks
        text = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    _print(text)


def print_data(text: str) -> None:
    _print(printable(text, keep="\n\t"))


def _print(text: str) -> None:
    """Flush at once: otherwise a full disk behind stdout is only reported when Python exits."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        hint = "redirect the output to another place, or free some space there"
        raise OperatorError(f"cannot write to stdout: {error.strerror}", hint=hint) from error


def silence_stdout() -> None:
    """Discard what is left in the buffer of stdout, so that Python does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into an error with a hint; for code that writes `path`."""
    try:
        yield
    except OSError as error:
        hint = "choose another folder with --output"
        if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
            hint = f"create the folder first: mkdir -p {path.parent}"
        if error.errno in _FULL:
            hint = "free some space there, then run the same command again"
        problem = error.strerror or str(error)
        raise OperatorError(f"cannot write {path}: {problem}", hint=hint) from error


class Terminated(KeyboardInterrupt):
    """SIGTERM. It ends the same work as Ctrl-C, with another exit code."""


@contextmanager
def resumable(
    kept: Callable[[], str] = lambda: (
        "finished runs are kept: run the same command again to continue"
    ),
) -> Iterator[None]:
    """Tell whoever presses Ctrl-C or sends SIGTERM what is kept and how to continue; to be used
    inside `writing`.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except (KeyboardInterrupt, OSError):
        note(kept())
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def make_folder(path: Path) -> Path:
    """Make the folder and check that files can be written to it, before a long run starts."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"probe")
    return path


def note(text: str) -> None:
    print(printable(text, keep="\n\t"), file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns under their titles: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        return "  ".join(cells).rstrip()

    ruler = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), ruler, *map(line, rows)])
