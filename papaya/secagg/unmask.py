"""The server's last step: take the masks off a sum, and believe it only if it can be true.

Paper, "Protocol Detail", step 8: the server "computes the sum of all private arrays". Under the
mask a server sees nothing, so a wrong seed or a broken client shows only here. Three rules, all
of which every sum of honest clients keeps: the constants add up to the members; the weight is above
zero and at most one per member; no coordinate exceeds clip per member. Refused (Implausible):
anything else. The caller drops the buffer, counts it, and makes no step.

What passes may still be poisoned: see the limitations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from papaya.secagg.errors import Implausible
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.words import BLOCK, SIGNED, WORD, Reals, Words, blocks

_FLOAT32: Final = np.dtype("<f4")
_FLOAT64: Final = np.dtype("<f8")


@dataclass(frozen=True, slots=True, eq=False)
class UnmaskedSum:
    """`vector` is the sum of weight x damping x update, `weight` the sum of weights (n/max)."""

    vector: Reals
    weight: float
    members: int


def unmask(
    masked_sum: Words, masks_sum: Words, members: int, parameters: PublicParameters
) -> UnmaskedSum:
    """The values of a sum, or Implausible with its reason. What is given stays as it is."""
    expected = (parameters.vector_words,)
    if masked_sum.shape != expected or masks_sum.shape != expected:
        found = f"{masked_sum.shape} and {masks_sum.shape}"
        raise Implausible("length", f"{found} words, {expected} expected")
    weight = _checked_weight(masked_sum[-2:] - masks_sum[-2:], members, parameters)
    limit = members * parameters.levels
    vector = np.empty(parameters.length, _FLOAT32)
    scratch, wide = np.empty(BLOCK, WORD), np.empty(BLOCK, _FLOAT64)
    for block in blocks(parameters.length):
        size = block.stop - block.start
        words, values = scratch[:size], wide[:size]
        np.subtract(masked_sum[block], masks_sum[block], out=words)
        signed = words.view(SIGNED)
        if (found_extent := max(-int(signed.min()), int(signed.max()))) > limit:
            most = found_extent * parameters.step
            raise Implausible("coordinate", f"a coordinate of {most:.3g}, above members x clip")
        np.copyto(values, signed)
        np.multiply(values, parameters.step, out=values)
        np.copyto(vector[block], values, casting="same_kind")
    return UnmaskedSum(vector, weight, members)


def _checked_weight(tail: Words, members: int, parameters: PublicParameters) -> float:
    if not parameters.threshold <= members <= parameters.aggregation_goal:
        limits = f"{parameters.threshold} to {parameters.aggregation_goal}"
        raise Implausible("members", f"{members} members, outside {limits}")
    steps, count = (int(word) for word in tail.view(SIGNED))
    if count != members:
        raise Implausible("constant", f"the constants add up to {count} for {members} members")
    weight = steps / parameters.levels
    if not 0 < steps <= members * parameters.levels:
        raise Implausible("weight", f"a weight of {weight:.3g} for {members} members")
    return weight
