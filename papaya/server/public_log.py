"""The public log of TSA binaries, served as static files where devices and auditors read it.

Devices read the same log as auditors, so that a server cannot show them different entries. A
release is appended by `papaya log append`, on the machine that has the log's key. If this server
starts its own TSA, whose software evidence proves nothing, it also makes a log, so that the same
checks run on one machine; that log is named INSECURE.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from papaya.http.exchange import Exchange
from papaya.http.routes import Buffered, HttpRoute
from papaya.messages.participation import Refused
from papaya.server.replies import NOT_FOUND, answer
from papaya.verifiable_log.checkpoint import Checkpoint
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import LOG_SIGNATURE, SignerKey, split_note
from papaya.verifiable_log.record import NO_REVISION, Record

if TYPE_CHECKING:
    from papaya.store.s3_blobs import S3Blobs

LOG_PATH = "/v1/log/{path...}"
_PUBLIC = re.compile(
    r"checkpoint|tile/(entries|[0-9]{1,2})(/x[0-9]{3}){0,6}/[0-9]{3}(\.p/[1-9][0-9]{0,2})?"
)
_NAME = "INSECURE.papaya.invalid/one-machine"


def is_public(path: str) -> bool:
    """Is it a path of a checkpoint or a tile?"""
    return _PUBLIC.fullmatch(path) is not None


def route(folder: Path) -> HttpRoute:
    """The files of the log. Tiles never change; a checkpoint does."""

    def on_file(exchange: Exchange, body: bytes) -> None:
        path = exchange.captured["path"]
        if not is_public(path):
            answer(exchange, Refused("this is not a file of the log"), NOT_FOUND)
            return
        is_partial = path == "checkpoint" or ".p/" in path
        lifetime = "no-cache" if is_partial else "public, max-age=31536000, immutable"
        exchange.answer_file(folder / path, (("Cache-Control", lifetime),))

    return Buffered("GET", LOG_PATH, on_file)


def publish(folder: Path, bucket: S3Blobs, published: set[str]) -> None:
    """Copy new files of the log to the bucket, the checkpoint last. `published` is remembered.

    Several servers may have copies of the log: an older checkpoint replaces none of a longer log.
    """
    try:
        checkpoint = (folder / "checkpoint").read_bytes()
    except FileNotFoundError:
        return  # there is no log here
    size = _size(checkpoint)
    found = (file.relative_to(folder).as_posix() for file in (folder / "tile").rglob("*"))
    for path in sorted(path for path in found if is_public(path) and path not in published):
        bucket.publish(path, (folder / path).read_bytes())
        published.add(path)
    bucket.publish_newest("checkpoint", checkpoint, lambda earlier: _size(earlier) <= size)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Of the log in this folder; its signatures are not checked. None if there is no log."""
    try:
        return _checkpoint((folder / "checkpoint").read_bytes())
    except (OSError, LogError):
        return None


def _size(checkpoint: bytes) -> int:
    return _checkpoint(checkpoint).size


def _checkpoint(data: bytes) -> Checkpoint:
    return Checkpoint.parse(split_note(data)[0])


def own_key(data: Path) -> SignerKey:
    """The key of the server's own log, created if it is missing."""
    with (data / "log.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _own_key(data / "log.key")


def own_record(data: Path, measurement: bytes) -> int:
    """The leaf of this binary in the server's own log, appended if it is missing.

    Several aggregators on this data folder, and several threads, may call it at the same time.
    """
    with (data / "log.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _own_record(data, measurement)


def _own_record(data: Path, measurement: bytes) -> int:
    key = _own_key(data / "log.key")
    folder = LogFolder(data / "log")
    if not (data / "log" / "checkpoint").exists():
        folder.create(key)
    known = data / "log.leaf"
    if known.exists():
        recorded, leaf = known.read_text().split()
        if recorded == measurement.hex():
            return int(leaf)
    record = Record(
        measurement.hex(),
        {"software": {"mrenclave": measurement.hex()}},
        "https://papaya.invalid/this-installation",
        NO_REVISION,
        "papaya tsa measure",
    )
    leaf_index = folder.append([record.encode()], key).size - 1
    _write(known, f"{measurement.hex()} {leaf_index}\n", 0o644)
    return leaf_index


def _own_key(path: Path) -> SignerKey:
    """The log's key. The public key is written beside it before the log exists."""
    if path.exists():
        key = SignerKey.parse(path.read_text().strip())
    else:
        key = SignerKey(_NAME, secrets.token_bytes(32), LOG_SIGNATURE)
        _write(path, f"{key.reveal()}\n", 0o600)
    public = path.with_name(f"{path.name}.pub")
    if not public.exists():
        _write(public, f"{key.verifier}\n", 0o644)
    return key


def _write(path: Path, text: str, mode: int) -> None:
    """Write the file atomically: the server may be killed, and others wait for the file."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text)
    os.replace(temporary, path)
