"""Folders that survive a power loss: a new name is durable once the folder that holds it is synced.

Refuses to go on when a folder cannot be made: the operator is told which, why and what to do.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from papaya.errors import OperatorError


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder that only we may read, and its parents, durably."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
            sync_folder(path.parent)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
    except OSError as error:
        raise unusable(folder, error) from error


def unusable(folder: Path, error: OSError) -> OperatorError:
    return OperatorError(
        f"the folder {folder} cannot be used: {error.strerror}",
        hint=f"choose a data directory on a local disk that this user may write, or try:"
        f" mkdir -p {folder} && chmod u+rwx {folder}",
    )
