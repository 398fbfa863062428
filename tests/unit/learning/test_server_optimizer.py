"""Server optimizers: torch and a coordinate-by-coordinate loop are the slow references."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from papaya.config import OptimizerConfig
from papaya.errors import InvariantError, OperatorError, ProtocolError
from papaya.learning.parameters import BLOCK, FLOAT32, Vector, encode_tensors
from papaya.learning.server_optimizer import OptimizerState, ServerOptimizer, server_optimizer

Kind = Literal["fedavg", "fedsgd", "fedadam", "fedyogi", "fedadagrad"]

KINDS: tuple[Kind, ...] = ("fedavg", "fedsgd", "fedadam", "fedyogi", "fedadagrad")
CONFIGS = [
    *(OptimizerConfig(kind=kind) for kind in KINDS),
    OptimizerConfig(kind="fedavg", rate=0.5, momentum=0.9),
    OptimizerConfig(kind="fedadam", rate=0.1, beta1=0.0, beta2=0.99, epsilon=1e-5),
    OptimizerConfig(kind="fedyogi", rate=0.1, beta2=0.99),
    OptimizerConfig(kind="fedadagrad", rate=0.1, beta1=0.0, epsilon=0.1),
]


def some_steps(count: int, length: int, seed: int = 0) -> list[Vector]:
    """Updates over several orders of magnitude, some coordinates of which never move."""
    generator = np.random.default_rng(seed)
    scales = 10.0 ** generator.uniform(-4, 1, length) * (generator.random(length) > 0.1)
    return [(generator.standard_normal(length) * scales).astype(np.float32) for _ in range(count)]


def run(
    optimizer: ServerOptimizer, parameters: Vector, steps: list[Vector], state: OptimizerState
) -> tuple[Vector, OptimizerState]:
    for step in steps:
        parameters, state = optimizer.step(parameters, step, state)
    return parameters, state


def run_from_start(config: OptimizerConfig, parameters: Vector, steps: list[Vector]) -> Vector:
    optimizer = server_optimizer(config)
    return run(optimizer, parameters, steps, optimizer.initial_state(parameters.size))[0]


def torch_run(
    optimizer: Callable[..., torch.optim.Optimizer],
    parameters: Vector,
    steps: list[Vector],
    **options: Any,
) -> Vector:
    tensor = torch.nn.Parameter(torch.tensor(parameters))
    reference = optimizer([tensor], **options)
    for step in steps:
        tensor.grad = torch.tensor(-step)
        reference.step()
    result: Vector = tensor.detach().numpy()
    return result


def reddi_run(config: OptimizerConfig, start: Vector, steps: list[Vector]) -> list[float]:
    """Algorithm 2 of "Adaptive Federated Optimization" in Python's float64."""
    rate, tau = config.rate or 1e-2, config.epsilon or 1e-3
    beta1, beta2 = config.beta1, config.beta2
    result = []
    for x, deltas in zip(start.tolist(), np.transpose(steps).tolist(), strict=True):
        m, v = 0.0, tau**2
        for delta in deltas:
            m = beta1 * m + (1 - beta1) * delta
            if config.kind == "fedadagrad":
                v = v + delta**2
            elif v != delta**2:
                v = v - (1 - beta2) * delta**2 * math.copysign(1, v - delta**2)
            x += rate * m / (math.sqrt(v) + tau)
        result.append(x)
    return result


# Against torch, over 50 steps.


@pytest.mark.parametrize("kind", ["fedavg", "fedsgd"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("rate", [None, 0.3])
def test_fedavg_is_torch_sgd(
    kind: Literal["fedavg", "fedsgd"], momentum: float, rate: float | None
) -> None:
    start, *steps = some_steps(51, 40)
    config = OptimizerConfig(kind=kind, rate=rate, momentum=momentum)
    expected = torch_run(torch.optim.SGD, start, steps, lr=rate or 1.0, momentum=momentum)
    np.testing.assert_allclose(run_from_start(config, start, steps), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999), (0.9, 0.0), (0.5, 0.99)])
@pytest.mark.parametrize("rate", [None, 0.1])
@pytest.mark.parametrize("epsilon", [None, 1e-5, 0.1])
def test_fedadam_is_torch_adam(
    betas: tuple[float, float], rate: float | None, epsilon: float | None
) -> None:
    start, *steps = some_steps(51, 40)
    config = OptimizerConfig(rate=rate, beta1=betas[0], beta2=betas[1], epsilon=epsilon)
    expected = torch_run(
        torch.optim.Adam, start, steps, lr=rate or 1e-3, betas=betas, eps=epsilon or 1e-8
    )
    np.testing.assert_allclose(run_from_start(config, start, steps), expected, 1e-5, 1e-5)


# Against Algorithm 2.


@pytest.mark.parametrize("kind", ["fedyogi", "fedadagrad"])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_fedyogi_and_fedadagrad_are_algorithm_2(
    kind: Literal["fedyogi", "fedadagrad"], beta1: float, beta2: float, epsilon: float | None
) -> None:
    start, *steps = some_steps(51, 40)
    config = OptimizerConfig(kind=kind, beta1=beta1, beta2=beta2, epsilon=epsilon)
    expected = reddi_run(config, start, steps)
    np.testing.assert_allclose(run_from_start(config, start, steps), expected, 1e-4, 1e-5)


# By hand: parameters [1], steps [2], [2], rate as given.


def by_hand(config: OptimizerConfig) -> tuple[float, float]:
    optimizer = server_optimizer(config)
    step = np.array([2], np.float32)
    once, state = optimizer.step(np.array([1], np.float32), step, optimizer.initial_state(1))
    twice, _ = optimizer.step(once, step, state)
    return float(once[0]), float(twice[0])


@pytest.mark.parametrize("kind", ["fedavg", "fedsgd"])
def test_fedavg_by_hand(kind: Literal["fedavg", "fedsgd"]) -> None:
    assert by_hand(OptimizerConfig(kind=kind)) == (3, 5)
    # Velocity 2, then 0.5 x 2 + 2 = 3.
    assert by_hand(OptimizerConfig(kind=kind, rate=0.5, momentum=0.5)) == (2, 3.5)


def test_fedadam_by_hand() -> None:
    """With bias correction a constant step moves every coordinate by the rate."""
    config = OptimizerConfig(rate=0.25, beta1=0.5, beta2=0.75)
    assert by_hand(config) == pytest.approx((1.25, 1.5), rel=1e-6)
    assert by_hand(OptimizerConfig()) == pytest.approx((1.001, 1.002), rel=1e-6)
    # epsilon = 2 is outside the root: m / (sqrt(v) + 2) = 2 / (2 + 2).
    assert by_hand(OptimizerConfig(rate=1.0, epsilon=2.0)) == pytest.approx((1.5, 2.0), rel=1e-6)


def test_fedyogi_by_hand() -> None:
    """tau = 1: m = 1, 1.5; v = 1 + 0.25 x 4 = 2, then 2 + 1 = 3; no bias correction."""
    config = OptimizerConfig(kind="fedyogi", rate=1.0, beta1=0.5, beta2=0.75, epsilon=1.0)
    first = 1 + 1 / (math.sqrt(2) + 1)
    assert by_hand(config) == pytest.approx((first, first + 1.5 / (math.sqrt(3) + 1)), rel=1e-6)


def test_fedyogi_lets_the_second_moment_fall_by_the_square_of_the_step() -> None:
    """v = 9 above step^2 = 4: 9 - 0.25 x 4 = 8, where Adam would give 0.75 x 9 + 1 = 7.75."""
    optimizer = server_optimizer(OptimizerConfig(kind="fedyogi", beta2=0.75, epsilon=3.0))
    one, two = np.ones(1, np.float32), np.full(1, 2, np.float32)
    _, state = optimizer.step(one, two, optimizer.initial_state(1))
    assert state.moments[1].tolist() == [8]


def test_fedadagrad_by_hand() -> None:
    """tau = 1: m = 1, 1.5; v = 1 + 4 = 5, then 9."""
    config = OptimizerConfig(kind="fedadagrad", rate=1.0, beta1=0.5, epsilon=1.0)
    first = 1 + 1 / (math.sqrt(5) + 1)
    assert by_hand(config) == pytest.approx((first, first + 1.5 / (3 + 1)), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "rate", "moments"),
    [
        ("fedavg", 1.0, []),
        ("fedsgd", 1.0, []),
        ("fedadam", 1e-3, [0.0, 0.0]),
        ("fedyogi", 1e-2, [0.0, 1e-6]),
        ("fedadagrad", 1e-2, [0.0, 1e-6]),
    ],
)
def test_defaults_of_each_kind(kind: Kind, rate: float, moments: list[float]) -> None:
    optimizer = server_optimizer(OptimizerConfig(kind=kind))
    state = optimizer.initial_state(2)
    assert optimizer.rate == rate
    assert state.steps == 0
    assert [m.tolist() for m in state.moments] == [[np.float32(v)] * 2 for v in moments]


# What a step never does.


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_step_changes_none_of_its_arguments(config: OptimizerConfig) -> None:
    optimizer = server_optimizer(config)
    start, warm_up, step = some_steps(3, 10)
    _, state = run(optimizer, start, [warm_up], optimizer.initial_state(10))
    arguments = [start, step, *state.moments]
    for array in arguments:
        array.flags.writeable = False
    before = [array.copy() for array in arguments]
    once, after = optimizer.step(start, step, state)
    twice, again = optimizer.step(start, step, state)
    assert all(map(np.array_equal, arguments, before))
    assert once.tobytes() == twice.tobytes()
    assert optimizer.encode_state(after) == optimizer.encode_state(again)
    results = [once, *after.moments]
    assert not any(np.shares_memory(new, old) for new in results for old in arguments)
    assert after.steps == state.steps + 1 == 2


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_everything_stays_float32(config: OptimizerConfig) -> None:
    optimizer = server_optimizer(config)
    start, step = some_steps(2, 10)
    result, state = optimizer.step(start, step, optimizer.initial_state(10))
    assert {array.dtype for array in (result, *state.moments)} == {np.dtype("<f4")}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_blocks_do_not_show(config: OptimizerConfig) -> None:
    """A coordinate moves the same way wherever it stands."""
    columns = some_steps(4, 7)
    copies = 2 * BLOCK // 7 + 3
    start, *steps = (np.tile(column, copies) for column in columns)
    expected = run_from_start(config, columns[0], columns[1:])
    assert run_from_start(config, start, steps).tobytes() == expected.tobytes() * copies


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_zero_step_at_the_start_moves_nothing(config: OptimizerConfig) -> None:
    start = np.array([1, -2], np.float32)
    assert run_from_start(config, start, [np.zeros(2, np.float32)]).tolist() == [1, -2]


@pytest.mark.parametrize(
    ("config", "parameter", "steps"),
    [
        (OptimizerConfig(kind="fedavg", rate=1e30), 0.0, [1e10]),
        (OptimizerConfig(kind="fedavg"), 3e38, [3e38]),
        # The parameters would stay finite, but the second moment would be stuck at infinity.
        (OptimizerConfig(kind="fedadam"), 0.0, [1e25]),
        (OptimizerConfig(kind="fedadagrad"), 0.0, [1e19] * 4),
    ],
)
def test_a_diverged_model_is_never_returned(
    config: OptimizerConfig, parameter: float, steps: list[float]
) -> None:
    start = np.array([parameter, 1], np.float32)
    with pytest.raises(OperatorError, match="diverged") as refusal:
        run_from_start(config, start, [np.array([step, 0], np.float32) for step in steps])
    assert "rate" in refusal.value.hint


def test_vectors_that_do_not_belong_together_are_refused() -> None:
    optimizer = server_optimizer(OptimizerConfig())
    two, three = np.zeros(2, np.float32), np.zeros(3, np.float32)
    good = optimizer.initial_state(2)
    sgd = server_optimizer(OptimizerConfig(kind="fedavg")).initial_state(2)
    one: Vector = np.zeros(1, np.float32)
    for parameters, step, state in (
        (two, three, good),
        (two, one, good),
        (three, three, good),
        (two, two.reshape(1, 2), good),
        (two, two.astype(">f4"), good),
        (two, two, sgd),
    ):
        with pytest.raises(InvariantError):
            optimizer.step(parameters, step, state)


# A successor resumes from bytes.


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(config: OptimizerConfig) -> None:
    start, *steps = some_steps(51, 33)
    expected = run_from_start(config, start, steps)
    optimizer = server_optimizer(config)
    parameters, state = start, optimizer.initial_state(33)
    for step in steps:
        stored = optimizer.encode_state(state)
        successor = server_optimizer(config)
        state = successor.decode_state(stored, 33)
        assert successor.encode_state(state) == stored
        parameters, state = successor.step(parameters, step, state)
    assert parameters.tobytes() == expected.tobytes()
    assert state.steps == 50


@given(st.integers(0, 2**63), st.integers(1, 20), st.sampled_from(CONFIGS), st.integers(0, 99))
def test_encode_and_decode_are_inverse(
    steps: int, length: int, config: OptimizerConfig, seed: int
) -> None:
    optimizer = server_optimizer(config)
    moments = some_steps(len(optimizer.initial_moments), length, seed)
    data = optimizer.encode_state(OptimizerState(steps, tuple(moments)))
    state = optimizer.decode_state(data, length)
    assert state.steps == steps
    assert [m.tobytes() for m in state.moments] == [m.tobytes() for m in moments]


def test_the_state_of_another_kind_or_length_is_refused() -> None:
    for kind in KINDS:
        optimizer = server_optimizer(OptimizerConfig(kind=kind))
        for other in KINDS:
            data = server_optimizer(OptimizerConfig(kind=other)).initial_state(2)
            stored = server_optimizer(OptimizerConfig(kind=other)).encode_state(data)
            if other == kind:
                assert optimizer.decode_state(stored, 2).steps == 0
            else:
                with pytest.raises(ProtocolError):
                    optimizer.decode_state(stored, 2)
    adam = server_optimizer(OptimizerConfig())
    for length in (1, 3):
        with pytest.raises(ProtocolError):
            adam.decode_state(adam.encode_state(adam.initial_state(2)), length)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"kind": "fedavg"},
        {"steps": "1"},
        {"kind": "fedavg", "steps": ""},
        {"kind": "fedavg", "steps": "-1"},
        {"kind": "fedavg", "steps": "+1"},
        {"kind": "fedavg", "steps": "01"},
        {"kind": "fedavg", "steps": "1.0"},
        {"kind": "fedavg", "steps": "1_0"},
        {"kind": "fedavg", "steps": "\u0661"},
        {"kind": "fedavg", "steps": "9" * 5000},
        {"kind": "fedavg", "steps": "1", "more": ""},
    ],
    ids=lambda metadata: str(metadata)[:50],
)
def test_other_metadata_is_refused(metadata: dict[str, str]) -> None:
    optimizer = server_optimizer(OptimizerConfig(kind="fedavg"))
    assert optimizer.decode_state(encode_tensors({}, {"kind": "fedavg", "steps": "1"}), 2).steps
    with pytest.raises(ProtocolError):
        optimizer.decode_state(encode_tensors({}, metadata), 2)


@given(st.binary(max_size=200), st.sampled_from(CONFIGS))
def test_arbitrary_bytes_raise_protocol_error_and_nothing_else(
    data: bytes, config: OptimizerConfig
) -> None:
    with pytest.raises(ProtocolError):
        server_optimizer(config).decode_state(data, 2)


@pytest.mark.parametrize("kind", ["fedavg", "fedadam", "fedyogi", "fedadagrad"])
def test_statistics_at_the_end_of_a_model_are_averaged_whatever_the_optimizer(kind: str) -> None:
    config = msgspec.convert({"kind": kind, "rate": 0.25}, OptimizerConfig)
    with_tail = msgspec.structs.replace(config, averaged=2)
    before, step = np.array([1, 2, 3, 4], FLOAT32), np.array([1, -1, 0.5, 8], FLOAT32)
    plain, tailed = server_optimizer(config), server_optimizer(with_tail)
    expected, _ = plain.step(before, step, plain.initial_state(4))
    found, _ = tailed.step(before, step, tailed.initial_state(4))
    np.testing.assert_array_equal(found[:2], expected[:2])
    np.testing.assert_array_equal(found[2:], (before + step)[2:])
