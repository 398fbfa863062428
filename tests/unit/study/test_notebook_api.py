"""`papaya.simulate` and `papaya.sweep`: what they take, what they give, and what they refuse."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from msgspec import structs

import papaya
from papaya.cli.main import main
from papaya.config import StopRule, Weighting
from papaya.errors import ConfigError, OperatorError, PapayaError
from papaya.learning.task import Task, load_task
from papaya.study import notebook, simulation
from papaya.study.checkpoint import Checkpoints
from papaya.study.data.opening import save_source
from papaya.study.data.source import Memory
from papaya.study.replay import Judging
from papaya.study.workloads.registry import WorkloadSpec

EXAMPLE = "examples/leaf.py"
SMALL: dict[str, Any] = {"updates": 60, "evaluations": 3, "population": 10_000, "progress": False}


def some_clients(count: int = 12) -> list[list[bytes]]:
    rng = np.random.default_rng(3)
    return [
        [
            json.dumps({"x": x, "y": int(x[0] > 0)}).encode()
            for x in rng.normal(size=(25, 2)).tolist()
        ]
        for _ in range(count)
    ]


def test_the_package_is_light() -> None:
    code = "import sys, papaya; assert not {'numpy', 'torch', 'msgspec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lists_mappings_and_sources_are_the_same_data() -> None:
    clients = some_clients()
    named = {f"c{number}": own for number, own in enumerate(clients)}
    runs = [
        papaya.simulate(EXAMPLE, given, **SMALL) for given in (clients, named, Memory("m", clients))
    ]
    assert len({run.result.run.data for run in runs}) == 1
    for run in runs[1:]:
        assert run.history.equals(runs[0].history)
    assert runs[1].clients["client"].tolist() == list(named)
    first = runs[0]
    assert list(first.history["updates"]) == [0, 20, 40, 60]
    assert first.model["weight"].shape == (1, 2)
    assert "60 client updates" in repr(first)
    assert first.clients["updates"].sum() == 60


def test_notebooks_choose_the_steps_of_long_runs_as_commands_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Prepared(Exception):
        pass

    def prepared(spec: WorkloadSpec, *rest: object) -> None:
        raise Prepared(spec.steps)

    monkeypatch.setattr(notebook, "with_source", prepared)
    for updates, steps in ((20_000, "auto"), (19_999, "eager")):
        given = SMALL | {"updates": updates}
        with pytest.raises(Prepared, match=f"^{steps}$"):
            papaya.simulate(EXAMPLE, some_clients(), **given)
        del given["evaluations"]
        with pytest.raises(Prepared, match=f"^{steps}$"):
            papaya.sweep(EXAMPLE, some_clients(), vary={"client_rate": (0.1,)}, **given)
    for seeds, steps in ((10, "auto"), (9, "eager")):
        given = SMALL | {"updates": 1000, "seeds": seeds}
        with pytest.raises(Prepared, match=f"^{steps}$"):
            papaya.sweep(EXAMPLE, some_clients(), vary={"client_rate": (0.1, 0.2)}, **given)


def test_a_task_of_a_notebook_gives_the_numbers_of_its_file(tmp_path: Path) -> None:
    task = load_task(Path(EXAMPLE)).task
    clients = some_clients()
    from_file = papaya.simulate(EXAMPLE, clients, goal=4, client_rate=0.2, seed=5, **SMALL)
    inline = papaya.simulate(
        task, clients, goal=4, client_rate=0.2, seed=5, output=tmp_path, **SMALL
    )
    assert inline.history.equals(from_file.history)
    assert main(["simulate", "--rerun", str(tmp_path / "run.json")]) == 2, "it has no file"
    with pytest.raises(OperatorError, match="defined in a notebook"):
        papaya.simulate(task, clients, processes=2, **SMALL)
    with pytest.raises(OperatorError, match="defined in a notebook"):
        papaya.sweep(task, clients, vary={"K": (2, 3)}, jobs=2, **SMALL)


def test_an_interrupted_run_of_a_task_of_a_notebook_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task, clients = load_task(Path(EXAMPLE)).task, some_clients()
    whole = papaya.simulate(task, clients, **SMALL)
    judge, judged, until = Judging.judge, list[int](), 3

    def interrupt(self: Judging, *values: Any, version: int, **named: Any) -> None:
        if len(judged) == until:
            raise KeyboardInterrupt
        judged.append(version)
        judge(self, *values, version=version, **named)

    monkeypatch.setattr(Judging, "judge", interrupt)
    monkeypatch.setattr(simulation, "Checkpoints", lambda path, every_s: Checkpoints(path, 0.0))
    with pytest.raises(KeyboardInterrupt):
        papaya.simulate(task, clients, output=tmp_path, **SMALL)
    assert "the last checkpoint is kept: run the same call again" in capsys.readouterr().err
    judged, until = [], 100
    resumed = papaya.simulate(task, clients, output=tmp_path, **SMALL)
    assert len(judged) == 1, "those before are in the checkpoint"
    assert resumed.history.equals(whole.history)
    assert not (tmp_path / "resume").exists()


def test_a_task_that_cannot_be_compared_leaves_nothing_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load_task(Path(EXAMPLE)).task

    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Judging, "judge", interrupt)
    with (tmp_path / "notes").open("w") as notes:
        noting = structs.replace(task, loss=lambda *given: (notes.closed, task.loss(*given))[1])
        with pytest.raises(KeyboardInterrupt):
            papaya.simulate(noting, some_clients(), output=tmp_path / "out", **SMALL)
    assert not (tmp_path / "out").exists()


def test_texts_need_a_task_file() -> None:
    task = load_task(Path(EXAMPLE)).task
    for data in ("stdlib", "text:examples"):
        with pytest.raises(OperatorError, match="texts need a task file") as refused:
            papaya.simulate(task, data, **SMALL)
        assert "write the task to a file" in refused.value.hint


def test_equal_weights_leave_more_precision() -> None:
    task = load_task(Path(EXAMPLE)).task
    found = {}
    for kind in ("examples", "equal"):
        weighted = structs.replace(task, weighting=Weighting(kind))
        found[kind] = papaya.simulate(weighted, some_clients(), goal=3, **SMALL).result.precision
    assert found["equal"] is not None
    assert found["examples"] is not None
    steps = {kind: one.error / one.step for kind, one in found.items() if one is not None}
    assert steps["equal"] == pytest.approx(1 / math.sqrt(12 * 3))
    assert steps["equal"] < steps["examples"]


def test_a_run_is_kept_if_pandas_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = papaya.simulate(EXAMPLE, some_clients(), **SMALL)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pandas", None)
        with pytest.raises(OperatorError, match="needs pandas") as refused:
            _ = run.history
        with pytest.warns(UserWarning, match="pandas is not installed"):
            papaya.simulate(EXAMPLE, some_clients(), **SMALL)
        with pytest.warns(UserWarning, match="pandas is not installed"):
            papaya.sweep(EXAMPLE, some_clients(), vary={"K": (4,)}, **SMALL)
    (folder,) = tmp_path.glob("papaya-*")
    assert str(refused.value).endswith(f"the results are in {folder}")
    assert ".venv/bin/pip install 'papaya-fl[data]'" in refused.value.hint
    assert len((folder / "curve.csv").read_text().splitlines()) == 1 + len(run.history)
    assert (folder / "model.safetensors").exists()


def test_a_run_of_clients_in_memory_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    papaya.simulate(EXAMPLE, some_clients(), output=tmp_path / "one", **SMALL)
    again = ["simulate", "--rerun", str(tmp_path / "one" / "run.json")]
    assert main([*again, "--output", str(tmp_path / "two")]) == 0
    assert "the same numbers" in capsys.readouterr().err


@pytest.mark.parametrize("at_the_old_place", ["nothing", "other clients"])
def test_a_run_of_clients_in_memory_can_be_repeated_from_a_moved_folder(
    at_the_old_place: str, tmp_path: Path
) -> None:
    papaya.simulate(EXAMPLE, some_clients(), output=tmp_path / "one", **SMALL)
    (tmp_path / "one").rename(tmp_path / "two")
    if at_the_old_place == "other clients":
        (tmp_path / "one").mkdir()
        save_source(Memory("others", some_clients(5)), tmp_path / "one" / "clients.data")
    assert main(["simulate", "--rerun", str(tmp_path / "two")]) == 0


def test_more_examples_of_a_client_are_held_out_on_request(tmp_path: Path) -> None:
    """The last version is judged on `held_out` validation examples of a client, or on all."""
    one = [example for own in some_clients(30) for example in own]
    runs = {
        held_out: papaya.simulate(EXAMPLE, [one], held_out=held_out, **SMALL)
        for held_out in (32, 50, 10**6)
    }
    examples = Memory("one", [one]).held_out(0)
    assert len(examples) > 50
    task = load_task(Path(EXAMPLE)).task
    assert callable(task.batch)
    model = task.model()
    model.load_state_dict(runs[32].model)
    # A client trains on fewer examples than it is judged on.
    few = structs.replace(task, client=structs.replace(task.client, max_examples=5))
    limited = papaya.simulate(few, [one], held_out=50, **SMALL)
    trained = task.model()
    trained.load_state_dict(limited.model)
    loss = task.loss(trained, *task.batch(examples[:50])).item()
    assert limited.loss == pytest.approx(loss, rel=1e-5)
    for held_out, run in runs.items():
        assert all(tensor.equal(run.model[name]) for name, tensor in runs[32].model.items())
        loss = task.loss(model, *task.batch(examples[:held_out])).item()
        assert run.loss == pytest.approx(loss, rel=1e-5)
    default = papaya.simulate(EXAMPLE, [one], **SMALL)
    assert default.result.run.digest == runs[32].result.run.digest
    assert len({run.result.run.digest for run in runs.values()}) == 3
    runs[50].save(tmp_path)
    assert main(["simulate", "--rerun", str(tmp_path)]) == 0


def test_a_run_that_does_less_than_asked_warns() -> None:
    task = structs.replace(load_task(Path(EXAMPLE)).task, stop=StopRule(versions=3))
    with warnings.catch_warnings(record=True, action="always") as caught:
        run = papaya.simulate(task, some_clients(), hours=0.03, **SMALL)
    counted = run.result.updates
    assert [str(each.message) for each in caught] == [
        "a simulation ignores stop.versions: it ends by updates or hours",
        f"the run ended after 0.03 virtual hours, with {counted} of 60 client updates; raise hours",
    ]
    assert 0 < counted < 60
    assert {each.filename for each in caught} == {__file__}
    with warnings.catch_warnings(record=True, action="always") as caught:
        papaya.sweep(task, some_clients(), vary={"K": (4,)}, hours=0.001, **SMALL)
    assert [str(each.message) for each in caught] == [
        "a simulation ignores stop.versions: it ends by updates or hours",
        "1 of 1 run made no server update and did not train; raise hours",
    ]
    assert {each.filename for each in caught} == {__file__}


def test_a_target_that_the_initial_model_meets_is_named() -> None:
    with pytest.warns(UserWarning, match="the initial model meets the target in 1 of 1 run"):
        papaya.sweep(EXAMPLE, some_clients(), vary={"K": (4,)}, target=10.0, **SMALL)


def test_runs_with_too_few_server_updates_for_their_target_are_named() -> None:
    """K = 30 makes two of the three server updates that show that a target is kept."""
    with pytest.warns(UserWarning, match="1 of 2 runs made fewer than 3 server updates"):
        papaya.sweep(EXAMPLE, some_clients(), vary={"K": (4, 30)}, target=1e-6, **SMALL)


def test_a_run_of_hours_has_no_other_limit() -> None:
    """The default number of updates is for runs that are given neither updates nor hours."""
    clients = some_clients()
    rest = {name: value for name, value in SMALL.items() if name != "updates"}
    with warnings.catch_warnings(action="error"):
        run = papaya.simulate(EXAMPLE, clients, hours=0.03, **rest)
        papaya.sweep(EXAMPLE, clients, vary={"K": (4,)}, hours=0.03, **rest)
    assert 0 < run.result.updates < 5000
    assert run.result.run.updates > 10**9


def test_a_sweep_has_a_row_for_each_setting(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"vary": {"K": (3, 6), "client_rate": (0.1, 0.5)}, **SMALL}
    found = papaya.sweep(EXAMPLE, some_clients(), seeds=1, output=tmp_path, **settings)
    assert len(found.table) == len(found.outcomes) == 4
    assert set(zip(found.table["K"], found.table["client_rate"], strict=True)) == {
        (3, 0.1), (3, 0.5), (6, 0.1), (6, 0.5),
    }  # fmt: skip
    assert found.table["loss"].is_monotonic_increasing
    assert list(found.table)[:4] == ["K", "client_rate", "loss", "regime"], "varied, then the rest"
    assert found.table.columns.is_unique
    assert len(list((tmp_path / "runs").glob("*.json"))) == 4


def test_a_sweep_has_the_means_of_the_metrics(tmp_path: Path) -> None:
    task = load_task(Path(EXAMPLE)).task

    def right(module: Any, inputs: Any, kinds: Any) -> Any:
        return ((module(inputs)[:, 0] > 0) == (kinds > 0.5)).float()

    task = structs.replace(task, metrics={"right": right})
    rates = {"client_rate": (0.1, 1e38)}
    found = papaya.sweep(task, some_clients(), vary=rates, seeds=2, **SMALL)
    ends = [outcome.end.metrics["right"].all for outcome in found.outcomes[:2]]
    table = found.table[["metrics.right", "metrics_spread.right"]]
    assert table.loc[0].tolist() == pytest.approx([np.mean(ends), np.std(ends, ddof=1)])
    assert table.loc[1].isna().all(), "it diverged"


@pytest.mark.parametrize("values", [5, "sgd", [[0.1]], (0.1, None)])
def test_values_that_cannot_be_varied_are_refused_at_once(values: Any) -> None:
    message = "must be a list of numbers or names"
    with pytest.raises(ConfigError, match=message) as refused:
        papaya.sweep(EXAMPLE, vary={"client_rate": values})
    assert 'vary={"client_rate": (1, 2)}' in refused.value.hint


def test_numbers_of_numpy_can_be_varied() -> None:
    found = papaya.sweep(EXAMPLE, some_clients(), vary={"K": np.array([2, 4])}, **SMALL)
    assert found.table["K"].tolist() == [2, 4]


def test_a_setting_that_diverged_has_no_loss_in_the_table() -> None:
    found = papaya.sweep(EXAMPLE, some_clients(), vary={"client_rate": (1e38, 0.1)}, **SMALL)
    assert found.table["diverged"].tolist() == [0, 1]
    losses = found.table[["loss", "p75", "p99"]]
    assert losses.loc[0].notna().all()
    assert losses.loc[1].isna().all()
    assert found.table["loss_spread"].isna().all(), "one seed has no spread"


def test_progress_describes_the_task_and_its_data_once(capsys: pytest.CaptureFixture[str]) -> None:
    clients = [*some_clients(), []]
    for progress in (True, False):
        given = SMALL | {"progress": progress}
        papaya.simulate(EXAMPLE, clients, **given)
        simulated = capsys.readouterr()
        papaya.sweep(EXAMPLE, clients, vary={"K": (4,)}, **given)
        for shown in (simulated, capsys.readouterr()):
            described = [line for line in shown.err.splitlines() if "parameters; " in line]
            assert len(described) == progress
            assert all("eager steps" in line and "12 clients" in line for line in described)
            assert not shown.out


def test_a_sweep_of_epochs_says_that_they_take_no_time() -> None:
    """All settings are learnt along one recording, with its times."""
    with pytest.warns(UserWarning, match=r"varies client\.epochs, .* compare losses and trips"):
        found = papaya.sweep(EXAMPLE, some_clients(), vary={"client.epochs": (1, 3)}, **SMALL)
    assert len(set(found.table["hours"])) == 1


def test_a_sweep_does_not_take_results_of_another_task_of_a_notebook(tmp_path: Path) -> None:
    """The functions have the same source; only a value that they use differs."""
    task = load_task(Path(EXAMPLE)).task

    def scaled(factor: float) -> Task:
        return structs.replace(task, loss=lambda *given: factor * task.loss(*given))

    settings: dict[str, Any] = {"vary": {"client_rate": (0.1,)}, "output": tmp_path, **SMALL}
    one, two, again = (
        papaya.sweep(scaled(factor), some_clients(), **settings).outcomes[0].start.all
        for factor in (1.0, 2.0, 1.0)
    )
    assert two == pytest.approx(2 * one)
    assert again == one
    assert len(list((tmp_path / "runs").glob("*.json"))) == 2, "equal tasks share their results"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"clients": None}, "needs data"),
        ({"clients": 100}, "clients=100 is not data"),
        ({"clients": [{"x": 1}]}, "which example belongs to which client"),
        ({"clients": [[b"1"]], "partition": "column:user"}, "pair or a mapping"),
        ({"clients": some_clients(), "regime": "sync", "goal": 3}, "only with the regime async"),
        ({"clients": some_clients(), "goal": 2.5}, "goal = 2.5: must be a whole number"),
        ({"clients": some_clients(), "concurrency": 9.5}, "concurrency = 9.5: must be a whole"),
        ({"clients": some_clients(), "task": "embedding"}, "embedding has its own data"),
        ({"partition": "column:user", "task": "bigram"}, "bigram has its own data"),
        ({"judges": 3, "task": "embedding"}, "judges = 3: has no effect on embedding"),
        ({"held_out": 3, "task": "embedding"}, "held_out = 3: has no effect on embedding"),
        ({"clients": some_clients(), "held_out": 0}, "held_out = 0: "),
        ({"steps": "compiled", "task": "embedding"}, "steps = 'compiled': has no effect on"),
        ({"seconds_per_example": 2.0, "task": "embedding"}, "has no effect on embedding"),
        ({"clients": [["{}"]]}, "an example of type str: '{}'; examples are bytes"),
        ({"clients": {"a": [b"1", {"x": 1}]}}, "an example of type dict"),
        ({"clients": [[]]}, "clients contains no examples"),
        ({"clients": [[b"{}", b"{}"]]}, "all examples of the 1 client are held out"),
        ({"clients": some_clients(), "updates": "50"}, "updates = '50': must be a number"),
        ({"clients": some_clients(), "hours": "two"}, "hours = 'two': must be a number"),
        ({"clients": some_clients(), "regime": "SyncFL"}, "regime = 'SyncFL': is not one of"),
        ({"clients": some_clients(), "steps": "fast"}, "steps = 'fast': is not one of"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(PapayaError, match=problem):
        papaya.simulate(**{"task": EXAMPLE, **SMALL, **given})
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        papaya.simulat  # noqa: B018
