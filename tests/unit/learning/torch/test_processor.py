"""Training on a GPU: everything that a step needs is there, and the numbers are the same.

Machines of tests have no GPU, so there is a fake one (tests/fake_gpu.py), in a process of its own.
It refuses operators that mix tensors of both processors, and computes as the CPU does.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.task import LoadedTask
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.local_training import LocalTraining
from papaya.learning.torch.processor import CPU, gpu, has_gpu, moved
from papaya.sim.population import PopulationConfig
from papaya.study.run_file import RunSummary
from papaya.study.simulation import run_of, simulate_run
from papaya.study.workloads.registry import Steps, WorkloadSpec, prepare, steps_of, with_steps
from tests.fake_gpu import NAME, FakeGpu
from tests.unit.learning.torch.test_parts import EXAMPLES, Normed, a_task
from tests.unit.study.workloads.test_registry import a_task_file, leaf_data

CHILD: list[FakeGpu] = []


def install() -> None:
    CHILD.append(FakeGpu())


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    """A process with the fake GPU."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, install) as pool:
        yield pool


def own_loop(local: LocalTraining) -> None:
    """Moves the parameters by hand, with a tensor of its own."""
    for batch in local.batches():
        gradients = local.gradients(local.loss(batch))
        factor = torch.tensor([0.5], device=local.parameters[0].device)
        with torch.no_grad():
            for parameter, gradient in zip(local.parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(gradient * factor)


ADAM = ClientSGD(
    rate=0.1, epochs=2, batch_size=5, optimizer="adam", proximal=0.1, max_gradient_norm=1.0
)
TASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"client": ClientSGD(rate=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)},
    "adam": {"client": ADAM},
    "personal": {"client": ADAM, "personal": ["head.*"]},
    "averaged statistics": {"model": Normed, "batch_norm": "averaged", "client": ADAM},
    "local statistics": {"model": Normed, "batch_norm": "local"},
    "own loop": {"train": own_loop},
}


def numbers(loaded: LoadedTask, processor: torch.device) -> tuple[bytes, bytes, bytes]:
    """The second update of a device, its personal tensors, and its evaluation."""
    engine = TorchEngine(loaded, processor)
    initial = loaded.initial_parameters(seed=0)
    engine.train(initial, EXAMPLES, 3)
    update, _ = engine.train(initial, EXAMPLES, 4)
    return update, engine.device_state, engine.evaluate(initial, EXAMPLES, len(EXAMPLES))


def both_ways(name: str) -> tuple[bool, int, list[int]]:
    """In the child: whether both processors give the same, what the GPU did, and its seeds."""
    [fake] = CHILD
    loaded = a_task(**TASKS[name])
    done, seeds = fake.operators, len(fake.seeds)
    is_same = numbers(loaded, gpu()) == numbers(loaded, CPU)
    return is_same, fake.operators - done, fake.seeds[seeds:]


@pytest.mark.parametrize("name", TASKS)
def test_a_gpu_computes_what_the_cpu_computes(name: str, child: ProcessPoolExecutor) -> None:
    is_same, operators, seeds = child.submit(both_ways, name).result()
    assert is_same
    assert operators > 50, "the GPU did the work"
    assert seeds == [3, 4, 0], "two trainings and an evaluation"


def simulated(folder: Path) -> tuple[dict[Steps, str], dict[Steps, RunSummary], list[str], int]:
    """In the child: what the same run is called and gives with both kinds of steps."""
    [fake] = CHILD
    done, digests, found, told = fake.operators, dict[Steps, str](), dict[Steps, RunSummary](), []
    kinds: tuple[Steps, ...] = ("eager", "gpu")
    for steps in kinds:
        spec = WorkloadSpec(str(a_task_file(folder)), f"leaf:{leaf_data(folder)}", steps=steps)
        prepared = prepare(spec, PopulationConfig(size=1000))
        run = run_of(prepared, "async", {}, seed=2, updates=40, hours=10.0, evaluations=3)
        found[steps] = simulate_run(run, prepared).summary
        digests[steps] = prepared.digest
        told.append(prepared.about)
    return digests, found, told, fake.operators - done


def test_a_simulation_on_a_gpu_has_the_same_result_and_another_name(
    tmp_path: Path, child: ProcessPoolExecutor
) -> None:
    digests, found, told, operators = child.submit(simulated, tmp_path).result()
    assert found["eager"] == found["gpu"], "the fake GPU rounds as the CPU does"
    assert operators > 500
    assert {steps: steps_of(digest) for steps, digest in digests.items()} == {
        "eager": "eager",
        "gpu": "gpu",
    }
    assert with_steps(digests["gpu"], "eager") == digests["eager"]
    assert told[0].endswith("eager steps; --steps gpu would use the GPU of this machine")
    assert told[1].endswith(f"eager steps on a GPU ({NAME})")


def on_ray(folder: Path) -> str:
    spec = WorkloadSpec(str(a_task_file(folder)), f"leaf:{leaf_data(folder)}", steps="gpu")
    prepared = prepare(spec, PopulationConfig(size=1000))
    with (
        pytest.raises(OperatorError, match="not those of a Ray cluster") as caught,
        prepared.opened(1, ray="local"),
    ):
        pass
    return caught.value.hint or ""


def test_a_ray_cluster_uses_no_gpu(tmp_path: Path, child: ProcessPoolExecutor) -> None:
    assert "--steps eager" in child.submit(on_ray, tmp_path).result()


def mixed() -> str:
    module = nn.Linear(2, 1).to(gpu())
    with pytest.raises(RuntimeError, match="not on the GPU") as caught:
        module(torch.zeros(3, 2))
    return str(caught.value)


def test_the_fake_gpu_refuses_tensors_of_the_cpu(child: ProcessPoolExecutor) -> None:
    """Or the tests above would pass without moving anything."""
    assert "(3, 2)" in child.submit(mixed).result()


class Lengths(NamedTuple):
    words: torch.Tensor
    most: int


class Padded(Lengths):
    """A named tuple whose constructor does not take its fields."""

    def __new__(cls, sequences: list[torch.Tensor]) -> Padded:
        return cls._make([nn.utils.rnn.pad_sequence(sequences), max(map(len, sequences))])


SEQUENCES = [torch.zeros(1), torch.ones(2)]


def where_parts_are() -> list[str]:
    lengths = Lengths(torch.zeros(1), 7)
    batch = (torch.zeros(2), [torch.zeros(1)], {"mask": (torch.zeros(1), 5)}, lengths, "text", None)
    first, [second], by_name, named, *rest = moved(batch, gpu())
    assert rest == ["text", None]
    assert by_name["mask"][1] == 5
    assert named.most == 7
    return [tensor.device.type for tensor in (first, second, by_name["mask"][0], named.words)]


def test_tensors_inside_of_other_values_are_moved(child: ProcessPoolExecutor) -> None:
    assert child.submit(where_parts_are).result() == [NAME] * 4


def where_sequences_are() -> list[str]:
    padded, packed = Padded(SEQUENCES), pack_sequence(SEQUENCES, enforce_sorted=False)
    on_gpu = moved((padded, packed), gpu())
    assert [type(each) for each in on_gpu] == [Padded, PackedSequence]
    assert on_gpu[0].most == 2
    assert on_gpu[1].batch_sizes.tolist() == [2, 1]
    tensors = on_gpu[0].words, on_gpu[1].data, on_gpu[1].sorted_indices, on_gpu[1].batch_sizes
    return [tensor.device.type for tensor in tensors]


def test_named_tuples_with_their_own_constructor_are_moved(child: ProcessPoolExecutor) -> None:
    """PyTorch needs the lengths of a packed sequence on the CPU."""
    assert child.submit(where_sequences_are).result() == [NAME, NAME, NAME, "cpu"]


def test_a_batch_for_the_cpu_stays_as_it_is() -> None:
    """Devices train on the CPU, also with classes that cannot be built from their fields."""
    batch = (Padded(SEQUENCES), {"packed": pack_sequence(SEQUENCES, enforce_sorted=False)})
    assert moved(batch, CPU) is batch


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(OperatorError, match="finds no GPU on this machine") as caught:
        gpu()
    assert "--steps auto" in (caught.value.hint or "")
