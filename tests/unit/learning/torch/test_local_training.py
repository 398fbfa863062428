"""A training loop of a task: what it gets, what becomes of its result, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import nn

from papaya.errors import CannotCompile, ConfigError, Diverged, OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.task import LoadedTask, load_task, loaded_in_memory
from papaya.learning.torch import export
from papaya.learning.torch.compiled_gradient import compile_gradient
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.local_training import LocalTraining, by_gradients
from tests.unit.learning.torch.test_parts import EXAMPLES, Headed, Normed, a_task

Loop = Callable[[LocalTraining], object]


def trained(loaded: LoadedTask, engine: TorchEngine | None = None, seed: int = 3) -> Vector:
    engine = engine or TorchEngine(loaded)
    update, examples = engine.train(loaded.initial_parameters(seed=0), EXAMPLES, seed)
    assert examples == len(EXAMPLES)
    return np.frombuffer(update, FLOAT32)


@pytest.mark.parametrize("changes", [{}, {"personal": ["head.*"]}], ids=["shared", "personal"])
def test_the_engines_loop_can_be_written_in_a_task(changes: dict[str, Any]) -> None:
    """The same bits, for all settings of the client, and the same state on the device."""
    client = ClientSGD(
        rate=0.1, epochs=2, batch_size=5, optimizer="adam", proximal=0.1, max_gradient_norm=1.0
    )
    built_in, own = (a_task(client=client, train=loop, **changes) for loop in (None, by_gradients))
    engines = TorchEngine(built_in), TorchEngine(own)
    for _ in range(2):
        first, second = trained(built_in, engines[0]), trained(own, engines[1])
        np.testing.assert_array_equal(first, second)
        assert engines[0].device_state == engines[1].device_state


def test_a_loop_gets_the_clients_settings_examples_and_seed() -> None:
    seen: list[Any] = []

    def loop(local: LocalTraining) -> None:
        sizes = [len(batch[0]) for batch in local.batches()]
        seen.append((local.client.rate, local.examples, local.seed, local.steps, sizes))
        seen.append(torch.rand(1).item())
        seen.append([name for name, _ in local.module.named_parameters()])

    loaded = a_task(train=loop)
    update = trained(loaded)
    assert not update.any(), "it changed nothing"
    assert seen[0] == (0.1, EXAMPLES, 3, 10, [5, 5, 5, 5, 1] * 2)
    torch.manual_seed(3)
    assert seen[1] == torch.rand(1).item(), "PyTorch's random numbers follow from the seed"
    assert seen[2] == ["body.weight", "body.bias", "head.weight", "head.bias"]


def test_the_engine_takes_the_difference_clips_it_and_counts_the_examples() -> None:
    def loop(local: LocalTraining) -> None:
        with torch.no_grad():
            for value in local.parameters:
                value += 1

    np.testing.assert_allclose(trained(a_task(train=loop)), 1, rtol=1e-6)
    clipped = trained(a_task(train=loop, clip=0.5))
    assert np.linalg.norm(clipped) == pytest.approx(0.5, rel=1e-5)


def test_what_a_loop_leaves_in_the_module_does_not_reach_the_next_client() -> None:
    gradients: list[Any] = []

    def loop(local: LocalTraining) -> None:
        gradients.append(local.parameters[0].grad)
        local.parameters[2].requires_grad_(False)
        local.module.eval()
        for batch in local.batches():
            torch.autograd.backward(local.loss(batch))

    loaded = a_task(train=loop)
    engine = TorchEngine(loaded)
    trained(loaded, engine)
    trained(loaded, engine)
    assert gradients == [None, None]
    assert all(value.requires_grad for value in engine._module.parameters())


class Held(Headed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))


def _returns(local: LocalTraining) -> object:
    return local.module.state_dict()


def _replaces(local: LocalTraining) -> None:
    local.module.get_submodule("body").weight = nn.Parameter(torch.zeros(4, 3))


def _doubles(local: LocalTraining) -> None:
    local.module.double()


def _changes_a_buffer(local: LocalTraining) -> None:
    local.module.get_buffer("scale").mul_(2)


def _adds_a_tensor(local: LocalTraining) -> None:
    local.module.seen = torch.ones(1)


@pytest.mark.parametrize(
    ("loop", "problem"),
    [
        (_returns, "train returned an object of type OrderedDict, expected nothing"),
        (_replaces, "train replaced 'body.weight' by another tensor"),
        (_doubles, "train replaced 'body.weight' by another tensor"),
        (_changes_a_buffer, "train changed 'scale', which clients neither upload nor keep"),
        (_adds_a_tensor, "train changed 'seen', which clients neither upload nor keep"),
    ],
)
def test_a_loop_that_would_reach_the_next_client_is_refused(loop: Loop, problem: str) -> None:
    with pytest.raises(OperatorError, match=problem):
        trained(a_task(model=Held, train=loop))


def test_a_loop_that_diverges_is_refused() -> None:
    def loop(local: LocalTraining) -> None:
        with torch.no_grad():
            local.parameters[0].fill_(float("inf"))

    with pytest.raises(Diverged, match="the model is not finite"):
        trained(a_task(train=loop))


def test_statistics_of_batch_norm_follow_the_batches_of_a_loop() -> None:
    def only_looks(local: LocalTraining) -> None:
        for batch in local.batches():
            local.loss(batch)

    loaded = a_task(model=Normed, batch_norm="averaged", train=only_looks)
    update = loaded.manifest.unflatten(trained(loaded))
    assert update["norm.running_mean"].any()
    assert not update["body.weight"].any()


def test_devices_without_torch_and_compiled_steps_refuse_a_loop(tmp_path: Path) -> None:
    loaded = a_task(train=by_gradients)
    with pytest.raises(OperatorError, match="the task has a training loop of its own") as caught:
        export.compile_task(loaded)
    assert "--engine torch" in caught.value.hint
    with pytest.raises(CannotCompile, match="the task has a training loop of its own"):
        compile_gradient(loaded.task, EXAMPLES, tmp_path)


def test_the_hash_of_a_task_in_memory_depends_on_its_loop() -> None:
    task = a_task().task
    own = structs.replace(task, train=by_gradients)
    assert loaded_in_memory(task).module_hash != loaded_in_memory(own).module_hash


def test_a_loop_must_be_callable() -> None:
    with pytest.raises(ConfigError, match="train = 3: must be callable"):
        a_task(train=3)


TASK = """
import torch
from papaya.learning.task import ClientSGD, Examples, Task

def train(local):
    for batch in local.batches():
        local.nothing(batch)

task = Task(name="t", model=lambda: torch.nn.Linear(1, 1), train=train,
    loss=lambda module, x: module(x).mean(), batch=lambda found: (torch.ones(len(found), 1),),
    examples=Examples("t"), client=ClientSGD(rate=1.0), concurrency=1, sample=[b"1"])
"""


def test_an_error_in_a_loop_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "t.py"
    file.write_text(TASK)
    loaded = load_task(file)
    with pytest.raises(ConfigError, match=r"t\.py:7: AttributeError.*while trying `sample`: train"):
        loaded.try_loop(loaded.task.sample, "`sample`")
