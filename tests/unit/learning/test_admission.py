"""Admission: what a peer may send, and the norm against exact arithmetic."""

from __future__ import annotations

import math
import struct
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.errors import UpdateRefused
from papaya.learning.parameters import BLOCK, Vector
from papaya.learning.weighting import (
    MAX_EXAMPLES,
    MAX_NORM,
    Contribution,
    WeightedSum,
    admit,
    clipped,
    norm,
)

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
        [admitted], scale = admit([data], length)
        assert scale == 1
        assert admitted.dtype == np.float32
        assert np.array_equal(admitted, delta)
        assert np.shares_memory(admitted, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("chunk_bytes", [1, 3, 4, 6, 8, 60, 64, 100])
def test_an_update_may_come_in_chunks_of_any_size(chunk_bytes: int) -> None:
    delta = np.arange(25, dtype="<f4")
    data = delta.tobytes()
    chunks = [data[i : i + chunk_bytes] for i in range(0, len(data), chunk_bytes)]
    pieces, _ = admit(chunks, 25)
    assert np.concatenate(pieces).tolist() == delta.tolist()
    with pytest.raises(UpdateRefused):
        admit(chunks[:-1], 25)


@pytest.mark.parametrize("size_bytes", [0, 1, 8, 11, 13, 16, 24])
def test_a_wrong_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(UpdateRefused) as refusal:
        admit([bytes(size_bytes)], 3)
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
                admit([update.tobytes()], length, clip, rule)
            assert refusal.value.reason == "not_finite"


@given(st.binary(max_size=100), st.integers(0, 24), st.sampled_from(["refuse", "clip"]))
def test_arbitrary_bytes_are_admitted_in_bounds_or_refused(
    data: bytes, length: int, rule: Literal["refuse", "clip"]
) -> None:
    reason = "admitted"
    try:
        [delta], scale = admit([data], length, 10.0, rule)
        assert delta.shape == (length,)
        assert norm(delta) * scale <= 10.0
    except UpdateRefused as refusal:
        reason = refusal.reason
    assert (reason == "wrong_size") == (len(data) != 4 * length)
    assert rule == "refuse" or reason != "over_norm"


def test_the_norm_may_equal_the_clip_and_no_more() -> None:
    update = struct.pack("<2f", 3, 4)
    assert admit([update], 2, 5.0).pieces[0].tolist() == [3, 4]
    with pytest.raises(UpdateRefused) as refusal:
        admit([update], 2, math.nextafter(5.0, 0))
    assert refusal.value.reason == "over_norm"
    assert "norm 5, at most 5" in str(refusal.value)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_clipped_update_points_the_same_way_as_one_clipped_on_a_device(length: int) -> None:
    update = np.random.default_rng(0).standard_normal(length).astype(np.float32)
    data = update.tobytes()
    [delta], scale = admit([data], length, 0.125, "clip")
    assert np.shares_memory(delta, np.frombuffer(data, np.uint8))
    on_device = clipped(update, 0.125)
    assert admit([on_device.tobytes()], length, 0.125, "refuse").scale == 1
    assert np.allclose(delta * np.float64(scale), on_device, rtol=1e-6)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.floats(1e-6, 1e6),
)
def test_what_a_device_has_clipped_the_server_admits(coordinates: list[float], clip: float) -> None:
    update = np.array(coordinates, np.float32)
    once = clipped(update, clip)
    assert admit([once.tobytes()], update.size, clip).scale == 1
    assert clipped(once, clip) is once
    assert norm(once) >= min(norm(update), clip) * (1 - 1e-6)


def test_without_a_clip_an_update_that_could_overflow_the_sum_is_refused() -> None:
    largest = np.array([MAX_NORM, 0], np.float32)
    with pytest.raises(UpdateRefused) as refusal:
        admit([(largest * np.float32(1.001)).tobytes()], 2)
    assert refusal.value.reason == "over_norm"
    with pytest.raises(UpdateRefused):
        admit([(largest * np.float32(1.001)).tobytes()], 2, clip=1e30, rule="clip")
    total = WeightedSum.zero(2)
    for _ in range(1000):
        total.add_all([Contribution(admit([largest.tobytes()], 2), MAX_EXAMPLES, 0)])
    assert total.mean().tolist() == [MAX_NORM, 0]


# The quick look that most updates pass must never decide otherwise than exact arithmetic.


def slow_verdict(update: Vector, clip: float | None, rule: Literal["refuse", "clip"]) -> str:
    try:
        found = norm(update)
    except UpdateRefused as refusal:
        return refusal.reason
    is_clipped = clip is not None and found > clip and rule == "clip"
    counted = clip if clip is not None and is_clipped else found
    if counted > (MAX_NORM if clip is None else min(clip, MAX_NORM)):
        return "over_norm"
    return "clipped" if is_clipped else "admitted"


def verdict(chunks: list[bytes], length: int, clip: float | None, rule: Any) -> str:
    try:
        scale = admit(chunks, length, clip, rule).scale
    except UpdateRefused as refusal:
        return refusal.reason
    return "admitted" if scale == 1 else "clipped"


RULES: list[Literal["refuse", "clip"]] = ["refuse", "clip"]


@pytest.mark.parametrize("rule", RULES)
@given(data=st.data())
def test_admission_decides_as_exact_arithmetic_does(
    rule: Literal["refuse", "clip"], data: st.DataObject
) -> None:
    length = data.draw(st.sampled_from([1, 16, 17, 100, 8191, 8192, 8193, 20000]))
    magnitude = data.draw(
        st.sampled_from([1e-44, 1e-38, 1e-25, 1e-12, 1.0, 1e15, 1e18, 1e19, 3e38])
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    update = (rng.uniform(-1, 1, length) * magnitude).astype(np.float32)
    if data.draw(st.booleans()):
        where = data.draw(st.integers(0, length - 1))
        strange = data.draw(st.sampled_from([*NOT_FINITE.values(), 0, 0x7F7FFFFF]))
        update.view(np.uint32)[where] = strange
    with np.errstate(all="ignore"):
        exact = math.sqrt(float(np.square(update.astype(np.float64)).sum()))
    off = data.draw(st.sampled_from([0.5, 0.99, 0.998, 0.999999, 1.000001, 1.001, 1.01, 2]))
    clip = data.draw(st.none() | st.just(exact * off))
    if clip is not None and not 0 < clip < math.inf:
        clip = None
    raw = update.tobytes()
    cut = 4 * data.draw(st.integers(0, length))
    assert verdict([raw[:cut], raw[cut:]], length, clip, rule) == slow_verdict(update, clip, rule)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rule", RULES)
def test_admission_is_exact_at_the_clip_itself(
    length: int, rule: Literal["refuse", "clip"]
) -> None:
    update = np.random.default_rng(1).standard_normal(length).astype(np.float32)
    found = norm(update)
    for clip in (found, math.nextafter(found, 0), math.nextafter(found, math.inf), MAX_NORM):
        raw = update.tobytes()
        chunks = [raw[i : i + 4 * BLOCK] for i in range(0, len(raw), 4 * BLOCK)]
        assert verdict(chunks, length, clip, rule) == slow_verdict(update, clip, rule)


@pytest.mark.parametrize("clip", [2.0**-40, 2.0**-41, 1e-30, 1e-300])
def test_squares_that_vanish_in_float32_still_count(clip: float) -> None:
    update = np.full(50_000, 1e-23, np.float32)
    expected = slow_verdict(update, clip, "refuse")
    assert expected == ("over_norm" if clip < 1e-20 else "admitted")
    assert verdict([update.tobytes()], update.size, clip, "refuse") == expected
