"""Updates in fewer bits: what the format is, that rounding is fair, and hostile bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.config.upload_bits import UploadBits, encoded_bytes
from papaya.errors import UpdateRefused
from papaya.learning.compression import decode_update, encode_update, session_seed
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.weighting import admit, clipped, norm

BITS: Sequence[UploadBits] = (8, 16)
LEVELS = {8: 127, 16: 32_767}


def a_vector(length: int, seed: int = 0, scale: float = 1.0) -> Vector:
    return (scale * np.random.default_rng(seed).standard_normal(length)).astype(FLOAT32)


def rounded(update: Vector, bits: UploadBits, seed: int = 0, clip: float | None = None) -> Vector:
    return decode_update([encode_update(update, bits, seed, clip)], update.size, bits)


def test_the_bytes_are_those_of_the_specification() -> None:
    """docs/spec/protocol.md has this example: numbers without a remainder do not need a draw."""
    update = np.array([127, -64, 0, 1], FLOAT32)
    assert encode_update(update, 8, seed=9) == struct.pack("<f4b", 1.0, 127, -64, 0, 1)
    wide = np.array([32767, -2, 0, 1], FLOAT32)
    assert encode_update(wide, 16, seed=9) == struct.pack("<f4h", 1.0, 32767, -2, 0, 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [1, 255, 256, 257, 1000])
def test_the_size_follows_from_the_number_of_values(bits: UploadBits, length: int) -> None:
    encoded = encode_update(a_vector(length), bits, seed=1)
    assert len(encoded) == encoded_bytes(length, bits)
    assert len(encoded) == 4 * (-(-length // 256)) + length * bits // 8


@settings(max_examples=60)
@given(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=600),
    st.sampled_from(BITS),
    st.integers(0, 2**32),
)
def test_no_number_is_off_by_more_than_its_scale(
    values: list[float], bits: UploadBits, seed: int
) -> None:
    update = np.array(values, FLOAT32)
    found = rounded(update, bits, seed)
    assert np.isfinite(found).all()
    for start in range(0, update.size, 256):
        block, decoded = update[start : start + 256], found[start : start + 256]
        largest = float(np.abs(block).max())
        step = max(largest / LEVELS[bits] * (1 + 1e-6), 1.5e-45)
        exact, got = block.astype(float), decoded.astype(float)
        assert (np.abs(got - exact) <= step + np.abs(exact) * 1e-6).all()


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_number_keeps_its_sign_with_the_largest_draw(bits: UploadBits) -> None:
    """With this seed the first draw is 1 - 2**-53, the largest below 1."""
    update = np.array([LEVELS[bits]], FLOAT32)
    assert rounded(update, bits, seed=0x31628AF67B2131AB) == update


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_of_many_rounded_updates_is_the_update(bits: UploadBits) -> None:
    """Rounding to the nearest would be off by the same amount each time."""
    update = a_vector(300)
    count = 400
    mean = np.mean([rounded(update, bits, seed).astype(float) for seed in range(count)], axis=0)
    steps = np.repeat(
        [np.abs(update[:256]).max() / LEVELS[bits], np.abs(update[256:]).max() / LEVELS[bits]],
        [256, 44],
    )
    # Each error has a standard deviation of at most half a step.
    assert (np.abs(mean - update) <= 5 * steps / 2 / np.sqrt(count)).all()
    nearest = np.rint(update / steps) * steps
    assert np.abs(nearest - update).max() > 0.4 * steps.max()


def test_the_same_session_gives_the_same_bytes() -> None:
    update = a_vector(500)
    first, second = session_seed("ab12"), session_seed("ab13")
    assert encode_update(update, 8, first) == encode_update(update, 8, session_seed("ab12"))
    assert encode_update(update, 8, first) != encode_update(update, 8, second)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [3, 40, 5000])
def test_what_a_device_has_clipped_is_not_refused(bits: UploadBits, length: int) -> None:
    clip = 0.5
    for seed in range(20):
        update = clipped(a_vector(length, seed, scale=10.0), clip)
        found = rounded(update, bits, seed, clip)
        admit([found.data], length, clip)
        assert norm(found) > 0.9 * clip


@pytest.mark.parametrize("bits", BITS)
def test_zeros_stay_zeros(bits: UploadBits) -> None:
    assert not rounded(np.zeros(300, FLOAT32), bits).any()


@pytest.mark.parametrize("bits", BITS)
def test_chunks_may_cut_anywhere(bits: UploadBits) -> None:
    update = a_vector(700)
    encoded = encode_update(update, bits, seed=1)
    chunks = [encoded[:1], encoded[1:9], encoded[9:600], encoded[600:]]
    expected = decode_update([encoded], 700, bits)
    np.testing.assert_array_equal(decode_update(chunks, 700, bits), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("change", [-1, 1, -4, 1000])
def test_another_size_is_refused(bits: UploadBits, change: int) -> None:
    data = bytes(encoded_bytes(300, bits) + change)
    with pytest.raises(UpdateRefused, match="expected") as refused:
        decode_update([data], 300, bits)
    assert refused.value.reason == "wrong_size"


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_scales_that_give_no_finite_number_are_refused(scale: float) -> None:
    data = struct.pack("<f4b", scale, 127, 0, 0, 1)
    with pytest.raises(UpdateRefused) as refused:
        admit([decode_update([data], 4, 8).data], 4)
    assert refused.value.reason in ("not_finite", "over_norm")


@settings(max_examples=200)
@given(st.binary(min_size=4 + 20, max_size=4 + 20), st.sampled_from([None, 1.0]))
def test_any_bytes_are_admitted_within_the_clip_or_refused(data: bytes, clip: float | None) -> None:
    try:
        admitted = admit([decode_update([data], 20, 8).data], 20, clip)
    except UpdateRefused:
        return
    [piece] = admitted.pieces
    assert norm(piece) <= (2.0**60 if clip is None else clip)
