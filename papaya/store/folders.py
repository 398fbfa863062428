"""Creates folders durably: a new name survives a power loss once its parent folder is synced."""

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
    """Create a folder that only this user can read, and its parents, durably."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
            sync_folder(path.parent)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
    except OSError as error:
        raise unusable(folder, error) from error


def unusable(folder: Path, error: OSError) -> OperatorError:
    return OperatorError(
        f"cannot use the folder {folder}: {error.strerror}",
        hint="use a data folder on a local disk that this user can write, or try: "
        f"mkdir -p {folder} && chmod u+rwx {folder}",
    )
