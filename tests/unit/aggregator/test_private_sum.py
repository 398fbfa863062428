"""Private tasks in the clear: the noise of a step, and what the sum is divided by."""

from __future__ import annotations

import math

import numpy as np
import pytest

from papaya.aggregator.private_sum import noised_mean
from papaya.config import AsyncFL, Privacy, TaskConfig
from papaya.config.privacy import PrivateWeighting
from papaya.learning.weighting import WeightedSum, counted_examples

LENGTH, MEMBERS, CLIP, Z = 50_000, 40, 0.5, 3.0


def a_config(weighting: PrivateWeighting = "equal") -> TaskConfig:
    privacy = Privacy(
        clip=CLIP,
        max_participations=1,
        delta=1e-6,
        noise_multiplier=Z,
        weighting=weighting,
        expected_weight=1.0 if weighting == "equal" else 0.25,
    )
    return TaskConfig(
        task="a",
        concurrency=100,
        model_length=LENGTH,
        regime=AsyncFL(aggregation_goal=MEMBERS),
        max_examples=200,
        privacy=privacy,
    )


@pytest.mark.parametrize("weighting", ["equal", "capped"])
def test_noise_is_z_clips_and_the_divisor_is_public(weighting: PrivateWeighting) -> None:
    config = a_config(weighting)
    delta = np.full(LENGTH, 0.9 * CLIP / math.sqrt(LENGTH), np.float32)
    total = WeightedSum.zero(LENGTH)
    for _ in range(MEMBERS):
        total.add(delta, counted_examples(config, 50), 0)
    found = noised_mean(config, total, MEMBERS, bytes(16)).astype(float)
    # 50 of 200 examples are a quarter, and a quarter is expected.
    assert found.mean() == pytest.approx(
        delta[0], abs=5 * Z * CLIP / MEMBERS / math.sqrt(LENGTH) * 4
    )
    expected = Z * CLIP / MEMBERS * (1 if weighting == "equal" else 4)
    assert found.std() == pytest.approx(expected, rel=0.02)
    again = noised_mean(config, total, MEMBERS, bytes(16))
    assert np.array_equal(again, found.astype(np.float32))
    other = noised_mean(config, total, MEMBERS, b"k" * 16)
    assert not np.array_equal(again, other)


def test_equal_weights_do_not_depend_on_examples() -> None:
    assert [counted_examples(a_config(), n) for n in (1, 7, 200)] == [1, 1, 1]
    assert [counted_examples(a_config("capped"), n) for n in (1, 7, 200)] == [1, 7, 200]
