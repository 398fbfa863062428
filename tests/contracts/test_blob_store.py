"""What every blob store promises: never overwritten, gone when deleted, synced survives."""

from __future__ import annotations

from random import Random

import pytest

from papaya.errors import MissingBlob
from papaya.sim.storage import BlobTwin


@pytest.fixture
def blobs() -> BlobTwin:
    return BlobTwin(Random(1))


def test_what_was_put_is_there_and_never_overwritten(blobs: BlobTwin) -> None:
    blobs.put("task/1/x", b"first")
    blobs.put("task/1/x", b"second")
    assert blobs.get("task/1/x") == b"first"


def test_what_is_missing_is_an_error_with_its_name(blobs: BlobTwin) -> None:
    blobs.put("task/1/x", b"first")
    blobs.delete("task/1/x")
    blobs.delete("task/1/x")
    with pytest.raises(MissingBlob, match="task/1/x"):
        blobs.get("task/1/x")


def test_a_power_loss_spares_what_was_synced_and_nothing_else() -> None:
    fates = set()
    for seed in range(30):
        blobs = BlobTwin(Random(seed))
        blobs.put("a", b"0123456789")
        blobs.put("b", b"0123456789", sync=False)
        lost: list[str] = []
        blobs.on_lost = lost.append
        blobs.lose_power()
        assert blobs.get("a") == b"0123456789"
        assert lost == ["b"]
        fates.add("gone" if "b" not in blobs.blobs else "torn")
        assert "b" not in blobs.blobs or len(blobs.get("b")) < 10
    assert fates == {"gone", "torn"}


def test_a_sweep_takes_only_what_earlier_holders_left_without_a_row(blobs: BlobTwin) -> None:
    for key in ("task/1/named", "task/1/left", "task/2/own", "task/3/later", "other/1/left"):
        blobs.put(key, b"")
    blobs.sweep("task", 2, frozenset({"task/1/named"}))
    assert sorted(blobs.blobs) == ["other/1/left", "task/1/named", "task/2/own", "task/3/later"]
