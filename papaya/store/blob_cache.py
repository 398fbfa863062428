"""Local copies of blobs of a remote store, to be sent to devices as files.

A copy is downloaded once, however many devices ask for it at the same time. The copies that were
used least recently are removed when there are too many bytes. The folder may be deleted at any
time while no server runs; a new cache starts empty.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock

from papaya.messages.base import BlobKey
from papaya.store.folders import make_folder

MAX_CACHE_BYTES = 4 << 30


class BlobCache:
    """Threads may share it. Invariant: the copies have at most `max_bytes`, except the newest."""

    def __init__(self, folder: Path, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = Lock()  # guards the fields below
        self._sizes: OrderedDict[BlobKey, int] = OrderedDict()
        self._downloads: dict[BlobKey, Lock] = {}
        self._is_ready = False

    def path(self, key: BlobKey, pieces: Callable[[], Iterable[bytes]]) -> Path:
        """The file of a blob; `pieces` downloads it if there is no copy."""
        path = self._folder / key.replace("/", "+")
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)
                return path
            self._make_ready()
            download = self._downloads.setdefault(key, Lock())
        with download:
            with self._lock:
                if key in self._sizes:
                    return path
            self._download(key, path, pieces)
        return path

    def remove(self, key: BlobKey) -> None:
        with self._lock:
            self._forget(key)

    def _make_ready(self) -> None:
        """Remove what an earlier process has left, before the first download."""
        if not self._is_ready:
            shutil.rmtree(self._folder, ignore_errors=True)
            make_folder(self._folder)
            self._is_ready = True

    def _download(self, key: BlobKey, path: Path, pieces: Callable[[], Iterable[bytes]]) -> None:
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                partly = Path(file.name)
                try:
                    for piece in pieces():
                        file.write(piece)
                except BaseException:
                    partly.unlink()
                    raise
                size = file.tell()
            partly.replace(path)
        finally:
            with self._lock:
                self._downloads.pop(key, None)
        with self._lock:
            self._sizes[key] = size
            while len(self._sizes) > 1 and sum(self._sizes.values()) > self._max_bytes:
                self._forget(next(iter(self._sizes)))

    def _forget(self, key: BlobKey) -> None:
        if self._sizes.pop(key, None) is not None:
            (self._folder / key.replace("/", "+")).unlink(missing_ok=True)
