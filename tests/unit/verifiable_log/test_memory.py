"""The checkpoint on the disk: durable, never shorter, and shared by several who read the log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from papaya.verifiable_log.errors import ForkError, LogError, RollbackError
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.memory import CheckpointFile, RememberingReader
from papaya.verifiable_log.reader import LogReader
from tests.unit.verifiable_log.builders import KEY, NOW, POLICY, a_log

ENTRIES = [b"entry %d" % i for i in range(9)]


def note(log: LogFolder) -> bytes:
    return log.fetch("checkpoint")


def a_file(folder: Path) -> CheckpointFile:
    return CheckpointFile(folder / "device.db.log-checkpoint", POLICY)


def remembering(log: LogFolder, memory: CheckpointFile) -> RememberingReader:
    return RememberingReader(log.fetch, POLICY, memory)


def test_what_was_accepted_is_on_the_disk(tmp_path: Path) -> None:
    log = a_log(tmp_path / "log", ENTRIES[:3])
    assert a_file(tmp_path).read() is None
    remembering(log, a_file(tmp_path)).refresh(NOW)
    assert a_file(tmp_path).read() == note(log)
    log.append(ENTRIES[3:], KEY)
    remembering(log, a_file(tmp_path)).refresh(NOW)
    assert a_file(tmp_path).read() == note(log)


def test_file_and_folder_are_synced_before_it_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written beside it is no other file of the device."""
    log, memory = a_log(tmp_path / "log", ENTRIES), a_file(tmp_path)
    bystander = tmp_path / "device.db.new"
    bystander.write_bytes(b"somebody else's")
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
    remembering(log, memory).refresh(NOW)
    assert events == [
        "sync .device.db.log-checkpoint.new",
        "rename device.db.log-checkpoint",
        f"sync {tmp_path.name}",
    ]
    assert bystander.read_bytes() == b"somebody else's"


def test_a_longer_log_is_never_replaced_by_a_shorter_one(tmp_path: Path) -> None:
    memory = a_file(tmp_path)
    short, long = (a_log(tmp_path / str(n), ENTRIES[:n]) for n in (3, 5))
    assert memory.replace(None, note(long))
    with pytest.raises(RollbackError):
        memory.replace(note(long), note(short))
    assert memory.read() == note(long)


def test_whoever_read_something_else_replaces_nothing(tmp_path: Path) -> None:
    """Two processes read the log at once; the slow one has seen less."""
    short, long = (a_log(tmp_path / str(n), ENTRIES[:n]) for n in (3, 5))
    slow, fast = a_file(tmp_path), a_file(tmp_path)
    assert fast.replace(None, note(long))
    assert not slow.replace(None, note(short))
    assert slow.read() == note(long)


@pytest.mark.parametrize("size", [4, 5, 6])
def test_two_processes_that_are_shown_two_histories_find_out(tmp_path: Path, size: int) -> None:
    """Both start with nothing; one is shown the log, the other a fork, while the first writes."""
    log = a_log(tmp_path / "log", ENTRIES[:5])
    fork = a_log(tmp_path / "fork", [b"for you alone", *ENTRIES[1:size]])
    memory = a_file(tmp_path)

    def meanwhile(path: str) -> bytes:
        if path == "checkpoint":
            remembering(log, a_file(tmp_path)).refresh(NOW)
        return fork.fetch(path)

    with pytest.raises((ForkError, RollbackError)):
        RememberingReader(meanwhile, POLICY, memory).refresh(NOW)
    assert memory.read() == note(log)


def test_two_processes_that_are_shown_one_history_agree(tmp_path: Path) -> None:
    log, memory = a_log(tmp_path / "log", ENTRIES[:5]), a_file(tmp_path)
    old = {"checkpoint": note(log)}

    def slow(path: str) -> bytes:
        """The first answer is older than what the other process has seen meanwhile."""
        if path in old:
            log.append(ENTRIES[5:], KEY)
            remembering(log, a_file(tmp_path)).refresh(NOW)
            return old.pop(path)
        return log.fetch(path)

    assert RememberingReader(slow, POLICY, memory).refresh(NOW).size == len(ENTRIES)
    assert memory.read() == note(log)


def test_a_process_remembers_though_its_file_is_deleted(tmp_path: Path) -> None:
    log, memory = a_log(tmp_path / "log", ENTRIES[:5]), a_file(tmp_path)
    remembering(log, memory).refresh(NOW)
    (tmp_path / "device.db.log-checkpoint").unlink()
    with pytest.raises(RollbackError):
        remembering(a_log(tmp_path / "older", ENTRIES[:3]), memory).refresh(NOW)
    remembering(log, memory).refresh(NOW)
    assert a_file(tmp_path).read() == note(log)


@pytest.mark.parametrize("damage", [b"", b"\0" * 200, b"x" * 10**6])
def test_a_damaged_file_is_no_fresh_start(tmp_path: Path, damage: bytes) -> None:
    log = a_log(tmp_path / "log", ENTRIES)
    (tmp_path / "device.db.log-checkpoint").write_bytes(damage)
    with pytest.raises(LogError, match="invalid checkpoint of this log"):
        remembering(log, a_file(tmp_path))


@pytest.mark.parametrize(("pinned", "remembered"), [(5, 3), (3, 5), (5, 5)])
def test_the_pinned_and_the_remembered_checkpoint_must_both_be_continued(
    tmp_path: Path, pinned: int, remembered: int
) -> None:
    """The fork continues what is remembered, or what is pinned, but not both."""
    log = a_log(tmp_path / "log", ENTRIES)
    known = note(a_log(tmp_path / "known", ENTRIES[: min(pinned, remembered)]))
    newer = note(a_log(tmp_path / "newer", ENTRIES[: max(pinned, remembered)]))
    first, second = (newer, known) if pinned > remembered else (known, newer)
    fork = a_log(tmp_path / "fork", [*ENTRIES[:3], b"for you alone", *ENTRIES[4:]])
    for order in ((first, second), (second, first)):
        with pytest.raises(ForkError):
            LogReader(fork.fetch, POLICY, *order).refresh(NOW)
        assert LogReader(log.fetch, POLICY, *order).refresh(NOW).size == len(ENTRIES)


def test_two_remembered_histories_of_one_size_are_a_fork(tmp_path: Path) -> None:
    one, other = (note(a_log(tmp_path / name, [name.encode()])) for name in ("one", "other"))
    with pytest.raises(ForkError, match="two different checkpoints"):
        LogReader(a_log(tmp_path / "log").fetch, POLICY, one, other)
