"""How files become examples, for `papaya client --import`.

Each line of a file is an example, unless a task file of the command has a function
`load_examples(text) -> list of bytes`: then it decides. It runs where the file trains too, in a
child process: the process that hosts devices stays small and without the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from papaya.device.executor import LOADER
from papaya.device.texts import lines, texts_in, unreadable
from papaya.device.training import ExecutorTrainer, Trainer


async def examples_of(
    files: Sequence[Path], task_files: Sequence[Path], trainer: Trainer
) -> list[list[bytes]]:
    """The examples of each file."""
    texts = [_read(path) for path in files]
    loaders = [path for path in task_files if f"def {LOADER}(" in _read(path)]
    if loaders and isinstance(trainer, ExecutorTrainer):
        return await trainer.load_examples(loaders[0], texts)
    return [lines(text) for text in texts]


def files_in(path: Path) -> list[Path]:
    """The file itself, or every text of a folder and its folders, in order; no hidden ones."""
    if not path.is_dir():
        return [path]
    return texts_in(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise unreadable(path, error) from error
