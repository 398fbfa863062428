"""A server with its state in PostgreSQL: start, refusals, and a stop if history is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from papaya.config import Deployment, ServerConfig
from papaya.errors import LostHistory, OperatorError
from papaya.server.server import Server
from papaya.store import postgresql_session
from papaya.store.clusters import read_cluster
from tests.postgresql import postgres

_LIMIT_S = 300.0


@pytest.fixture
def url() -> Iterator[str]:
    with postgres().schema() as made:
        yield made


def server_at(folder: Path, url: str) -> Server:
    return Server(
        Deployment(
            data=str(folder),
            state=url,
            devices="127.0.0.1:0",
            admin="127.0.0.1:0",
            servers="127.0.0.1:0",
            server=ServerConfig(heartbeat_s=0.2),
        )
    )


def test_a_second_cluster_in_the_database_is_refused(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new folder may belong to a machine that joins, but not while its name is taken."""

    async def run() -> None:
        first, second = server_at(tmp_path / "a", url), server_at(tmp_path / "b", url)
        await first.start()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(postgresql_session, "RECONNECT_PATIENCE_S", 0.1)
                patch.setattr(postgresql_session, "START_PATIENCE_S", 0.1)
                with pytest.raises(OperatorError, match=r"another process is connected .* as serv"):
                    await second.start()
        finally:
            await first.stop()
        assert not (tmp_path / "a" / "state.db").exists()
        assert read_cluster(tmp_path / "b") is None
        await first.start()  # a restart
        await first.stop()

    asyncio.run(run())


def test_it_stops_if_committed_rows_are_gone(tmp_path: Path, url: str) -> None:
    async def run() -> None:
        server = server_at(tmp_path, url)
        await server.start()
        try:
            with psycopg.connect(url) as connection:  # the server cannot write in between
                key = "'\\xff'::bytea || 'commits/server'"
                connection.execute(f"UPDATE papaya_rows SET row = '0' WHERE key = {key}")
                connection.execute(
                    "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity "
                    "WHERE application_name = 'papaya server'"
                )
            await asyncio.wait_for(server.failed.wait(), _LIMIT_S)
        finally:
            await server.stop()
        assert isinstance(server.failure, LostHistory)
        with pytest.raises(LostHistory):
            await server_at(tmp_path, url).start()

    asyncio.run(run())
