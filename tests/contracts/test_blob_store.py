"""What every blob store promises: never overwritten, not listed when deleted, synced survives.

A store may keep a deleted blob for a while; nothing may depend on that. Callers write no key again
that they have deleted: a store may refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.aggregator.shards import blob_key
from papaya.credentials.s3_keys import s3_keys
from papaya.errors import MissingBlob
from papaya.messages.base import BlobKey
from papaya.sim.storage import BlobTwin
from papaya.store.blob_cache import BlobCache
from papaya.store.blobs import FolderBlobs
from papaya.store.s3_blobs import S3Blobs
from tests.s3.server import BUCKET, S3Server, key_file, s3_server


class Store(Protocol):
    def put(self, key: BlobKey, data: bytes) -> None: ...

    def get(self, key: BlobKey) -> bytes: ...

    def get_part(self, key: BlobKey, start: int, end: int) -> bytes: ...

    def delete(self, key: BlobKey) -> None: ...

    def sweep(self, task: str, below_seq: int, keep: frozenset[BlobKey]) -> None: ...

    def keys(self, task: str) -> list[BlobKey]: ...


class Twin(BlobTwin):
    """The simulator's store, with the list that only its checkers need there."""

    def keys(self, task: str) -> list[BlobKey]:
        return sorted(key for key in self.blobs if key.startswith(f"{task}/"))


@contextmanager
def simulated() -> Iterator[Store]:
    yield Twin(Random(1))


@contextmanager
def folder() -> Iterator[Store]:
    with TemporaryDirectory() as root:
        yield FolderBlobs(Path(root))


@contextmanager
def bucket() -> Iterator[Store]:
    with TemporaryDirectory() as cache:
        yield S3Blobs.open(
            f"s3://{BUCKET}/{token_hex(8)}/blobs",
            BlobCache(Path(cache) / "copies"),
            endpoint=Servers.s3.endpoint,
            credentials=s3_keys(key_file(Path(cache))),
        )


class Servers:
    s3: S3Server


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with s3_server() as Servers.s3:
        yield


NewStore = Callable[[], AbstractContextManager[Store]]
STORES: list[NewStore] = [simulated, folder, bucket]


@pytest.fixture(params=STORES)
def blobs(request: pytest.FixtureRequest) -> Iterator[Store]:
    with request.param() as made:
        yield made


def a_key(seq: int = 1, name: str = "x", task: str = "task") -> BlobKey:
    return f"{task}/{seq}/{name}-{sha256(name.encode()).hexdigest()[:32]}"


def test_what_was_put_is_there_and_never_overwritten(blobs: Store) -> None:
    blobs.put(a_key(), b"first")
    blobs.put(a_key(), b"again")
    assert blobs.get(a_key()) == b"first"


def test_a_blob_can_be_read_in_parts(blobs: Store) -> None:
    key = blob_key("words", 1, "update-1", b"0123456789")
    with pytest.raises(MissingBlob):
        blobs.get_part(key, 0, 4)
    blobs.put(key, b"0123456789")
    parts = [blobs.get_part(key, start, start + 4) for start in (0, 4, 8)]
    assert parts == [b"0123", b"4567", b"89"]


def test_a_blob_may_be_empty(blobs: Store) -> None:
    blobs.put(a_key(), b"")
    assert blobs.get(a_key()) == b""


def test_the_keys_of_the_aggregator_are_keys(blobs: Store) -> None:
    keys = [blob_key("next-word_2", 12, what, b"content") for what in ("sum-3-10", "version-0")]
    for key in keys:
        blobs.put(key, b"content")
    assert blobs.keys("next-word_2") == keys


def test_what_is_missing_is_an_error_with_its_name(blobs: Store) -> None:
    blobs.put(a_key(1, "other"), b"first")
    with pytest.raises(MissingBlob, match=a_key()):
        blobs.get(a_key())


def test_what_was_deleted_is_not_listed_and_keeps_no_other_content(blobs: Store) -> None:
    blobs.put(a_key(), b"first")
    blobs.delete(a_key())
    blobs.delete(a_key())
    blobs.delete(a_key(1, "never-put"))
    assert blobs.keys("task") == []
    with suppress(MissingBlob):
        assert blobs.get(a_key()) == b"first"


def test_a_sweep_takes_only_what_earlier_holders_left_without_a_row(blobs: Store) -> None:
    named, left, own, later = a_key(1, "named"), a_key(1, "left"), a_key(2), a_key(10)
    others = [a_key(1, "left", task) for task in ("tas", "task2", "other")]
    for key in (named, left, own, later, *others):
        blobs.put(key, b"")
    blobs.sweep("task", 2, frozenset({named}))
    assert blobs.keys("task") == sorted([named, own, later])
    assert [blobs.keys(key.split("/")[0]) for key in others] == [[key] for key in others]


def test_a_sweep_of_a_task_without_blobs_is_no_error(blobs: Store) -> None:
    blobs.sweep("task", 2, frozenset())
    assert blobs.keys("task") == []


some_keys = st.builds(a_key, st.sampled_from([0, 1, 9, 10]), st.sampled_from("xy"))
changes = st.one_of(
    st.tuples(st.just("put"), some_keys, st.binary(min_size=3, max_size=3)),
    st.tuples(st.just("delete"), some_keys, st.just(b"")),
    st.tuples(st.just("sweep"), some_keys, st.sampled_from([b"", b"1", b"10", b"11"])),
)


@pytest.mark.parametrize("new_store", STORES)
@settings(max_examples=15, deadline=None)
@given(steps=st.lists(changes, max_size=12))
def test_it_is_the_store_that_a_dictionary_would_be(
    new_store: NewStore, steps: list[tuple[str, BlobKey, bytes]]
) -> None:
    model: dict[BlobKey, bytes] = {}
    deleted: set[BlobKey] = set()
    with new_store() as blobs:
        for what, key, data in steps:
            if what == "put":
                if key in deleted:
                    continue  # no caller does that
                blobs.put(key, data)
                model.setdefault(key, data)
            elif what == "delete":
                blobs.delete(key)
                model.pop(key, None)
                deleted.add(key)
            else:
                below = int(data or b"0")
                blobs.sweep("task", below, frozenset({key}))
                before = set(model)
                model = {
                    kept: value
                    for kept, value in model.items()
                    if kept == key or int(kept.split("/")[1]) >= below
                }
                deleted |= before - set(model)
        assert {key: blobs.get(key) for key in blobs.keys("task")} == model


def test_a_power_loss_spares_what_was_synced_and_nothing_else() -> None:
    fates = set()
    for seed in range(30):
        blobs = BlobTwin(Random(seed))
        blobs.put("a", b"0123456789")
        blobs.put("b", b"0123456789", sync=False)
        lost: list[str] = []
        blobs.observers.append(lost.append)
        blobs.lose_power()
        assert blobs.get("a") == b"0123456789"
        assert lost == ["b"]
        fates.add("gone" if "b" not in blobs.blobs else "torn")
        assert "b" not in blobs.blobs or len(blobs.get("b")) < 10
    assert fates == {"gone", "torn"}
