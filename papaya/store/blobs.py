"""The blob store in a folder: bytes under `task/seq/what-hash`, never overwritten.

A put writes a temporary file in the blob's own folder, syncs it, renames it and syncs the folder.
The parents of a new folder are synced first. When put returns, a row may name the blob; after a
power loss the whole blob is there or nothing of it (docs/adr/0006). Deletions are not synced: if a
power loss brings a blob back, no row names it, and the next holder deletes it.

Several processes may share the folder. The writer of a temporary file holds a lock on it, which
ends with the process. So a temporary file that can be locked was left behind by a crash. An empty
folder is removed with its last blob; a put whose folder was removed creates it again.

Keys must have exactly the form of `blob_key` in papaya/aggregator/shards.py, so that no key leads
out of the folder. The store does not check the hash.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeAlias

from papaya.errors import MissingBlob, OperatorError, ProtocolError
from papaya.messages.base import BlobKey, TaskId
from papaya.store.folders import make_folder, sync_folder, unusable

Piece: TypeAlias = bytes | bytearray | memoryview

_TASK = r"[a-z0-9][a-z0-9_-]{0,63}"
_SEQ = r"(?:0|[1-9][0-9]{0,17})"
_NAME = r"[a-z][a-z0-9-]{0,95}-[0-9a-f]{32}"
_task_form = re.compile(_TASK)
_key_form = re.compile(f"{_TASK}/{_SEQ}/{_NAME}")
# What devices download. Sums and optimizer states are for servers only.
PUBLIC_KEY = re.compile(
    f"{_TASK}/{_SEQ}/(?:version|bundle|program|frozen)-[0-9]{{1,18}}-(?P<hash>[0-9a-f]{{32}})"
)
_INCOMING = ".incoming-"
_QUOTED = 100
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How often a put creates its folder again after another process removed it.
_ATTEMPTS = 100


class Blobs(Protocol):
    """A blob store of server processes; tests/contracts/test_blob_store.py has its rules.

    No caller writes a key again that it has deleted.
    """

    is_remote: bool
    """Every call may take seconds, and fails while the network does."""

    def put(self, key: BlobKey, data: Piece | Sequence[Piece]) -> None: ...

    def get(self, key: BlobKey) -> bytes: ...

    def get_part(self, key: BlobKey, start: int, end: int) -> bytes: ...

    def path(self, key: BlobKey) -> Path: ...

    def delete(self, key: BlobKey) -> None: ...

    def sweep(self, task: TaskId, below_seq: int, keep: Set[BlobKey]) -> None: ...


def is_key(text: str) -> bool:
    return _key_form.fullmatch(text) is not None


def check_key(key: BlobKey) -> None:
    if not is_key(key):
        raise ProtocolError(
            f"invalid blob key: {key[:_QUOTED]!r}",
            hint="use a key that the server returned; its form is task/seq/what-hash",
        )


def check_task(task: TaskId) -> None:
    if _task_form.fullmatch(task) is None:
        raise ProtocolError(f"invalid task id: {task[:_QUOTED]!r}")


class FolderBlobs:
    """Immutable bytes by key. Threads may share it."""

    is_remote = False

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).resolve()
        # Folders whose names are durable. A folder is taken out before it is removed.
        self._durable: set[Path] = set()
        make_folder(self.root)
        try:
            with tempfile.TemporaryFile(dir=self.root):
                pass  # check now that the folder is writable
            self._remove_leftovers()
        except OSError as error:
            raise unusable(self.root, error) from error

    def put(self, key: BlobKey, data: Piece | Sequence[Piece]) -> None:
        """Durable when it returns. No-op if the key exists."""
        path = self._path(key)
        pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        size = sum(view.nbytes for view in views)
        try:
            if not self._is_there(key, path, size):
                self._write(path, views)
        except OSError as error:
            raise self._not_written(key, size, error) from error

    def get(self, key: BlobKey) -> bytes:
        with self._reading(key) as path:
            return path.read_bytes()

    def get_part(self, key: BlobKey, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`; fewer if the blob is shorter."""
        with self._reading(key) as path, path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), end - start, start)

    def size(self, key: BlobKey) -> int:
        with self._reading(key) as path:
            return path.stat().st_size

    def path(self, key: BlobKey) -> Path:
        """The file of a blob, to be sent. It may be deleted at any time."""
        with self._reading(key) as path:
            path.stat()
            return path

    def keys(self, task: TaskId) -> list[BlobKey]:
        check_task(task)
        folder = self.root / task
        try:
            found = [f"{task}/{seq}/{name}" for seq, name in _names_under(folder)]
        except OSError as error:
            raise unusable(folder, error) from error
        return sorted(key for key in found if is_key(key))

    def delete(self, key: BlobKey) -> None:
        """No-op if the blob does not exist: it may have been deleted before a crash."""
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise unusable(path.parent, error) from error
        self._remove_if_empty(path.parent)

    def sweep(self, task: TaskId, below_seq: int, keep: Set[BlobKey]) -> None:
        """Delete blobs of earlier holders that no row names."""
        for key in self.keys(task):
            if key not in keep and int(key.split("/")[1]) < below_seq:
                self.delete(key)

    def _path(self, key: BlobKey) -> Path:
        check_key(key)
        return self.root / key

    @contextmanager
    def _reading(self, key: BlobKey) -> Iterator[Path]:
        try:
            yield self._path(key)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingBlob(f"blob {key} is missing") from error
        except OSError as error:
            raise OperatorError(
                f"cannot read blob {key}: {error.strerror}",
                hint=f"check the disk and the permissions of {self.root}",
            ) from error

    def _is_there(self, key: BlobKey, path: Path, size: int) -> bool:
        try:
            found = path.stat().st_size
            # Another process may have renamed the file and not synced the folders yet.
            for folder in (path.parent, path.parent.parent, self.root):
                sync_folder(folder)
        except FileNotFoundError:
            return False
        if found != size:
            raise OperatorError(
                f"blob {key} exists with {found} bytes, expected {size}",
                hint=f"the file is damaged: check the disk, then remove {path}",
            )
        return True

    def _write(self, path: Path, views: list[memoryview]) -> None:
        handle, temporary = self._temporary(path.parent)
        try:
            self._sync_names(path.parent)
            for view in views:
                while view:
                    view = view[os.write(handle, view) :]
            os.fsync(handle)
            os.rename(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            self._remove_if_empty(path.parent)
            raise
        finally:
            os.close(handle)
        with suppress(FileNotFoundError):  # already deleted by a new holder
            sync_folder(path.parent)

    def _temporary(self, folder: Path) -> tuple[int, str]:
        """Create and lock a file. Its folder is then not empty, so it cannot be removed."""
        problem: OSError | None = None
        for _ in range(_ATTEMPTS):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(prefix=_INCOMING, dir=folder)
            except (FileNotFoundError, FileExistsError) as error:
                problem = error  # removed just now, with its last blob
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if os.path.exists(name):
                    return handle, name
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # another process removed it as a leftover before it was locked
        raise problem or FileNotFoundError(errno.ENOENT, "temporary files keep disappearing")

    def _sync_names(self, folder: Path) -> None:
        """Make the names `task` and `task/seq` durable, once. Needs a file in the folder."""
        if folder not in self._durable:
            sync_folder(folder.parent)
            sync_folder(self.root)
            self._durable.add(folder)

    def _remove_if_empty(self, folder: Path) -> None:
        for empty in (folder, folder.parent):
            self._durable.discard(empty)
            try:
                empty.rmdir()
            except OSError:
                return  # not empty, or already removed

    def _remove_leftovers(self) -> None:
        for task in _folders_in(self.root):
            for seq, name in _names_under(task):
                if name.startswith(_INCOMING):
                    _remove_unless_locked(task / seq / name)
            for folder in _folders_in(task):
                self._remove_if_empty(folder)

    def _not_written(self, key: BlobKey, size: int, error: OSError) -> OperatorError:
        if error.errno in _FULL:
            return OperatorError(
                f"no space for the {size} bytes of blob {key}: {error.strerror}",
                hint=f"free space on the disk of {self.root}, or raise this user's quota",
            )
        return OperatorError(
            f"cannot write blob {key} of {size} bytes: {error.strerror}",
            hint=f"check the disk and the permissions of {self.root}",
        )


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []  # removed just now, or not a folder


def _names_under(task: Path) -> Iterator[tuple[str, str]]:
    """(seq, name) of every file of a task."""
    for folder in _folders_in(task):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            continue  # removed just now
        yield from ((folder.name, name) for name in names)


def _remove_unless_locked(leftover: Path) -> None:
    try:
        handle = os.open(leftover, os.O_RDONLY)
    except FileNotFoundError:
        return  # renamed or removed just now
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leftover.unlink(missing_ok=True)
    except BlockingIOError:
        pass  # still being written
    finally:
        os.close(handle)
