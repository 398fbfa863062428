"""The public log of trusted binaries, served as static files where devices and auditors read it.

DESIGN, "The log is read where auditors read it". A release is appended by `papaya log append`,
wherever the log's key is kept. Only for a trusted party that this server starts itself, whose
software evidence proves nothing anyway, a log is made here too, so that the same checks can be
tried on one machine; it is named INSECURE.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from papaya.messages.participation import Refused
from papaya.net.answers import NOT_FOUND, answer
from papaya.net.http.exchange import Exchange
from papaya.net.http.routes import Buffered, Route
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import LOG_SIGNATURE, SignerKey
from papaya.verifiable_log.record import Record

LOG_PATH = "/v1/log/{path...}"
_PUBLIC = re.compile(r"checkpoint|tile/[0-9a-z/.]{1,100}")
_NAME = "INSECURE.papaya.invalid/one-machine"


def route(folder: Path) -> Route:
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
    """The leaf of this very binary in the server's own log, appended if it is not there."""
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
    known.write_text(f"{measurement.hex()} {leaf_index}\n")
    return leaf_index


def _own_key(path: Path) -> SignerKey:
    if path.exists():
        return SignerKey.parse(path.read_text().strip())
    key = SignerKey(_NAME, secrets.token_bytes(32), LOG_SIGNATURE)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"{key.reveal()}\n")
    path.with_name(f"{path.name}.pub").write_text(f"{key.verifier}\n")
    return key
