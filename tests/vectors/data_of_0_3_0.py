"""A data folder as Papaya 0.3.0 left it after a clean stop: rows, blobs, what was acknowledged.

`data-0.3.0.json` was recorded from the release's commit: a task of 8 parameters and K = 4, five
devices, two versions, and two open buffers.
"""

from __future__ import annotations

import json
import sqlite3
from base64 import b64decode
from contextlib import closing
from pathlib import Path

_RECORDED = json.loads(Path(__file__).with_name("data-0.3.0.json").read_text(encoding="utf-8"))
TASK = "words"
ACKNOWLEDGED: list[str] = _RECORDED["acknowledged"]
ROWS: dict[bytes, bytes] = {k.encode(): row.encode() for k, row in _RECORDED["rows"].items()}


def write(folder: Path) -> None:
    for key, data in _RECORDED["blobs"].items():
        path = folder / "blobs" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b64decode(data))
    with closing(sqlite3.connect(folder / "state.db")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE rows (key BLOB PRIMARY KEY NOT NULL, row BLOB NOT NULL)")
        database.execute(f"PRAGMA application_id = {0x50415059}")
        database.execute("PRAGMA user_version = 1")
        database.executemany("INSERT INTO rows VALUES (?, ?)", ROWS.items())
        database.commit()
