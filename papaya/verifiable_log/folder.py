"""Writes a log as a folder of static files, which any HTTP server or CDN can serve.

Files are written atomically and synced, the checkpoint last. So after a power failure a checkpoint
never names a missing tile; tiles without a checkpoint are overwritten by the next append. A lock
file refuses a second writer. The writer also refuses a folder whose tiles do not give the root of
its checkpoint, because it would sign a fork. The private key is never kept in this folder.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from papaya.verifiable_log.checkpoint import (
    Checkpoint,
    LogPolicy,
    open_remembered,
    sign_checkpoint,
)
from papaya.verifiable_log.errors import ForkError, LogError, MissingFile
from papaya.verifiable_log.merkle import EMPTY_ROOT, leaf_hash, tree_root
from papaya.verifiable_log.note import (
    SignerKey,
    VerifierKey,
    open_note,
    signed_note,
    split_note,
)
from papaya.verifiable_log.tiles import (
    CHECKPOINT,
    MAX_FILE_BYTES,
    TILE_HEIGHT,
    TILE_WIDTH,
    TileNodes,
    entries_path,
    join_entries,
    split_entries,
    split_hashes,
    subtree_root,
    tile_path,
)

_LOCK = ".lock"


class LogFolder:
    """Reads and appends. What is appended is durable when the call returns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fetch(self, path: str) -> bytes:
        """A file of the log, as a reader would get it over HTTP."""
        try:
            with (self._folder / path).open("rb") as file:
                return file.read(MAX_FILE_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise MissingFile(f"the log in {self._folder} has no file {path}") from error

    def create(self, key: SignerKey) -> Checkpoint:
        """Create a signed empty log. Refuses a folder that contains a log."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if (self._folder / CHECKPOINT).exists():
                raise LogError(f"{self._folder} already contains a log")
            checkpoint = Checkpoint(key.name, 0, EMPTY_ROOT)
            self._write(CHECKPOINT, sign_checkpoint(checkpoint, key))
            return checkpoint

    def append(self, entries: Sequence[bytes], key: SignerKey) -> Checkpoint:
        """Append, sign and publish."""
        if not entries:
            raise LogError("no entries to append")
        join_entries(entries)  # refuses entries that are too long before anything is written
        with self._locked():
            old = self._checked(key)
            new_size = old.size + len(entries)
            self._write_level_0(old.size, entries)
            root = tree_root(TileNodes(self.fetch, new_size), new_size)
            checkpoint = Checkpoint(key.name, new_size, root)
            self._write(CHECKPOINT, sign_checkpoint(checkpoint, key))
            return checkpoint

    def add_cosignature(self, line: str, witness: VerifierKey, key: SignerKey) -> None:
        """Add a witness's signature to the published checkpoint."""
        with self._locked():
            self._checked(key)
            text, lines = split_note(self.fetch(CHECKPOINT))
            kept = [kept for kept in lines if not kept.startswith(f"— {witness.name} ")]
            note = signed_note(text, [*kept, line])
            if witness not in open_note(note, [key.verifier, witness]).signed_by:
                raise LogError(f"the line is not a signature of {witness.name} on this checkpoint")
            self._write(CHECKPOINT, note)

    def _checked(self, key: SignerKey) -> Checkpoint:
        checkpoint = open_remembered(self.fetch(CHECKPOINT), LogPolicy(key.verifier))
        size = checkpoint.size
        if tree_root(TileNodes(self.fetch, size), size) != checkpoint.root:
            raise ForkError(f"the tiles in {self._folder} do not match its checkpoint")
        return checkpoint

    def _write_level_0(self, old_size: int, entries: Sequence[bytes]) -> None:
        first, width = divmod(old_size, TILE_WIDTH)
        kept = self._kept_entries(first, width) if width else []
        for number, group in _groups(first, [*kept, *entries]):
            self._write(entries_path(number, len(group)), join_entries(group))
        self._write_hashes(0, old_size, [leaf_hash(entry) for entry in entries])

    def _kept_entries(self, number: int, width: int) -> list[bytes]:
        """The entries of a partial bundle, which is written again with more."""
        kept = split_entries(self.fetch(entries_path(number, width)), width)
        hashes = split_hashes(self.fetch(tile_path(0, number, width)), width)
        if [leaf_hash(entry) for entry in kept] != hashes:
            raise ForkError(f"the entries in {self._folder} do not match its tiles")
        return kept

    def _write_hashes(self, level: int, old_size: int, hashes: Sequence[bytes]) -> None:
        """Write tiles of this level, then of the levels above for tiles that became full."""
        first, width = divmod(old_size >> (TILE_HEIGHT * level), TILE_WIDTH)
        kept = split_hashes(self.fetch(tile_path(level, first, width)), width) if width else []
        full = []
        for number, group in _groups(first, [*kept, *hashes]):
            self._write(tile_path(level, number, len(group)), b"".join(group))
            if len(group) == TILE_WIDTH:
                full.append(subtree_root(group))
        if full:
            self._write_hashes(level + 1, old_size, full)

    def _write(self, path: str, data: bytes) -> None:
        place = self._folder / path
        for folder in reversed([place.parent, *place.parent.parents]):
            if folder.is_relative_to(self._folder) and not folder.exists():
                folder.mkdir()
                sync_folder(folder.parent)
        write_durably(place, data)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self._folder / _LOCK, wait=False))
            except BlockingIOError as error:
                raise LogError(f"another process is writing the log in {self._folder}") from error
            yield


def _groups(first: int, items: Sequence[bytes]) -> Iterator[tuple[int, Sequence[bytes]]]:
    for start in range(0, len(items), TILE_WIDTH):
        yield first + start // TILE_WIDTH, items[start : start + TILE_WIDTH]


def write_durably(place: Path, data: bytes) -> None:
    """Replace a file atomically; durable when the call returns."""
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
    """Excludes other threads and processes. Raises BlockingIOError if locked and not `wait`."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
