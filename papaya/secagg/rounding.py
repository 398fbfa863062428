"""Rounding at random to the grid of Z_2^16, with the right expectation.

    t     round(2^16 x factor x value), clamped to ±2^16 x limit: the value in 2^-16 of a step
    word  (t + r) >> 16, with r uniform from 0 to 2^16 - 1; >> rounds down

So the expectation of the word is t / 2^16 exactly, and that of a value is off by at most 2^-17 of a
step. A value on the grid stays as it is, and no word is beyond the limit. t + r is below 2^31.

The random bits are little-endian 16-bit words of the AES-128-CTR keystream of the update's seed
from counter 2^127 on: apart from the mask, which starts at zero, and as secret as it. An update is
encoded once, so its words follow from its seed, and vectors can be published.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from papaya.secagg.fixed_point import Encoder
from papaya.secagg.mask import ROUNDING_COUNTER, Mask
from papaya.secagg.words import BLOCK, RING_16, SIGNED, WORD, Reals, Words

_FRACTION_BITS: Final = 16
_ONE: Final = 1 << _FRACTION_BITS


class RandomEncoder:
    """The weight, and then the values in order, to words of 16 bits. One thread at a time."""

    def __init__(self, factor: float, limit: int, seed: bytes) -> None:
        self._encoder = Encoder(factor * _ONE, limit * _ONE)
        self._bits = Mask(seed, ROUNDING_COUNTER)
        self._draws = np.empty(BLOCK, RING_16.word)
        self._fine = np.empty(BLOCK, WORD)

    def encode_into(self, values: Reals, block: Words) -> None:
        """Overwrites a block with the group elements of the next values."""
        fine = self._fine[: values.size]
        self._encoder.encode_into(values, fine)
        self._round(fine, block)

    def encode_weight_into(self, steps: float, block: Words) -> None:
        """Overwrites one word with so many steps."""
        fine = self._fine[:1]
        fine[0] = round(steps * _ONE)
        self._round(fine, block)

    def _round(self, fine: Words, block: Words) -> None:
        draws = self._draws[: fine.size]
        self._bits.next_into(draws)
        signed = fine.view(SIGNED)
        np.add(signed, draws, out=signed)
        np.right_shift(signed, _FRACTION_BITS, out=signed)
        np.copyto(block.view(RING_16.signed), signed, casting="unsafe")
