"""Texts as clients: one file is one client.

The task file's `load_examples(text)` makes the examples, as on a device; without it, each line that
is not empty is one. Nothing is downloaded: `library_source` reads the sources of Python's standard
library, which every machine has.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from papaya.device.executor import LOADER
from papaya.device.texts import LIBRARY, library_texts, lines, texts_in, unreadable
from papaya.errors import OperatorError
from papaya.learning.task import NO_FILE, LoadedTask
from papaya.study.data.source import Memory

TextLoader: TypeAlias = Callable[[str], list[bytes]]

_MAX_TEXT_BYTES: Final = 64 << 20
_MAX_TEXTS: Final = 1_000_000


def library_source(load: TextLoader, library: Path = LIBRARY) -> Memory:
    """The texts of Python's standard library."""
    return text_source("the standard library", library_texts(library), load)


def folder_source(folder: Path, load: TextLoader) -> Memory:
    """Every text of a folder and its folders, in order; no hidden ones."""
    if not folder.is_dir():
        raise OperatorError(f"{folder} is not a folder", hint="use a folder with text files")
    return text_source(f"texts in {folder}", texts_in(folder), load)


def text_source(name: str, texts: list[Path], load: TextLoader) -> Memory:
    if not texts:
        raise OperatorError(f"there are no {name}", hint="use a folder with text files")
    if len(texts) > _MAX_TEXTS:
        raise OperatorError(
            f"{name}: {len(texts):,} files, above the limit of {_MAX_TEXTS:,}",
            hint="use a folder with fewer files",
        )
    folder = Path(os.path.commonpath(texts)) if len(texts) > 1 else texts[0].parent
    clients = ((path.relative_to(folder).as_posix(), _loaded(path, load)) for path in texts)
    return Memory.named(name, clients)


def loader_of(loaded: LoadedTask) -> TextLoader:
    """How this task makes examples of a text."""
    if loaded.path == NO_FILE:
        raise OperatorError(
            f"texts need a task file ({LOADER} may be in it); this task is defined in a notebook",
            hint="write the task to a file and give its name, or give lists of bytes as data",
        )
    loader: TextLoader = runpy.run_path(str(loaded.path)).get(LOADER, lines)
    return loader


def _loaded(path: Path, load: TextLoader) -> list[bytes]:
    try:
        with path.open("rb") as opened:
            raw = opened.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(raw) > _MAX_TEXT_BYTES:
        raise OperatorError(
            f"{path} has more than {_MAX_TEXT_BYTES >> 20} MiB", hint="split it into several files"
        )
    try:
        examples = list(load(raw.decode("utf-8", "replace")))
    except Exception as error:
        raise OperatorError(
            f"{LOADER} fails on {path}: {type(error).__name__}: {error}",
            hint="fix it in the task file, or leave this text out",
        ) from error
    for example in examples:
        if not isinstance(example, bytes):
            raise OperatorError(
                f"{LOADER} returned a {type(example).__name__} for {path}, expected bytes",
                hint="return a list of bytes",
            )
    return examples
