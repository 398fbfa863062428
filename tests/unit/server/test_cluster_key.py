"""The key with which a cluster proves to a TSA that tasks are its own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from papaya.errors import OperatorError
from papaya.messages.storage import Outcome, Row, Transaction
from papaya.server.state_thread import StateThread
from papaya.server.tsa import load_cluster_key
from papaya.store.state import SqliteState


def test_all_servers_of_a_cluster_have_one_key(tmp_path: Path) -> None:
    async def keys() -> list[bytes]:
        states = [
            StateThread(SqliteState(tmp_path / "state.db", busy_timeout_s=60.0)) for _ in range(3)
        ]
        try:
            made = await asyncio.gather(*(load_cluster_key(s, os.urandom) for s in states))
            return [key.private_bytes_raw() for key in made]
        finally:
            for state in states:
                await state.close()

    first, second = asyncio.run(keys()), asyncio.run(keys())
    assert len({*first, *second}) == 1


class FullDisk:
    async def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        return {}

    async def transact(self, transaction: Transaction) -> Outcome:
        return "unknown"


def test_a_key_that_cannot_be_stored_is_not_used() -> None:
    with pytest.raises(OperatorError, match="cannot store the key of this cluster"):
        asyncio.run(load_cluster_key(FullDisk(), os.urandom))
