"""The blob store in a folder: order of system calls, keys, leftovers, full disks."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.errors import MissingBlob, OperatorError, ProtocolError
from papaya.store.blobs import FolderBlobs

HASH = "0123456789abcdef" * 2
KEY = f"task/1/version-0-{HASH}"


@pytest.fixture
def blobs(tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path / "blobs")


def files(blobs: FolderBlobs) -> list[str]:
    return sorted(str(path.relative_to(blobs.root)) for path in blobs.root.rglob("*"))


def record_calls(blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Real system calls that leave a trace: each with the folder that it was for."""
    calls: list[str] = []

    def name(handle: int) -> str:
        found = os.fstat(handle)
        if not stat.S_ISDIR(found.st_mode):
            return "file"
        folders = [blobs.root, *(path for path in blobs.root.rglob("*") if path.is_dir())]
        [folder] = [path for path in folders if os.path.samestat(path.stat(), found)]
        return str(folder.relative_to(blobs.root))

    def recording(call: str, say: Callable[..., str]) -> None:
        real = getattr(os, call)

        def recorded(*arguments: Any) -> Any:
            calls.append(f"{call} {say(*arguments)}")
            return real(*arguments)

        monkeypatch.setattr(os, call, recorded)

    recording("write", lambda handle, data: f"{name(handle)} {len(data)}")
    recording("fsync", name)
    recording("rename", lambda old, new: f"to {Path(new).relative_to(blobs.root)}")
    return calls


def test_a_put_is_written_synced_renamed_and_synced_again(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill keeps the page cache; only the order of calls shows what a power loss would leave."""
    calls = record_calls(blobs, monkeypatch)
    blobs.put(KEY, b"bytes")
    parents = ["fsync task", "fsync ."]
    assert calls == [
        *parents, "write file 5", "fsync file", f"rename to {KEY}", "fsync task/1",
    ]  # fmt: skip


def test_parents_are_synced_once_and_again_when_the_folder_is_new(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(blobs, monkeypatch)
    second = f"task/1/optimizer-0-{HASH}"
    blobs.put(KEY, b"bytes")
    blobs.put(second, b"bytes")
    assert [calls.count("fsync ."), calls.count("fsync task/1")] == [1, 2]
    blobs.delete(KEY)
    blobs.delete(second)
    blobs.put(KEY, b"bytes")
    assert [calls.count("fsync ."), calls.count("fsync task/1")] == [2, 3]


def test_a_blob_that_another_renamed_is_synced_before_it_counts_as_there(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    FolderBlobs(blobs.root).put(KEY, b"bytes")
    calls = record_calls(blobs, monkeypatch)
    blobs.put(KEY, b"bytes")
    assert calls == ["fsync task/1", "fsync task", "fsync ."]


def test_pieces_become_one_blob_however_little_the_system_takes_at_once(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:3]))
    words = memoryview(bytes(range(16))).cast("I")
    blobs.put(KEY, [b"head", bytearray(b""), words])
    assert blobs.get(KEY) == b"head" + bytes(range(16))
    assert blobs.size(KEY) == 20
    assert blobs.path(KEY).read_bytes() == blobs.get(KEY)


@pytest.mark.parametrize(
    ("call", "number", "message"),
    [
        ("write", errno.ENOSPC, "no space for the 10 bytes"),
        ("fsync", errno.EDQUOT, "no space for the 10 bytes"),
        ("fsync", errno.EIO, "cannot write"),
        ("rename", errno.EIO, "cannot write"),
    ],
)
def test_a_failed_put_leaves_nothing_and_says_what_to_do(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch, call: str, number: int, message: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OperatorError, match=message) as caught:
        blobs.put(KEY, b"0123456789")
    monkeypatch.undo()
    assert str(blobs.root) in caught.value.hint
    assert files(blobs) == []
    blobs.put(KEY, b"0123456789")
    assert blobs.get(KEY) == b"0123456789"


def test_a_blob_of_another_size_is_damage_and_not_overwritten(blobs: FolderBlobs) -> None:
    blobs.put(KEY, b"torn")
    with pytest.raises(OperatorError, match="exists with 4 bytes, expected 5"):
        blobs.put(KEY, b"whole")
    assert blobs.get(KEY) == b"torn"


def test_what_is_missing_has_no_size_and_no_path(blobs: FolderBlobs) -> None:
    for ask in (blobs.get, blobs.size, blobs.path):
        with pytest.raises(MissingBlob, match=KEY):
            ask(KEY)


BAD_KEYS = [
    "", "task", "task/1", "task/1/", f"/task/1/x-{HASH}", f"../1/x-{HASH}", f"task/../x-{HASH}",
    f"task/1/../x-{HASH}", f"task/1/x-{HASH}/..", f"task/1/x-{HASH}\n", f"task/1/x-{HASH}\x00",
    f"task/01/x-{HASH}", f"task/-1/x-{HASH}", f"task/²/x-{HASH}", f"Task/1/x-{HASH}",
    f"task/1/.incoming-{HASH}", f"task/1/x-{HASH[1:]}", f"task/1/x-{HASH.upper()}",
    f"task/1/x y-{HASH}", f"task//x-{HASH}", f"task/1/{'x' * 250}-{HASH}", f"task\\1\\x-{HASH}",
]  # fmt: skip


@pytest.mark.parametrize("key", BAD_KEYS)
def test_no_other_key_is_a_key(blobs: FolderBlobs, key: str) -> None:
    def put(key: str) -> None:
        blobs.put(key, b"")

    asks: list[Callable[[str], object]] = [put, blobs.get, blobs.size, blobs.path, blobs.delete]
    for ask in asks:
        with pytest.raises(ProtocolError, match="invalid blob key"):
            ask(key)
    assert files(blobs) == []


@given(key=st.text() | st.text(alphabet="./ax1-\\\x00", max_size=40))
def test_a_peer_can_name_nothing_outside(
    tmp_path_factory: pytest.TempPathFactory, key: str
) -> None:
    blobs = FolderBlobs(tmp_path_factory.getbasetemp())
    with pytest.raises(ProtocolError):
        blobs.path(key)


@pytest.mark.parametrize("task", ["", ".", "..", "a/b", "/", "A", "a\n"])
def test_only_a_task_has_keys(blobs: FolderBlobs, task: str) -> None:
    with pytest.raises(ProtocolError, match="invalid task id"):
        blobs.keys(task)
    with pytest.raises(ProtocolError, match="invalid task id"):
        blobs.sweep(task, 1, frozenset())


def test_empty_folders_disappear_with_their_last_blob(blobs: FolderBlobs) -> None:
    blobs.put(KEY, b"")
    blobs.put(f"task/2/x-{HASH}", b"")
    blobs.delete(KEY)
    assert files(blobs) == ["task", "task/2", f"task/2/x-{HASH}"]
    blobs.sweep("task", 3, frozenset())
    assert files(blobs) == []


def test_foreign_files_are_neither_listed_nor_swept(blobs: FolderBlobs) -> None:
    blobs.put(KEY, b"")
    (blobs.root / "task/1/notes.txt").touch()
    (blobs.root / "task/notes.txt").touch()
    (blobs.root / "lost+found").mkdir()
    blobs.sweep("task", 9, frozenset())
    FolderBlobs(blobs.root)
    assert files(blobs) == ["lost+found", "task", "task/1", "task/1/notes.txt", "task/notes.txt"]


def test_what_a_crash_left_is_removed_at_the_next_start(blobs: FolderBlobs) -> None:
    blobs.put(KEY, b"whole")
    for folder in ("task/1", "task/2"):
        (blobs.root / folder).mkdir(exist_ok=True)
        (blobs.root / folder / ".incoming-abc").write_bytes(b"half")
    FolderBlobs(blobs.root)
    assert files(blobs) == ["task", "task/1", KEY]


def test_a_start_spares_what_another_process_is_writing(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write_while_another_starts(handle: int, data: memoryview) -> int:
        FolderBlobs(blobs.root)
        return real(handle, data)

    monkeypatch.setattr(os, "write", write_while_another_starts)
    blobs.put(KEY, b"bytes")
    assert blobs.get(KEY) == b"bytes"
    assert files(blobs) == ["task", "task/1", KEY]


def test_a_put_survives_that_its_file_is_taken_for_a_leftover_before_it_is_locked(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock
    started: list[FolderBlobs] = []

    def lock_too_late(handle: int, how: int) -> None:
        if not started:
            started.append(blobs)
            FolderBlobs(blobs.root)
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    blobs.put(KEY, b"bytes")
    assert blobs.get(KEY) == b"bytes"
    assert files(blobs) == ["task", "task/1", KEY]


def test_a_put_survives_that_its_folder_vanishes(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tempfile.mkstemp
    removed: list[Path] = []

    def make_too_late(*, prefix: str, dir: Path) -> tuple[int, str]:
        if not removed:
            removed.append(dir)
            dir.rmdir()
            dir.parent.rmdir()
        return real(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkstemp", make_too_late)
    blobs.put(KEY, b"bytes")
    assert blobs.get(KEY) == b"bytes"


@pytest.mark.parametrize("place", ["task", "task/1"])
def test_a_file_in_the_place_of_a_folder_is_the_operators_to_mend(
    blobs: FolderBlobs, place: str
) -> None:
    (blobs.root / place).parent.mkdir(exist_ok=True)
    (blobs.root / place).touch()
    with pytest.raises(OperatorError, match="cannot write") as caught:
        blobs.put(KEY, b"bytes")
    assert str(blobs.root) in caught.value.hint
    with pytest.raises(MissingBlob):
        blobs.get(KEY)
    blobs.delete(KEY)
    assert blobs.keys("task") == []


def test_puts_and_deletes_in_one_folder_do_not_disturb_each_other(blobs: FolderBlobs) -> None:
    failed: list[Exception] = []

    def put_and_delete(what: str) -> None:
        key = f"task/1/{what}-{HASH}"
        try:
            for _ in range(20):
                blobs.put(key, b"bytes")
                assert blobs.get(key) == b"bytes"
                blobs.delete(key)
        except Exception as error:
            failed.append(error)

    threads = [Thread(target=put_and_delete, args=(what,)) for what in ("x", "y", "z")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert files(blobs) == []


def test_a_root_that_cannot_be_used_is_the_operators_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError, match="cannot use") as caught:
        FolderBlobs(tmp_path / "file")
    assert "mkdir -p" in caught.value.hint
