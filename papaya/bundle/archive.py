"""A program's files as one blob, in exactly one encoding.

    papaya-archive-1\\n
    [["task.py",1204],["tools/words.py",310]]\\n
    <the bytes of the files, one after the other>

The list is sorted by name. There are no links, folders, permissions or times, and no compression,
so an archive cannot write outside its folder or expand to more than its size. Reading compares the
archive with one made from its own files and refuses any difference. The hash of the archive names
the program.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from papaya.bundle.errors import BundleError

MAX_ARCHIVE_BYTES: Final = 16 << 20
MAX_FILES: Final = 256
_FIRST_LINE: Final = b"papaya-archive-1\n"
_MAX_NAME_CHARS: Final = 200
_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_NAME: Final = re.compile(rf"{_PART}(?:/{_PART})*")
_listed = msgspec.json.Decoder(tuple[tuple[str, int], ...])


def pack(files: Mapping[str, bytes]) -> bytes:
    """The archive of these files. BundleError if a name or the size is not allowed."""
    _check(files)
    names = sorted(files)
    index = msgspec.json.encode([(name, len(files[name])) for name in names])
    return _FIRST_LINE + index + b"\n" + b"".join(files[name] for name in names)


def unpack(archive: bytes) -> dict[str, bytes]:
    """The files of an archive. BundleError for anything that `pack` would not have made."""
    if len(archive) > MAX_ARCHIVE_BYTES:
        raise _broken(f"{len(archive)} bytes, at most {MAX_ARCHIVE_BYTES}")
    if not archive.startswith(_FIRST_LINE):
        raise _broken("not in the format of an archive")
    index, _, content = archive.removeprefix(_FIRST_LINE).partition(b"\n")
    try:
        listed = _listed.decode(index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _broken("its list of files is invalid") from None
    files: dict[str, bytes] = {}
    start = 0
    for name, size in listed[: MAX_FILES + 1]:
        files[name] = content[start : start + max(0, size)]
        start += len(files[name])
    if pack(files) != archive:
        raise _broken("not in canonical encoding")
    return files


def digest(archive: bytes) -> str:
    """The name of a program: SHA-256 of its archive, in hex."""
    return hashlib.sha256(archive).hexdigest()


def _check(files: Mapping[str, bytes]) -> None:
    if not 0 < len(files) <= MAX_FILES:
        raise _broken(f"{len(files)} files; an archive has 1 to {MAX_FILES}")
    for name in files:
        if len(name) > _MAX_NAME_CHARS or _NAME.fullmatch(name) is None:
            raise _broken(f"invalid file name {name[:_MAX_NAME_CHARS]!r}")
        if any(name.startswith(f"{other}/") for other in files):
            raise _broken(f"{name!r} is inside another file")
    total = sum(map(len, files.values()))
    if total > MAX_ARCHIVE_BYTES:
        raise _broken(f"{total} bytes of files, at most {MAX_ARCHIVE_BYTES}")


def _broken(problem: str) -> BundleError:
    return BundleError(
        "encoding",
        f"archive: {problem}",
        hint="the owner has to submit the task again",
    )
