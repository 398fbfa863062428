"""Vectors over Z_2^32 or Z_2^16: little-endian words, worked on in blocks that stay in the cache.

One block of words, its keystream and its float64 scratch stay in a core's caches, so each
coordinate travels to memory and back once however many operations it goes through. Smaller blocks
would fit the inner caches better, but every call costs: 512 KiB measured best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
Signed: TypeAlias = npt.NDArray[np.signedinteger[Any]]
Reals: TypeAlias = npt.NDArray[np.floating[Any]]
Entropy: TypeAlias = Callable[[int], bytes]
"""Draws so many unpredictable bytes; production gives `os.urandom`."""

BLOCK: Final = 131072  # words: 512 KiB of 32 bits


@dataclass(frozen=True, slots=True)
class Ring:
    """Z_2^bits. `word` is its element in memory, `signed` the same bytes as a signed number."""

    bits: int

    @property
    def word(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype(f"<u{self.word_bytes}")

    @property
    def signed(self) -> np.dtype[np.signedinteger[Any]]:
        return np.dtype(f"<i{self.word_bytes}")

    @property
    def word_bytes(self) -> int:
        return self.bits // 8

    @property
    def largest(self) -> int:
        """The largest signed number."""
        return int(2 ** (self.bits - 1)) - 1


RING_32: Final = Ring(32)
RING_16: Final = Ring(16)
WORD: Final = RING_32.word
SIGNED: Final = RING_32.signed


def blocks(length: int) -> Iterator[slice]:
    """Consecutive slices of at most BLOCK words."""
    for start in range(0, length, BLOCK):
        yield slice(start, min(start + BLOCK, length))
