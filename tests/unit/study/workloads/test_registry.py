"""Workloads by name, and a task file with data: what they become, and what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from papaya.cli.simulate.options import add_data
from papaya.cli.simulate.task import summary
from papaya.errors import ConfigError, OperatorError
from papaya.learning.task import load_task
from papaya.sim.population import PopulationConfig
from papaya.study.data.opening import open_source
from papaya.study.data.source import Memory
from papaya.study.simulation import run_of, simulate_run
from papaya.study.workloads.base import Clients
from papaya.study.workloads.registry import (
    BUILT_IN,
    WORTH_COMPILING,
    Steps,
    WorkloadSpec,
    chosen_steps,
    eager_because_of_ray,
    judges,
    prepare,
    with_source,
)

POPULATION = PopulationConfig(size=1000)
TASK = """
import json
import torch
from torch import nn
from papaya.learning.task import AsyncFL, ClientSGD, Examples, Task

def load_examples(text):
    return [json.dumps({"x": [len(w), 1.0], "y": len(w) % 2}).encode() for w in text.split()]

def batch(examples):
    pairs = [json.loads(example) for example in examples]
    return torch.tensor([p["x"] for p in pairs]), torch.tensor([float(p["y"]) for p in pairs])

def loss(module, x, y):
    return nn.functional.binary_cross_entropy_with_logits(module(x)[:, 0], y)

task = Task(
    name="parity", model=lambda: nn.Linear(2, 1), loss=loss, batch=batch, clip=5.0,
    examples=Examples("pairs"), client=ClientSGD(rate=0.1, max_examples=30),
    regime=AsyncFL(aggregation_goal=4), concurrency=12,
)
"""


def a_task_file(folder: Path) -> Path:
    (folder / "parity.py").write_text(TASK)
    return folder / "parity.py"


def leaf_data(folder: Path, clients: int = 8) -> Path:
    """The label follows the sign of the first number, the more so the more data."""
    rng = np.random.default_rng(5)
    data = {}
    for client in range(clients):
        x = rng.normal(size=(15 + 10 * client, 2)).round(3)
        data[f"user-{client}"] = {"x": x.tolist(), "y": (x[:, 0] > 0).astype(int).tolist()}
    counts = [len(pairs["y"]) for pairs in data.values()]
    content = {"users": list(data), "num_samples": counts, "user_data": data}
    (folder / "data.json").write_text(json.dumps(content))
    return folder / "data.json"


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_workload_learns(name: str) -> None:
    prepared = prepare(WorkloadSpec(name), POPULATION)
    with prepared.opened(3) as workload:
        assert workload.length == prepared.task.model_length
        model = workload.initial(3)
        clients = Clients(np.array([5, 9]), np.array([0, 0]), np.array([20, 40]))
        updates = workload.train([model], np.array([0, 0]), clients, prepared.rates.client)
        assert updates.shape == (2, workload.length)
        assert workload.evaluate(model + updates[1]).all < workload.evaluate(model).all


def test_a_task_file_and_its_data_become_a_workload(tmp_path: Path) -> None:
    spec = WorkloadSpec(str(a_task_file(tmp_path)), f"leaf:{leaf_data(tmp_path)}")
    prepared = prepare(spec, POPULATION)
    assert prepared.task.task == "parity"
    assert prepared.rates.clip == 5.0
    assert max(prepared.population.volumes) == 30
    with prepared.opened(1) as workload:
        model = workload.initial(1)
        device = 8 * 7 + 2  # holds the data of client 2
        one, same, other = (
            workload.train(
                [model],
                np.array([0]),
                a_client(d, prepared.population.volumes),
                prepared.rates.client,
            )
            for d in (device, device, device + 1)
        )
        assert (one == same).all()
        assert not (one == other).all()
        trained = model.copy()
        for _ in range(30):
            trained += workload.train(
                [trained],
                np.array([0]),
                a_client(7, prepared.population.volumes),
                prepared.rates.client,
            )[0]
        assert workload.evaluate(trained).all < 0.8 * workload.evaluate(model).all


def test_settings_replace_those_of_the_file(tmp_path: Path) -> None:
    file, data = str(a_task_file(tmp_path)), f"leaf:{leaf_data(tmp_path)}"
    given = ("concurrency=9", "clip=2", "optimizer.rate=0.5", "client.batch_size=3")
    changed = prepare(WorkloadSpec(file, data, settings=given), POPULATION)
    assert (changed.task.concurrency, changed.task.clip) == (9, 2.0)
    assert (changed.rates.clip, changed.rates.optimizer.rate) == (2.0, 0.5)
    assert changed.rates.client.batch_size == 3
    assert changed.loaded is not None
    assert changed.loaded.task.client.batch_size == 3
    with pytest.raises(ConfigError, match="there is no setting concurency"):
        prepare(WorkloadSpec(file, data, settings=("concurency=9",)), POPULATION)
    with pytest.raises(OperatorError, match="--set clip=2: bigram has no task file"):
        prepare(WorkloadSpec("bigram", settings=("clip=2",)), POPULATION)


def test_a_private_task_is_simulated_with_its_noise(tmp_path: Path) -> None:
    """A model without the noise would promise what the task cannot reach."""
    path = a_task_file(tmp_path)
    private = "privacy=Privacy(clip=5.0, max_participations=9, delta=1e-6, noise_multiplier=400.0)"
    optimizer = 'optimizer=OptimizerConfig(kind="fedavg", rate=1.0)'
    names = "Examples, OptimizerConfig, Privacy,"
    path.write_text(TASK.replace("clip=5.0", f"{private}, {optimizer}").replace("Examples,", names))
    prepared = prepare(WorkloadSpec(str(path), f"leaf:{leaf_data(tmp_path)}"), POPULATION)
    run = run_of(prepared, None, {}, seed=1, updates=8, hours=24.0, evaluations=1)
    found = simulate_run(run, prepared)
    assert found.result.norms is not None
    assert found.result.norms.largest < 1
    longest = float(np.abs(found.parameters).max())
    assert longest > 50, "a step has a deviation of 400 x 5 / 4 in each number"
    words = " ".join(summary(found.result).split())
    assert "noise of norm 866 in each step" in words


def a_client(device: int, volumes: tuple[int, ...]) -> Clients:
    examples = volumes[device % len(volumes)]
    return Clients(np.array([device]), np.array([0]), np.array([examples]))


def test_a_file_that_changed_since_it_was_loaded_is_refused(tmp_path: Path) -> None:
    file, data = a_task_file(tmp_path), f"leaf:{leaf_data(tmp_path)}"
    loaded = load_task(file)
    spec, source = WorkloadSpec(str(file), data), open_source(data, loaded, None)
    assert with_source(spec, loaded, source, POPULATION).task_source == TASK.encode()
    file.write_text(TASK + "# edited")
    with pytest.raises(OperatorError, match="changed while it was prepared"):
        with_source(spec, loaded, source, POPULATION)
    file.unlink()
    with pytest.raises(OperatorError, match="changed while it was prepared"):
        with_source(spec, loaded, source, POPULATION)


def test_other_data_or_another_file_has_another_digest(tmp_path: Path) -> None:
    file, data = a_task_file(tmp_path), leaf_data(tmp_path)
    digests = [prepare(WorkloadSpec(str(file), f"leaf:{data}"), POPULATION).digest]
    leaf_data(tmp_path, clients=7)
    digests.append(prepare(WorkloadSpec(str(file), f"leaf:{data}"), POPULATION).digest)
    file.write_text(TASK + "# changed\n")
    digests.append(prepare(WorkloadSpec(str(file), f"leaf:{data}"), POPULATION).digest)
    assert len(set(digests)) == 3


def test_another_built_in_workload_has_another_digest() -> None:
    embedding, bigram = (prepare(WorkloadSpec(name), POPULATION) for name in BUILT_IN)
    assert embedding.digest != bigram.digest


def test_texts_become_examples_by_the_task_files_own_loader(tmp_path: Path) -> None:
    loaded = load_task(a_task_file(tmp_path))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words of a text " * 20)
    source = open_source(f"text:{tmp_path / 'texts'}", loaded)
    assert set(json.loads(source.training(0)[0])) == {"x", "y"}


@pytest.mark.parametrize("data", ["leaf:", "text", "leaf", "sql:x", "csv:", "stdlib:x", ""])
def test_data_of_another_kind_is_refused(tmp_path: Path, data: str) -> None:
    with pytest.raises(OperatorError, match=f"unknown data source: '{data}'"):
        open_source(data, load_task(a_task_file(tmp_path)))


def test_who_names_a_folder_alone_is_told_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="unknown data source") as refused:
        open_source(str(tmp_path), load_task(a_task_file(tmp_path)))
    assert refused.value.hint.startswith(f"did you mean leaf:{tmp_path} (LEAF's JSON) or text:")


def test_data_belongs_to_a_task_file(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="embedding has its own data"):
        prepare(WorkloadSpec("embedding", "stdlib"))
    with pytest.raises(OperatorError, match="needs data to learn from"):
        prepare(WorkloadSpec(str(a_task_file(tmp_path))))
    with pytest.raises(OperatorError, match=r"cannot read task file gone\.py"):
        prepare(WorkloadSpec("gone.py", "stdlib"))


def test_judges_are_a_sample_by_the_seed_of_those_who_can_judge() -> None:
    source = Memory("numbers", [[b"%d/%d" % (c, i) for i in range(8)] for c in range(200)])
    able = [c for c in range(len(source.volumes)) if source.held_out(c)]
    assert 0 < len(able) < 200
    everyone = judges(source, seed=1)
    assert everyone.device.tolist() == able
    assert (everyone.examples == source.volumes[everyone.device]).all()
    some = judges(source, seed=1, most=20)
    assert set(some.device.tolist()) < set(able)
    assert some.device.tolist() == judges(source, 1, 20).device.tolist()
    assert some.device.tolist() != judges(source, 2, 20).device.tolist()


def test_without_held_out_examples_there_is_no_judge() -> None:
    source = Memory("few", [[b"1"]])
    with pytest.raises(OperatorError, match="no client has an example for validation"):
        judges(source, seed=1)


@pytest.mark.parametrize(
    ("asked", "updates", "ray", "found"),
    [
        ("auto", 20_000, None, "auto"),  # compiled, if the task can be compiled
        ("auto", 19_999, None, "eager"),
        ("auto", None, None, "eager"),
        ("auto", 20_000, "local", "eager"),
        ("compiled", 10, None, "compiled"),
        ("eager", 20_000, None, "eager"),
    ],
)
def test_long_runs_on_this_machine_are_worth_a_compilation(
    asked: Steps, updates: int | None, ray: str | None, found: Steps
) -> None:
    assert chosen_steps(asked, updates, ray) == found
    without = chosen_steps(asked, updates, None)
    told = eager_because_of_ray(asked, updates, ray)
    assert (told is None) == (found == without), "told if Ray changes the choice"


def test_the_help_names_the_number_of_updates_that_are_worth_it() -> None:
    parser = argparse.ArgumentParser()
    add_data(parser.add_argument_group())
    assert f"{WORTH_COMPILING:,} client updates" in " ".join(parser.format_help().split())
