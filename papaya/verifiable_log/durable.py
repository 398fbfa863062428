"""Files that are whole or not there, whenever the power fails.

Written beside its place, synced, renamed, and its folder synced. A lock file keeps others out; the
lock counts between threads as it does between processes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_durably(place: Path, data: bytes) -> None:
    beside = place.with_name(f".{place.name}.new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(place)
    sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Raises BlockingIOError if somebody else has the lock and `wait` is False."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
