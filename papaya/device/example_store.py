"""The example store (paper, "Client Runtime"): training examples on the device, in SQLite.

An app adds examples to collections, and tasks that the collection's policy allows read them.
Expired and surplus examples are deleted: no call returns them any more, and `sweep`, which the
device's runtime calls every few minutes, removes their bytes from the files
(`papaya/device/device_file.py`). Copies that a flash controller or a file-system snapshot keeps
cannot be deleted by a program.

A hash of its content decides whether an example is for training, validation or test, so the split
needs no state and equal examples are on the same side. Policies are stored in the file, so that the
app that adds examples and the process that trains on them apply the same ones.

Refused: a collection that the device's owner did not declare, a task that its policy does not
allow, an example over the limit. Servers cannot change any of this. Retention uses the caller's
`now`: setting the clock back keeps examples for longer, by at most the time that it was set back.
An example from the future counts as added now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Literal, Self, TypeAlias

import msgspec

from papaya.device.device_file import DeviceFile, StrPath
from papaya.device.use_policy import UsePolicies, UsePolicy, check_collections
from papaya.errors import ConfigError, OperatorError

Split: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

MAX_EXAMPLE_BYTES = 1 << 20
MAX_QUERY_BYTES = 256 << 20
_BUCKETS = 1 << 32

_SCHEMA = """
CREATE TABLE IF NOT EXISTS example (
    id INTEGER PRIMARY KEY,
    collection TEXT NOT NULL,
    added_at REAL NOT NULL,
    bucket INTEGER NOT NULL,
    content BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS example_by_age ON example (collection, added_at, id);
CREATE INDEX IF NOT EXISTS example_by_bucket ON example (collection, bucket);
CREATE TABLE IF NOT EXISTS collection (name TEXT PRIMARY KEY, policy BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS device_state (
    task TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    collection TEXT NOT NULL,
    began_at REAL NOT NULL,
    state BLOB NOT NULL
) STRICT;
"""


class UseRefused(OperatorError):
    """A task asked for examples that the owner's policy does not allow."""


def bucket_of(example: bytes) -> int:
    """The position of an example on the scale that the split divides."""
    return int.from_bytes(sha256(b"papaya split\0" + example).digest()[:4], "big")


def split_of(example: bytes, policy: UsePolicy) -> Split:
    bucket = bucket_of(example)
    return next(split for split in SPLITS if bucket in range(*_bounds(split, policy)))


def _bounds(split: Split, policy: UsePolicy) -> tuple[int, int]:
    """Validation and test are at the two ends: changing one share does not move the other."""
    validation = round(policy.validation * _BUCKETS)
    test = min(_BUCKETS, max(validation, _BUCKETS - round(policy.test * _BUCKETS)))
    match split:
        case "validation":
            return 0, validation
        case "train":
            return validation, test
        case "test":
            return test, _BUCKETS


class ExampleStore:
    """One device's examples. May be called from any thread."""

    def __init__(self, path: StrPath, policies: UsePolicies | None = None) -> None:
        """`policies` declares or replaces collections; all others are unchanged."""
        self._policies: dict[str, UsePolicy] = {}  # replaced, never changed: threads iterate it
        self._file = DeviceFile(path, _SCHEMA)
        try:
            self.declare(policies or {})
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def collections(self) -> UsePolicies:
        """The policies as of the last call; `refresh` reads them again."""
        return self._policies

    def refresh(self) -> None:
        """Read policies that another process has declared."""
        with self._current():
            pass

    def declare(self, policies: UsePolicies) -> None:
        """Declare or replace collections."""
        with self._current():
            check_collections({**self._policies, **policies})
            for name, policy in policies.items():
                self._file.change(
                    "INSERT OR REPLACE INTO collection (name, policy) VALUES (?, ?)",
                    name,
                    msgspec.json.encode(policy),
                )
        self._policies = {**self._policies, **policies}

    def add(self, collection: str, examples: Iterable[bytes], now: float) -> int:
        """Add all or none, and return their number. Surplus examples are deleted at once."""
        return self._add(collection, examples, now, only_new=False)

    def add_new(self, collection: str, examples: Iterable[bytes], now: float) -> int:
        """Add examples whose content is not in the collection yet, and return their number."""
        return self._add(collection, examples, now, only_new=True)

    def query(
        self,
        collection: str,
        task: str,
        split: Split,
        limit: int,
        newest_first: bool,
        now: float,
    ) -> list[bytes]:
        """At most `limit` examples that `task` may use; no expired ones."""
        order = "added_at DESC, id DESC" if newest_first else "added_at ASC, id ASC"
        select = (
            "SELECT content FROM (SELECT added_at, id, content, sum(length(content)) OVER "
            f"(ORDER BY {order} ROWS UNBOUNDED PRECEDING) AS so_large FROM example "
            f"WHERE collection = ? AND bucket >= ? AND bucket < ? ORDER BY {order} LIMIT ?) "
            f"WHERE so_large <= {MAX_QUERY_BYTES} ORDER BY {order}"
        )
        with self._current():
            policy = self._policy(collection)
            if not policy.allows(task):
                raise UseRefused(
                    f"task {task!r} may not use collection {collection!r}",
                    hint=f"to allow it, list the task under [collections.{collection}] in a file "
                    "and pass it with --policies FILE",
                )
            self._sweep(now)
            values = (collection, *_bounds(split, policy), max(0, limit))
            return [content for [content] in self._file.rows(select, *values)]

    def counts(self, collection: str, now: float) -> dict[Split, int]:
        select = "SELECT count(*) FROM example WHERE collection = ? AND bucket >= ? AND bucket < ?"
        found: dict[Split, int] = {}
        with self._current():
            policy = self._policy(collection)
            self._sweep(now)
            for split in SPLITS:
                [[found[split]]] = self._file.rows(select, collection, *_bounds(split, policy))
        return found

    def why_none(self, collection: str, task: str) -> str:
        """Why this task would find nothing to train on; empty if it would find examples."""
        select = "SELECT 1 FROM example WHERE collection = ? AND bucket >= ? AND bucket < ? LIMIT 1"
        with self._current():
            policy = self._policies.get(collection)
            if policy is None:
                return f"this device has no collection {collection!r}"
            if not policy.allows(task):
                return f"the policies of this device do not allow collection {collection!r}"
            if self._file.rows(select, collection, *_bounds("train", policy)):
                return ""
            select = "SELECT 1 FROM example WHERE collection = ? LIMIT 1"
            has_some = bool(self._file.rows(select, collection))
        problem = "has only held-out examples" if has_some else "is empty"
        return f"collection {collection!r} {problem}"

    def drop(self, collection: str) -> None:
        """Delete a collection: its policy, all its examples, and what was trained on them."""
        with self._current():
            self._policy(collection)
            self._file.delete("DELETE FROM example WHERE collection = ?", collection)
            self._file.delete("DELETE FROM collection WHERE name = ?", collection)
            self._file.delete("DELETE FROM device_state WHERE collection = ?", collection)
        left = {name: kept for name, kept in self._policies.items() if name != collection}
        self._policies = left
        self._file.scrub()

    def state_of(self, task: str, run: str) -> bytes:
        """What this device keeps of a task, in this run of it; empty if it keeps nothing."""
        with self._file.transaction():
            return self._state(task, run)

    def keep_state(
        self,
        task: str,
        run: str,
        collection: str,
        state: bytes,
        began_at: float,
        trained_from: bytes = b"",
    ) -> None:
        """Keep this in place of the task's previous state, also of another run. It is deleted with
        its collection, and when the first state of the run has reached the greatest age of an
        example: otherwise each state could pass on what the device has deleted.

        `began_at`: when its training began. `trained_from`: the state that it continues. If that
        was deleted or replaced in the meantime, nothing is kept.
        """
        with self._current():
            self._policy(collection)
            if trained_from and self._state(task, run) != trained_from:
                return
            self._file.change(
                "INSERT INTO device_state VALUES (?, ?, ?, ?, ?) ON CONFLICT (task) DO UPDATE SET "
                "began_at = iif(run = excluded.run, began_at, excluded.began_at), "
                "run = excluded.run, collection = excluded.collection, state = excluded.state",
                *(task, run, collection, began_at, state),
            )

    def sweep(self, now: float) -> None:
        """Delete expired and surplus examples and expired states, and remove their bytes from the
        file.
        """
        with self._current():
            self._sweep(now)
        self._file.scrub()

    # -- inside -----------------------------------------------------------------------------

    @contextmanager
    def _current(self) -> Iterator[None]:
        """A transaction with the current policies, which another process may have changed."""
        select = "SELECT name, policy FROM collection"
        with self._file.transaction():
            self._policies = {name: self._parsed(text) for name, text in self._file.rows(select)}
            yield

    def _state(self, task: str, run: str) -> bytes:
        select = "SELECT state FROM device_state WHERE task = ? AND run = ?"
        found = self._file.rows(select, task, run)
        state: bytes = found[0][0] if found else b""
        return state

    def _add(
        self, collection: str, examples: Iterable[bytes], now: float, *, only_new: bool
    ) -> int:
        rows = [(collection, now, bucket_of(example), example) for example in map(_small, examples)]
        with self._current():
            self._policy(collection)
            if only_new:
                self._sweep(now)  # what is expired does not count
                rows = [row for row in rows if not self._has(collection, row[2], row[3])]
            self._file.insert(
                "INSERT INTO example (collection, added_at, bucket, content) VALUES (?, ?, ?, ?)",
                rows,
            )
            self._sweep(now)
        return len(rows)

    def _has(self, collection: str, bucket: int, example: bytes) -> bool:
        select = "SELECT 1 FROM example WHERE collection = ? AND bucket = ? AND content = ? LIMIT 1"
        return bool(self._file.rows(select, collection, bucket, example))

    def _parsed(self, policy: bytes) -> UsePolicy:
        try:
            return msgspec.json.decode(policy, type=UsePolicy)
        except (msgspec.MsgspecError, ConfigError) as error:
            raise OperatorError(
                f"cannot use the device's file {self._file.path}: a policy is damaged",
                hint="declare its collections again, in a new file",
            ) from error

    def _sweep(self, now: float) -> None:
        # The clock was ahead when they were added. They are kept for as long as others from now on;
        # otherwise they would outlive a window of the privacy budget (docs/privacy.md).
        self._file.change("UPDATE example SET added_at = ? WHERE added_at > ?", now, now)
        self._file.change("UPDATE device_state SET began_at = ? WHERE began_at > ?", now, now)
        for collection, policy in self._policies.items():
            self._file.delete(
                "DELETE FROM example WHERE collection = ? AND added_at <= ?",
                collection,
                now - policy.max_age_s,
            )
            self._file.delete(
                "DELETE FROM device_state WHERE collection = ? AND began_at <= ?",
                collection,
                now - policy.max_age_s,
            )
            self._file.delete(
                "DELETE FROM example WHERE id IN (SELECT id FROM (SELECT id, "
                "count(*) OVER newer AS so_many, sum(length(content)) OVER newer AS so_large "
                "FROM example WHERE collection = ? WINDOW newer AS "
                "(ORDER BY added_at DESC, id DESC ROWS UNBOUNDED PRECEDING)) "
                "WHERE so_many > ? OR so_large > ?)",
                collection,
                policy.max_count,
                policy.max_bytes,
            )

    def _policy(self, collection: str) -> UsePolicy:
        try:
            return self._policies[collection]
        except KeyError:
            raise ConfigError.of(
                "collection",
                collection,
                f"is not one of {sorted(self._policies)}",
                f"declare [collections.{collection}] on this device",
            ) from None


def _small(example: bytes) -> bytes:
    if len(example) > MAX_EXAMPLE_BYTES:
        raise ConfigError.of(
            "example",
            f"{len(example)} bytes",
            f"is above the limit of {MAX_EXAMPLE_BYTES}",
            "cut it into smaller examples",
        )
    return example
