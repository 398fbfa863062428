"""The noise of differential privacy: the rounded Gaussian on whole numbers, from a key.

A word of noise is round(g) with g ~ N(0, sigma^2). A sum of whole numbers plus round(g) is the
rounded Gaussian mechanism (docs/privacy.md), so the only question is how close the samples are to
this law. They are rejection samples whose every decision is exact:

    strip      of width 2^w, between sigma/64 and sigma/32, by 16 random bits through a table
    position   in the strip, 47 random bits: y = (strip + (bits + 1/2) / 2^47) * 2^w
    accept     with probability slots * exp(-y^2 / (2 sigma^2)) / (slots of this strip)
    word       round(y), with a random sign

The table gives a strip at least the slots that its largest density needs, so the probability is at
most 1 for every table. It is compared with 32 random bits in float64; if these do not decide, with
128 bits and an exact decimal. What is left: |g| is at most 12 sigma, and the density is taken at
the middle of each of the 2^47 positions. The distance from the rounded Gaussian is below
`DISTANCE` for each word.

Words are made in blocks. A block's random bits are the AES-128-CTR keystream of the key, from a
counter that starts with the block's number, so that a word depends on the key and its place only.
"""

from __future__ import annotations

import math
import struct
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CTR

from papaya.secagg.errors import ParametersError
from papaya.secagg.fixed_point import SMALLEST_SIGMA
from papaya.secagg.words import WORD, Words

KEY_BYTES: Final = 16
NOISE_BLOCK: Final = 1 << 14  # words
LARGEST_SIGMA: Final = 2**28
DISTANCE: Final = 2.0**-100
"""Total variation between a word of noise and the rounded Gaussian, at most."""

_CUT: Final = 12  # no noise beyond so many sigma
_SLOT_BITS: Final = 16
_SLOTS: Final = 1 << _SLOT_BITS
_POSITION_BITS: Final = 47
_POSITION_MASK: Final = np.uint64((1 << _POSITION_BITS) - 1)
_SIGN_BIT: Final = np.uint64(_POSITION_BITS)
_TEST: Final = 2.0**32
# The test in float64 is off by less than 2^-40 of a probability: an exponent of at most 72 after
# five operations, and one exponential. Then at most 2^-8 of the 2^32.
_UNSURE: Final = 2.0**-8
_CANDIDATE_BYTES: Final = 12
_EXACT: Final = Context(prec=80)
_REST_BITS: Final = 96
_COUNTER: Final = struct.Struct(">QQ")
_RARE: Final = 1 << 63  # counters of the bits for exact decisions, apart from all others
_ZEROS: Final = memoryview(bytes(2 * NOISE_BLOCK * _CANDIDATE_BYTES))

_Floats = npt.NDArray[np.float64]


class _Table(NamedTuple):
    """The proposal for one sigma."""

    shift: int  # w: a strip has 2^w words
    strip_of: npt.NDArray[np.int64]  # for each slot; an unused slot has the last strip + 1
    strips: int
    slots: npt.NDArray[np.int64]  # of each strip
    scale: int  # the slots that a density of 1 would need
    factor: _Floats  # 2^32 * scale / slots
    curvature: float  # 2^2w / (2 sigma^2)
    exact: Fraction  # the same


@lru_cache(maxsize=64)
def _table(sigma: Fraction) -> _Table:
    if not SMALLEST_SIGMA <= sigma <= LARGEST_SIGMA:
        limits = f"{SMALLEST_SIGMA} to {LARGEST_SIGMA} steps"
        raise ParametersError("noise", f"noise of {float(sigma):g} steps, outside {limits}")
    shift = int(sigma / 32).bit_length() - 1
    curvature = Fraction(4**shift) / (2 * sigma * sigma)
    strips = math.ceil(_CUT * sigma / 2**shift)
    # The largest density of a strip, at its start, and a little more than float64 may be off.
    largest = np.exp(-float(curvature) * np.arange(strips) ** 2.0) * (1 + 2.0**-40)
    scale = int((_SLOTS - strips) / largest.sum())
    slots = np.floor(scale * largest).astype(np.int64) + 1
    strip_of = np.full(_SLOTS, strips, np.int64)
    strip_of[: slots.sum()] = np.repeat(np.arange(strips), slots)
    factor = np.append(_TEST * scale / slots, 0.0)  # a candidate without a strip is not accepted
    return _Table(shift, strip_of, strips, slots, scale, factor, float(curvature), curvature)


class Noise:
    """The noise of one key. `sigma` is the standard deviation in steps, exactly."""

    def __init__(self, key: bytes, sigma: Fraction) -> None:
        if len(key) != KEY_BYTES:
            raise ParametersError("noise", f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._algorithm = AES128(key)
        self._table = _table(sigma)

    def add_to(self, words: Words, start: int, end: int) -> None:
        """Add the noise of words `start` to `end` in place; `start` is that of a block."""
        for first in range(start, end, NOISE_BLOCK):
            part = words[first : min(first + NOISE_BLOCK, end)]
            np.add(part, self.block(first // NOISE_BLOCK)[: part.size], out=part)

    def block(self, number: int) -> Words:
        """The words of one block, all of them."""
        made = np.empty(NOISE_BLOCK, WORD)
        stream = self._stream(number)
        filled = draw = 0
        while filled < NOISE_BLOCK:
            # 5 % are rejected: nearly always one draw is enough.
            count = (NOISE_BLOCK - filled) * 17 // 16 + 64
            found = self._draw(stream, number, draw, count)[: NOISE_BLOCK - filled]
            made[filled : filled + found.size] = found
            filled += found.size
            draw += 1
        return made

    def _draw(self, stream: Any, number: int, draw: int, count: int) -> npt.NDArray[np.int64]:
        """The accepted of so many candidates, in their order."""
        table = self._table
        drawn = np.empty(count * _CANDIDATE_BYTES, np.uint8)
        stream.update_into(_ZEROS[: drawn.size], drawn.data)
        bits = drawn[: 8 * count].view("<u8")
        tests = drawn[8 * count :].view("<u4")
        strips = table.strip_of[(bits >> np.uint64(64 - _SLOT_BITS)).view(np.int64)]
        positions = (bits & _POSITION_MASK).view(np.int64)
        positions += strips << _POSITION_BITS
        levels = positions * 2.0**-_POSITION_BITS
        np.multiply(levels, levels, out=levels)
        np.multiply(levels, -table.curvature, out=levels)
        np.exp(levels, out=levels)
        np.multiply(levels, table.factor[strips], out=levels)
        np.subtract(levels, tests, out=levels)  # accept for sure: at least 1; refuse: at most 0
        accepted = levels > 0.5
        for index in np.flatnonzero(np.abs(levels - 0.5) <= 0.5 + _UNSURE).tolist():
            where = (number, draw, index)
            accepted[index] = self._accepts(int(positions[index]), int(tests[index]), where)
        kept = positions[accepted]
        kept += 1 << (_POSITION_BITS - 1 - table.shift)
        kept >>= _POSITION_BITS - table.shift
        negative = -(bits[accepted] >> _SIGN_BIT & np.uint64(1)).view(np.int64)
        return (kept ^ negative) - negative

    def _accepts(self, position: int, test: int, where: tuple[int, int, int]) -> bool:
        """Decide exactly, with 96 more random bits."""
        table, (number, draw, index) = self._table, where
        strip = position >> _POSITION_BITS
        if strip >= table.strips:
            return False
        stream = self._stream(number, _RARE | draw << 32 | index)
        rest = stream.update(bytes(_REST_BITS // 8))
        uniform = (test << _REST_BITS) + int.from_bytes(rest, "big")
        level = Fraction(2 * position + 1, 2 << _POSITION_BITS)
        exponent = table.exact * level * level
        density = _EXACT.exp(
            -_EXACT.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
        )
        slots = int(table.slots[strip])
        most = _EXACT.divide(_EXACT.multiply(Decimal(table.scale), density), Decimal(slots))
        return Decimal(uniform) < _EXACT.multiply(most, Decimal(1 << (32 + _REST_BITS)))

    def _stream(self, number: int, counter: int = 0) -> Any:
        return Cipher(self._algorithm, CTR(_COUNTER.pack(number, counter))).encryptor()
