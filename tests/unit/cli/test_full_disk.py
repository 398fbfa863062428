"""A disk that fills up under `papaya sweep` and `papaya reproduce`: it is told as what it is, and
what was done before is neither lost nor done again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from msgspec import structs

from papaya.cli.main import main
from papaya.sim.jobs import write_whole
from papaya.study import lab
from papaya.study.experiments import reproduce
from papaya.study.experiments.runs import QUICK, SCALES

ROOT: Final = Path(__file__).resolve().parents[3]
FULL: Final = Path("/dev/full")
TOY = structs.replace(
    QUICK,
    concurrency=20,
    goal=4,
    concurrencies=(10, 20),
    rounds=4,
    large_goal=10,
    table_updates=40,
)
# No file may grow any more: for a program that is what a full disk is.
LIMITED = """import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from papaya.cli.main import main
sys.exit(main(sys.argv[1:]))"""
# 2 traces in two files each, then 4 runs; a plot.
SWEEP = """sweep embedding --population 1e5 --updates 60 --evaluations 3 --jobs 1
    --vary concurrency=20 --vary K=4,6 --vary server_rate=0.01,0.03 --output"""
# 4 traces in two files each; the first result; 8 runs, the second result, the report; plots.
REPRODUCE = "reproduce execution-times sync-scaling --seeds 1 --jobs 1 --output"

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs a disk that is always full")


INF: Final = float("inf")


class Disk:
    """Has room for so many files; then it is as full as /dev/full."""

    def __init__(self, room: float) -> None:
        self.room = room

    def write_whole(self, path: Path, write: Callable[[Path], object]) -> None:
        self.room -= 1
        write_whole(path, write if self.room >= 0 else lambda partly: write(FULL))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(room=INF)
    for module in (lab, reproduce):
        monkeypatch.setattr(module, "write_whole", disk.write_whole)
    monkeypatch.setitem(SCALES, "quick", TOY)
    return disk


def kept(folder: Path) -> dict[Path, int]:
    """Traces and runs, and when they were written."""
    files = [path for path in folder.rglob("*") if path.parent.name in ("traces", "runs")]
    return {path: path.stat().st_mtime_ns for path in files}


def fails(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    status = main([*command.split(), str(folder)])
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if status == 2:
        assert "finished runs are kept" in err or "sweep.png" in err
        assert "error: cannot write " in err
        assert ": No space left on device\n\nhint: free some space there" in err
    return status == 2  # and not 1: of a toy, not every claim holds


@pytest.mark.parametrize(
    ("command", "stages"),
    [
        (SWEEP, [(0, 0), (2, 2), (5, 7), (INF, 8)]),
        (REPRODUCE, [(4, 4), (4, 8), (3, 10), (4, 13), (INF, 16)]),
    ],
    ids=["sweep", "reproduce"],
)
def test_what_has_ended_is_kept_and_the_rest_is_done_when_there_is_room(
    command: str,
    stages: list[tuple[float, int]],
    disk: Disk,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each stage has room for so many files more; then so many traces and runs are there."""
    before: dict[Path, int] = {}
    for room, done in stages:
        disk.room = room
        assert fails(command, tmp_path, capsys) == (room < INF)
        after = kept(tmp_path)
        assert len(after) == done  # and nothing that is half done
        assert before.items() <= after.items()
        before = after


@pytest.mark.parametrize(
    ("command", "plot", "done"),
    [(SWEEP, "sweep.png", 8), (REPRODUCE, "quick/execution-times.png", 8)],
)
def test_a_plot_without_room_costs_no_run(
    command: str,
    plot: str,
    done: int,
    disk: Disk,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / plot
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(FULL)
    assert fails(command, tmp_path, capsys)
    before = kept(tmp_path)
    assert len(before) == done
    path.unlink()
    assert not fails(command, tmp_path, capsys)
    assert before.items() <= kept(tmp_path).items()
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_full_disk_is_told_by_other_processes_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not fails(SWEEP.replace("K=4,6", "K=4"), tmp_path, capsys)
    before = kept(tmp_path)
    arguments = [*SWEEP.replace("--jobs 1", "--jobs 2").split(), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert f"error: cannot write {tmp_path}: File too large\n\nhint: free" in done.stderr
    assert "Traceback" not in done.stderr
    assert kept(tmp_path) == before
