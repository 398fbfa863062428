"""The torch engine against torch.optim in a plain loop, its limits, and its refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from papaya.errors import Diverged, OperatorError
from papaya.learning.definition import ClientSGD, Examples, Metric, Task
from papaya.learning.evaluation import EVALUATION_LENGTH, summarize
from papaya.learning.parameters import Vector
from papaya.learning.schedules import ConstantRate, CosineDecay, LinearDecay, StepDecay
from papaya.learning.task import LoadedTask
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.module import checked_module, make_module, state_dict
from papaya.learning.weighting import norm


class Model(nn.Module):
    """With a tied layer, a layer that the loss does not use, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.unused = nn.Linear(1, 1)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.again(torch.tanh(self.first(x))))))  # type: ignore[no-any-return]


def to_tensors(examples: list[bytes]) -> tuple[Tensor, Tensor]:
    rows = torch.tensor([[float(number) for number in example.split()] for example in examples])
    return rows[:, :3], rows[:, 3:]


def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(module(x), y)


TASK = Task(
    name="plane",
    model=Model,
    loss=loss,
    batch=to_tensors,
    examples=Examples("points"),
    client=ClientSGD(rate=0.05, momentum=0.9, epochs=3, batch_size=4),
    concurrency=10,
)
MANIFEST, FROZEN = checked_module(TASK)
EXAMPLES = [
    " ".join(f"{number:.3f}" for number in row).encode()
    for row in np.random.default_rng(5).standard_normal((10, 4))
]


def an_engine(**changes: object) -> TorchEngine:
    task = msgspec.structs.replace(TASK, **changes)
    return TorchEngine(LoadedTask(Path("here.py"), task, "sha256:0", MANIFEST, FROZEN))


def a_model(seed: int = 3) -> Vector:
    tensors = dict(make_module(TASK, seed).named_parameters())
    return MANIFEST.flatten({name: tensor.detach().numpy() for name, tensor in tensors.items()})


def torchs_own(client: ClientSGD, module: nn.Module) -> torch.optim.Optimizer:
    decay = client.weight_decay
    if client.optimizer:
        kind = torch.optim.AdamW if client.optimizer == "adamw" else torch.optim.Adam
        beta1, beta2, epsilon = client.adam
        values = module.parameters()
        return kind(values, client.rate, (beta1, beta2), eps=epsilon, weight_decay=decay)
    nesterov = bool(client.nesterov)
    return torch.optim.SGD(
        module.parameters(), client.rate, client.momentum, weight_decay=decay, nesterov=nesterov
    )


def trained_by_torch(initial: Vector, client: ClientSGD, seed: int) -> Vector:
    """The slow reference: torch's own optimizer in the loop that everyone writes."""
    module = make_module(TASK)
    module.load_state_dict(state_dict(MANIFEST, initial), strict=False)
    module.train()
    start_values = [value.detach().clone() for value in module.parameters()]
    optimizer = torchs_own(client, module)
    shuffle = np.random.default_rng(seed)
    torch.manual_seed(seed)
    step, steps = 0, client.epochs * math.ceil(len(EXAMPLES) / client.batch_size)
    for _ in range(client.epochs):
        order = shuffle.permutation(len(EXAMPLES))
        for start in range(0, len(order), client.batch_size):
            chosen = [EXAMPLES[i] for i in order[start : start + client.batch_size]]
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(client.precision)):
                value = loss(module, *to_tensors(chosen))
            if client.proximal:
                pairs = zip(module.parameters(), start_values, strict=True)
                distance = torch.stack([(now - before).square().sum() for now, before in pairs])
                value = value + client.proximal / 2 * distance.sum()
            value.backward()  # type: ignore[no-untyped-call]
            if client.max_gradient_norm:
                nn.utils.clip_grad_norm_(module.parameters(), client.max_gradient_norm)
            for group in optimizer.param_groups:
                group["lr"] = client.rate_at(step, steps)
            optimizer.step()
            step += 1
    tensors = {name: value.detach().numpy() for name, value in module.named_parameters()}
    return MANIFEST.flatten(tensors)


def as_vector(update: bytes) -> Vector:
    return np.frombuffer(update, np.dtype("<f4"))


SCHEDULES = st.one_of(
    st.builds(ConstantRate, warmup_steps=st.integers(0, 12)),
    st.builds(LinearDecay, warmup_steps=st.integers(0, 5), end=st.floats(0, 1)),
    st.builds(CosineDecay, warmup_steps=st.integers(0, 5), end=st.floats(0, 1)),
    st.builds(StepDecay, every_steps=st.integers(1, 5), decay=st.floats(0.1, 1)),
)


@st.composite
def ways_to_train(draw: st.DrawFn) -> ClientSGD:
    settings: dict[str, Any] = {
        "rate": draw(st.floats(1e-4, 0.1)),
        "weight_decay": draw(st.sampled_from((0.0, 0.01, 0.3))),
        "epochs": draw(st.integers(1, 3)),
        "batch_size": draw(st.integers(1, 12)),
        "max_gradient_norm": draw(st.sampled_from((UNSET, 0.05, 100.0))),
        "schedule": draw(SCHEDULES),
        "optimizer": draw(st.sampled_from(("sgd", "adam", "adamw"))),
    }
    if settings["optimizer"] == "sgd":
        settings["momentum"] = draw(st.sampled_from((0.0, 0.5, 0.9)))
        settings["nesterov"] = draw(st.booleans()) and settings["momentum"] > 0
    else:
        settings["beta1"] = draw(st.sampled_from((0.0, 0.4, 0.9)))
        settings["beta2"] = draw(st.sampled_from((0.0, 0.9, 0.999)))
        settings["epsilon"] = draw(st.sampled_from((1e-8, 1e-3)))
    return ClientSGD(**settings)


@settings(max_examples=30, deadline=None)
@given(client=ways_to_train(), seed=st.integers(0, 2**32))
def test_it_trains_bit_by_bit_as_torch_optim_does(client: ClientSGD, seed: int) -> None:
    initial = a_model()
    try:
        expected = trained_by_torch(initial, client, seed=seed) - initial
    except OperatorError:  # it has diverged
        with pytest.raises(Diverged):
            an_engine(client=client).train(initial, EXAMPLES, seed=seed)
        return
    update, examples = an_engine(client=client).train(initial, EXAMPLES, seed=seed)
    assert update == expected.tobytes()
    assert examples == len(EXAMPLES)
    assert np.count_nonzero(as_vector(update)) > 10


def test_bfloat16_is_that_of_torchs_autocast_and_the_update_is_float32() -> None:
    exact = ClientSGD(rate=0.05, momentum=0.9, epochs=3, batch_size=4)
    client = msgspec.structs.replace(exact, precision="bfloat16")
    initial = a_model()
    update, _ = an_engine(client=client).train(initial, EXAMPLES, seed=11)
    assert update == (trained_by_torch(initial, client, seed=11) - initial).tobytes()
    precise, _ = an_engine(client=exact).train(initial, EXAMPLES, seed=11)
    difference = norm(as_vector(update) - as_vector(precise))
    assert 0 < difference < 0.2 * norm(as_vector(precise))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("most", [UNSET, 0.1])
def test_fedprox_adds_the_distance_to_the_downloaded_model_to_the_loss(
    optimizer: str, most: float | UnsetType
) -> None:
    client = msgspec.convert(
        {"rate": 0.02, "epochs": 4, "batch_size": 3, "proximal": 0.7, "optimizer": optimizer},
        ClientSGD,
    )
    client = msgspec.structs.replace(client, max_gradient_norm=most)
    initial = a_model()
    update = as_vector(an_engine(client=client).train(initial, EXAMPLES, seed=2)[0])
    expected = trained_by_torch(initial, client, seed=2) - initial
    np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-6)
    without = msgspec.structs.replace(client, proximal=UNSET)
    free = as_vector(an_engine(client=without).train(initial, EXAMPLES, seed=2)[0])
    assert norm(update) < norm(free)


def test_the_same_seed_gives_the_same_bytes_whatever_was_trained_before() -> None:
    engine = an_engine()
    initial = a_model()
    first = engine.train(initial, EXAMPLES, seed=1)
    other = engine.train(initial, EXAMPLES, seed=2)
    engine.evaluate(a_model(seed=8), EXAMPLES, volume=1)
    assert engine.train(initial, EXAMPLES, seed=1) == first
    assert other[0] != first[0]


def test_training_leaves_the_random_generators_of_others_alone() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3).tolist()
    torch.manual_seed(4)
    an_engine().train(a_model(), EXAMPLES, seed=1)
    assert torch.rand(3).tolist() == expected


def test_at_most_max_examples_are_used_the_first_ones() -> None:
    client = msgspec.structs.replace(TASK.client, max_examples=6)
    engine = an_engine(client=client)
    update, examples = engine.train(a_model(), EXAMPLES, seed=1)
    assert examples == 6
    assert engine.train(a_model(), EXAMPLES[:6], seed=1) == (update, 6)


def test_an_update_is_clipped_on_the_device() -> None:
    initial = a_model()
    free = as_vector(an_engine().train(initial, EXAMPLES, seed=1)[0])
    clip = norm(free) / 2
    bound = as_vector(an_engine(clip=clip).train(initial, EXAMPLES, seed=1)[0])
    assert clip * 0.999 < norm(bound) <= clip
    np.testing.assert_allclose(bound, free / 2, rtol=1e-5)
    roomy = an_engine(clip=norm(free) * 2).train(initial, EXAMPLES, seed=1)[0]
    assert roomy == free.tobytes()


def test_training_makes_the_loss_fall() -> None:
    engine = an_engine()
    initial = a_model()
    update, _ = engine.train(initial, EXAMPLES, seed=1)

    def mean_loss(parameters: Vector) -> float:
        return summarize(as_vector(engine.evaluate(parameters, EXAMPLES, 10))).all.loss

    assert mean_loss(initial + as_vector(update)) < 0.9 * mean_loss(initial)


def test_an_evaluation_is_the_mean_loss_without_dropout_whatever_the_batches() -> None:
    parameters = a_model()
    module = make_module(TASK)
    module.load_state_dict(state_dict(MANIFEST, parameters), strict=False)
    expected = float(loss(module.eval(), *to_tensors(EXAMPLES)).detach())
    update = an_engine().evaluate(parameters, EXAMPLES, volume=100)
    assert len(update) == 4 * EVALUATION_LENGTH
    result = summarize(as_vector(update))
    assert result.p99 is not None
    assert result.all.loss == pytest.approx(expected, rel=1e-6)
    assert (result.p99.from_volume, result.all.clients, result.all.examples) == (64, 1, 10)


def close_enough(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    difference: Tensor = (module(x) - y).abs()
    return (difference < 0.5).float().squeeze(1)


def mean_error(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    difference: Tensor = (module(x) - y).abs()
    return difference.mean()


def test_metrics_are_means_by_examples_without_dropout_whatever_the_batches() -> None:
    parameters, module = a_model(), make_module(TASK)
    module.load_state_dict(state_dict(MANIFEST, parameters), strict=False)
    metrics = {"close": close_enough, "error": Metric(mean_error, high=50)}
    engine = an_engine(metrics=metrics)

    uploaded = as_vector(engine.evaluate(parameters, EXAMPLES, volume=100))

    found = summarize(uploaded, metrics=engine.task.metric_bounds)
    batch = to_tensors(EXAMPLES)
    with torch.no_grad():
        expected = {
            "close": float(close_enough(module.eval(), *batch).mean()),
            "error": float(mean_error(module, *batch)),
        }
    assert 0 < expected["close"] < 1
    assert found.all.metrics == pytest.approx(expected, abs=1e-4)
    plain = summarize(as_vector(an_engine().evaluate(parameters, EXAMPLES, volume=100)))
    assert found.all.loss == plain.all.loss


@pytest.mark.parametrize("value", [torch.zeros(3), "0.5", None, torch.zeros(4, 1)])
def test_a_metric_of_another_shape_is_an_error(value: object) -> None:
    engine = an_engine(metrics={"close": lambda module, x, y: value})
    with pytest.raises(OperatorError, match=r"metric 'close' returned .* one number for each of 4"):
        engine.evaluate(a_model(), EXAMPLES, volume=1)


@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_training_that_diverges_is_an_error(rate: float) -> None:
    client = ClientSGD(rate=rate, epochs=5)
    with pytest.raises(OperatorError, match="diverged") as raised:
        an_engine(client=client).train(a_model(), EXAMPLES, seed=1)
    assert "client.rate" in raised.value.hint


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    engine = an_engine(loss=lambda module, x, y: loss(module, x, y) * math.nan)
    with pytest.raises(OperatorError, match="diverged"):
        engine.train(a_model(), EXAMPLES, seed=1)
    with pytest.raises(OperatorError, match="held-out data is not a number"):
        engine.evaluate(a_model(), EXAMPLES, volume=1)


def test_no_examples_and_another_model_are_errors() -> None:
    engine = an_engine()
    with pytest.raises(OperatorError, match="no examples"):
        engine.train(a_model(), [], seed=1)
    with pytest.raises(OperatorError, match="no examples"):
        engine.evaluate(a_model(), [], volume=1)
    with pytest.raises(OperatorError, match="shape"):
        engine.train(a_model()[:-1], EXAMPLES, seed=1)


def test_a_state_dict_is_the_model() -> None:
    parameters = a_model()
    module = make_module(TASK)
    unknown = module.load_state_dict(state_dict(MANIFEST, parameters), strict=False)
    assert unknown.unexpected_keys == []
    assert unknown.missing_keys == ["again.weight", "again.bias"], "they are `first`"
    found = {name: value.detach().numpy() for name, value in module.named_parameters()}
    assert MANIFEST.flatten(found).tobytes() == parameters.tobytes()
