"""Sums in Z_2^16 against a slow reference: exact, right on average, and never around the ring."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.secagg import fixed_point
from papaya.secagg.errors import Implausible, OfferRefused, ParametersError
from papaya.secagg.mask import sum_masks
from papaya.secagg.parameters import SCHEME_16, PublicParameters
from papaya.secagg.participant import _masked, weight_and_damping
from papaya.secagg.rounding import RandomEncoder
from papaya.secagg.unmask import chance_of_random_words, largest_norm, unmask
from papaya.secagg.words import BLOCK, RING_16, Reals, Words
from tests.unit.secagg import reference
from tests.unit.secagg.builders import Deployment, a_policy, a_task, entropy
from tests.unit.secagg.vectors import FILE

TASK = a_task(scheme=SCHEME_16)
GOALS = st.integers(1, fixed_point.largest_goal(fixed_point.FEWEST_LEVELS, RING_16))


def encoded(values: Reals, factor: float, limit: int, seed: bytes) -> Words:
    words = np.empty(values.size, RING_16.word)
    encoder = RandomEncoder(factor, limit, seed)
    encoder.encode_weight_into(limit / 2, np.empty(1, RING_16.word))
    for start in range(0, values.size, BLOCK):
        encoder.encode_into(values[start : start + BLOCK], words[start : start + BLOCK])
    return words


def a_sum(task: PublicParameters, updates: list[Reals], examples: list[int]) -> Words:
    """What is left of the sum of the masked updates without their masks."""
    draw = entropy("sum")
    seeds = [draw(16) for _ in updates]
    total = np.zeros(task.vector_words, RING_16.word)
    for update, n, seed in zip(updates, examples, seeds, strict=True):
        total += _masked(update, *weight_and_damping(task, n, 0), task, seed)
    unmasked: Words = total - sum_masks(seeds, task.vector_words, RING_16)
    return unmasked


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=6),
    st.integers(1, 120),
    st.integers(0, 8),
    GOALS,
    st.binary(min_size=16, max_size=16),
)
def test_a_masked_update_is_the_reference(
    values: list[float], examples: int, staleness: int, goal: int, seed: bytes
) -> None:
    task = a_task(scheme=SCHEME_16, length=len(values), aggregation_goal=goal, threshold=1)
    weight, damping = weight_and_damping(task, examples, staleness)
    found = _masked(np.array(values, np.float32), weight, damping, task, seed)
    factor = weight * damping * (task.levels / task.clip)
    words = [*reference.encoded_16(values, weight, factor, task.levels, seed), 1]
    masks = reference.mask(seed, len(words), 16)
    assert found.dtype == RING_16.word
    assert found.tolist() == [(a + b) % 2**16 for a, b in zip(words, masks, strict=True)]


def test_the_published_vector() -> None:
    whole = json.loads(FILE.read_text(encoding="utf-8"))
    vector = whole["in_16_bits"]
    task = PublicParameters.decode(vector["parameters"].encode())
    assert task.digest().hex() == vector["parameters_sha256"]
    weight, damping = weight_and_damping(task, whole["examples"], whole["staleness"])
    update, seed = np.array(whole["update"], np.float32), bytes.fromhex(whole["seed"])
    masked = _masked(update, weight, damping, task, seed)
    assert masked.tolist() == vector["masked"]
    plain: Words = masked - sum_masks([seed], task.vector_words, RING_16)
    assert plain.tolist() == vector["encoded"]


def test_blocks_continue_the_same_random_bits() -> None:
    values = np.full(BLOCK + 3, 0.4, np.float32)
    found = encoded(values, 10.0, 100, bytes(16))
    again = encoded(values[: BLOCK + 1], 10.0, 100, bytes(16))
    assert found[: BLOCK + 1].tolist() == again.tolist()


def test_the_random_bits_are_not_those_of_the_mask() -> None:
    draws = encoded(np.full(64, 0.5, np.float32), 1.0, 1, bytes(16))
    masks = sum_masks([bytes(16)], 65, RING_16)[1:]
    assert draws.tolist() != (masks >= 2**15).astype(int).tolist()


@pytest.mark.parametrize("value", [0.0, 1 / 3, -1 / 3, 0.999, -7.25, 100.5])
def test_rounding_is_right_on_average_and_off_by_less_than_a_step(value: float) -> None:
    n = 200_000
    found = encoded(np.full(n, value), 1.0, 1000, b"average of draws").view(RING_16.signed)
    assert np.abs(found - value).max() < 1
    part = value % 1
    deviation = math.sqrt(part * (1 - part) / n)
    assert abs(found.mean() - value) <= 6 * deviation + 2.0**-17


def test_a_value_on_the_grid_stays_as_it_is() -> None:
    values = np.arange(-1000, 1001, dtype=np.float64)
    assert encoded(values, 1.0, 1000, bytes(16)).view(RING_16.signed).tolist() == values.tolist()


@given(GOALS)
def test_a_full_sum_never_wraps(goal: int) -> None:
    levels = fixed_point.levels(goal, RING_16)
    assert goal * levels < 2**15 <= (goal + 1) * (levels + 2)
    extreme = np.array([1.0, -1.0, 3e38, -3e38])
    for seed in (bytes(16), b"\xff" * 16):
        words = encoded(extreme, levels, levels, seed).view(RING_16.signed)
        assert words.tolist() == [levels, -levels] * 2


@pytest.mark.parametrize("goal", [1, 4, 100, 1927])
def test_a_sum_at_the_bound_is_exact(goal: int) -> None:
    """Every client at the clip, in the same coordinate: the largest sum that there can be."""
    task = a_task(scheme=SCHEME_16, aggregation_goal=goal, threshold=1)
    update = np.array([1, 0, 0, 0, 0], np.float32)
    words = a_sum(task, [update] * goal, [100] * goal)
    found = unmask(words, np.zeros_like(words), goal, task)
    assert found.steps.tolist() == [goal * task.levels, 0, 0, 0, 0]
    assert found.mean().tolist() == [1.0, 0, 0, 0, 0]


def test_a_sum_that_wrapped_is_refused() -> None:
    """Planted: clients that use twice the levels. Their sum is negative, and one client short."""
    updates = [np.array([1, 0, 0, 0, 0], np.float32)] * 4
    wide = a_task(scheme=SCHEME_16, aggregation_goal=2)
    words = a_sum(wide, updates, [100] * 4)
    assert words.view(RING_16.signed)[0] < 0
    with pytest.raises(Implausible):
        unmask(words, np.zeros_like(words), 4, TASK)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 400), st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_honest_sums_are_plausible_and_near_the_real_mean(
    length: int, members: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    task = a_task(scheme=SCHEME_16, length=length, aggregation_goal=members, threshold=1)
    updates = list(rng.standard_normal((members, length)).astype(np.float32))
    updates = [update / max(1.0, 1.001 * float(np.linalg.norm(update))) for update in updates]
    examples = rng.integers(1, 150, members).tolist()
    words = a_sum(task, updates, examples)
    found = unmask(words, np.zeros_like(words), members, task)
    weights = [min(n, 100) / 100 for n in examples]
    exact = sum(w * u.astype(np.float64) for w, u in zip(weights, updates, strict=True))
    assert np.abs(found.steps * found.step - exact).max() < members * task.step
    assert abs(found.weight - sum(weights)) < members / task.levels


def test_rounding_errors_of_many_clients_cancel_out() -> None:
    goal, length = 100, 2000
    task = a_task(scheme=SCHEME_16, length=length, aggregation_goal=goal, weighting="equal")
    rng = np.random.default_rng(7)
    updates = list(rng.standard_normal((goal, length)).astype(np.float32))
    updates = [update / np.float32(1.001 * np.linalg.norm(update)) for update in updates]
    words = a_sum(task, updates, [1] * goal)
    mean = unmask(words, np.zeros_like(words), goal, task).mean()
    error = float(np.linalg.norm(mean - np.mean(updates, axis=0, dtype=np.float64)))
    bound = fixed_point.relative_error(length, goal)
    assert bound / 2 < error < 1.2 * bound


def test_random_words_are_refused() -> None:
    task = a_task(scheme=SCHEME_16, length=200)
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2**16, task.vector_words).astype(RING_16.word)
    words[-2:] = 2 * task.levels, 3
    with pytest.raises(Implausible) as caught:
        unmask(words, np.zeros_like(words), 3, task)
    assert caught.value.reason in ("coordinate", "norm")
    assert chance_of_random_words(4, task) < 2.0**-100


def test_the_allowance_for_rounding_never_exceeds_what_is_certain() -> None:
    for members in (1, 2, 4):
        allowed = largest_norm(0.0, members, TASK)
        assert allowed <= (1 + 2.0**-10) * members * (1 + math.sqrt(TASK.length))


def test_a_tsa_sums_words_of_16_bits() -> None:
    world = Deployment(TASK)
    updates = world.accepted(3, value=0.25)
    assert {update.masked.nbytes for update in updates} == {2 * TASK.vector_words}
    words = world.unmasked(updates)
    found = unmask(words, np.zeros_like(words), 3, TASK)
    assert found.mean() == pytest.approx(np.full(5, 0.25), abs=TASK.step)


def test_a_device_refuses_words_of_another_size_than_its_own_file_says() -> None:
    with pytest.raises(OfferRefused, match="papaya-secagg-3"):
        a_policy(a_task()).check(TASK)
    with pytest.raises(OfferRefused, match="papaya-secagg-1"):
        a_policy(TASK).check(a_task())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"weighting": "none"}, "weighting"),
        ({"weighting": "capped"}, "weighting"),
        ({"noise_multiplier": 1.0}, "noise_multiplier"),
        ({"aggregation_goal": 1928}, "aggregation_goal"),
        ({"aggregation_goal": 100, "length": 430_000}, "aggregation_goal"),
    ],
)
def test_parameters_that_words_of_16_bits_cannot_hold_are_refused(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(ParametersError) as caught:
        a_task(scheme=SCHEME_16, **changes)
    assert caught.value.reason == field
