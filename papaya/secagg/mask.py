"""The mask: a 16-byte seed expanded to a vector that is uniform over Z_2^32.

Paper, appendix "Additive One-time pad": "a cryptographically secure PRNG is used to generate a
vector m [...] The ciphertext c is defined as the element-wise sum v + m." The generator is the
AES-128-CTR keystream of the seed, counter from zero, read as little-endian 32-bit words: every
word of the group is equally likely, nothing is rejected or reduced.

Many seeds are expanded block by block, so that the sum is read and written once for all of them.
Refused: a seed of another size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from papaya.secagg.errors import ChannelError
from papaya.secagg.words import BLOCK, WORD, WORD_BYTES, Words, blocks

SEED_BYTES: Final = 16
_ZERO_COUNTER: Final = bytes(16)
_ZEROS: Final = memoryview(bytes(BLOCK * WORD_BYTES))


class Mask:
    """The words of one seed's mask, from the first on."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ChannelError("seed_length", f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._stream = Cipher(algorithms.AES128(seed), modes.CTR(_ZERO_COUNTER)).encryptor()

    def next_into(self, block: Words) -> None:
        """Overwrites a contiguous block, of at most BLOCK words, with the next words."""
        self._stream.update_into(_ZEROS[: block.nbytes], block.data.cast("B"))


def sum_masks(seeds: Sequence[bytes], length: int) -> Words:
    """The sum of these seeds' masks."""
    total = np.zeros(length, WORD)
    add_masks(total, seeds)
    return total


def add_masks(total: Words, seeds: Sequence[bytes]) -> None:
    """Adds the seeds' masks to a vector in place. Raising leaves the vector alone."""
    masks = [Mask(seed) for seed in seeds]
    scratch = np.empty(min(total.size, BLOCK), WORD)
    for block in blocks(total.size):
        part = total[block]
        words = scratch[: part.size]
        for mask in masks:
            mask.next_into(words)
            np.add(part, words, out=part)


def subtract_masks(total: Words, seeds: Sequence[bytes]) -> None:
    """Takes the seeds' masks off a vector in place. Raising leaves the vector alone."""
    masks = [Mask(seed) for seed in seeds]
    scratch = np.empty(min(total.size, BLOCK), WORD)
    for block in blocks(total.size):
        part = total[block]
        words = scratch[: part.size]
        for mask in masks:
            mask.next_into(words)
            np.subtract(part, words, out=part)
