"""How files become examples, for `papaya client --import`.

Each line of a file is an example, unless a task file of the command has a function
`load_examples(text) -> list of bytes`: then it decides. It runs in a child process: the process
that hosts devices stays small and without the engine.
"""

from __future__ import annotations

import multiprocessing
import runpy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from papaya.errors import OperatorError

_LOADER = "load_examples"
_LOOKED_AT_BYTES = 4096


def examples_of(files: Sequence[Path], task_files: Sequence[Path]) -> list[list[bytes]]:
    """The examples of each file."""
    texts = [_read(path) for path in files]
    loaders = [path for path in task_files if f"def {_LOADER}(" in _read(path)]
    if not loaders:
        return [_lines(text) for text in texts]
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            return child.submit(_load, str(loaders[0]), texts).result()
    except BrokenProcessPool as error:
        raise OperatorError(
            f"{loaders[0]} ended the process that ran its {_LOADER}",
            hint="run the file by itself to see why",
        ) from error


def files_in(path: Path) -> list[Path]:
    """The file itself, or every text of a folder and its folders, in order; no hidden ones."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and _is_text(path, file))
    if not found:
        raise OperatorError(f"there are no texts in {path}", hint="name a folder with texts in it")
    return found


def _is_text(folder: Path, file: Path) -> bool:
    if any(part.startswith(".") for part in file.relative_to(folder).parts):
        return False
    with _reading(file), file.open("rb") as opened:
        return b"\0" not in opened.read(_LOOKED_AT_BYTES)


def _load(task_file: str, texts: list[str]) -> list[list[bytes]]:
    try:
        loader: Callable[[str], list[bytes]] = runpy.run_path(task_file)[_LOADER]
        return [list(loader(text)) for text in texts]
    except Exception as error:  # the owner's code can raise anything
        raise OperatorError(
            f"{_LOADER} of {task_file} failed: {type(error).__name__}: {error}",
            hint="it takes the text of a file and returns a list of bytes",
        ) from None


def _lines(text: str) -> list[bytes]:
    return [line.encode() for line in text.splitlines() if line.strip()]


def _read(path: Path) -> str:
    with _reading(path):
        return path.read_text(encoding="utf-8", errors="replace")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OperatorError(
            f"{path} cannot be read: {error.strerror}", hint="check its name and its permissions"
        ) from error
