"""Work in several processes, and files that are written completely or not at all.

Worker processes end with their parent: when the work fails, Ctrl-C is pressed or the parent is
killed, a pipe closes, and the workers that read from it exit. If a worker is killed (usually out of
memory), that is reported instead of waiting for it.
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
from typing import Any, NamedTuple, Protocol, TypeAlias

from papaya.errors import OperatorError

_PARTLY = ".part-"
_ABANDONED_S = 86400.0
_BEAT_S = 1.0

Tell: TypeAlias = Callable[[float], None]
"""Called with the amount of work done since the last call, in a unit that the work chooses."""


class SharedFiles(NamedTuple):
    """Files of a folder that the work on an item needs and makes, by their names in the folder.

    Machines that do not share the folder get copies, and what they make comes back.
    """

    folder: Path
    needs: Callable[[Any], Sequence[str]]
    makes: Callable[[Any], Sequence[str]]


class Map(Protocol):
    """Yields results as they finish. With `hear`, the work is called with a keyword `tell`; with
    `files`, with a keyword `folder`.
    """

    def __call__(
        self,
        work: Callable[..., Any],
        items: Sequence[Any],
        hear: Tell | None = None,
        files: SharedFiles | None = None,
    ) -> Iterator[Any]: ...


def in_turn(
    work: Callable[..., Any],
    items: Sequence[Any],
    hear: Tell | None = None,
    files: SharedFiles | None = None,
) -> Iterator[Any]:
    """In this process, one after the other."""
    called = _in_folder(work, files)
    return map(called if hear is None else partial(called, tell=hear), items)


def _in_folder(work: Callable[..., Any], files: SharedFiles | None) -> Callable[..., Any]:
    """All processes of one machine share the folder itself."""
    return work if files is None else partial(work, folder=files.folder)


@contextmanager
def mapping(jobs: int, ray: str | None = None) -> Iterator[Map]:
    """In this process, or in fresh ones: `spawn`, so that no state leaks. With the address of a Ray
    cluster (ray_jobs.py), on all its machines.
    """
    if ray is not None:
        from papaya.sim.ray_jobs import ray_mapping  # imports ray

        with ray_mapping(ray) as mapped_by_ray:
            yield mapped_by_ray
        return
    if jobs <= 1:
        yield in_turn
        return
    spawn = get_context("spawn")
    watched, held = spawn.Pipe(duplex=False)
    done = spawn.Value("d", 0.0)
    pool = ProcessPoolExecutor(jobs, spawn, _prepare, (watched, done))
    has_worked = False

    def mapped(
        work: Callable[..., Any],
        items: Sequence[Any],
        hear: Tell | None = None,
        files: SharedFiles | None = None,
    ) -> Iterator[Any]:
        work = _in_folder(work, files)
        called = work if hear is None else partial(_tell_parent, work)
        nonlocal has_worked
        futures: list[Future[Any]] = []
        try:
            reader = (
                None if hear is None else _ProgressReader(done, hear)
            )  # before any work reports
            futures += [pool.submit(called, item) for item in items]
            for ended in _as_they_end(futures, reader):
                result = ended.result()
                has_worked = True
                yield result
        except BrokenProcessPool as error:
            # The pool ends them itself. In Python 3.11 it fails if someone cancels one meanwhile.
            futures.clear()
            raise worker_killed("--jobs", has_worked) from error
        finally:
            for future in futures:
                future.cancel()  # the caller needs no more results

    try:
        yield mapped
    except BaseException:
        held.close()  # ends the workers: their results are not needed
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        held.close()
        watched.close()


def worker_killed(option: str, has_worked: bool) -> OperatorError:
    """`option` says how many processes there are; `has_worked`: whether one has done anything."""
    if not has_worked:
        return OperatorError(
            "a worker process ended before any had done its work",
            hint="see its messages above. In a script, put the call under `if __name__ == "
            f'"__main__":`. If the machine ran out of memory, lower {option}',
        )
    return OperatorError(
        "a worker process was killed, probably because the machine ran out of memory",
        hint=f"lower {option}: each process needs its own memory. Then do the same again: what was "
        "kept is not repeated",
    )


class _ProgressReader:
    """Reads the sum of what the workers reported. Takes no lock: a killed worker may hold it."""

    def __init__(self, done: Synchronized[float], hear: Tell) -> None:
        self._counter = done.get_obj()
        self._heard = self._counter.value
        self._hear = hear

    def pass_on(self) -> None:
        before, self._heard = self._heard, self._counter.value
        if self._heard > before:
            self._hear(self._heard - before)


def _as_they_end(
    futures: Sequence[Future[Any]], reader: _ProgressReader | None
) -> Iterator[Future[Any]]:
    ended = SimpleQueue[Future[Any]]()
    for future in futures:
        future.add_done_callback(ended.put)
    for _ in futures:
        yield ended.get() if reader is None else _next_while_reading(ended, reader)


def _next_while_reading(ended: SimpleQueue[Future[Any]], reader: _ProgressReader) -> Future[Any]:
    """What a worker reported before its work ended is passed on before the result."""
    while True:
        try:
            future = ended.get(timeout=_BEAT_S)
        except Empty:
            reader.pass_on()
        else:
            reader.pass_on()
            return future


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write all of the file or nothing, also if the program is interrupted or the disk is full.

    An unfinished part is deleted. A killed process leaves its part behind: see `take_away_parts`.
    """
    partly = path.with_name(f"{_PARTLY}{token_hex(8)}-{path.name}")
    try:
        write(partly)
        partly.replace(path)
    except BaseException:
        partly.unlink(missing_ok=True)
        raise


def take_away_parts(folder: Path) -> None:
    """Delete parts that are too old for anyone to be still writing them."""
    for partly in folder.glob(f"{_PARTLY}*"):
        with suppress(FileNotFoundError):  # another process deleted it
            if time() - partly.stat().st_mtime > _ABANDONED_S:
                partly.unlink()


# -- in a worker ----------------------------------------------------------------------------------


class _Worker:
    """What a worker shares with its parent: how much all workers have done."""

    done: Synchronized[float]


def _prepare(watched: Connection, done: Synchronized[float]) -> None:
    _Worker.done = done
    end_with_parent(watched)


def end_with_parent(watched: Connection) -> None:
    """Exit when the parent closes the other end or dies. Ignore Ctrl-C, which is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_exit_at_end, args=(watched,), daemon=True).start()


def _tell_parent(work: Callable[..., Any], item: Any) -> Any:
    def tell(amount: float) -> None:
        with _Worker.done.get_lock():
            _Worker.done.value += amount

    return work(item, tell=tell)


def _exit_at_end(watched: Connection) -> None:
    with suppress(EOFError):
        watched.recv_bytes()  # nothing is ever sent
    os._exit(1)
