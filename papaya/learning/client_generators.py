"""The generators that draw clients' orders of examples, for many seeds at once.

The numbers are those of `np.random.default_rng(seed)`, whose stream numpy keeps the same. It spends
most of its time in small calls for one seed; here the hashes of numpy's SeedSequence are computed
for all seeds together, and one generator is set to the state of each client in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

_Words: TypeAlias = npt.NDArray[np.uint32]

_POOL: Final = 4  # words; the constants are those of SeedSequence and PCG64
_MASK: Final = (1 << 32) - 1
_POOL_HASH: Final = (0x43B0D7E5, 0x931E8875)
_STATE_HASH: Final = (0x8B51F9DD, 0x58F38DED)
_LEFT: Final = np.uint32(0xCA01F9DD)
_RIGHT: Final = np.uint32(0x4973F715)
_MULTIPLIER: Final = 0x2360ED051FC65DA44385DF649FCCF645


def generators(seeds: Sequence[int]) -> Iterator[np.random.Generator]:
    """`default_rng(seed)` for each of these seeds below 2**64: one object, valid until the next."""
    bits = np.random.PCG64(0)
    generator = np.random.Generator(bits)
    for start, high, low in _seeded(np.array(seeds, np.uint64)):
        step = ((high << 64 | low) << 1 | 1) & ((1 << 128) - 1)
        state = ((start + step) * _MULTIPLIER + step) & ((1 << 128) - 1)
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": step},
            "has_uint32": 0,
            "uinteger": 0,
        }
        yield generator


def _seeded(seeds: npt.NDArray[np.uint64]) -> Iterator[tuple[int, int, int]]:
    """PCG64's first number, and the two halves of its stream, of each seed."""
    nothing = np.zeros(len(seeds), np.uint32)
    given = [seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32), nothing, nothing]
    constants = _constants(*_POOL_HASH)
    pool = [_hashed(words, *next(constants)) for words in given]
    for source in range(_POOL):
        for other in range(_POOL):
            if source != other:
                mixed = _LEFT * pool[other] - _RIGHT * _hashed(pool[source], *next(constants))
                pool[other] = mixed ^ (mixed >> np.uint32(16))
    constants = _constants(*_STATE_HASH)
    words = [_hashed(pool[n % _POOL], *next(constants)) for n in range(2 * _POOL)]
    pairs = [
        (low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)).tolist()
        for low, high in zip(words[::2], words[1::2], strict=True)
    ]
    for first, second, third, fourth in zip(*pairs, strict=True):
        yield first << 64 | second, third, fourth


def _constants(value: int, multiplier: int) -> Iterator[tuple[np.uint32, np.uint32]]:
    while True:
        following = value * multiplier & _MASK
        yield np.uint32(value), np.uint32(following)
        value = following


def _hashed(words: _Words, constant: np.uint32, following: np.uint32) -> _Words:
    product = (words ^ constant) * following
    return product ^ (product >> np.uint32(16))
