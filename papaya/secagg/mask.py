"""The mask: a 16-byte seed expanded to a vector that is uniform over Z_2^32 or Z_2^16.

Paper, appendix "Additive One-time pad": "a cryptographically secure PRNG is used to generate a
vector m [...] The ciphertext c is defined as the element-wise sum v + m." The generator is the
AES-128-CTR keystream of the seed, counter from zero, read as little-endian words of 32 or 16 bits:
every word of the group is equally likely, nothing is rejected or reduced.

The random bits of rounding.py are another part of the same keystream, from counter 2^127 on.

Many seeds are expanded block by block, so that the sum is read and written once for all of them.
Refused: a seed of another size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from papaya.secagg.errors import ChannelError
from papaya.secagg.words import BLOCK, RING_32, Ring, Words, blocks

SEED_BYTES: Final = 16
FIRST_COUNTER: Final = bytes(16)
ROUNDING_COUNTER: Final = bytes([128]) + bytes(15)
_ZEROS: Final = memoryview(bytes(BLOCK * RING_32.word_bytes))


class Mask:
    """The words of one seed's mask, from the first on."""

    def __init__(self, seed: bytes, counter: bytes = FIRST_COUNTER) -> None:
        if len(seed) != SEED_BYTES:
            raise ChannelError("seed_length", f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._stream = Cipher(algorithms.AES128(seed), modes.CTR(counter)).encryptor()

    def next_into(self, block: Words) -> None:
        """Overwrites a contiguous block, of at most BLOCK words, with the next words."""
        self._stream.update_into(_ZEROS[: block.nbytes], block.data.cast("B"))


def sum_masks(seeds: Sequence[bytes], length: int, ring: Ring = RING_32) -> Words:
    """The sum of these seeds' masks."""
    total = np.zeros(length, ring.word)
    add_masks(total, seeds)
    return total


def add_masks(total: Words, seeds: Sequence[bytes]) -> None:
    """Adds the seeds' masks to a vector in place. Raising leaves the vector alone."""
    masks = [Mask(seed) for seed in seeds]
    scratch = np.empty(min(total.size, BLOCK), total.dtype)
    for block in blocks(total.size):
        part = total[block]
        words = scratch[: part.size]
        for mask in masks:
            mask.next_into(words)
            np.add(part, words, out=part)


def subtract_masks(total: Words, seeds: Sequence[bytes]) -> None:
    """Takes the seeds' masks off a vector in place. Raising leaves the vector alone."""
    masks = [Mask(seed) for seed in seeds]
    scratch = np.empty(min(total.size, BLOCK), total.dtype)
    for block in blocks(total.size):
        part = total[block]
        words = scratch[: part.size]
        for mask in masks:
            mask.next_into(words)
            np.subtract(part, words, out=part)
