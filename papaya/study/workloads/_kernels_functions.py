"""Functions of single numbers in compiled kernels, written so that LLVM makes vectors of them.

Needs `papaya-fl[numba]`. Good to a few units in the last place of float32. NaN may come
out as a number: what a kernel gives is checked by its weights, which keep a NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from papaya.study.workloads._kernels import (
    WIDTH,
    fma,
    highest,
    inner,
    intrinsic,
    lower,
    scale,
    total,
)

_ONE: Final = np.float32(1)
_LEAST: Final = np.float32(1e-37)
_LOWEST: Final = np.float32(-87)
NO_ODDS: Final = np.float32(-1e30)
"""A score for what is no word."""


def _as_float(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


_float_of_bits: Final = intrinsic(_as_float)


@inner
def _exp(x: Any) -> Any:
    """e^x for x <= 0, to 2e-7 of its value (Cephes' polynomial); 0 where that has few digits."""
    nothing = x < _LOWEST
    x = max(x, _LOWEST)
    power = np.int32(fma(x, np.float32(1.44269504), np.float32(-0.5)))
    r = fma(np.float32(power), np.float32(-0.693359375), x)
    r = fma(np.float32(power), np.float32(2.12194440e-4), r)
    y = fma(np.float32(1.9875691500e-4), r, np.float32(1.3981999507e-3))
    y = fma(y, r, np.float32(8.3334519073e-3))
    y = fma(y, r, np.float32(4.1665795894e-2))
    y = fma(y, r, np.float32(1.6666665459e-1))
    y = fma(y, r, np.float32(5.0000001201e-1))
    y = fma(y * r, r, r + _ONE)
    y *= _float_of_bits((power + np.int32(127)) << np.int32(23))
    return np.float32(0) if nothing else y


@inner
def _tanh(x: Any) -> Any:
    """A quotient of polynomials, to 3e-7 (as in Eigen)."""
    x = min(max(x, np.float32(-7.9053111)), np.float32(7.9053111))
    s = x * x
    p = fma(np.float32(-2.76076847742355e-16), s, np.float32(2.00018790482477e-13))
    p = fma(p, s, np.float32(-8.60467152213735e-11))
    p = fma(p, s, np.float32(5.12229709037114e-08))
    p = fma(p, s, np.float32(1.48572235717979e-05))
    p = fma(p, s, np.float32(6.37261928875436e-04))
    p = fma(p, s, np.float32(4.89352455891786e-03))
    q = fma(np.float32(1.19825839466702e-06), s, np.float32(1.18534705686654e-04))
    q = fma(q, s, np.float32(2.26843463243900e-03))
    q = fma(q, s, np.float32(4.89352518554385e-03))
    return x * p / q


@inner
def tanh_all(x: Any) -> None:
    for e in range(x.size):
        x[e] = _tanh(x[e])


@inner
def sigmoid_all(x: Any) -> None:
    half = np.float32(0.5)
    for e in range(x.size):
        x[e] = fma(half, _tanh(half * x[e]), half)


@inner
def _exp_all(x: Any) -> None:
    for e in range(x.size):
        x[e] = _exp(x[e])


@inner
def _odds(scores: Any, first: Any, last: Any, width: Any) -> None:
    """Scores, `width` in a row, become e^(score - highest score of the row)."""
    for row in range(first, last, width):
        top = highest(scores, row, width)
        for at in range(row, row + width, WIDTH):
            lower(scores, at, top)
    _exp_all(scores[first:last])


@inner
def shares(scores: Any, first: Any, rows: Any, width: Any, weight: Any) -> None:
    """Rows of scores become the gradient of `weight` times their cross-entropy, almost.

    The right answer still misses `weight`. Padding must be low enough to have no odds.
    """
    last = first + rows * width
    _odds(scores, first, last, width)
    for row in range(first, last, width):
        factor = weight / total(scores, row, width)
        for at in range(row, row + width, WIDTH):
            scale(scores, at, factor)


@inner
def cross_entropy(scores: Any, at: Any, width: Any, target: Any) -> Any:
    """Of the row of scores that starts there."""
    _odds(scores, at, at + width, width)
    return np.log(total(scores, at, width)) - np.log(max(scores[at + target], _LEAST))


@inner
def descend(target: Any, gradient: Any, rate: Any) -> None:
    for e in range(target.size):
        target[e] = fma(-rate, gradient[e], target[e])


@inner
def take(packed: Any, places: Any, vector: Any) -> None:
    for e in range(vector.size):
        vector[e] = packed[places[e]]
