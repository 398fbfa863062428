"""A data folder as Papaya 0.3.0 left it after a clean stop: rows, blobs, what was acknowledged.

`data-0.3.0.json` was recorded from the release's commit: a task of 8 parameters and K = 4, five
devices, two versions, and two open buffers.
"""

from __future__ import annotations

import json
import re
import sqlite3
from base64 import b64decode
from contextlib import closing
from pathlib import Path

_RECORDED = json.loads(Path(__file__).with_name("data-0.3.0.json").read_text(encoding="utf-8"))
TASK = "words"
ACKNOWLEDGED: list[str] = _RECORDED["acknowledged"]
ROWS: dict[bytes, bytes] = {k.encode(): row.encode() for k, row in _RECORDED["rows"].items()}


_TIME = re.compile(rb"1[0-9]{9}\.[0-9]+")  # Unix time, the only numbers of this size in rows


def rows_at(now: float) -> dict[bytes, bytes]:
    """As if they had been written just before `now`: their tickets have not expired."""
    created = re.compile(rb'"created":([0-9.]+)')  # others, such as expiry, are in the future
    last = max(float(found) for row in ROWS.values() for found in created.findall(row))

    def later(found: re.Match[bytes]) -> bytes:
        return repr(float(found[0]) + now - last).encode()

    return {key: _TIME.sub(later, row) for key, row in ROWS.items()}


def write(folder: Path, rows: dict[bytes, bytes] = ROWS) -> None:
    for key, data in _RECORDED["blobs"].items():
        path = folder / "blobs" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b64decode(data))
    with closing(sqlite3.connect(folder / "state.db")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE rows (key BLOB PRIMARY KEY NOT NULL, row BLOB NOT NULL)")
        database.execute(f"PRAGMA application_id = {0x50415059}")
        database.execute("PRAGMA user_version = 1")
        database.executemany("INSERT INTO rows VALUES (?, ?)", rows.items())
        database.commit()
