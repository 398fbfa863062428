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

import numpy as np

from papaya.secagg import fixed_point
from papaya.secagg.errors import Implausible
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.words import SIGNED, Reals, Words, blocks


@dataclass(frozen=True, slots=True, eq=False)
class UnmaskedSum:
    """`vector` is the sum of weight x damping x update, `weight` the sum of weights (n/max)."""

    vector: Reals
    weight: float
    members: int


def unmask(masked_sum: Words, masks_sum: Words) -> None:
    """Subtracts the masks in place."""
    for block in blocks(masked_sum.size):
        part = masked_sum[block]
        np.subtract(part, masks_sum[block], out=part)


def decode_sum(words: Words, members: int, parameters: PublicParameters) -> UnmaskedSum:
    """The values of an unmasked sum, or Implausible with its reason."""
    check_plausible(words, members, parameters)
    vector = fixed_point.decode(words[:-2], parameters.step)
    weight = int(words[-2:-1].view(SIGNED)[0]) / parameters.levels
    return UnmaskedSum(vector, weight, members)


def check_plausible(words: Words, members: int, parameters: PublicParameters) -> None:
    """Raises Implausible unless honest clients can have made this sum."""
    if words.shape != (parameters.vector_words,):
        message = f"{words.shape} words, {parameters.vector_words} expected"
        raise Implausible("length", message)
    if not parameters.threshold <= members <= parameters.aggregation_goal:
        limits = f"{parameters.threshold} to {parameters.aggregation_goal}"
        raise Implausible("members", f"{members} members, outside {limits}")
    weight, count = (int(word) for word in words[-2:].view(SIGNED))
    if count != members:
        raise Implausible("constant", f"the constants add up to {count} for {members} members")
    limit = members * parameters.levels
    if not 0 < weight <= limit:
        share = weight / parameters.levels
        raise Implausible("weight", f"a weight of {share:.3g} for {members} members")
    if (found := fixed_point.extent(words[:-2])) > limit:
        share = found * parameters.step
        raise Implausible("coordinate", f"a coordinate of {share:.3g}, clip x members exceeded")
