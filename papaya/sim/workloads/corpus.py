"""Real text as data: one file is one client.

The standard library's own sources and documentation are on every machine with Python: a few files
are long and many are short, and each has words of its own, as the texts of people do. Tests, and
tables that a program wrote, are left out. Any other folder of texts will do as well.

What an example is, the task file says: its `load_examples(text)` makes them, as on a device; a file
without one gets an example for each line that is not empty. Nothing is downloaded.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

from papaya.client.executor import LOADER
from papaya.errors import OperatorError
from papaya.learning.task import LoadedTask
from papaya.sim.workloads.source import Memory

TextLoader: TypeAlias = Callable[[str], list[bytes]]

LIBRARY: Final = Path(os.__file__).parent
_LEFT_OUT: Final = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__")
)
_SETTINGS: Final = "_sysconfigdata"
_SUFFIXES: Final = (".py", ".txt")
_LEAST_BYTES: Final = 4096  # so that each client has a dozen examples to be judged by
_LOOKED_AT_BYTES: Final = 4096
_MAX_TEXT_BYTES: Final = 64 << 20
_MAX_TEXTS: Final = 1_000_000


def library_source(load: TextLoader, library: Path = LIBRARY) -> Memory:
    """The texts of Python's standard library."""
    return text_source("the standard library", sorted(library_texts(library)), load)


def folder_source(folder: Path, load: TextLoader) -> Memory:
    """Every text of a folder and its folders, in order; no hidden ones."""
    if not folder.is_dir():
        raise OperatorError(f"{folder} is not a folder", hint="name a folder with texts in it")
    texts = sorted(f for f in folder.rglob("*") if f.is_file() and _is_text(folder, f))
    return text_source(f"texts in {folder}", texts, load)


def text_source(name: str, texts: list[Path], load: TextLoader) -> Memory:
    if not texts:
        raise OperatorError(f"there are no {name}", hint="name a folder with texts in it")
    if len(texts) > _MAX_TEXTS:
        raise OperatorError(
            f"{name}: {len(texts):,} files, above the limit of {_MAX_TEXTS:,}",
            hint="name a folder with fewer of them",
        )
    return Memory(name, (_loaded(path, load) for path in texts))


def lines(text: str) -> list[bytes]:
    """Each line that is not empty."""
    return [line.encode() for line in text.splitlines() if line.strip()]


def loader_of(loaded: LoadedTask) -> TextLoader:
    """How this task makes examples of a text."""
    loader: TextLoader = runpy.run_path(str(loaded.path)).get(LOADER, lines)
    return loader


def library_texts(library: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in files:
            path = Path(where, name)
            if path.suffix in _SUFFIXES and not name.startswith(_SETTINGS) and _is_long(path):
                yield path


def _is_long(path: Path) -> bool:
    return path.is_file() and path.stat().st_size >= _LEAST_BYTES


def _is_text(folder: Path, file: Path) -> bool:
    if any(part.startswith(".") for part in file.relative_to(folder).parts):
        return False
    try:
        with file.open("rb") as opened:
            return b"\0" not in opened.read(_LOOKED_AT_BYTES)
    except OSError as error:
        raise _unreadable(file, error) from error


def _loaded(path: Path, load: TextLoader) -> list[bytes]:
    try:
        with path.open("rb") as opened:
            raw = opened.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(raw) > _MAX_TEXT_BYTES:
        raise OperatorError(
            f"{path} has more than {_MAX_TEXT_BYTES >> 20} MiB", hint="cut it into several texts"
        )
    try:
        examples = list(load(raw.decode("utf-8", "replace")))
    except Exception as error:
        raise OperatorError(
            f"{LOADER} fails on {path}: {type(error).__name__}: {error}",
            hint="mend it in the task file, or leave this text out",
        ) from error
    for example in examples:
        if not isinstance(example, bytes):
            raise OperatorError(
                f"{LOADER} made a {type(example).__name__} of {path}, not bytes",
                hint="return a list of bytes",
            )
    return examples


def _unreadable(path: Path, error: OSError) -> OperatorError:
    return OperatorError(
        f"cannot read {path}: {error.strerror}", hint="check its name and its permissions"
    )
