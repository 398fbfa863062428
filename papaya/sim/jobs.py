"""Work in several processes, and files that are there whole or not at all.

No process outlives its use: whether the work fails, Ctrl-C is pressed or this process is ended by
a signal that it cannot answer, a pipe closes, and the workers that wait for its end exit at once.
A worker that is ended by someone else (mostly for want of memory) is told, not waited for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_hex
from threading import Thread
from time import time
from typing import Any, Protocol, TypeAlias

from papaya.errors import OperatorError

_PARTLY = ".part-"
_ABANDONED_S = 86400.0
_BEAT_S = 1.0

Tell: TypeAlias = Callable[[float], None]
"""How much more of the work is done, in a measure of the work's own."""


class Map(Protocol):
    """Results as they come. If somebody hears, the work gets a keyword `tell`."""

    def __call__(
        self, work: Callable[..., Any], items: Sequence[Any], hear: Tell | None = None
    ) -> Iterator[Any]: ...


def in_turn(
    work: Callable[..., Any], items: Sequence[Any], hear: Tell | None = None
) -> Iterator[Any]:
    """In this process, one after the other."""
    return map(work if hear is None else partial(work, tell=hear), items)


@contextmanager
def mapping(jobs: int) -> Iterator[Map]:
    """In this process, or in fresh ones: `spawn`, so that no state leaks."""
    if jobs <= 1:
        yield in_turn
        return
    spawn = get_context("spawn")
    watched, held = spawn.Pipe(duplex=False)
    done = spawn.Value("d", 0.0)
    pool = ProcessPoolExecutor(jobs, spawn, _prepare, (watched, done))

    def mapped(
        work: Callable[..., Any], items: Sequence[Any], hear: Tell | None = None
    ) -> Iterator[Any]:
        called = work if hear is None else partial(_tell_parent, work)
        futures: list[Future[Any]] = []
        try:
            ears = None if hear is None else _Ears(done, hear)  # before anybody tells
            futures += [pool.submit(called, item) for item in items]
            for ended in _as_they_end(futures, ears):
                yield ended.result()
        except BrokenProcessPool as error:
            raise OperatorError(
                f"one of {jobs} processes was ended before its work was done, "
                "as the system does when memory runs out",
                hint="lower --jobs: each process needs memory of its own",
            ) from error
        finally:
            for future in futures:
                future.cancel()  # whoever asked has enough

    try:
        yield mapped
    except BaseException:
        held.close()  # what runs is in vain
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        held.close()
        watched.close()


class _Ears:
    """Hears what the workers have told together. Without the lock: one may have died with it."""

    def __init__(self, done: Synchronized[float], hear: Tell) -> None:
        self._counter = done.get_obj()
        self._heard = self._counter.value
        self._hear = hear

    def listen(self) -> None:
        before, self._heard = self._heard, self._counter.value
        if self._heard > before:
            self._hear(self._heard - before)


def _as_they_end(futures: Sequence[Future[Any]], ears: _Ears | None) -> Iterator[Future[Any]]:
    ended = SimpleQueue[Future[Any]]()
    for future in futures:
        future.add_done_callback(ended.put)
    for _ in futures:
        yield ended.get() if ears is None else _next_while_listening(ended, ears)


def _next_while_listening(ended: SimpleQueue[Future[Any]], ears: _Ears) -> Future[Any]:
    """What a worker has told by the time that its work ends is heard before it."""
    while True:
        try:
            future = ended.get(timeout=_BEAT_S)
        except Empty:
            ears.listen()
        else:
            ears.listen()
            return future


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


# -- in a worker ----------------------------------------------------------------------------------


class _Worker:
    """What a worker has of its parent: how much all of them have done."""

    done: Synchronized[float]


def _prepare(watched: Connection, done: Synchronized[float]) -> None:
    """Ctrl-C is for the parent, which ends its workers."""
    _Worker.done = done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, args=(watched,), daemon=True).start()


def _tell_parent(work: Callable[..., Any], item: Any) -> Any:
    def tell(amount: float) -> None:
        with _Worker.done.get_lock():
            _Worker.done.value += amount

    return work(item, tell=tell)


def _end_with_parent(watched: Connection) -> None:
    with suppress(EOFError):
        watched.recv_bytes()  # nothing is ever sent
    os._exit(1)
