"""Clients in LEAF's JSON format (https://github.com/TalwalkarLab/leaf):

    {"users": ["u1", …], "num_samples": [2, …],
     "user_data": {"u1": {"x": […, …], "y": […, …]}, …}}

Refused, with the file and the user: JSON of another shape, a user twice or without data, counts
that differ from the data, files above the limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from papaya.errors import OperatorError
from papaya.study.data.source import Memory

_MAX_FILE_BYTES: Final = 2 << 30
_MAX_FILES: Final = 10_000
_SHAPE: Final = '{"users": […], "num_samples": […], "user_data": {user: {"x": […], "y": […]}}}'


class _Data(msgspec.Struct, frozen=True):
    x: list[msgspec.Raw]
    y: list[msgspec.Raw]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    users: list[str]
    num_samples: list[int]
    user_data: dict[str, _Data]
    hierarchies: msgspec.Raw = msgspec.Raw(b"[]")


def leaf_source(path: Path) -> Memory:
    """The users of a file, or of all `*.json` in a folder, as clients in their order.

    An example is the bytes `{"x":…,"y":…}` with both values as they stand in the file, so a task's
    `batch` begins with `[json.loads(example) for example in examples]`. LEAF's folders `train` and
    `test` are not used as a split: name one of them.
    """
    return Memory.named(f"LEAF {path}", _clients(_files_of(path)))


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.glob("*.json") if not file.name.startswith("."))
    if not found:
        inner = sorted(folder.parent for folder in path.glob("*/*.json"))
        hint = f"leaf:{inner[0]}" if inner else "use a folder with LEAF's files"
        raise OperatorError(f"there is no *.json in {path}", hint=hint)
    if len(found) > _MAX_FILES:
        raise OperatorError(
            f"{path} has {len(found):,} files, above the limit of {_MAX_FILES:,}",
            hint="join them: a file can contain many users",
        )
    return found


def _clients(files: list[Path]) -> Iterator[tuple[str, list[bytes]]]:
    where: dict[str, Path] = {}
    for path in files:
        content = _decoded(path)
        if len(content.num_samples) != len(content.users):
            raise _malformed(
                path, f"{len(content.users)} users and {len(content.num_samples)} num_samples"
            )
        if strangers := content.user_data.keys() - set(content.users):
            raise _malformed(path, f"user_data of {min(strangers)!r}, who is not in users")
        for user, count in zip(content.users, content.num_samples, strict=True):
            if user in where:
                raise _malformed(path, f"user {user!r} is in {where[user]} already")
            where[user] = path
            yield user, _examples(path, content, user, count)


def _examples(path: Path, content: _File, user: str, count: int) -> list[bytes]:
    data = content.user_data.get(user)
    if data is None:
        raise _malformed(path, f"user {user!r} has no user_data")
    if not len(data.x) == len(data.y) == count:
        raise _malformed(
            path,
            f"user {user!r} has {len(data.x)} x, {len(data.y)} y and num_samples {count}",
        )
    pairs = zip(data.x, data.y, strict=True)
    return [b'{"x":%b,"y":%b}' % (bytes(x), bytes(y)) for x, y in pairs]


def _decoded(path: Path) -> _File:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise OperatorError(
                f"{path} has more than {_MAX_FILE_BYTES >> 30} GiB",
                hint="take a sample: LEAF's preprocess.sh has --sf",
            )
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise OperatorError(
            f"cannot read {path}: {error.strerror}", hint="check its name and its permissions"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _malformed(path, str(error)) from error


def _malformed(path: Path, problem: str) -> OperatorError:
    return OperatorError(f"invalid LEAF file {path}: {problem}", hint=f"write {_SHAPE}")
