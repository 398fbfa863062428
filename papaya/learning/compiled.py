"""The fused loop of the numba kernel. Importing it needs `papaya-fl[numba]` and compiles the loop.

Only papaya/learning/kernels.py imports it. The loop is compiled for one signature: read-only,
contiguous, aligned float32 streams, whatever they are views of. No fast-math: LLVM must neither
fuse a product into a sum nor reorder them, or the bits would differ from numpy's.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit, types

WIDTH: Final = 8

_total = types.Array(types.float32, 1, "C")
_stream = types.Array(types.float32, 1, "C", readonly=True)
_signature = types.void(_total, *[_stream] * WIDTH, *[types.float32] * WIDTH)


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
    try:
        return njit([_signature], nogil=True, cache=True)(_loop)
    except RuntimeError:  # no folder for numba's cache can be written
        return njit([_signature], nogil=True)(_loop)


add_eight: Final = _compile()
