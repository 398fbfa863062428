"""How files become examples, for `papaya client --import`.

Each line of a file is an example, unless a task file of the command has a function
`load_examples(text) -> list of bytes`: then it decides. It runs where the file trains too, in a
child process: the process that hosts devices stays small and without the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from papaya.client.executor import LOADER
from papaya.errors import OperatorError
from papaya.net.device import ExecutorTrainer, Trainer

_LOOKED_AT_BYTES = 4096


async def examples_of(
    files: Sequence[Path], task_files: Sequence[Path], trainer: Trainer
) -> list[list[bytes]]:
    """The examples of each file."""
    texts = [_read(path) for path in files]
    loaders = [path for path in task_files if f"def {LOADER}(" in _read(path)]
    if loaders and isinstance(trainer, ExecutorTrainer):
        return await trainer.load_examples(loaders[0], texts)
    return [_lines(text) for text in texts]


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
