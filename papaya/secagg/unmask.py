"""The server's last step: remove the masks from a sum and check that it is plausible.

Paper, "Protocol Detail", step 8: the server "computes the sum of all private arrays". A server
cannot see masked updates, so a wrong seed or a broken client is found only here. Every sum of
honest clients satisfies four rules (ADR 0024):

- the constants add up to the number of members;
- the weight is above zero and at most one per member;
- no coordinate exceeds the clip times the members;
- the norm is at most what updates within the clip can add up to. Noise in even a few coordinates
  exceeds it. Rounding at random (Z_2^16) may exceed it once in 2^64 sums.

With noise the weight is not part of the sum, and coordinates and norm may be larger by what noise
adds with any likelihood: 9 standard deviations, and one of 2^-64 for the norm (ADR 0074).

Other sums are refused (Implausible): the caller drops the buffer, counts it, and makes no step. A
sum that passes may still be poisoned (docs/limitations.md).

Masks are removed block by block while they arrive, so the sum of masks is never held as a whole,
and the TSA sends while the server computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from papaya.secagg.errors import Implausible
from papaya.secagg.fixed_point import NOISE_DEVIATIONS
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.words import BLOCK, RING_16, Signed, Words, blocks

_Floats: TypeAlias = npt.NDArray[np.float32]
TakeBlock: TypeAlias = Callable[[int, Words], None]
"""Takes a block of a sum of masks and the word that it starts at; the block is then overwritten."""

_FLOAT32: Final = np.dtype("<f4")
_FLOAT32_SLACK: Final = 2.0**-10
_FLOAT64: Final = np.dtype("<f8")
_NORM_DEVIATIONS: Final = 9.5


@dataclass(frozen=True, slots=True, eq=False)
class UnmaskedSum:
    """`steps` x `step` is the sum of weight x damping x update, `weight` that of n/max; with noise,
    `weight` is the public divisor.
    """

    steps: Signed
    step: float
    weight: float
    members: int

    @property
    def vector(self) -> _Floats:
        return self._times(self.step)

    def mean(self) -> _Floats:
        """The weighted updates by their weights; rounded once, to float32."""
        return self._times(self.step / self.weight)

    def _times(self, factor: float) -> _Floats:
        found = np.empty(self.steps.size, _FLOAT32)
        wide = np.empty(min(found.size, BLOCK), _FLOAT64)
        for block in blocks(found.size):
            values = wide[: block.stop - block.start]
            np.copyto(values, self.steps[block])
            np.multiply(values, factor, out=values)
            np.copyto(found[block], values, casting="same_kind")
        return found


class Unmasking:
    """Takes blocks of masks, returns a checked sum. `masked_sum` is not changed."""

    def __init__(self, masked_sum: Words, members: int, parameters: PublicParameters) -> None:
        self._masked = masked_sum
        self._members = members
        self._parameters = parameters
        expected = (parameters.vector_words,)
        if masked_sum.shape != expected:
            raise Implausible("length", f"{masked_sum.shape} words, {expected} expected")
        self._unmasked = np.empty(parameters.vector_words, parameters.ring.word)
        self._floats = np.empty(min(parameters.length, BLOCK), _FLOAT32)
        self._taken = 0
        self._extent = 0
        self._squares = 0.0

    def take(self, start: int, masks: Words) -> None:
        """Take the next block, at most BLOCK words. Word 0 starts over."""
        if start == 0:
            self._taken, self._extent, self._squares = 0, 0, 0.0
        end = start + masks.size
        if start != self._taken or end > self._masked.size:
            raise Implausible("length", f"unexpected masks for words {start} to {end}")
        self._taken = end
        words = self._unmasked[start:end]
        np.subtract(self._masked[start:end], masks, out=words)
        parameters = self._parameters
        coordinates = words[: max(0, parameters.length - start)].view(parameters.ring.signed)
        if coordinates.size:
            low, high = int(coordinates.min()), int(coordinates.max())
            self._extent = max(self._extent, -low, high)
            floats = self._floats[: coordinates.size]
            np.copyto(floats, coordinates, casting="same_kind")
            # Not `dot`, which starts threads for a vector of this size and waits for them.
            self._squares += float(np.einsum("i,i->", floats, floats))

    def result(self) -> UnmaskedSum:
        """The values of the sum. Raises Implausible."""
        if self._taken != self._masked.size:
            message = f"masks for {self._taken} words, {self._masked.size} expected"
            raise Implausible("length", message)
        parameters, members = self._parameters, self._members
        signed = self._unmasked.view(parameters.ring.signed)
        weight = _checked_weight(signed[parameters.length :], members, parameters)
        if self._extent > largest_coordinate(members, parameters):
            most = self._extent * parameters.step
            raise Implausible("coordinate", f"a coordinate of {most:.3g}, above members x clip")
        norm, limit = math.sqrt(self._squares), largest_norm(weight, members, parameters)
        if norm > limit:
            found = f"a norm of {norm * parameters.step:.3g}"
            raise Implausible("norm", f"{found}, above {limit * parameters.step:.3g}")
        return UnmaskedSum(signed[: parameters.length], parameters.step, weight, members)


def largest_coordinate(members: int, parameters: PublicParameters) -> int:
    """The largest coordinate of a sum, in steps, that honest clients can have made together."""
    most = members * parameters.most_steps
    return most + math.ceil(NOISE_DEVIATIONS * parameters.sigma) if parameters.is_private else most


def largest_norm(weight: float, members: int, parameters: PublicParameters) -> float:
    """The longest sum, in steps, that honest clients of this weight can have made together.

    Each update has at most the clip's norm, times its weight. Rounding adds, per member, half a
    step to each coordinate and to the weight. The slack of a thousandth is for norms computed in
    float32. Evaluations have no limit, because the clip bounds each of their numbers.

    With noise, an update is never longer than the clip, and the norm of Gaussian noise exceeds
    sigma x (sqrt(n) + t) with a probability of at most exp(-t^2 / 2); rounding adds half a step to
    each coordinate.
    """
    if parameters.is_private:
        noise = float(parameters.sigma) * (math.sqrt(parameters.length) + _NORM_DEVIATIONS)
        rounded = math.sqrt(parameters.length) / 2
        return (1 + _FLOAT32_SLACK) * (members * parameters.levels + noise + rounded)
    if parameters.weighting == "none":
        return math.inf
    rounded = members * (1 + math.sqrt(parameters.length)) / 2
    if parameters.ring == RING_16:
        rounded = _rounded_at_random(members, parameters.length)
    return (1 + _FLOAT32_SLACK) * (weight * parameters.levels + rounded)


def _rounded_at_random(members: int, length: int) -> float:
    """What rounding at random adds, in steps: the norm of the sum of errors, and the error of the
    weight.

    An error is below one step, so `members` x (1 + sqrt(length)) holds for certain. Errors are
    independent, with the mean 0 and a variance of at most 1/4. The norm of their sum is convex in
    them and changes by at most sqrt(members) times the length of a change, so it exceeds its mean,
    sqrt(members x length) / 2 or less, by sqrt(members) x t with a probability of at most
    exp(-t^2 / 2) (Talagrand). For the weight that is Hoeffding's inequality.
    """
    likely = math.sqrt(members) * (math.sqrt(length) / 2 + 2 * _NORM_DEVIATIONS)
    return min(likely, members * (1 + math.sqrt(length)))


def chance_of_random_words(members: int, parameters: PublicParameters) -> float:
    """At most so often random words with the right constant are plausible: the volume of the ball
    of plausible sums divided by that of all words.
    """
    n = parameters.length
    radius = largest_norm(members, members, parameters) / 2**parameters.ring.bits
    log_volume = n / 2 * math.log(math.pi) - math.lgamma(n / 2 + 1)
    return math.exp(min(0.0, log_volume + n * math.log(radius)))


def give_in_blocks(masks: Words, take: TakeBlock) -> None:
    """Pass a whole sum of masks to `take`, block by block."""
    for block in blocks(masks.size):
        take(block.start, masks[block])


def unmask(
    masked_sum: Words, masks_sum: Words, members: int, parameters: PublicParameters
) -> UnmaskedSum:
    """Unmask with a whole sum of masks. Raises Implausible."""
    unmasking = Unmasking(masked_sum, members, parameters)
    give_in_blocks(masks_sum, unmasking.take)
    return unmasking.result()


def _checked_weight(tail: Signed, members: int, parameters: PublicParameters) -> float:
    if not parameters.threshold <= members <= parameters.aggregation_goal:
        limits = f"{parameters.threshold} to {parameters.aggregation_goal}"
        raise Implausible("members", f"{members} members, outside {limits}")
    *steps_found, count = (int(word) for word in tail)
    if count != members:
        raise Implausible("constant", f"the constants add up to {count} for {members} members")
    if parameters.is_private:
        return members * parameters.expected_weight
    [steps] = steps_found
    weight = steps / parameters.levels
    if not 0 < steps <= members * parameters.levels:
        raise Implausible("weight", f"a weight of {weight:.3g} for {members} members")
    return weight
