"""From norms to a clip, and what fixed point makes of updates: against the real encoder."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from papaya.config import AsyncFL, TaskConfig, Weighting
from papaya.secagg import fixed_point
from papaya.study.precision import (
    LEAST_UPDATES,
    mean_weight,
    norms_of,
    precision,
    rounding_errors,
    suggested_clip,
)
from tests.unit.secagg.builders import encoded

LENGTH, GOAL = 400, 20
TASK = TaskConfig(
    task="t", concurrency=40, model_length=LENGTH, regime=AsyncFL(GOAL), max_examples=100
)


def test_norms_are_quantiles() -> None:
    norms = norms_of([float(value) for value in range(101)])
    assert norms is not None
    found = structs.astuple(norms)
    assert found == (101, 50, 90, 95, 99, 100)
    assert norms_of([]) is None


@given(st.lists(st.floats(1e-20, 1e20), min_size=1, max_size=300))
def test_the_suggested_clip_is_just_above_the_99th_percentile(found: list[float]) -> None:
    norms = norms_of(found)
    assert norms is not None
    clip = suggested_clip(norms)
    assert norms.p99 * (1 - 1e-6) <= clip <= 1.11 * norms.p99


def test_the_clip_has_two_digits() -> None:
    norms = norms_of([1.7321] * 10)
    assert norms is not None
    assert suggested_clip(norms) == 1.8
    silent = norms_of([0.0] * 10)
    assert silent is not None
    assert suggested_clip(silent) > 0


def test_the_errors_are_those_of_the_encoder() -> None:
    """Encode and sum as devices and servers do; the mean misses as was said."""
    rng = np.random.default_rng(3)
    updates = rng.normal(0, 0.1 / math.sqrt(LENGTH), (GOAL, LENGTH))
    examples = np.full(GOAL, 25)
    norms = 4 * np.linalg.norm(updates, axis=1).tolist()
    said = precision(TASK, LENGTH, mean_weight(TASK, examples), norms)
    assert said is not None
    shares = examples / TASK.max_examples
    scale = fixed_point.scale(GOAL, said.clip)
    clipped = updates * np.minimum(1, said.clip / np.linalg.norm(updates, axis=1))[:, None]
    weighted = clipped * shares[:, None]
    words = [encoded(row, scale, said.levels) for row in weighted]
    total = np.sum(words, axis=0, dtype=np.uint32).view(np.int32)
    misses = total / scale / shares.sum() - weighted.sum(axis=0) / shares.sum()
    assert np.abs(misses).max() <= said.error_bound
    assert np.sqrt((misses**2).mean()) == pytest.approx(said.error, rel=0.15)
    assert said.step == said.clip / fixed_point.levels(GOAL)
    assert said.coordinate == pytest.approx(0.1 / math.sqrt(LENGTH), rel=0.1)
    assert said.clipped == np.mean(np.array(norms) > said.clip)


def test_few_examples_cost_precision_and_a_large_goal_levels() -> None:
    fine = precision(TASK, LENGTH, 1.0, 20 * [1.0, 2.0])
    coarse = precision(TASK, LENGTH, 0.1, 20 * [1.0, 2.0])
    assert fine is not None
    assert coarse is not None
    assert coarse.error == pytest.approx(10 * fine.error)
    assert fine.is_enough
    wide = structs.replace(TASK, regime=AsyncFL(2**25), concurrency=2**26)
    found = precision(wide, 10**6, 1.0, 30 * [1.0])
    assert found is not None
    assert not found.is_enough


def test_the_weights_are_those_of_the_task() -> None:
    examples = np.array([10, 30, 200])
    assert mean_weight(TASK, examples) == pytest.approx((0.1 + 0.3 + 1) / 3)
    capped = structs.replace(TASK, weighting=Weighting("capped", cap=20))
    assert mean_weight(capped, examples) == pytest.approx((0.5 + 1 + 1) / 3)
    equal = structs.replace(TASK, weighting=Weighting("equal"))
    assert mean_weight(equal, examples) == 1


def test_a_clip_can_be_asked_for() -> None:
    found = precision(TASK, LENGTH, 0.5, [1.0, 3.0], clip=2.0)
    assert found is not None
    assert (found.clip, found.clipped) == (2.0, 0.5)
    assert precision(TASK, LENGTH, 0.5, []) is None


def test_a_clip_is_not_suggested_from_a_few_updates() -> None:
    assert precision(TASK, LENGTH, 0.5, (LEAST_UPDATES - 1) * [1.0]) is None
    assert precision(TASK, LENGTH, 0.5, LEAST_UPDATES * [1.0]) is not None


def test_the_error_of_fewer_bits_is_measured_on_the_updates_and_on_their_mean() -> None:
    rng = np.random.default_rng(3)
    common = rng.standard_normal(2000)
    updates = (common + rng.standard_normal((50, 2000)) / 4).astype(np.float32)
    found = rounding_errors(updates)
    # Of normal numbers the largest of 256 is about 2.8, and a rounding error at random has a
    # variance of a sixth of a step.
    expected = 2.8 / 127 / math.sqrt(6)
    assert found[8].update == pytest.approx(expected, rel=0.3)
    assert found[8].mean == pytest.approx(found[8].update / math.sqrt(50), rel=0.3)
    assert found[16].update == pytest.approx(found[8].update * 127 / 32767, rel=0.1)
    assert rounding_errors(np.zeros((3, 10), np.float32)) == {}
    assert rounding_errors(np.full((3, 10), np.nan, np.float32)) == {}
