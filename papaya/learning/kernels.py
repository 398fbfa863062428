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
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from papaya.errors import InvariantError
from papaya.learning.parameters import FLOAT32, Tensor, Vector

Update: TypeAlias = Sequence[Vector]
"""The pieces of one update, in order."""

# Coordinates: 1 MiB of the total and 1 MiB of scratch fit into the outer caches. Smaller blocks
# would fit into the inner caches, but need more calls, each of which takes the GIL.
_BLOCK: Final = 1 << 18
_WIDTH: Final = 8  # updates that the compiled loop reads at once
_SMALL: Final = 1024  # coordinates: below this, preparing blocks costs more than the arithmetic


class Kernel(ABC):
    """A way to add updates. It has no state: any number of threads may use it at once."""

    name: ClassVar[str]

    def add_all(self, total: Tensor, updates: Sequence[Update], factors: Sequence[float]) -> None:
        """Updates cut at the same places share a pass. An error leaves the total unchanged."""
        if len(updates) != len(factors):
            raise InvariantError(f"{len(factors)} factors for {len(updates)} updates")
        if len(updates) == 1:
            _cuts(total, updates[0])
            self._add_alike(total, updates, factors)
            return
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
        """Add vectors of the length of the total; the caller has checked them."""


def _cuts(total: Tensor, update: Update) -> tuple[int, ...]:
    """The lengths of an update's pieces; InvariantError if they do not fit the total."""
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
                # The dtype also sets the precision of the factor.
                block = delta[start : start + _BLOCK]
                np.multiply(block, factor, out=products, dtype=total.dtype)
                np.add(sums, products, out=sums)


NUMPY: Final[Kernel] = _Numpy()


def _loop(
    total: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    e: Any,
    f: Any,
    g: Any,
    h: Any,
    by_a: Any,
    by_b: Any,
    by_c: Any,
    by_d: Any,
    by_e: Any,
    by_f: Any,
    by_g: Any,
    by_h: Any,
) -> None:
    for i in range(total.size):
        sums = total[i] + by_a * a[i] + by_b * b[i] + by_c * c[i] + by_d * d[i]
        total[i] = sums + by_e * e[i] + by_f * f[i] + by_g * g[i] + by_h * h[i]


def _compile() -> Any:
    """`_loop` for read-only, contiguous, aligned float32 streams. ImportError without numba.

    No fast-math: LLVM must neither fuse a product into a sum nor reorder them, or the bits would
    differ from numpy's.
    """
    from numba import njit, types

    total = types.Array(types.float32, 1, "C")
    stream = types.Array(types.float32, 1, "C", readonly=True)
    signature = types.void(total, *[stream] * _WIDTH, *[types.float32] * _WIDTH)
    try:
        return njit([signature], nogil=True, cache=True)(_loop)
    except RuntimeError:  # numba finds no writable folder for its cache
        return njit([signature], nogil=True)(_loop)


class _Compiled(Kernel):
    name = "numba"

    def __init__(self) -> None:
        self._add_eight = _compile()

    def _add(self, total: Tensor, deltas: Sequence[Vector], factors: Sequence[float]) -> None:
        if total.dtype != FLOAT32:
            NUMPY._add(total, deltas, factors)
            return
        rounded = list(np.array(factors, FLOAT32))
        for first in range(0, len(deltas), _WIDTH):
            streams = [_aligned(delta) for delta in deltas[first : first + _WIDTH]]
            weights = rounded[first : first + _WIDTH]
            # Pad with zero times the first stream, which is in the cache anyway.
            spare = _WIDTH - len(streams)
            padded = (*streams, *(streams[:1] * spare), *weights, *([np.float32(0)] * spare))
            self._add_eight(total, *padded)


def _aligned(delta: Vector) -> Vector:
    return delta if delta.flags.aligned else delta.copy()


@cache
def compiled() -> Kernel:
    """Loaded from numba's cache, or compiled in about a second. ImportError without numba."""
    return _Compiled()


@cache
def fastest() -> Kernel:
    """The fastest kernel that is installed; its `name` says which."""
    try:
        return compiled()
    except ImportError:
        return NUMPY
