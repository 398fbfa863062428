"""Work in several processes, and files that are there whole or not at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

Map: TypeAlias = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]


@contextmanager
def mapping(jobs: int) -> Iterator[Map]:
    """`map` in this process, or in fresh ones as results come: `spawn`, so that no state leaks."""
    if jobs <= 1:
        yield map
        return
    with get_context("spawn").Pool(jobs, _ignore_interrupt) as pool:
        yield pool.imap_unordered


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """All of the file or nothing of it: the program may be interrupted at any time."""
    partly = path.with_name(f".{os.getpid()}-{path.name}")
    write(partly)
    partly.replace(path)


def _ignore_interrupt() -> None:
    """Ctrl-C is for the parent, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
