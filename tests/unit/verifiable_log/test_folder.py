"""The one writer: what it publishes can be read, whenever it stops, and it never signs a fork."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.verifiable_log.errors import ForkError, LogError, MissingFile, SignatureError
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import SignerKey
from tests.unit.verifiable_log.builders import (
    KEY,
    NOW,
    WITNESSES,
    a_log,
    a_reader,
    slow_root,
)

SIZES = [1, 2, 255, 256, 257, 511, 512, 513]


def entries(count: int, start: int = 0) -> list[bytes]:
    return [b"entry %d" % i for i in range(start, start + count)]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_appended_can_be_read_and_proven(tmp_path: Path, size: int) -> None:
    reader = a_reader(a_log(tmp_path, entries(size)))
    checkpoint = reader.refresh(NOW)
    assert (checkpoint.size, checkpoint.root) == (size, slow_root(entries(size)))
    assert reader.entries() == entries(size)
    for index in {0, size // 2, size - 1}:
        assert reader.entry(index) == b"entry %d" % index


@settings(max_examples=20, deadline=None)
@given(parts=st.lists(st.sampled_from([1, 2, 3, 100, 255, 256, 300]), min_size=1, max_size=4))
def test_appending_in_parts_gives_the_same_tree(
    tmp_path_factory: pytest.TempPathFactory, parts: list[int]
) -> None:
    log = a_log(tmp_path_factory.mktemp("log"))
    reader = a_reader(log)
    reader.refresh(NOW)
    done = 0
    for part in parts:
        log.append(entries(part, done), KEY)
        done += part
        assert reader.refresh(NOW).root == slow_root(entries(done))
    assert reader.entries() == entries(done)


def test_only_the_checkpoint_ever_changes(tmp_path: Path) -> None:
    log = a_log(tmp_path, entries(3))

    def files() -> dict[str, bytes]:
        found = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in found}

    before = files()
    log.append(entries(300, 3), KEY)
    after = files()
    assert before["checkpoint"] != after["checkpoint"]
    for path in before.keys() - {"checkpoint"}:
        assert after[path] == before[path]
    assert "tile/entries/000.p/3" in before
    assert {"tile/entries/000", "tile/0/001.p/47", "tile/1/000.p/1"} <= after.keys()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("stop_after", range(9))
def test_a_writer_that_stops_anywhere_leaves_a_log_that_holds(
    tmp_path: Path, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two files, the published checkpoint names only what is there."""
    log = a_log(tmp_path, entries(255))
    reader = a_reader(log)
    reader.refresh(NOW)
    rename, renamed = Path.rename, [0]

    def stop(path: Path, target: Path) -> Path:
        if renamed[0] == stop_after:
            raise Stopped
        renamed[0] += 1
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stop)
    try:
        log.append(entries(3, 255), KEY)
    except Stopped:
        assert reader.refresh(NOW).size == 255
    else:
        assert reader.refresh(NOW).size == 258
        assert stop_after >= 6
    assert reader.entries() == entries(reader.checkpoint.size)
    monkeypatch.setattr(Path, "rename", rename)
    log.append([b"something else"], KEY)
    reader.refresh(NOW)
    assert reader.entries()[-1] == b"something else"


def test_files_are_synced_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = a_log(tmp_path, entries(1))
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(handle: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    log.append(entries(1, 1), KEY)
    assert events == [
        *("sync .2.new", "rename 2", "sync 000.p"),
        *("sync .2.new", "rename 2", "sync 000.p"),
        *("sync .checkpoint.new", "rename checkpoint", f"sync {tmp_path.name}"),
    ]


def test_there_is_one_writer_at_a_time(tmp_path: Path) -> None:
    log = a_log(tmp_path)
    with (tmp_path / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LogError, match="another process"):
            log.append(entries(1), KEY)
    log.append(entries(1), KEY)


def test_another_key_cannot_append(tmp_path: Path) -> None:
    log = a_log(tmp_path, entries(3))
    with pytest.raises(SignatureError):
        log.append(entries(1), SignerKey(KEY.name, bytes(32)))
    assert a_reader(log).refresh(NOW).size == 3


@pytest.mark.parametrize(
    ("size", "damaged"),
    [
        (3, "tile/0/000.p/3"),
        (3, "tile/entries/000.p/3"),
        (300, "tile/1/000.p/1"),
        (300, "tile/0/001.p/44"),
    ],
)
def test_a_damaged_folder_is_not_signed(tmp_path: Path, size: int, damaged: str) -> None:
    log = a_log(tmp_path, entries(size))
    path = tmp_path / damaged
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    before = log.fetch("checkpoint")
    with pytest.raises(ForkError, match="do not match its"):
        log.append(entries(1), KEY)
    assert log.fetch("checkpoint") == before


def test_a_folder_with_a_missing_tile_is_not_signed(tmp_path: Path) -> None:
    log = a_log(tmp_path, entries(3))
    (tmp_path / "tile/0/000.p/3").unlink()
    with pytest.raises(MissingFile):
        log.append(entries(1), KEY)


def test_a_log_is_not_made_over_another(tmp_path: Path) -> None:
    a_log(tmp_path, entries(1))
    with pytest.raises(LogError, match="already"):
        LogFolder(tmp_path).create(KEY)


def test_what_cannot_be_published_is_not_begun(tmp_path: Path) -> None:
    log = a_log(tmp_path)
    with pytest.raises(LogError, match="no entries to append"):
        log.append([], KEY)
    with pytest.raises(LogError, match="longer than"):
        log.append([bytes(70_000)], KEY)
    assert not (tmp_path / "tile").exists()


def test_a_witness_signs_beside_the_log(tmp_path: Path) -> None:
    log = a_log(tmp_path, entries(1))
    witness = WITNESSES[0]
    text = a_reader(log).refresh(NOW).text
    for time in (NOW, NOW + 60):  # the second takes the place of the first
        log.add_cosignature(witness.signature_line(text, time), witness.verifier, KEY)
    assert log.fetch("checkpoint").decode().count(witness.name) == 1
    assert a_reader(log).refresh(NOW).size == 1


@pytest.mark.parametrize("line", ["", "nonsense\n", WITNESSES[0].signature_line("other\n", NOW)])
def test_what_is_not_a_cosignature_is_not_published(tmp_path: Path, line: str) -> None:
    log = a_log(tmp_path, entries(1))
    before = log.fetch("checkpoint")
    with pytest.raises(LogError):
        log.add_cosignature(line, WITNESSES[0].verifier, KEY)
    assert log.fetch("checkpoint") == before
