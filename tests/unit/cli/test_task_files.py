"""`papaya task submit`, `export` and `metrics`: what goes in from files and comes out into them."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.numpy import load_file
from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]

from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import TaskManifest
from papaya.cli.admin_client import TOKEN_VARIABLE
from papaya.cli.owner import create_key
from papaya.cli.task.signing import run_of
from papaya.cli.task.submit import refusals
from papaya.config import (
    AsyncFL,
    EvaluationPlan,
    MetricBounds,
    MetricTarget,
    SecureAggregation,
    StopRule,
    TaskConfig,
)
from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.evaluation import EvaluationResult, Share
from papaya.learning.executorch.program_file import EXECUTORCH_VERSION, read_program
from papaya.learning.executorch.shim import cache_folder
from papaya.learning.settings import changed
from papaya.messages.storage import PointRow, Transaction, VersionRow, point_key, version_key
from papaya.server.admin import bundles
from tests.unit.cli.admin_server import TOKEN, AdminServer, admin_server, papaya
from tests.unit.learning.executorch.small_program import SOURCE as SUMS
from tests.unit.server.admin.builders import TASK

TASK_FILE = """
import torch
from torch import nn
from papaya.learning.task import AsyncFL, ClientSGD, Examples, Task

task = Task(
    name="tiny",
    model=lambda: nn.Linear(2, 1),
    batch=lambda examples: (torch.zeros(len(examples), 2),),
    loss=lambda module, x: module(x).square().mean(),
    examples=Examples("numbers"),
    client=ClientSGD(rate=0.1),
    concurrency=4,
    participation_gap_s=0.0,
)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdminServer]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with admin_server(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where programs are cached, so that the tests of this file compile once. The runtime that runs
    them is the one of other tests.
    """
    shims = cache_folder() / "shim"
    shims.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        cache_folder().mkdir()
        (cache_folder() / "shim").symlink_to(shims)
        yield cache_folder() / "programs"


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.py"
    file.write_text(TASK_FILE)
    return file


def run(server: AdminServer, *arguments: str | Path) -> int:
    return papaya(*map(str, arguments), "--admin", server.url)


def as_owner(server: AdminServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key of an owner whose clock is that of the server."""
    clock = SimpleNamespace(time=server.system.service.now)
    monkeypatch.setattr("papaya.cli.task.signing.time", clock)
    create_key(folder / "owner.key")
    return folder / "owner.key"


def test_a_file_becomes_a_task_and_its_model_comes_back_by_name(
    server: AdminServer, task_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--name", "mine", "--seed", "7", "--set", "concurrency=9")
    assert run(server, "task", "submit", task_file, *settings) == 0
    out, err = capsys.readouterr()
    assert out == "mine is running: 9 clients at a time\n"
    assert "warning: participation_gap_s = 0" in err
    assert "warning: the file names its task tiny" in err
    assert "--alias mine=tiny" in err
    assert f"papaya task watch --admin {server.url} mine" in err
    config = server.call(server.system.service.task("mine")).config
    assert (config.concurrency, config.model_length) == (9, 3)
    assert (config.requirements.module or "").startswith("sha256:")

    exported = tmp_path / "model.safetensors"
    assert run(server, "task", "export", "mine", "--output", exported) == 0
    assert "version 0 of mine, 3 parameters" in capsys.readouterr().out
    tensors = load_file(exported)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "weight": (1, 2),
        "bias": (1,),
    }
    pickled = tmp_path / "model.pt"
    assert run(server, "task", "export", "mine", "--version", "0", "--output", pickled) == 0
    module = torch.nn.Linear(2, 1)
    module.load_state_dict(torch.load(pickled, weights_only=True))
    assert np.array_equal(module.weight.detach().numpy(), tensors["weight"])

    # And in again: a new task starts where the old one was.
    again = ("--name", "again", "--checkpoint", exported)
    assert run(server, "task", "submit", task_file, *again) == 0
    capsys.readouterr()
    second = tmp_path / "again.safetensors"
    assert run(server, "task", "export", "again", "--output", second) == 0
    assert np.array_equal(load_file(second)["weight"], tensors["weight"])


def test_a_task_is_submitted_for_devices_with_its_program(
    server: AdminServer,
    compiled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, program = tmp_path / "sums.py", tmp_path / "sums.program"
    file.write_text(SUMS)
    assert papaya("task", "compile", str(file)) == 0
    name = read_program(program).name
    assert capsys.readouterr().out.endswith(f"{name}\n")
    assert run(server, "task", "submit", file, "--program", program) == 0
    needs = server.call(server.system.service.task("sums")).config.requirements
    assert (needs.engine, needs.module) == ("executorch", name)

    key = as_owner(server, tmp_path, monkeypatch)
    signed = ("--engine", "executorch", "--owner", key, "--name", "signed")
    assert run(server, "task", "submit", file, *signed) == 0
    assert "collection numbers and engine executorch" in capsys.readouterr().err
    needs = server.call(server.system.service.task("signed")).config.requirements
    assert (needs.engine, needs.engine_version) == ("executorch", EXECUTORCH_VERSION)
    assert needs.module is None
    assert len(list(compiled.iterdir())) == 1, "compiled once"
    with pytest.raises(OperatorError, match="reaches only devices that have its program"):
        run(server, "task", "submit", file, "--engine", "executorch", "--unsigned")

    file.write_text(SUMS + "\n# changed\n")
    with pytest.raises(OperatorError, match="the program was compiled from sha256:"):
        run(server, "task", "submit", file, "--program", program)


def test_settings_of_the_client_are_signed_and_shown(
    server: AdminServer,
    task_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = as_owner(server, tmp_path, monkeypatch)
    settings = ("--set", "client.rate=0.05", "--set", "client.epochs=2", "--set", "concurrency=9")
    submit = ("--engine", "torch", "--owner", key, *settings)
    assert run(server, "task", "submit", task_file, *submit) == 0
    head = server.call(bundles.newest(server.system.service, "tiny")).bundle
    manifest = TaskManifest.verify(BundleHead.decode(head).manifest)
    assert (
        f"id of this run in lists, logs and metrics: {run_of(manifest)}" in capsys.readouterr().err
    )
    assert manifest.client == ClientSGD(rate=0.05, epochs=2)
    config = server.call(server.system.service.task("tiny")).config
    assert (config.concurrency, config.max_examples) == (9, manifest.client.max_examples)

    capsys.readouterr()
    assert run(server, "task", "show", "tiny") == 0
    out, err = capsys.readouterr()
    line = next(x for x in out.splitlines() if x.startswith("client"))
    assert "SGD, rate 0.05, 2 epochs, batches of" in line
    assert "participation_gap_s" not in err, "its owner was warned at submission"

    assert run(server, "task", "diff", task_file, *settings) == 0
    out, err = capsys.readouterr()
    assert (out, "no changes" in err) == ("", True)
    assert run(server, "task", "diff", task_file, *settings[2:]) == 0
    assert capsys.readouterr().out == "client.rate: 0.05 → 0.1\n"

    adam = ("--set", "client.optimizer=adam", "--set", "client.schedule=cosine")
    assert run(server, "task", "diff", task_file, *settings, *adam) == 0
    shown = capsys.readouterr().out.splitlines()
    assert 'client.optimizer: nothing → "adam"' in shown
    assert 'client.schedule.type: nothing → "cosine"' in shown
    update = ("--owner", key, *adam, "--set", "client.proximal=0.1")
    assert run(server, "task", "update", "tiny", *update, "--set", "durability=step") == 0
    [warning] = [x for x in capsys.readouterr().err.splitlines() if "warning" in x]
    assert "durability = 'step'" in warning, "no warning about settings that stay as they are"
    assert run(server, "task", "show", "tiny") == 0
    shown = capsys.readouterr().out.splitlines()
    line = next(each for each in shown if each.startswith("client"))
    assert "Adam, rate 0.05, beta1 0.9, beta2 0.999, epsilon 1e-08, proximal term 0.1" in line
    assert "cosine schedule (warmup_steps 0, end 0), 2 epochs" in line


@pytest.mark.usefixtures("compiled")
def test_diff_compares_with_the_engine_that_was_asked_for(
    server: AdminServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, key = tmp_path / "sums.py", as_owner(server, tmp_path, monkeypatch)
    file.write_text(SUMS)
    assert run(server, "task", "submit", file, "--engine", "torch", "--owner", key) == 0
    capsys.readouterr()

    def changes(*arguments: str) -> dict[str, tuple[object, object]]:
        assert run(server, "task", "diff", file, "--format", "json", *arguments) == 0
        found = msgspec.json.decode(capsys.readouterr().out)
        return {each["field"]: (each["before"], each["after"]) for each in found}

    assert changes() == changes("--engine", "torch") == {}
    other = changes("--engine", "executorch")
    assert other["engine"] == ("torch", "executorch")
    assert other["engine_version"][1] == EXECUTORCH_VERSION
    assert "program.sha256" in other
    assert not any(field.startswith("client") for field in other)


def test_a_file_that_is_not_python_is_refused_before_it_is_run(
    server: AdminServer, tmp_path: Path
) -> None:
    policy = tmp_path / "trust.toml"
    policy.write_text("allow_smt = true\n")
    with pytest.raises(
        OperatorError, match=r"trust\.toml: a task file is a Python file"
    ) as refused:
        run(server, "task", "submit", policy)
    assert refused.value.hint == "give the file that defines `task`, or a folder with a task.py"


def test_a_name_that_is_taken_is_told(server: AdminServer, task_file: Path) -> None:
    assert run(server, "task", "submit", task_file) == 0
    with pytest.raises(OperatorError, match="task tiny exists already") as error:
        run(server, "task", "submit", task_file)
    assert "--name" in error.value.hint


def test_secure_aggregation_is_one_setting(server: AdminServer, task_file: Path) -> None:
    settings = ("--set", "secure_aggregation={}", "--set", "clip=1.0")
    assert run(server, "task", "submit", task_file, *settings) == 0
    [view] = server.call(server.system.service.tasks())
    assert view.task == "tiny"


def test_the_loop_of_a_task_is_tried_before_it_is_submitted(
    server: AdminServer, task_file: Path
) -> None:
    broken = 'sample=[b"1"],\n    train=lambda local: local.missing,\n    concurrency=4'
    task_file.write_text(TASK_FILE.replace("concurrency=4", broken))
    with pytest.raises(OperatorError, match=r"attribute 'missing' \(while trying `sample`: train"):
        run(server, "task", "submit", task_file)


def test_a_private_task_with_personal_tensors_names_the_window_that_devices_need(
    server: AdminServer, task_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = [
        *("privacy.clip=1", "privacy.max_participations=3", "privacy.noise_multiplier=4"),
        *("privacy.delta=1e-6", "regime.aggregation_goal=16", "regime.max_staleness=9"),
        *("concurrency=100", "secure_aggregation.threshold=16"),
    ]
    settings = [word for setting in private for word in ("--set", setting)]
    warning = "shorter than twice its max_age_s"
    assert run(server, "task", "submit", task_file, *settings) == 0
    assert warning not in capsys.readouterr().err
    personal = TASK_FILE.replace("concurrency=4", 'concurrency=4, personal=["bias"]')
    task_file.write_text(personal)
    assert run(server, "task", "submit", task_file, "--name", "own", *settings) == 0
    assert warning in capsys.readouterr().err


def test_the_rounding_error_of_masked_words_is_printed(
    server: AdminServer, task_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secure = ("--set", "secure_aggregation.threshold=1", "--set", "clip=1.0")
    settings = (*secure, "--set", "requirements.upload_bits=16")
    assert run(server, "task", "submit", task_file, *settings) == 0
    found = capsys.readouterr().err
    assert "by at most 0.0026 % of the clip (root mean square) if all have 1500 examples" in found
    assert "warning: requirements.upload_bits = 16 with weights by examples" in found


@pytest.mark.parametrize(
    ("setting", "difference"),
    [
        ("clip=3", "clip = 3.0, but the file has 1.0"),
        ("max_examples=7", "max_examples = 7, but the file has 1500"),
        ("regime.max_staleness=77", "max_staleness = 77, but the file has"),
        ("regime.aggregation_goal=3", "threshold = 3, but the file has 4"),
        ("secure_aggregation.threshold=2", "threshold = 2, but the file has 4"),
        ("secure_aggregation=null", "secure aggregation differs from the file"),
        ("regime.aggregation_goal=5", ""),
        ("concurrency=30", ""),
    ],
)
def test_what_devices_would_refuse_is_told_at_submission(setting: str, difference: str) -> None:
    file = TaskConfig(
        task="tiny",
        concurrency=20,
        model_length=3,
        regime=AsyncFL(aggregation_goal=4, max_staleness=50),
        clip=1.0,
        secure_aggregation=SecureAggregation(),
    )
    found = refusals(file, changed(file, "mine", [setting]))
    assert len(found) == bool(difference)
    assert all(difference in text and "change the file" in text for text in found)
    in_the_clear = structs.replace(file, secure_aggregation=None)
    assert refusals(in_the_clear, changed(in_the_clear, None, ["clip=3"])) == []


# -- history ------------------------------------------------------------------------------------


@pytest.fixture
def history(server: AdminServer) -> AdminServer:
    accuracy = (MetricBounds("accuracy"),)
    server.call(server.system.submit(structs.replace(TASK, metrics=accuracy, perplexity=True)))
    shares = [
        Share(volume, clients, examples, loss, {"accuracy": accuracy})
        for volume, clients, examples, loss, accuracy in (
            (0, 20.0, 200.0, 2.5, 0.5),
            (16, 5.0, 100.0, 2.25, 0.75),
            (64, 1.0, 70.0, 2.0, 1.0),
        )
    ]
    evaluated = msgspec.json.encode(EvaluationResult(*shares)).decode()
    metrics = {"accuracy": 0.5}
    points = (
        PointRow(1, 1010.0, 4, 40, 0.5),
        PointRow(2, 1020.0, 4, 44, 1.5, 2.5, 12.0, evaluated=evaluated, metrics=metrics),
    )
    put = tuple((point_key("next-word", point.version), point) for point in points)
    server.system.change(Transaction(put=put))
    return server


def test_metrics_as_csv(
    history: AdminServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.csv"
    assert run(history, "task", "metrics", "next-word", "--output", file) == 0
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["version"] for row in rows] == ["1", "2"]
    assert (rows[0]["loss"], rows[1]["loss"]) == ("", "2.5")
    assert (rows[1]["p75_loss"], rows[1]["p99_loss"]) == ("2.25", "2.0")
    assert (rows[0]["accuracy"], rows[0]["perplexity"]) == ("", "")
    assert (rows[1]["accuracy"], rows[1]["perplexity"]) == ("0.5", "12.0")
    assert (rows[1]["p75_accuracy"], rows[1]["p99_accuracy"]) == ("0.75", "1.0")
    assert rows[0]["created"] == "1970-01-01T00:16:50.000Z"
    out, err = capsys.readouterr()
    assert out == ""
    assert "p75" not in err
    assert run(history, "task", "metrics", "next-word") == 0
    assert capsys.readouterr().out == file.read_text()


def test_metrics_as_json_keep_numbers(
    history: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(history, "task", "metrics", "next-word", "--format", "json") == 0
    rows = msgspec.json.decode(capsys.readouterr().out)
    assert [row["created"] for row in rows] == [1010.0, 1020.0]


def test_nobody_with_much_data_is_known_under_secure_aggregation(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    config = structs.replace(TASK, secure_aggregation=SecureAggregation(), clip=1.0)
    server.call(server.system.submit(config))
    share = Share(0, 20.0, 200.0, 2.5)
    result = msgspec.json.encode(EvaluationResult(share, share, share)).decode()
    point = PointRow(1, 1010.0, 4, 4, 0.5, 2.5, 12.0, evaluated=result)
    server.system.change(Transaction(put=((point_key("next-word", 1), point),)))
    assert run(server, "task", "metrics", "next-word") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].endswith(",loss,p75_loss,p99_loss"), "it asks for no perplexity"
    assert out.splitlines()[1].endswith(",2.5,,")
    assert "the columns p75_ and p99_ are empty" in err


def test_metrics_for_tensorboard(history: AdminServer, tmp_path: Path) -> None:
    folder = tmp_path / "board"
    assert run(history, "task", "metrics", "next-word", "--tensorboard", folder) == 0
    [file] = folder.iterdir()
    data, scalars = file.read_bytes(), {}
    while data:  # length, checksum, event, checksum
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        for value in event.summary.value:
            scalars[value.tag, event.step] = value.simple_value
    assert scalars["loss", 2] == 2.5
    assert ("loss", 1) not in scalars
    assert scalars["staleness", 1] == 0.5
    assert scalars["accuracy", 2] == 0.5
    assert scalars["p99_accuracy", 2] == 1.0


def test_metrics_for_mlflow(
    history: AdminServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "tracked").as_uri()
    for _ in range(2):  # each export is a run of its own
        assert run(history, "task", "metrics", "next-word", "--mlflow", uri) == 0
    client = tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("next-word")
    first, second = client.search_runs([experiment.experiment_id])
    for found in (first, second):
        [loss] = client.get_metric_history(found.info.run_id, "loss")
        assert (loss.value, loss.step, loss.timestamp) == (2.5, 2, 1_020_000)
        [accuracy] = client.get_metric_history(found.info.run_id, "p75_accuracy")
        assert accuracy.value == 0.75


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_named(
    history: AdminServer, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(OperatorError, match="not installed here") as raised:
        run(history, "task", "metrics", "next-word", f"--{tracker}", "somewhere")
    assert f"pip install 'papaya-fl[{tracker}]'" in raised.value.hint


def test_show_has_the_metrics_of_each_version_and_by_data_volume(
    history: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(history, "task", "show", "next-word") == 0
    out = capsys.readouterr().out
    assert "loss 2.500 at version 2, perplexity 12.0, accuracy 0.5" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "version created updates staleness loss perplexity accuracy note" in lines
    assert "99th percentile and above 1 70 2 7.389 1" in lines


def test_show_has_the_numbers_of_versions_that_are_older_than_the_newest_points(
    history: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = VersionRow(2, "next-word/1/parameters-2", 1, 1020.0, marked=True)
    later = [PointRow(version, 1020.0 + version, 3, 30, 0.5) for version in range(3, 300)]
    put = tuple((point_key("next-word", point.version), point) for point in later)
    history.system.change(Transaction(put=((version_key("next-word", 2), kept), *put)))
    detail = history.call(history.system.service.task("next-word"))
    assert min(point.version for point in detail.points) > 2
    assert run(history, "task", "show", "next-word") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    [line] = [line for line in lines if line.startswith("2 ") and line.endswith("marked")]
    assert line.endswith(" 4 1.5 2.5 12 0.5 marked")


def test_show_says_which_version_has_the_model_of_the_one_before(
    history: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A masked buffer that is dropped publishes the previous model again."""
    models = {2: "next-word/1/parameters-2", 3: "next-word/1/parameters-2", 4: "next-word/1/other"}
    rows = {v: VersionRow(v, model, 1, 1020.0, marked=v == 3) for v, model in models.items()}
    put = tuple((version_key("next-word", version), row) for version, row in rows.items())
    history.system.change(Transaction(put=put))
    assert run(history, "task", "show", "next-word") == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    [dropped] = [line for line in lines if "same model" in line]
    assert dropped.startswith("3 ")
    assert dropped.endswith(" marked, same model as 2")


def test_show_names_the_target_of_a_metric(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    target = MetricTarget(name="accuracy", above=0.9)
    config = structs.replace(
        TASK,
        metrics=(MetricBounds("accuracy"),),
        evaluation=EvaluationPlan(clients=3),
        stop=StopRule(versions=9, target_metric=target),
    )
    server.call(server.system.submit(config))
    assert run(server, "task", "show", "next-word") == 0
    out = capsys.readouterr().out
    assert "every 10 versions, on 3 clients: loss, accuracy" in out
    assert "versions = 9 or accuracy above 0.9" in out
