"""Real processes on one store: killed in mid-write, racing each other, out of space."""

from __future__ import annotations

from pathlib import Path

import pytest

from papaya.messages.storage import EpochRow, VersionRow
from papaya.store.blobs import FolderBlobs
from papaya.store.state import SqliteState
from tests.unit.store import children


def test_what_was_acknowledged_before_a_kill_is_there_whole(tmp_path: Path) -> None:
    for lines in (1, 7, 20, 3):
        child = children.start("write", tmp_path)
        assert child.stdout is not None
        heard = [child.stdout.readline() for _ in range(lines)]
        child.kill()
        heard += child.communicate()[0].splitlines()
        assert_whole(tmp_path, acknowledged=int(heard[-1]))


def assert_whole(folder: Path, acknowledged: int) -> None:
    state, blobs = SqliteState(folder / "state.sqlite"), FolderBlobs(folder / "blobs")
    rows = state.read(("",))
    state.close()
    count = rows.pop("count")
    assert isinstance(count, EpochRow)
    assert acknowledged <= count.epoch <= acknowledged + 1
    assert len(rows) == count.epoch  # the version and the count of one transaction: both or none
    for version, row in enumerate(rows.values()):
        assert isinstance(row, VersionRow)
        assert blobs.get(row.parameters) == children.content(version)
    names = [path.name for path in (folder / "blobs").rglob("*") if path.is_file()]
    assert [name for name in names if name.startswith(".")] == []


def test_processes_that_race_on_one_row_lose_no_increment(tmp_path: Path) -> None:
    """Three processes make the file at once, then compare and set."""
    racing = [children.start("count", tmp_path, "30") for _ in range(3)]
    for child in racing:
        child.communicate()
        assert child.returncode == 0
    state = SqliteState(tmp_path / "state.sqlite")
    assert state.read(("",)) == {"count": EpochRow(90)}
    state.close()


def test_without_space_nothing_is_half_written_and_the_errors_say_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limit = 200_000
    child = children.start("fill", tmp_path, str(limit))
    said, _ = child.communicate()
    outcomes, rows, refusal, left = said.splitlines()
    assert child.returncode == 0
    assert outcomes == "committed unknown"
    assert rows == "small"
    assert refusal.startswith(f"no space for the {2 * limit} bytes of blob task/1/version-0")
    assert left == "[] []"
    complaint = capfd.readouterr().err
    assert "could not be written" in complaint
    assert "hint: check the disk of" in complaint
