"""`papaya compare`: one table and one picture of three regimes on the same simulated fleet."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from matplotlib.image import imread

from papaya.cli.main import main
from papaya.sim.report import RunReport


def test_three_regimes_are_compared_in_a_table_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--hours", "0.08", "--output", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    window, _, header, _, *rows = out.splitlines()
    assert window == "minutes 1.2 to 4.8 of virtual time, seed 1"
    assert header.split("  ")[-1].strip() == "trips"
    names = ["AsyncFL", "SyncFL, 30 % over-selection", "SyncFL, no over-selection"]
    assert [row.split("  ")[0] for row in rows] == names
    numbers = [row.split("  ", 1)[1].split() for row in rows]
    assert header.split()[0] == "K"
    assert [row[0] for row in numbers] == ["100", "1,000", "1,300"]
    utilization = [float(row[1]) for row in numbers]
    assert utilization[0] > 95 > utilization[1] + 20 > utilization[2] + 20
    assert imread(tmp_path / "utilization.png").ndim == 3
    assert f"plot:   {tmp_path / 'utilization.png'}" in err


@pytest.mark.parametrize("name", ["utilization.png", "report.json"])
def test_the_table_is_shown_even_when_a_file_finds_no_place(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    assert main(["compare", "--hours", "0.02", "--output", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "SyncFL, no over-selection" in out
    assert f"{name} cannot be written: " in err
    assert "\n\nhint: " in err


def test_it_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--hours", "0.02", "--output", str(tmp_path), "--format", "json"]) == 0
    printed, err = capsys.readouterr()
    assert "warning: SyncFL, no over-selection made no server update in the window" in err
    assert (tmp_path / "report.json").read_text() == printed.rstrip()
    reports = msgspec.json.decode(printed, type=dict[str, RunReport])
    assert [len(report.tasks) for report in reports.values()] == [1, 1, 1]
    assert {report.config_of("task-1").concurrency for report in reports.values()} == {1300}
