"""Text files as examples: which files are texts, and one example per line.

The sources of Python's standard library are texts that every machine has: a few long files, many
short ones, each with its own vocabulary, so heavy-tailed and non-IID like the texts of people.
Tests and generated tables are left out. Nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from papaya.errors import OperatorError

LIBRARY: Final = Path(os.__file__).parent
LEAST_BYTES: Final = 4096  # so that a text of the library has a dozen examples for evaluation
_LEFT_OUT: Final = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__")
)
_SETTINGS: Final = "_sysconfigdata"
_SUFFIXES: Final = (".py", ".txt")
_LOOKED_AT_BYTES: Final = 4096


def lines(text: str) -> list[bytes]:
    """The lines that are not empty."""
    return [line.encode() for line in text.splitlines() if line.strip()]


def texts_in(folder: Path) -> list[Path]:
    """All texts below a folder, in order, except hidden ones."""
    found = sorted(file for file in folder.rglob("*") if file.is_file() and _is_text(folder, file))
    if not found:
        raise OperatorError(
            f"there are no texts in {folder}",
            hint="a text is a file that is not hidden and has no zero byte near its start",
        )
    return found


def library_texts(library: Path = LIBRARY) -> list[Path]:
    """The long texts of the standard library, in order."""
    return sorted(_library_texts(library))


def unreadable(path: Path, error: OSError) -> OperatorError:
    return OperatorError(
        f"cannot read {path}: {error.strerror}", hint="check its name and its permissions"
    )


def _library_texts(library: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in files:
            path = Path(where, name)
            if path.suffix in _SUFFIXES and not name.startswith(_SETTINGS) and _is_long(path):
                yield path


def _is_long(path: Path) -> bool:
    return path.is_file() and path.stat().st_size >= LEAST_BYTES


def _is_text(folder: Path, file: Path) -> bool:
    if any(part.startswith(".") for part in file.relative_to(folder).parts):
        return False
    try:
        with file.open("rb") as opened:
            return b"\0" not in opened.read(_LOOKED_AT_BYTES)
    except OSError as error:
        raise unreadable(file, error) from error
