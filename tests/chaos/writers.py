"""Finds who writes the rows of a task without holding it, in a real PostgreSQL.

A trigger compares the process that writes the record or the members of a buffer with the one that
the task's fence names at that moment. Servers are not asked, and cannot tell that it is there.
Without the fence, the other rows that a transaction requires still prevent most double counts. So
the model alone rarely shows that two aggregators write.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import psycopg

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

_WATCH = """
CREATE SCHEMA chaos;
CREATE TABLE chaos.strangers (key text, writer text, holder text);
CREATE FUNCTION chaos.note_stranger() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    name text := convert_from(NEW.key, 'UTF8');
    fence bytea := convert_to('fence/' || split_part(name, '/', 2), 'UTF8');
    holder text := (SELECT convert_from(row, 'UTF8')::json ->> 'aggregator'
                    FROM public.papaya_rows WHERE key = fence);
    writer text := substr(current_setting('application_name'), length('papaya ') + 1);
BEGIN
    IF writer IS DISTINCT FROM holder THEN
        INSERT INTO chaos.strangers VALUES (name, writer, holder);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_stranger AFTER INSERT OR UPDATE ON public.papaya_rows FOR EACH ROW
WHEN ((NEW.key >= 'record/' AND NEW.key < 'record0')
   OR (NEW.key >= 'consumed/' AND NEW.key < 'consumed0'))
EXECUTE FUNCTION chaos.note_stranger()
"""
_STRANGERS = """
SELECT writer, coalesce(holder, ''), split_part(key, '/', 2), count(*), min(key)
FROM chaos.strangers GROUP BY 1, 2, 3 ORDER BY 5
"""


def watch_writers(connection: Connection) -> None:
    """After the first process of the cluster has made the table."""
    connection.execute(_WATCH)


def strangers(connection: Connection) -> list[str]:
    """Who has written to a task that someone else held, in words."""
    return [
        f"{writer} wrote {count} rows of {task}, which {holder or 'nobody'} held; the first: {key}"
        for writer, holder, task, count, key in connection.execute(_STRANGERS)
    ]
