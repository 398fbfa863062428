"""`papaya simulate`: options reach the run, files are what they say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from matplotlib.image import imread

from papaya.cli.main import main
from papaya.config import AsyncFL, SyncFL
from papaya.sim.report import RunReport

SMALL = ["simulate", "--concurrency", "20", "--population", "1e5", "--hours", "0.1"]


def report_of(
    arguments: list[str], output: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[RunReport, str]:
    assert main([*arguments, "--output", str(output), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    return msgspec.json.decode(out, type=RunReport), err


def test_every_option_reaches_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servers = ["--coordinators", "2", "--selectors", "3", "--aggregators", "4"]
    fleet = ["--supply", "3", "--gap", "60", "--seed", "9"]
    arguments = [*SMALL, "--goal", "5", "--tasks", "2", *servers, *fleet]
    report, _ = report_of(arguments, tmp_path, capsys)
    config = report.configuration
    assert (config.coordinators, config.selectors, config.aggregators) == (2, 3, 4)
    assert (config.supply, config.population.size) == (3, 100_000)
    assert (report.seed, report.until_s) == (9, 360)
    assert [task.regime for task in config.tasks] == [AsyncFL(5)] * 2
    assert [task.concurrency for task in config.tasks] == [20, 20]
    assert {task.participation_gap_s for task in config.tasks} == {60}
    assert [result.task for result in report.tasks] == ["task-1", "task-2"]
    assert all(result.versions > 0 for result in report.tasks)


@pytest.mark.parametrize(
    ("arguments", "regime", "goal"),
    [
        (["--regime", "sync"], SyncFL(0.3), 15),
        (["--regime", "sync", "--over-selection", "0"], SyncFL(0.0), 20),
        ([], AsyncFL(), 2),
    ],
)
def test_the_regime_is_one_option(
    arguments: list[str],
    regime: AsyncFL | SyncFL,
    goal: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, _ = report_of([*SMALL, *arguments], tmp_path, capsys)
    task = report.configuration.tasks[0]
    assert (task.regime, task.aggregation_goal) == (regime, goal)
    assert report.tasks[0].counted == goal * report.tasks[0].versions


def test_text_goes_to_stdout_and_files_to_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--output", str(tmp_path / "new" / "run")]) == 0
    out, err = capsys.readouterr()
    report = msgspec.json.decode((tmp_path / "new/run/report.json").read_bytes(), type=RunReport)
    assert out == report.summary() + "\n"
    assert imread(tmp_path / "new/run/plot.png").ndim == 3
    assert "100 %" in err


def test_an_unwise_configuration_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = report_of([*SMALL, "--gap", "0"], tmp_path, capsys)
    assert "warning: participation_gap_s = 0" in err
    _, err = report_of(SMALL, tmp_path, capsys)
    assert "warning" not in err


def test_a_folder_that_cannot_be_made_is_the_operators_to_mend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main([*SMALL, "--output", str(tmp_path / "file" / "run")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "hint: " in err
    assert "100 %" not in err  # told before the run, not after it
