"""Fixed point against exact rationals: scale, rounding, clamp, sign, bound."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.secagg import fixed_point
from papaya.secagg.errors import UpdateError
from papaya.secagg.words import BLOCK
from tests.unit.secagg import reference
from tests.unit.secagg.builders import encoded

floats = st.floats(-1e6, 1e6, width=32)


@given(st.lists(floats, min_size=1, max_size=20), st.integers(1, 10**6), st.floats(0.01, 100))
def test_encoding_is_the_reference(values: list[float], goal: int, clip: float) -> None:
    limit, factor = fixed_point.levels(goal), fixed_point.scale(goal, clip)
    found = encoded(np.array(values, np.float32), factor, limit)
    assert found.tolist() == [reference.encoded(value, factor, limit) for value in values]


def test_halves_go_to_the_even_neighbour() -> None:
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32)
    found = encoded(values, 1.0, 100).view("<i4").tolist()
    assert found == [0, 2, 2, 0, -2, -2]


def test_negative_integers_are_the_upper_half_of_the_group() -> None:
    """Fixed point: "-floor(n/2), ..., -1 to group elements ceil(n/2), ..., n - 1"."""
    values = np.array([-1.0, -2.0, 1.0], np.float32)
    assert encoded(values, 1.0, 9).tolist() == [2**32 - 1, 2**32 - 2, 1]


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 2])
def test_one_large_value_is_clamped_wherever_it_is(at: int) -> None:
    values = np.full(2 * BLOCK + 3, 0.25, np.float32)
    values[at] = -3e38
    found = encoded(values, 1000.0, 1000).view("<i4")
    assert found[at] == -1000
    assert np.delete(found, at).tolist() == [250] * (2 * BLOCK + 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, BLOCK + 1])
def test_what_is_not_finite_is_refused(bad: float, at: int) -> None:
    values = np.zeros(BLOCK + 2, np.float32)
    values[at] = bad
    with pytest.raises(UpdateError) as caught:
        encoded(values, 1000.0, 1000)
    assert caught.value.reason == "not_finite"


def test_a_signalling_nan_is_refused_without_a_warning() -> None:
    values = np.array([0x7F800001], "<u4").view("<f4")
    with pytest.raises(UpdateError):
        encoded(values, 1000.0, 1000)


@given(st.integers(1, 2**20))
def test_a_full_sum_never_wraps(goal: int) -> None:
    assert goal * fixed_point.levels(goal) < 2**31 <= (goal + 1) * (fixed_point.levels(goal) + 2)


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=30),
    st.integers(30, 10**6),
    st.floats(1e-6, 1e6),
)
def test_a_sum_is_within_the_bound(shares: list[float], goal: int, clip: float) -> None:
    values = [np.float32(share * clip) for share in shares]
    values = [value for value in values if abs(float(value)) <= clip] or [np.float32(0)]
    limit, factor = fixed_point.levels(goal), fixed_point.scale(goal, clip)
    words = encoded(np.array(values, np.float32), factor, limit).view("<i4")
    exact = sum(Fraction(float(value)) for value in values)
    found = Fraction(int(words.sum(dtype=np.int64))) * Fraction(clip) / limit
    assert abs(found - exact) <= Fraction(fixed_point.error_bound(len(values), goal, clip))


def test_the_bound_is_not_loose() -> None:
    """Values in the middle between two steps are off by nearly half a step each."""
    goal, clip = 1000, 1.0
    values = np.full(1000, 10.5 / fixed_point.levels(goal), np.float64)
    words = encoded(values, fixed_point.scale(goal, clip), fixed_point.levels(goal))
    missed = abs(float(words.sum()) / fixed_point.levels(goal) - values.sum())
    assert missed > 0.99 * fixed_point.error_bound(1000, goal, clip)


@given(st.integers(1, 2**30), st.integers(1, 2**31 - 1))
def test_needed_levels_leave_precision(length: int, max_examples: int) -> None:
    needed = fixed_point.needed_levels(length, max_examples)
    assert needed >= max_examples
    assert 1 / needed <= 0.25 / math.sqrt(length) * (1 + 1e-9)
