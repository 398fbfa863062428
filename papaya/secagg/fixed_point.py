"""Real numbers as elements of Z_2^32 or Z_2^16 (paper, appendix "Fixed Point Conversion").

    "Any real number a waiting for aggregation is multiplied by c and rounded to the nearest
    integer [ca]. [...] the parties need to estimate the scale of the model updates to aggregate,
    the desired accuracy to properly pick the parameters"

K clipped updates are summed without wrap-around, so one update may use at most `levels(K)` steps to
either side of zero. Negative integers are mapped as in the paper: -1 is 2^32 - 1, which is two's
complement. Values are scaled and rounded half to even in float64, and clamped to the levels.

A ring of 2^16 has so few levels that rounding to the nearest would shift the updates of all clients
in the same way. There values are rounded at random (rounding.py), and errors cancel out in a sum.

Refused: NaN and infinity, which have no place in the group. What a task needs is for configuration
and `parameters` to refuse; `needed_levels` says it.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from papaya.secagg.errors import UpdateError
from papaya.secagg.words import BLOCK, RING_16, RING_32, SIGNED, Reals, Ring, Words

NOISE_DEVIATIONS: Final = 9  # for which a sum with noise has room
SMALLEST_SIGMA: Final = 64  # steps; less noise cannot be made (noise.py)
FEWEST_LEVELS: Final = 16  # in Z_2^16, for the weight of a small model
_FLOAT64: Final = np.dtype("<f8")

# Before it is rounded, a value of at most 2^31 steps has gone through nine float64 operations: the
# weight (1), the damping (3), the scale (1), their products (2) and the product with the value (1),
# and what it is compared with has one rounding of its own. Each is off by at most 2^-53 of the
# value, 2^-22 of a step.
_FLOAT64_SLACK: Final = 9 * 2.0**-22


def levels(aggregation_goal: int, ring: Ring = RING_32) -> int:
    """How many steps one coordinate of one update has to either side of zero."""
    return ring.largest // aggregation_goal - 1


def private_levels(aggregation_goal: int, noise_multiplier: float) -> int:
    """The same, with noise: the most with K x levels + 9 sigma within the group, where sigma is
    noise_multiplier x levels. Computed in whole numbers.
    """
    numerator, denominator = noise_multiplier.as_integer_ratio()
    return (
        RING_32.largest
        * denominator
        // (aggregation_goal * denominator + NOISE_DEVIATIONS * numerator)
    )


def largest_goal(wanted_levels: int, ring: Ring = RING_32) -> int:
    """The largest aggregation goal that leaves so many levels."""
    return ring.largest // (wanted_levels + 1)


def needed_levels(length: int, max_examples: int, ring: Ring = RING_32) -> int:
    """The fewest levels that leave precision.

    A step must stay below a quarter of the root-mean-square coordinate of an update at the clip,
    or most coordinates round to nothing; and one example must be a step of the weight.

    In Z_2^16 neither is a loss, because rounding at random has the right mean: a step must stay
    below twice that coordinate, so that the rounding error of an update is at most as long as an
    update at the clip (`relative_error` with a goal of 1).
    """
    if ring == RING_16:
        return max(FEWEST_LEVELS, math.ceil(math.sqrt(length) / 2))
    return max(math.ceil(4 * math.sqrt(length)), max_examples)


def scale(aggregation_goal: int, clip: float) -> float:
    """The paper's c: fixed point = round(c x value), for values within ±clip."""
    return levels(aggregation_goal) / clip


def error_bound(members: int, aggregation_goal: int, clip: float) -> float:
    """The most by which a decoded sum of so many values can miss their real sum.

    For values within ±clip, summed without error, and before the result is rounded to float32.
    Each member is rounded once: half a step, and what float64 itself loses.
    """
    return members * (0.5 + _FLOAT64_SLACK) * clip / levels(aggregation_goal)


def relative_error(length: int, aggregation_goal: int) -> float:
    """The rounding error of a mean in Z_2^16 as a share of the clip: at most the root mean square
    of its L2 norm, for updates of full weight. It is that divided by the mean weight otherwise.

    Rounding at random has a variance of at most a quarter of a squared step, in each coordinate of
    each client, independently.
    """
    steps = math.sqrt(length / aggregation_goal) / 2
    return steps / levels(aggregation_goal, RING_16)


class Encoder:
    """value -> round(factor x value), clamped to ±limit. Holds scratch: one thread at a time."""

    def __init__(self, factor: float, limit: int) -> None:
        self._factor = factor
        self._limit = limit
        self._scratch = np.empty(BLOCK, _FLOAT64)

    def encode_into(self, values: Reals, block: Words) -> None:
        """Overwrites a block with the group elements of as many values."""
        scaled = self._scratch[: values.size]
        with np.errstate(invalid="ignore", over="ignore"):
            np.copyto(scaled, values)
            np.multiply(scaled, self._factor, out=scaled)
            if not self._within(values):
                self._clamp(values, scaled)
        np.rint(scaled, out=scaled)
        np.copyto(block.view(SIGNED), scaled, casting="unsafe")

    def _within(self, values: Reals) -> bool:
        """Whether no value needs the clamp; False if any is NaN. Rounding keeps the order."""
        low, high = float(values.min()), float(values.max())
        return -self._limit <= low * self._factor and high * self._factor <= self._limit

    def _clamp(self, values: Reals, scaled: Reals) -> None:
        if not np.isfinite(values).all():
            raise UpdateError("not_finite", "the update holds NaN or infinity")
        np.clip(scaled, -self._limit, self._limit, out=scaled)
