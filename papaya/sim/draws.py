"""Draws that are the same bit for bit on every machine: hashed words, uniforms, normals, exp.

Output number `counter` of a splitmix64 generator is a pure function of (state, counter), so it can
be drawn in any order, in any block, in any process. Normals are built from integer arithmetic and
from +, -, *, /, sqrt, rint, frexp and ldexp on float64, which IEEE 754 rounds in one way only.
`np.exp`, `np.log` and `np.cos` are not used on draws: their last bit depends on the CPU. Normals
carry 32 bits (|z| < 6.4), uniforms 52.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

HashWords: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Indices: TypeAlias = npt.NDArray[np.integer[Any]]

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = 2**64 - 1


def splitmix64(state: int, counter: int) -> int:
    """Output number `counter` of the splitmix64 generator (Steele et al. 2014) at `state`."""
    word = (state + (counter + 1) * _GOLDEN) & _MASK
    word = (word ^ (word >> 30)) * _MIX_1 & _MASK
    word = (word ^ (word >> 27)) * _MIX_2 & _MASK
    return word ^ (word >> 31)


def splitmix64_words(state: HashWords | np.uint64, counter: HashWords) -> HashWords:
    """The same for arrays, whose arithmetic is modulo 2^64 already."""
    words = (counter + np.uint64(1)) * np.uint64(_GOLDEN) + state
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2)
    return words ^ (words >> np.uint64(31))


def counters(values: Indices) -> HashWords:
    """Indices or counters as words. -1 must not become device 2^64 - 1."""
    if values.dtype.kind not in "iu" or values.ndim == 0:
        raise TypeError(f"expected an array of integers, not {values!r}")
    if values.size and values.min() < 0:
        raise IndexError(f"{values.min()}: device indices and counters start at 0")
    return values.astype(np.uint64)


def uniforms(words: HashWords) -> Floats:
    """The middles of 2^52 equal cells of (0, 1): never 0, never 1."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


# AS 241 (Wichura 1988): quotients of polynomials, highest power first, good to 1e-16. Its third
# region starts where p < 1.4e-11, out of reach of p >= 2^-33.
_CENTRE: Final = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
     5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
)  # fmt: skip
_TAIL: Final = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
     1.27045825245236838258, 3.64784832476320460504, 5.76949722146069140550,
     4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
     1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940,
     2.05319162663775882187, 1.0),
)  # fmt: skip
_LN2: Final = 0.6931471805599453
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-1, 1.90821492927058770002e-10
_EXP: Final = tuple(1 / math.factorial(k) for k in range(14, -1, -1))
_ATANH: Final = tuple(1 / (2 * k + 1) for k in range(11, -1, -1))


def normals(words: HashWords) -> Floats:
    """Standard normals by the inverse of the distribution function at 2^32 points."""
    q = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32 - 0.5
    z = q * _quotient(_CENTRE, 0.180625 - q * q)
    far = np.abs(q) > 0.425
    beyond = q[far]
    root = np.sqrt(-_log(0.5 - np.abs(beyond)))
    z[far] = np.copysign(_quotient(_TAIL, root - 1.6), beyond)
    return z


def exp(x: Floats) -> Floats:
    """e^x = 2^k e^r with |r| <= ln(2)/2."""
    k = np.rint(x / _LN2)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    return np.ldexp(_polynomial(_EXP, r), k.astype(np.int32))


def _log(x: Floats) -> Floats:
    """ln(m 2^k) = 2 atanh((m - 1)/(m + 1)) + k ln(2) for m in [1/2, 1)."""
    mantissa, k = np.frexp(x)
    mantissa *= math.sqrt(2)  # centred on 1, where the series is short
    t: Floats = (mantissa - 1) / (mantissa + 1)
    return 2 * t * _polynomial(_ATANH, t * t) + (k - 0.5) * _LN2


def _quotient(pair: tuple[tuple[float, ...], tuple[float, ...]], x: Floats) -> Floats:
    return _polynomial(pair[0], x) / _polynomial(pair[1], x)


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total
