"""The scale of the fixed-point conversion (paper, appendix "Fixed Point Conversion").

    "Any real number a waiting for aggregation is multiplied by c and rounded to the nearest
    integer [ca]. [...] the parties need to estimate the scale of the model updates to aggregate,
    the desired accuracy to properly pick the parameters"

K clipped updates are summed in Z_2^32 without wrap-around, so one update may use at most
`levels(K)` steps to either side of zero. This file refuses nothing: configuration does.
"""

from __future__ import annotations

_HALF_GROUP = 2**31 - 1


def levels(aggregation_goal: int) -> int:
    """How many steps one coordinate of one update has to either side of zero."""
    return _HALF_GROUP // aggregation_goal - 1


def largest_goal(wanted_levels: int) -> int:
    """The largest aggregation goal that leaves so many levels."""
    return _HALF_GROUP // (wanted_levels + 1)


def scale(aggregation_goal: int, clip: float) -> float:
    """The paper's c: fixed point = round(c x value), for values within ±clip."""
    return levels(aggregation_goal) / clip
