"""Work in several processes, and files that are there whole or not at all.

No process outlives its use: whether the work fails, Ctrl-C is pressed or this process is ended by
a signal that it cannot answer, a pipe closes, and the workers that wait for its end exit at once.
A worker that is ended by someone else (mostly for want of memory) is told, not waited for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from secrets import token_hex
from threading import Thread
from time import time
from typing import Any, TypeAlias

from papaya.errors import OperatorError

_PARTLY = ".part-"
_ABANDONED_S = 86400.0

Map: TypeAlias = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]


@contextmanager
def mapping(jobs: int) -> Iterator[Map]:
    """`map` in this process, or in fresh ones as results come: `spawn`, so that no state leaks."""
    if jobs <= 1:
        yield map
        return
    spawn = get_context("spawn")
    watched, held = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, spawn, _prepare, (watched,))

    def mapped(work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        try:
            for ended in as_completed([pool.submit(work, item) for item in items]):
                yield ended.result()
        except BrokenProcessPool as error:
            raise OperatorError(
                f"one of {jobs} processes was ended before its work was done, "
                "as the system does when memory runs out",
                hint="lower --jobs: each process needs memory of its own",
            ) from error

    try:
        yield mapped
    except BaseException:
        held.close()  # what runs is in vain
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        held.close()
        watched.close()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """All of the file or nothing of it: the program may be interrupted at any time, the disk full.

    What cannot be finished is taken away, so that it does not fill the disk further. A process that
    is ended leaves its part: see `take_away_parts`.
    """
    partly = path.with_name(f"{_PARTLY}{token_hex(8)}-{path.name}")
    try:
        write(partly)
        partly.replace(path)
    except BaseException:
        partly.unlink(missing_ok=True)
        raise


def take_away_parts(folder: Path) -> None:
    """Of files that nobody can still be writing."""
    for partly in folder.glob(f"{_PARTLY}*"):
        with suppress(FileNotFoundError):  # somebody else was faster
            if time() - partly.stat().st_mtime > _ABANDONED_S:
                partly.unlink()


def _prepare(watched: Connection) -> None:
    """Ctrl-C is for the parent, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, args=(watched,), daemon=True).start()


def _end_with_parent(watched: Connection) -> None:
    with suppress(EOFError):
        watched.recv_bytes()  # nothing is ever sent
    os._exit(1)
