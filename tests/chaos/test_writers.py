"""The trigger that notices an aggregator that writes to a task of another one."""

from __future__ import annotations

from contextlib import closing

import psycopg

from papaya.messages.storage import (
    ConsumedRow,
    FenceRow,
    RecordRow,
    Row,
    Transaction,
    consumed_key,
    fence_key,
    record_key,
)
from papaya.store.postgresql import PostgresState
from tests.chaos.writers import strangers, watch_writers
from tests.postgresql import postgres

HOLDER, OTHER = "aggregator@10.0.0.1:8752", "aggregator@10.0.0.2:8752"


def put(store: PostgresState, key: str, row: Row) -> None:
    assert store.transact(Transaction(put=((key, row),))) == "committed"


def test_only_writes_of_the_holder_go_unnoticed() -> None:
    with postgres().database() as name:
        url = postgres().url(name)
        with (
            closing(PostgresState(url, HOLDER)) as holder,
            closing(PostgresState(url, OTHER)) as other,
            psycopg.connect(url, autocommit=True) as connection,
        ):
            watch_writers(connection)
            put(other, fence_key("clear"), FenceRow(1, HOLDER, 1))
            for version in (1, 2):
                put(holder, record_key("clear", version), RecordRow(version, "blob", (), 0.0))
                put(holder, consumed_key("clear", version), ConsumedRow(version, ()))
            assert strangers(connection) == []
            put(other, record_key("clear", 2), RecordRow(2, "other", (), 0.0))
            put(other, consumed_key("masked", 1), ConsumedRow(1, ()))
            first, second = strangers(connection)
    assert first.startswith(f"{OTHER} wrote 1 rows of masked, which nobody held")
    assert second.startswith(f"{OTHER} wrote 1 rows of clear, which {HOLDER} held; the first: rec")
