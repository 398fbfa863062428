"""Adding many updates to one sum, in one pass over memory (paper, "Parallel Model Aggregation").

    total += factor_1 x update_1 + ... + factor_8 x update_8

An update is given as it was received: as a sequence of pieces. The limit is memory bandwidth, so
each coordinate of the total should be read and written once for many updates, and each update
read once. `NUMPY` works in blocks that stay in the cache; `compiled()` is one fused loop and needs
`papaya-fl[numba]`. Both release the GIL while they add.

Every kernel rounds each product to the dtype of the total and adds the products one after the
other, so both give the same bits. A kernel refuses updates of another length or dtype
before it has added anything; it does not check that they are finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, Final, TypeAlias

import numpy as np

from papaya.errors import InvariantError
from papaya.learning.parameters import FLOAT32, Tensor, Vector

Update: TypeAlias = Sequence[Vector]
"""The pieces of one update, in order."""

# Coordinates: 1 MiB of the total and as much of scratch, which the outer caches hold. Smaller
# blocks would fit the inner ones, but each call costs, and returns to the interpreter, which the
# event loop may be using just then.
_BLOCK: Final = 1 << 18
_SMALL: Final = 1024  # coordinates: below this, preparing blocks costs more than the arithmetic


class Kernel(ABC):
    """One way of adding. It keeps nothing: any number of threads may use it at once."""

    name: ClassVar[str]

    def add_all(self, total: Tensor, updates: Sequence[Update], factors: Sequence[float]) -> None:
        """Updates that are cut at the same places share a pass. Raising leaves the total alone."""
        if len(updates) != len(factors):
            raise InvariantError(f"{len(factors)} factors for {len(updates)} updates")
        alike: dict[tuple[int, ...], tuple[list[Update], list[float]]] = {}
        for update, factor in zip(updates, factors, strict=True):
            group = alike.setdefault(_cuts(total, update), ([], []))
            group[0].append(update)
            group[1].append(factor)
        for members, weights in alike.values():
            self._add_alike(total, members, weights)

    def _add_alike(
        self, total: Tensor, updates: Sequence[Update], factors: Sequence[float]
    ) -> None:
        start = 0
        for pieces in zip(*updates, strict=True):
            stop = start + pieces[0].size
            self._add(total[start:stop], pieces, factors)
            start = stop

    @abstractmethod
    def _add(self, total: Tensor, deltas: Sequence[Vector], factors: Sequence[float]) -> None:
        """All of one length, which is checked."""


def _cuts(total: Tensor, update: Update) -> tuple[int, ...]:
    """The lengths of an update's pieces, which must fit."""
    sizes = []
    for piece in update:
        if piece.ndim != 1 or piece.dtype != FLOAT32:  # numpy would broadcast, or cast
            break
        sizes.append(piece.size)
    if len(sizes) != len(update) or sum(sizes) != total.size:
        found = [f"{piece.shape} {piece.dtype}" for piece in update]
        raise InvariantError(f"an update of {found} in a sum of {total.shape}")
    return tuple(sizes)


class _Numpy(Kernel):
    name = "numpy"

    def _add(self, total: Tensor, deltas: Sequence[Vector], factors: Sequence[float]) -> None:
        if total.size <= _SMALL:
            for delta, factor in zip(deltas, factors, strict=True):
                total += np.multiply(delta, factor, dtype=total.dtype)
            return
        scratch = np.empty(min(total.size, _BLOCK), total.dtype)
        for start in range(0, total.size, _BLOCK):
            sums = total[start : start + _BLOCK]
            products = scratch[: sums.size]
            for delta, factor in zip(deltas, factors, strict=True):
                # The dtype also decides in which precision the factor is taken.
                block = delta[start : start + _BLOCK]
                np.multiply(block, factor, out=products, dtype=total.dtype)
                np.add(sums, products, out=sums)


NUMPY: Final[Kernel] = _Numpy()


class _Compiled(Kernel):
    name = "numba"

    def __init__(self) -> None:
        from papaya.learning import compiled

        self._add_eight = compiled.add_eight
        self._width = compiled.WIDTH

    def _add(self, total: Tensor, deltas: Sequence[Vector], factors: Sequence[float]) -> None:
        if total.dtype != FLOAT32:
            NUMPY._add(total, deltas, factors)
            return
        rounded = list(np.array(factors, FLOAT32))
        for first in range(0, len(deltas), self._width):
            streams = [_aligned(delta) for delta in deltas[first : first + self._width]]
            weights = rounded[first : first + self._width]
            # Zero times a stream that is in the cache anyway costs next to nothing.
            spare = self._width - len(streams)
            padded = (*streams, *(streams[:1] * spare), *weights, *([np.float32(0)] * spare))
            self._add_eight(total, *padded)


def _aligned(delta: Vector) -> Vector:
    return delta if delta.flags.aligned else delta.copy()


@cache
def compiled() -> Kernel:
    """From numba's cache, or compiled now, which takes a second. ImportError without numba."""
    return _Compiled()


@cache
def fastest() -> Kernel:
    """What a server should use here; its `name` says which it is."""
    try:
        return compiled()
    except ImportError:
        return NUMPY
