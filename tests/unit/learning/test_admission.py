"""Admission: what a peer may send, and the norm against exact arithmetic."""

from __future__ import annotations

import math
import struct
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.errors import UpdateRefused
from papaya.learning.parameters import BLOCK
from papaya.learning.weighting import MAX_EXAMPLES, MAX_NORM, WeightedSum, admit, clipped, norm

# Lengths on both sides of every branch: tiny, one block, several blocks.
LENGTHS = [1, 16, 17, BLOCK, BLOCK + 1, 3 * BLOCK - 5]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40))
def test_the_norm_is_that_of_exact_arithmetic(coordinates: list[float]) -> None:
    """From subnormal numbers to the largest float32, whose square no float32 can hold."""
    found = norm(np.array(coordinates, np.float32))
    assert found == pytest.approx(math.sqrt(math.fsum(x * x for x in coordinates)), rel=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1.0, 1e30, 3e38])
def test_the_norm_of_long_vectors(length: int, scale: float) -> None:
    vector = np.full(length, scale, np.float32)
    assert norm(vector) == pytest.approx(float(vector[0]) * math.sqrt(length), rel=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_admitted_update_is_the_bytes_that_were_sent(length: int) -> None:
    delta = np.arange(length, dtype="<f4")
    for data in (delta.tobytes(), bytearray(delta.tobytes()), memoryview(delta.tobytes())):
        admitted = admit(data, length)
        assert admitted.dtype == np.float32
        assert np.array_equal(admitted, delta)
        assert np.shares_memory(admitted, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("size_bytes", [0, 1, 8, 11, 13, 16, 24])
def test_a_wrong_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(UpdateRefused) as refusal:
        admit(bytes(size_bytes), 3)
    assert refusal.value.reason == "wrong_size"
    assert f"{size_bytes} bytes, expected 12" in str(refusal.value)


NOT_FINITE = {
    "quiet nan": 0x7FC00000,
    "signalling nan": 0x7F800001,
    "negative signalling nan": 0xFFBFFFFF,
    "infinity": 0x7F800000,
    "minus infinity": 0xFF800000,
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bits", NOT_FINITE.values(), ids=NOT_FINITE.keys())
@pytest.mark.parametrize("rule", ["refuse", "clip"])
def test_one_coordinate_that_is_not_finite_is_enough(
    length: int, bits: int, rule: Literal["refuse", "clip"]
) -> None:
    for where in (0, length // 2, length - 1):
        update = np.ones(length, np.float32)
        update.view(np.uint32)[where] = bits
        for clip in (None, 1.0):
            with pytest.raises(UpdateRefused) as refusal:
                admit(update.tobytes(), length, clip, rule)
            assert refusal.value.reason == "not_finite"


@given(st.binary(max_size=100), st.integers(0, 24), st.sampled_from(["refuse", "clip"]))
def test_arbitrary_bytes_are_admitted_in_bounds_or_refused(
    data: bytes, length: int, rule: Literal["refuse", "clip"]
) -> None:
    reason = "admitted"
    try:
        delta = admit(data, length, 10.0, rule)
        assert delta.shape == (length,)
        assert norm(delta) <= 10.0
    except UpdateRefused as refusal:
        reason = refusal.reason
    assert (reason == "wrong_size") == (len(data) != 4 * length)
    assert rule == "refuse" or reason != "over_norm"


def test_the_norm_may_equal_the_clip_and_no_more() -> None:
    update = struct.pack("<2f", 3, 4)
    assert admit(update, 2, 5.0).tolist() == [3, 4]
    with pytest.raises(UpdateRefused) as refusal:
        admit(update, 2, math.nextafter(5.0, 0))
    assert refusal.value.reason == "over_norm"
    assert "norm 5, at most 5" in str(refusal.value)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_clipped_update_points_the_same_way_and_would_be_admitted(length: int) -> None:
    update = np.random.default_rng(0).standard_normal(length).astype(np.float32)
    before = update.copy()
    delta = admit(update.tobytes(), length, 0.125, "clip")
    assert np.array_equal(update, before)
    assert np.allclose(delta, update.astype(np.float64) * (0.125 / norm(update)), rtol=1e-6)
    assert admit(delta.tobytes(), length, 0.125) is not None


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.floats(1e-6, 1e6),
)
def test_what_a_device_has_clipped_the_server_admits(coordinates: list[float], clip: float) -> None:
    update = np.array(coordinates, np.float32)
    once = clipped(update, clip)
    assert admit(once.tobytes(), update.size, clip).tolist() == once.tolist()
    assert clipped(once, clip) is once
    assert norm(once) >= min(norm(update), clip) * (1 - 1e-6)


def test_without_a_clip_an_update_that_could_overflow_the_sum_is_refused() -> None:
    largest = np.array([MAX_NORM, 0], np.float32)
    with pytest.raises(UpdateRefused) as refusal:
        admit((largest * np.float32(1.001)).tobytes(), 2)
    assert refusal.value.reason == "over_norm"
    with pytest.raises(UpdateRefused):
        admit((largest * np.float32(1.001)).tobytes(), 2, clip=1e30, rule="clip")
    total = WeightedSum.zero(2)
    for _ in range(1000):
        total.add(admit(largest.tobytes(), 2), MAX_EXAMPLES, 0)
    assert total.mean().tolist() == [MAX_NORM, 0]
