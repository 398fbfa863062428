"""`papaya simulate my_task.py --data …` and `papaya sweep`: options reach the runs, files are
what they say, and what contradicts itself is refused before anything runs.
"""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from matplotlib.image import imread
from msgspec import structs

import papaya
from papaya.cli.main import main
from papaya.cli.simulate.task import summary
from papaya.config import AsyncFL, SyncFL
from papaya.errors import OperatorError
from papaya.study.checkpoint import Checkpoints, LearningState
from papaya.study.replay import Judging
from papaya.study.run import RunResult
from papaya.study.workloads.registry import WorkloadSpec

TASK = """
import json
import torch
from torch import nn
from papaya.learning.task import AsyncFL, ClientSGD, Examples, OptimizerConfig, Task

def batch(examples):
    pairs = [json.loads(example) for example in examples]
    return torch.tensor([p["x"] for p in pairs]), torch.tensor([float(p["y"]) for p in pairs])

def loss(module, x, y):
    return nn.functional.binary_cross_entropy_with_logits(module(x)[:, 0], y)

def right(module, x, y):
    return ((module(x)[:, 0] > 0) == (y > 0.5)).float()

task = Task(
    name="signs", model=lambda: nn.Linear(2, 1), loss=loss, batch=batch, metrics={"right": right},
    examples=Examples("pairs"), client=ClientSGD(rate=0.5),
    regime=AsyncFL(aggregation_goal=4), concurrency=12, optimizer=OptimizerConfig(kind="fedavg"),
)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A task file and its data, as arguments."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "signs.py").write_text(TASK)
    rng = np.random.default_rng(5)
    data = {}
    for client in range(12):
        x = rng.normal(size=(15 + 10 * client, 2)).round(3)
        data[f"user-{client}"] = {"x": x.tolist(), "y": (x[:, 0] > 0).astype(int).tolist()}
    counts = [len(pairs["y"]) for pairs in data.values()]
    content = {"users": list(data), "num_samples": counts, "user_data": data}
    (folder / "data.json").write_text(json.dumps(content))
    return [str(folder / "signs.py"), "--data", f"leaf:{folder / 'data.json'}"]


def simulate(own: list[str], output: Path, *more: str) -> int:
    small = ["--population", "1e5", "--updates", "80", "--output", str(output)]
    return main(["simulate", *own, *small, *more])


def test_a_fleet_learns_the_task_and_tells_all_about_it(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(own, tmp_path, "--seed", "3") == 0
    out, err = capsys.readouterr()
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=dict[str, Any])
    learnt = msgspec.convert(report["learning"], RunResult, str_keys=True)
    assert out == summary(learnt) + "\n"
    assert learnt.run.recording_plan.seed == 3
    assert (learnt.updates, learnt.versions, learnt.length) == (80, 20, 3)
    assert learnt.end.all < 0.8 * learnt.start.all
    assert learnt.fleet.mean_staleness is not None  # the warm-up is shorter than even this run
    assert report["fleet"]["from_s"] < report["fleet"]["until_s"] / 2
    assert learnt.judges is not None
    assert f"all, weighted by examples ({learnt.judges.all})" in out
    assert f"99th percentile and above ({learnt.judges.p99})" in out
    assert learnt.judges.all > learnt.judges.p75 > learnt.judges.p99 > 0
    assert report["fleet"]["tasks"][0]["task"] == "signs"
    assert learnt.start.metrics["right"].all < learnt.end.metrics["right"].all <= 1
    assert "perplexity" not in out, "the task does not ask for it"
    assert "best:" not in out
    first, *rest = learnt.curve.points
    worse = structs.replace(first.quality, all=2 * first.quality.all)
    curve = structs.replace(learnt.curve, points=(first, structs.replace(rest[-1], quality=worse)))
    degraded = summary(structs.replace(learnt, curve=curve))
    assert degraded.endswith(f"\nbest: loss {first.quality.all:.4f} at version 0")
    for words in ("right", "99th percentile", "K–S", "update norms", "suggested", "step"):
        assert words in out
    assert "12 clients" in err
    told = {line for line in err.splitlines() if line.startswith(str(tmp_path))}
    assert told == {str(path) for path in tmp_path.iterdir()}, "every file that was written"
    assert imread(tmp_path / "curve.png").ndim == imread(tmp_path / "plot.png").ndim == 3
    with (tmp_path / "curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss_p99"]) for row in rows] == [p.quality.p99 for p in learnt.curve.points]
    right = [point.quality.metrics["right"].p75 for point in learnt.curve.points]
    assert [float(row["right_p75"]) for row in rows] == right


def test_over_rides_reach_the_run(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--goal", "5", "--concurrency", "20", "--client-rate", "0.25", "--format", "json"]
    more = ["--server-rate", "0.125", "--seconds-per-example", "0.5", "--hours", "0.5"]
    assert simulate(own, tmp_path, *options, *more) == 0
    learnt = msgspec.json.decode(capsys.readouterr().out, type=RunResult)
    task, rates = learnt.run.recording_plan.task, learnt.run.rates
    assert (task.regime, task.concurrency) == (AsyncFL(5), 20)
    assert (rates.client.rate, rates.optimizer.rate) == (0.25, 0.125)
    assert learnt.run.recording_plan.hours == 0.5
    assert learnt.run.recording_plan.cluster.population.execution_per_example_s == 0.5


def test_the_regime_can_be_switched(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(own, tmp_path, "--regime", "sync", "--format", "json") == 0
    learnt = msgspec.json.decode(capsys.readouterr().out, type=RunResult)
    assert learnt.run.recording_plan.task.regime == SyncFL(0.3)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["simulate", "--data", "stdlib"], "--data stdlib has an effect only with a task file"),
        (["simulate", "--set", "clip=2"], "--set clip=2 has an effect only with a task file"),
        (
            ["simulate", "--training-processes", "2"],
            "--training-processes 2 has an effect only with",
        ),
        (["simulate", "signs.py", "--tasks", "2"], "--tasks 2 has an effect only without"),
        (["simulate", "signs.py"], "needs data to learn from"),
        (["sweep", "signs.py"], "needs data to learn from"),
        (["sweep", "bigam"], "unknown workload 'bigam': use embedding, bigram or a .py file"),
        (["sweep", "embedding", "--vary", "k=5"], "did you mean K=5?"),
        (["sweep", "embedding", "--vary", "K=1", "--vary", "K=2"], "--vary K is given twice"),
        (["sweep", "embedding", "--vary", "speed=1"], "is not one of concurrency"),
        (["sweep", "embedding", "--vary", "K=a"], "K = 'a': must be a number"),
        (["sweep", "embedding", "--regime", "both"], "'both' is neither async nor sync"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert problem in err
    assert "hint: " in err
    assert list(tmp_path.iterdir()) == []


def test_a_goal_is_of_the_tasks_own_regime(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(own, tmp_path, "--over-selection", "0.1") == 2
    assert "--over-selection is for SyncFL" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "sweep"])
@pytest.mark.parametrize(
    ("change", "tried", "hint"),
    [
        (('p["y"]', 'p["label"]'), "KeyError: 'label' (while trying the first example", 'b\'{"x"'),
        (("Linear(2, 1)", "Linear(3, 1)"), "of client 0 of LEAF", "torch.float32[1, 2]"),
        (('float(p["y"])', 'float("nan")'), "the loss of a fresh module is nan", "log(0)"),
    ],
)
def test_a_task_that_fails_on_the_data_is_refused_before_anything_runs(
    command: str,
    change: tuple[str, str],
    tried: str,
    hint: str,
    own: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(TASK.replace(*change))
    assert main([command, str(path), *own[1:], "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {path}:")
    assert tried in err
    assert hint in err
    assert "recorded" not in err


@pytest.mark.parametrize(
    ("loop", "problem"),
    [
        ("local.steps(1)", ":18: TypeError: 'int' object is not callable"),
        ("return 3", ":17: train returned an object of type int, expected nothing"),
    ],
)
def test_a_training_loop_is_tried_before_anything_runs(
    loop: str, problem: str, own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    own_loop = f"def train(local):\n    {loop}\n\ntask = Task(\n    train=train,"
    path.write_text(TASK.replace("task = Task(", own_loop))
    assert simulate([str(path), *own[1:]], tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert f"error: {path}{problem} (while trying the examples of client 0" in err
    assert not (tmp_path / "out" / "resume").exists()


def test_an_example_that_fails_during_the_run_is_named(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    picky = "[float(p['y'] if p['x'][0] < 1.5 else p['label']) for p in pairs]"
    path.write_text(TASK.replace('[float(p["y"]) for p in pairs]', picky))
    assert simulate([str(path), *own[1:]], tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert f"error: {path}:9: KeyError: 'label' (while trying example " in err
    assert "Traceback" not in err


def test_a_few_clients_are_told_as_what_they_are(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(own, tmp_path, "--updates", "3") == 0
    out, err = capsys.readouterr()
    assert "100 %, 4 of 4 clients trained, 1 version evaluated" in err  # a server update is of K
    assert (
        "warning: the run continues until 4 client updates, because one server update needs "
        "that many" in err
    )
    assert "clip          – (this needs " in out


def test_a_run_that_is_too_short_says_so_and_what_it_ignores(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = ("--set", "stop.versions=3", "--set", "stop.hours=2")
    assert simulate(own, tmp_path, "--hours", "0.002", *stop) == 0
    out, err = capsys.readouterr()
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        "warning: a simulation ignores stop.versions, stop.hours: it ends by updates or hours",
        "warning: the model was not trained: no server update in 0.002 virtual hours; raise hours",
    ]
    assert "staleness –" in out
    assert "staleness 0" not in out
    fleet = msgspec.json.decode((tmp_path / "report.json").read_bytes())["learning"]["fleet"]
    assert fleet["mean_staleness"] is None
    assert main(["simulate", "--rerun", str(tmp_path)]) == 0
    again = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert again == warnings


def test_a_sweep_says_what_it_ignores_and_which_runs_ended_early(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["sweep", *own, "--output", str(tmp_path / "out"), "--vary", "client_rate=0.1,0.2"]
    assert main([*given, "--set", "stop.versions=3", "--hours", "0.002", "--jobs", "1"]) == 0
    err = capsys.readouterr().err
    assert "warning: a simulation ignores stop.versions: it ends by updates or hours" in err
    assert "warning: 2 of 2 runs made no server update and did not train; raise hours" in err


def test_a_run_that_diverges_has_neither_loss_nor_clip(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(own, tmp_path, "--client-rate", "3e38", "--server-rate", "0.5") == 2
    out, err = capsys.readouterr()
    assert "error: the model diverged after version 0, the last one evaluated: " in err
    assert err.endswith("hint: lower --client-rate (3e+38) or --server-rate (0.5)\n")
    assert (tmp_path / "curve.csv").exists()
    assert "  diverged      " in out
    assert "the lines below describe the whole recording" in out
    assert "clip          – (the run diverged" in out
    assert "suggested" not in out
    [judged] = [line for line in out.splitlines() if line.startswith("all, weighted by examples")]
    assert judged.split()[-1] == judged.split()[-3] == "–"


# -- papaya sweep


def sweep(own: list[str], output: Path, *more: str) -> int:
    small = ["--population", "1e5", "--updates", "60", "--evaluations", "3", "--jobs", "1"]
    vary = ["--vary", "K=4,6", "--vary", "client_rate=0.1,0.5"]
    return main(["sweep", *own, *vary, *small, "--output", str(output), *more])


def test_a_sweep_prints_a_table_with_the_best_first_and_resumes(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(own, tmp_path) == 0
    out, err = capsys.readouterr()
    shown, fixed, scale = out.split("\n\n")
    assert fixed.startswith("fixed: regime async, concurrency ")
    assert fixed.endswith(", beta1 0.9, upload_bits 32, until the version that contains update 60")
    assert "K " not in fixed
    assert "client_rate" not in fixed
    assert "over_selection" not in fixed
    header, _, *rows = shown.splitlines()
    assert header.split()[:4] == ["K", "client_rate", "hours", "trips"]
    assert header.split()[4:] == ["loss", "p75", "p99", "right", "utilization", "K–S"]
    losses = [float(row.split()[4]) for row in rows]
    assert losses == sorted(losses)
    assert len(losses) == 4
    assert "warning: the best client_rate, 0.5, is the largest that was tried" in err
    assert imread(tmp_path / "sweep.png").ndim == 3
    assert sweep(own, tmp_path, "--format", "json") == 0
    out, err = capsys.readouterr()
    assert "runs: 100 %, 4 of 4 runs\n" in err
    found = json.loads(out)
    assert [f"{row['loss']:.4f}" for row in found] == [f"{loss:.4f}" for loss in losses]
    assert [f"{row['metrics']['right']:.4f}" for row in found] == [row.split()[7] for row in rows]
    assert_is_of(found[0], scale)
    for row in found:
        [outcome] = row["outcomes"]
        assert row["metrics"] == outcome["metrics"]
        assert row["metrics_spread"] == {"right": None}
        assert (tmp_path / outcome["run"]).exists()
        assert outcome["norms"]["p99"] > 0
        assert outcome["precision"]["clip"] > 0


def test_a_table_over_seeds_says_what_its_spread_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--updates", "30", "--evaluations", "1", "--jobs", "1", "--population", "1e5"]
    few += ["--vary", "K=5", "--vary", "concurrency=20", "--output", str(tmp_path)]
    assert main(["sweep", "embedding", "--seeds", "2", *few]) == 0
    out = capsys.readouterr().out
    assert " ± " in out.splitlines()[2]
    assert out.splitlines()[3] == "means over 2 seeds ± sample standard deviation"
    assert main(["sweep", "embedding", *few]) == 0
    assert "±" not in capsys.readouterr().out, "one seed has no spread"


@pytest.mark.parametrize(
    ("more", "steps", "told"),
    [
        (["--seeds", "5", "--updates", "1000"], "auto", False),
        (["--seeds", "5", "--updates", "999"], "eager", False),
        (["--seeds", "5", "--updates", "1000", "--ray", "local"], "eager", True),
    ],
)
def test_all_runs_of_a_sweep_decide_whether_to_compile(
    more: list[str],
    steps: str,
    told: bool,
    own: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepared(spec: WorkloadSpec, *rest: object) -> NoReturn:
        raise OperatorError(f"steps: {spec.steps}")

    monkeypatch.setattr("papaya.cli.sweep.prepare", prepared)
    assert sweep(own, tmp_path, *more) == 2
    err = capsys.readouterr().err
    assert f"steps: {steps}\n" in err
    assert ("code for this machine and not for a Ray cluster" in err) == told


def assert_is_of(best: dict[str, Any], scale: str) -> None:
    """What people read of the lengths of updates is what programs read of the best setting."""
    head, norms, clip, fixed_point, _ = scale.splitlines()
    [outcome] = best["outcomes"]
    assert head == f"client updates with the best setting ({best['label']}), seed 1:"
    quantiles = outcome["norms"]
    for words, level in (("median", "p50"), ("90 %", "p90"), ("99 %", "p99")):
        assert f"{words} {quantiles[level]:.3g}, " in norms
    assert f"suggested {outcome['precision']['clip']:g}: " in clip
    assert f"the mean is {outcome['precision']['error']:.2g} " in fixed_point


def test_a_setting_that_diverges_has_no_loss_but_a_reason(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--population", "1e5", "--updates", "40", "--jobs", "1", "--output", str(tmp_path)]
    vary = ["--vary", "client_rate=3e38,0.5"]
    assert main(["sweep", *own, *vary, *small]) == 0
    shown = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert shown[-2].split()[0] == "3e+38"
    assert shown[-2].split()[3:6] == ["–", "–", "–"]
    assert shown[-1].startswith("– client_rate 3e+38: diverged after version ")
    assert main(["sweep", *own, *vary, *small, "--format", "json"]) == 0
    best, worst = json.loads(capsys.readouterr().out)
    assert best["loss"] > 0
    assert worst["loss"] is worst["outcomes"][0]["precision"] is None


@pytest.mark.parametrize(
    ("varied", "regime", "hint"),
    [("over_selection=0.1", "async", "add --regime sync"), ("K=4", "sync", "add --regime async")],
)
def test_what_would_vary_nothing_is_refused(
    varied: str, regime: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sweep", "embedding", "--vary", varied, "--regime", regime]
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"applies only to {hint.split()[-1]} runs" in err
    assert f"hint: {hint}" in err


def test_an_interrupted_sweep_says_how_to_go_on(
    own: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("papaya.cli.sweep.sweep", interrupt)
    assert sweep(own, tmp_path) == 130
    assert "run the same command again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "work"),
    [
        (["reproduce", "utilization", "--data", "none"], "papaya.cli.reproduce.reproduce"),
        (["sweep", "embedding", "--vary", "K=5"], "papaya.cli.sweep.sweep"),
    ],
)
def test_sigterm_says_what_is_kept_and_how_to_go_on(
    command: list[str],
    work: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def terminated(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(work, terminated)
    assert main([*command, "--output", str(tmp_path)]) == 143
    *_, kept, last = capsys.readouterr().err.splitlines()
    assert kept == "finished runs are kept: run the same command again to continue"
    assert last == "terminated"
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_example_of_the_documentation_learns(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[3] / "examples" / "leaf.py"
    assert simulate([str(example), *own[1:]], tmp_path, "--format", "json") == 0
    out = capsys.readouterr().out
    learnt = msgspec.json.decode(out, type=RunResult)
    assert learnt.end.all < 0.8 * learnt.start.all
    setting = json.loads(out)["setting"]
    assert setting["K"] == learnt.run.recording_plan.task.aggregation_goal
    assert setting["server_rate"] > 0


def test_who_judges_less_often_has_a_shorter_curve(own: list[str], tmp_path: Path) -> None:
    for evaluations in (2, 5):
        folder = tmp_path / str(evaluations)
        assert simulate(own, folder, "--evaluations", str(evaluations)) == 0
        rows = (folder / "curve.csv").read_text().splitlines()
        assert len(rows) == 1 + 1 + evaluations  # a header, and version 0


def test_a_target_sorts_by_hours(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(own, tmp_path, "--target", "1e-9", "--regime", "async,sync") == 0
    out = capsys.readouterr().out
    assert "hours to target" in out
    assert out.count("not reached") == 6  # K is AsyncFL's alone


def files_of(folder: Path) -> dict[str, bytes]:
    """The numbers of a run, and the model."""
    return {name: (folder / name).read_bytes() for name in NUMBERS}


NUMBERS = ("curve.csv", "clients.csv", "model.safetensors")


def test_the_output_has_the_model_and_a_row_for_each_client(own: list[str], tmp_path: Path) -> None:
    assert simulate(own, tmp_path, "--judges", "5") == 0
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "weight": (1, 2),
        "bias": (1,),
    }
    with (tmp_path / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == [f"user-{number}" for number in range(12)]
    assert sum(int(row["updates"]) for row in rows) == 80
    judged = [row for row in rows if row["loss"]]
    assert len(judged) == 5
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=dict[str, Any])
    learnt = msgspec.convert(report["learning"], RunResult, str_keys=True)
    for column, mean in (("loss", learnt.end), ("right", learnt.end.metrics["right"])):
        values = [float(row[column]) for row in judged]
        weights = [int(row["examples"]) for row in judged]
        assert np.average(values, weights=weights) == pytest.approx(mean.all)
    assert not (tmp_path / "resume").exists()


def test_a_run_is_repeated_from_its_file(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--goal", "5", "--client-rate", "0.25", "--seed", "9", "--device", "dropout=0.3"]
    options += ["--set", "optimizer.rate=0.5", "--set", "client.batch_size=4", "--held-out", "5"]
    assert simulate(own, tmp_path / "one", *options) == 0
    again = ["simulate", "--rerun", str(tmp_path / "one")]
    assert main([*again, "--output", str(tmp_path / "two")]) == 0
    assert f"the same numbers as in {tmp_path / 'one' / 'run.json'}" in capsys.readouterr().err
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    file = msgspec.json.decode((tmp_path / "one" / "run.json").read_bytes())
    assert file["run"]["recording_plan"]["cluster"]["population"]["dropout"] == 0.3
    assert file["workload"]["held_out"] == 5
    rates = file["run"]["rates"]
    assert (rates["optimizer"]["rate"], rates["client"]["batch_size"]) == (0.5, 4)
    assert file["versions"].keys() >= {"papaya", "python", "numpy", "torch"}
    file["result"]["loss"] += 1e-9
    file["versions"]["numpy"] = "1.0"
    (tmp_path / "one" / "run.json").write_bytes(msgspec.json.encode(file))
    assert main(again) == 1
    told = capsys.readouterr().err
    assert f"results go to {tmp_path / 'one' / 'rerun'} (--output)" in told
    assert files_of(tmp_path / "one" / "rerun") == files_of(tmp_path / "two")
    assert "differs from" in told
    assert "was 1.0" in told
    assert main([*again, "--seed", "3"]) == 2, "a repetition has the settings of its file"


def test_a_repetition_needs_the_same_task_and_data(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "task.py"
    task.write_text(TASK)
    assert simulate([str(task), *own[1:]], tmp_path / "one") == 0
    again = ["simulate", "--rerun", str(tmp_path / "one" / "run.json")]
    task.write_text(TASK.replace("rate=0.5", "rate=0.1"))
    capsys.readouterr()
    assert main([*again, "--output", str(tmp_path / "two")]) == 0, "the copy is used"
    assert main([*again[:1], str(task), *again[1:], "--output", str(tmp_path / "two")]) == 2
    assert "was made with another task file\n" in capsys.readouterr().err
    assert main([*again, "--data", "stdlib", "--output", str(tmp_path / "two")]) == 2


def test_device_traces_that_were_moved_are_named_and_compared(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {client: {"computation": 20 * client, "communication": 9000} for client in (1, 2, 3)}
    times = {1: {"active": [0, 70], "inactive": [60, 90], "finish_time": 100}}
    options = []
    for name, content in (("capacity", speeds), ("availability", times)):
        (tmp_path / name).write_text(json.dumps(content))
        options += [f"--{name}-trace", str(tmp_path / name)]
    assert simulate(own, tmp_path / "out", *options) == 0
    elsewhere = [option.replace(str(tmp_path), str(tmp_path / "moved")) for option in options]
    (tmp_path / "moved").mkdir()
    for name in ("capacity", "availability"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    again = ["simulate", "--rerun", str(tmp_path / "out")]
    capsys.readouterr()
    assert main(again) == 2
    assert "hint: say where it is: papaya simulate --capacity-trace FILE" in capsys.readouterr().err
    assert main([*again, *elsewhere]) == 0
    (tmp_path / "moved" / "availability").write_text(json.dumps(times) + " ")
    capsys.readouterr()
    assert main([*again, *elsewhere]) == 2
    assert "the availability_trace " in capsys.readouterr().err
    assert simulate(own, tmp_path / "without") == 0
    assert main(["simulate", "--rerun", str(tmp_path / "without"), *elsewhere[:2]]) == 2
    assert "has no capacity_trace" in capsys.readouterr().err


KILLED = """
import os, signal, sys
from papaya.cli.main import main
from papaya.study.checkpoint import Checkpoints

save, saved = Checkpoints.save_if_due, []

def save_and_die(self, make):
    save(self, make)
    saved.append(self.path)
    if len(saved) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

Checkpoints.save_if_due = save_and_die
main(sys.argv[1:])
"""


def test_a_killed_run_resumes_with_the_same_numbers(
    own: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SIGKILL after the third checkpoint; then the same command, which goes on from there."""
    arguments = [*own, "--updates", "400", "--evaluations", "5", "--population", "1e5"]
    arguments += ["--checkpoint-every", "0", "--output"]
    command = [sys.executable, "-c", KILLED, "simulate", *arguments, str(tmp_path / "killed")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert list((tmp_path / "killed").glob("resume/**/*.checkpoint"))
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    offered: Counter[Path] = Counter()
    save = Checkpoints.save_if_due

    def counted(self: Checkpoints, make: Callable[[], LearningState]) -> None:
        offered[next(p.parent for p in self.path.parents if p.name == "resume")] += 1
        save(self, make)

    monkeypatch.setattr(Checkpoints, "save_if_due", counted)
    for folder, first in (("killed", "2 %, resumes at 8 of 400"), ("whole", "0 %, 0 of 400")):
        assert main(["simulate", *arguments, str(tmp_path / folder)]) == 0
        told = capsys.readouterr().err.splitlines()
        learning = [line for line in told if line.startswith("learning: ")]
        assert learning[0].startswith(f"learning: {first} clients trained")
        assert learning[-1] == "learning: 100 %, 400 of 400 clients trained, 6 versions evaluated"
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    reports = [(tmp_path / folder / "report.json").read_bytes() for folder in ("killed", "whole")]
    assert reports[0] == reports[1]
    assert offered[tmp_path / "whole"] - offered[tmp_path / "killed"] == 3


def test_a_finished_run_keeps_the_checkpoints_of_others_in_its_folder(
    own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one run learns, another one of the same folder begins and ends."""
    save = Checkpoints.save_if_due
    saved: list[Path] = []

    def save_and_run_another(self: Checkpoints, make: Callable[[], LearningState]) -> None:
        save(self, make)
        saved.append(self.path)
        if len(saved) == 1:
            assert simulate(own, tmp_path, "--seed", "2", "--checkpoint-every", "0") == 0
            assert saved[0] != saved[-1]
            assert saved[0].exists()
            assert not saved[-1].exists()

    monkeypatch.setattr(Checkpoints, "save_if_due", save_and_run_another)
    assert simulate(own, tmp_path, "--seed", "1", "--checkpoint-every", "0") == 0
    assert not (tmp_path / "resume").exists()


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_the_saved_task_file_is_the_one_that_ran(
    change: str, own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tmp_path / "signs.py"
    task.write_text(TASK)
    judge = Judging.judge

    def change_and_judge(self: Judging, *values: Any, **named: Any) -> None:
        if change == "edited":
            task.write_text(TASK + "# edited")
        else:
            task.unlink(missing_ok=True)
        judge(self, *values, **named)

    monkeypatch.setattr(Judging, "judge", change_and_judge)
    assert simulate([str(task), *own[1:]], tmp_path / "out") == 0
    assert (tmp_path / "out" / "task.py").read_text() == TASK


@pytest.mark.parametrize(
    ("every_s", "stops_in", "kept"),
    [
        ("0", "evaluate", "the last checkpoint is kept: run the same {} again to continue"),
        ("900", "evaluate", "only the recording of the fleet is kept, there is no checkpoint yet"),
        ("0", "record", "nothing is kept yet: the same {} starts from the beginning"),
    ],
)
def test_an_interrupted_run_says_what_is_kept(
    every_s: str,
    stops_in: str,
    kept: str,
    own: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    judge = Judging.judge

    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    def interrupt_second(self: Judging, *values: Any, **named: Any) -> None:
        calls.append(self)
        if len(calls) > 1:
            interrupt()
        judge(self, *values, **named)

    if stops_in == "record":
        monkeypatch.setattr("papaya.study.simulation.record_plan", interrupt)
    monkeypatch.setattr(Judging, "judge", interrupt_second)
    arguments = ["--evaluations", "2", "--checkpoint-every", every_s]
    assert simulate(own, tmp_path / "command", *arguments) == 130
    *_, told, last = capsys.readouterr().err.splitlines()
    assert told.startswith(kept.format("command"))
    assert last == "interrupted"
    calls.clear()
    task, _, data = own
    with pytest.raises(KeyboardInterrupt):
        papaya.simulate(
            *(task, data), updates=80, evaluations=2, population=100_000, output=tmp_path / "call"
        )
    if every_s == "900" or stops_in == "record":  # by default, checkpoints are half a minute apart
        assert capsys.readouterr().err.splitlines()[-1].startswith(kept.format("call"))


def test_a_table_is_shared_out(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(2)
    rows = [f"{i % 5},{x:.3f},{int(x > 0)}" for i, x in enumerate(rng.normal(size=300))]
    (tmp_path / "rows.csv").write_text("\n".join(["user,x,y", *rows]))
    task = tmp_path / "task.py"
    task.write_text(TASK.replace('p["x"] for', '[p["x"], 1.0] for'))
    table = [str(task), "--data", f"csv:{tmp_path / 'rows.csv'}"]
    for partition, clients in (("column:user", 5), ("dirichlet:clients=9,alpha=0.5", 9)):
        assert simulate([*table, "--partition", partition], tmp_path / "out") == 0
        assert f"{clients} clients" in capsys.readouterr().err
        assert imread(tmp_path / "out" / "clients.png").ndim == 3
    assert simulate(table, tmp_path / "out") == 2
    assert "--partition" in capsys.readouterr().err


def test_labels_are_drawn_from_the_column_of_the_partition(tmp_path: Path) -> None:
    rows = [f"{x:.3f},{int(x > 0)}" for x in np.random.default_rng(2).normal(size=100)]
    (tmp_path / "rows.csv").write_text("\n".join(["x,kind", *rows]))
    task = tmp_path / "task.py"
    task.write_text(TASK.replace('p["x"] for', '[p["x"], 1.0] for').replace('p["y"]', 'p["kind"]'))
    table = [str(task), "--data", f"csv:{tmp_path / 'rows.csv'}", "--partition"]
    assert simulate([*table, "dirichlet:clients=9,label=kind"], tmp_path / "out") == 0
    height, width, _ = imread(tmp_path / "out" / "clients.png").shape
    assert width > 2 * height, "sizes and labels, side by side"
