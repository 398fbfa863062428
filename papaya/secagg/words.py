"""Vectors over Z_2^32: little-endian 32-bit words, worked on in blocks that stay in the cache.

One block of words, its keystream and its float64 scratch stay in a core's caches, so each
coordinate travels to memory and back once however many operations it goes through. Smaller blocks
would fit the inner caches better, but every call costs: 512 KiB measured best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint32]
Reals: TypeAlias = npt.NDArray[np.floating[Any]]
Entropy: TypeAlias = Callable[[int], bytes]
"""Draws so many unpredictable bytes; production gives `os.urandom`."""

WORD: Final = np.dtype("<u4")
SIGNED: Final = np.dtype("<i4")
WORD_BYTES: Final = 4
BLOCK: Final = 131072  # words: 512 KiB


def blocks(length: int) -> Iterator[slice]:
    """Consecutive slices of at most BLOCK words."""
    for start in range(0, length, BLOCK):
        yield slice(start, min(start + BLOCK, length))
