"""The public log of TSA binaries, served as static files where devices and auditors read it.

DESIGN, "The log is read where auditors read it". A release is appended by `papaya log append`,
wherever the log's key is kept. Only for a TSA that this server starts itself, whose
software evidence proves nothing anyway, a log is made here too, so that the same checks can be
tried on one machine; it is named INSECURE.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path

from papaya.http.exchange import Exchange
from papaya.http.routes import Buffered, HttpRoute
from papaya.messages.participation import Refused
from papaya.server.replies import NOT_FOUND, answer
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import LOG_SIGNATURE, SignerKey
from papaya.verifiable_log.record import Record

LOG_PATH = "/v1/log/{path...}"
_PUBLIC = re.compile(r"checkpoint|tile/[0-9a-z/.]{1,100}")
_NAME = "INSECURE.papaya.invalid/one-machine"


def route(folder: Path) -> HttpRoute:
    """Tiles never change; a checkpoint does."""

    def on_file(exchange: Exchange, body: bytes) -> None:
        path = exchange.captured["path"]
        if _PUBLIC.fullmatch(path) is None:
            answer(exchange, Refused("this is not a file of the log"), NOT_FOUND)
            return
        is_partial = path == "checkpoint" or ".p/" in path
        lifetime = "no-cache" if is_partial else "public, max-age=31536000, immutable"
        exchange.answer_file(folder / path, (("Cache-Control", lifetime),))

    return Buffered("GET", LOG_PATH, on_file)


def own_record(data: Path, measurement: bytes) -> int:
    """The leaf of this very binary in the server's own log, appended if it is not there.

    Every aggregator on this data folder, and every thread of it, may ask at the same time.
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
        "0" * 40,
        "papaya tsa measure",
    )
    leaf_index = folder.append([record.encode()], key).size - 1
    _write(known, f"{measurement.hex()} {leaf_index}\n", 0o644)
    return leaf_index


def _own_key(path: Path) -> SignerKey:
    """Its public half beside it, there whenever the log is."""
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
    """All of it or nothing: the server may be killed, and others wait for the file."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text)
    os.replace(temporary, path)
