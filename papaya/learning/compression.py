"""Updates in 16 or 8 bits for each number, rounded at random so that the mean stays right.

    scales    float32, one for every 256 numbers (the last may be for fewer)
    codes     int16 or int8, one for each number

all little-endian. A number is code × scale. The scale of 256 numbers is the largest magnitude among
them divided by 32,767 or 127, rounded up to a float32. A code is ⌊x ÷ scale + u⌋ with u uniform in
[0, 1), drawn from a seed: its expectation is x ÷ scale, so rounding errors of many clients cancel
out in a sum. The error of a number is less than one scale.

Rounding can lift the norm above the clip, for which a server would discard the update. Then the
client shrinks the update and rounds it again, with the same draws.

Refused (UpdateRefused): another size. All other bytes are numbers, which `admit` checks as it
checks those of an update in float32: scales that are not finite give numbers that are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from papaya.config.upload_bits import VALUES_PER_SCALE, UploadBits, encoded_bytes
from papaya.errors import InvariantError, UpdateRefused
from papaya.learning.parameters import FLOAT32, FLOAT64, Vector
from papaya.learning.weighting import BytesLike, norm

FEWEST_BITS: Final = 8
"""What this version can encode, as a device declares it."""

_LARGEST = {16: 32_767, 8: 127}
_MAX_SHRINKS = 64
_SHRINK = 1 - 2.0**-10


def session_seed(session: str) -> int:
    """A client that repeats an upload sends the same bytes."""
    return int.from_bytes(hashlib.sha256(b"papaya rounding\n" + session.encode()).digest()[:8])


def encode_update(update: Vector, bits: UploadBits, seed: int, clip: float | None = None) -> bytes:
    """An update within the clip, in so many bits. UpdateRefused if it is not finite."""
    if bits == 32:
        return update.tobytes()
    norm(update)  # refuses what is not finite
    draws = _draws(seed, update.size)
    shrunk: npt.NDArray[np.float64] = update.astype(FLOAT64)
    for _ in range(_MAX_SHRINKS):
        encoded = _rounded(shrunk, bits, draws)
        found = norm(decode_update([encoded], update.size, bits))
        if clip is None or found <= clip:
            return encoded
        shrunk *= clip / found * _SHRINK
    raise InvariantError(f"rounding lifts the norm of an update above {clip:g}, however short")


def decode_update(chunks: Sequence[BytesLike], length: int, bits: UploadBits) -> Vector:
    """The numbers of an upload, or UpdateRefused for one of another size."""
    size = sum(memoryview(chunk).nbytes for chunk in chunks)
    if size != (expected := encoded_bytes(length, bits)):
        raise UpdateRefused("wrong_size", f"update has {size} bytes, expected {expected}")
    data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    count = -(-length // VALUES_PER_SCALE)
    scales = np.frombuffer(data, FLOAT32, count)
    codes = np.frombuffer(data, _dtype(bits), length, offset=4 * count)
    update: Vector = codes.astype(FLOAT32)
    whole = length // VALUES_PER_SCALE
    rows, rest = update[: whole * VALUES_PER_SCALE], update[whole * VALUES_PER_SCALE :]
    with np.errstate(all="ignore"):  # whoever admits the update looks for what is not finite
        rows.reshape(whole, VALUES_PER_SCALE)[:] *= scales[:whole, np.newaxis]
        rest *= scales[whole:]
    return update


def _rounded(
    update: npt.NDArray[np.float64], bits: UploadBits, draws: npt.NDArray[np.float64]
) -> bytes:
    largest = _LARGEST[bits]
    starts = np.arange(0, update.size, VALUES_PER_SCALE)
    exact = np.maximum.reduceat(np.abs(update), starts) / largest
    scales = exact.astype(FLOAT32)
    scales = np.where(scales < exact, np.nextafter(scales, np.float32(np.inf)), scales)
    divisors = np.repeat(np.where(scales > 0, scales, 1), VALUES_PER_SCALE)[: update.size]
    codes = np.floor(update / divisors.astype(FLOAT64) + draws)
    np.minimum(codes, largest, out=codes)  # a draw just below 1 is rounded to 1 in the addition
    return scales.astype(FLOAT32).tobytes() + codes.astype(_dtype(bits)).tobytes()


def _draws(seed: int, count: int) -> npt.NDArray[np.float64]:
    """Uniform in [0, 1): the numbers of splitmix64 from this seed."""
    words = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(seed % 2**64)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return (words >> np.uint64(11)).astype(FLOAT64) * 2.0**-53


def _dtype(bits: UploadBits) -> np.dtype[np.signedinteger]:
    return np.dtype(f"<i{bits // 8}")
