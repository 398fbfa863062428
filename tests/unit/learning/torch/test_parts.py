"""Personal parameters and the statistics of BatchNorm, in both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD, Examples, Task
from papaya.learning.device_state import decode_state, encode_state
from papaya.learning.evaluation import summarize
from papaya.learning.example_fields import Numbers
from papaya.learning.executorch.engine import ExecuTorchEngine
from papaya.learning.executorch.program_file import decode_program
from papaya.learning.frozen_file import decode_frozen
from papaya.learning.parameters import FLOAT32, Manifest, Vector
from papaya.learning.task import LoadedTask
from papaya.learning.torch import export
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.module import checked_module, make_module

RNG = np.random.default_rng(2)
EXAMPLES = [",".join(f"{x:.3f}" for x in row).encode() for row in RNG.standard_normal((21, 4))]


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


class Normed(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4, momentum=momentum)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))  # type: ignore[no-any-return]


def a_task(**changes: Any) -> LoadedTask:
    task = Task(
        name="parts",
        model=Headed,
        loss=lambda module, x, y: (module(x) - y).square()[:, 0],
        batch=(Numbers(3), Numbers(1, start=3)),
        examples=Examples("points"),
        client=ClientSGD(rate=0.1, epochs=2, batch_size=5, proximal=0.1),
        concurrency=4,
        sample=EXAMPLES[:6],
    )
    task = structs.replace(task, **changes)
    return LoadedTask(Path("parts.py"), task, "sha256:parts", *checked_module(task))


def trained(engine: Any, initial: Vector, seed: int = 0) -> Vector:
    update, _ = engine.train(initial, EXAMPLES, seed)
    return np.frombuffer(update, FLOAT32)


def loss_of(engine: Any, parameters: Vector) -> float:
    return summarize(np.frombuffer(engine.evaluate(parameters, EXAMPLES, 1), FLOAT32)).all.loss


def test_personal_parameters_are_trained_and_neither_uploaded_nor_in_the_model() -> None:
    loaded = a_task(personal=["head.*"])
    assert [name for name, _ in loaded.manifest.tensors] == ["body.weight", "body.bias"]
    initial, engine = loaded.initial_parameters(seed=0), TorchEngine(loaded)
    update = trained(engine, initial)
    assert update.size == loaded.manifest.length

    # All shared, in a plain engine: the first participation computes the same.
    plain = a_task(client=structs.replace(loaded.task.client, proximal=0.0))
    free = a_task(personal=["head.*"], client=plain.task.client)
    whole = plain.manifest.unflatten(trained(TorchEngine(plain), plain.initial_parameters(seed=0)))
    own = TorchEngine(free)
    body = free.manifest.unflatten(trained(own, free.initial_parameters(seed=0)))
    np.testing.assert_array_equal(body["body.weight"], whole["body.weight"])
    layout = Manifest((("head.weight", (1, 4)), ("head.bias", (1,))))
    kept = decode_state(layout, own.device_state)
    assert kept is not None
    start = dict(make_module(free.task).named_parameters())["head.weight"].detach().numpy()
    change = layout.unflatten(kept)["head.weight"] - start
    np.testing.assert_allclose(change, whole["head.weight"], rtol=1e-5, atol=1e-7)


def test_the_next_participation_continues_with_what_the_device_has_kept() -> None:
    loaded = a_task(personal=["head.*"])
    initial = loaded.initial_parameters(seed=0)
    engine = TorchEngine(loaded)
    first = trained(engine, initial)
    state = engine.device_state
    second = trained(engine, initial)
    assert (second != first).any()

    other = TorchEngine(loaded)
    other.device_state = state
    np.testing.assert_array_equal(trained(other, initial), second)
    other.device_state = b""
    np.testing.assert_array_equal(trained(other, initial), first)


def test_an_evaluation_uses_the_state_and_leaves_it_alone() -> None:
    loaded = a_task(personal=["head.*"])
    initial, engine = loaded.initial_parameters(seed=0), TorchEngine(loaded)
    before = loss_of(engine, initial)
    for _ in range(3):
        trained(engine, initial)
    state = engine.device_state
    assert loss_of(engine, initial) != before
    assert engine.device_state == state


@pytest.mark.parametrize("damage", ["layout", "short", "nan"])
def test_a_state_that_does_not_fit_is_not_used(damage: str) -> None:
    layout = Manifest((("head.weight", (1, 4)), ("head.bias", (1,))))
    values = np.ones(5, FLOAT32)
    values[2] = np.nan if damage == "nan" else 1
    data = encode_state(layout, values)
    data = {"layout": b"\0" * 16 + data[16:], "short": data[:-1], "nan": data}[damage]
    assert decode_state(layout, data) is None


def test_both_engines_keep_the_same_state() -> None:
    loaded = a_task(personal=["head.*"])
    program = decode_program(export.compile_task(loaded))
    assert program.header.terms.model_length == loaded.manifest.length
    tensors = export.program_tensors(loaded, program.header.file_names)
    frozen = decode_frozen(np.frombuffer(tensors, np.uint8))
    engines: list[Any] = [TorchEngine(loaded), ExecuTorchEngine(program, lambda: frozen)]
    initial = loaded.initial_parameters(seed=0)
    for seed in (1, 2):
        theirs, ours = (trained(engine, initial, seed) for engine in engines)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        assert ours.any()
    assert program.header.personal_layout is not None
    theirs, ours = (np.frombuffer(each.device_state, FLOAT32, offset=16) for each in engines)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert loss_of(engines[0], initial) == pytest.approx(loss_of(engines[1], initial), rel=1e-5)


def test_averaged_statistics_are_the_end_of_the_vector() -> None:
    loaded = a_task(model=Normed, batch_norm="averaged")
    names = [name for name, _ in loaded.manifest.tensors]
    assert names[-2:] == ["norm.running_mean", "norm.running_var"]
    assert loaded.config().optimizer.averaged == 8
    initial, engine = loaded.initial_parameters(seed=0), TorchEngine(loaded)
    update = loaded.manifest.unflatten(trained(engine, initial))
    assert update["norm.running_mean"].any()
    assert engine.device_state == b""

    # The reference: torch's own module, which sees the same batches.
    module = make_module(loaded.task).train()
    client = ClientSGD(rate=1e-30, batch_size=5)
    still = TorchEngine(a_task(model=Normed, batch_norm="averaged", client=client))
    rng = np.random.default_rng(0)
    order = rng.permutation(20)
    for start in range(0, 20, 5):
        rows = [EXAMPLES[i].split(b",") for i in order[start : start + 5]]
        module(torch.tensor([[float(x) for x in row[:3]] for row in rows]))
    got, _ = still.train(initial, EXAMPLES[:20], 0)
    statistics = loaded.manifest.unflatten(initial + np.frombuffer(got, FLOAT32))
    expected = module.norm.running_var.numpy()  # type: ignore[union-attr, operator]
    np.testing.assert_allclose(statistics["norm.running_var"], expected, rtol=1e-5)


def test_local_statistics_stay_on_the_device() -> None:
    loaded = a_task(model=Normed, batch_norm="local")
    assert not any("running" in name for name, _ in loaded.manifest.tensors)
    initial, engine = loaded.initial_parameters(seed=0), TorchEngine(loaded)
    before = loss_of(engine, initial)
    trained(engine, initial)
    assert engine.device_state
    after = loss_of(engine, initial)
    assert after != before


def test_a_negative_variance_is_used_as_zero() -> None:
    """A step of the server, or noise, can make one."""
    loaded = a_task(model=Normed, batch_norm="averaged")
    initial = loaded.initial_parameters(seed=0)
    initial[-4:] = -1
    assert np.isfinite(loss_of(TorchEngine(loaded), initial))


def test_a_batch_of_one_example_uses_the_running_statistics() -> None:
    """BatchNorm has no variance for one: 21 examples in batches of 5 would fail."""
    loaded = a_task(model=Normed, batch_norm="averaged")
    assert trained(TorchEngine(loaded), loaded.initial_parameters(seed=0)).any()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"personal": ["tail.*"]}, "names no trainable parameter"),
        ({"personal": ["*"]}, "all trainable parameters are personal"),
        ({"model": Normed}, "keeps running statistics"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(OperatorError, match=problem):
        a_task(**changes)


@pytest.mark.parametrize("changes", [{"personal": "head.*"}, {"batch_norm": "mean"}])
def test_settings_of_the_wrong_kind_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match=next(iter(changes))):
        a_task(**changes)
