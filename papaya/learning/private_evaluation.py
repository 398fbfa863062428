"""Evaluations and histograms of norms of private tasks (docs/privacy.md): short vectors with noise.

An evaluation without noise uploads digits in buckets, and noise would destroy them. Of a private
task a device uploads one number per metric and a count, all weighted by its examples up to a limit:

    w | w x loss | w x each metric | 62 zeros        w = min(examples, max_examples) / max_examples

Loss and metrics are the device's means, scaled to ±1/2 of their range, so the norm is at most
`evaluation_clip`. The zeros reveal sums of random words, which a few numbers would not. The result
is the quotient of two noised sums; `Share.deviations` has the standard deviation of its noise.

A histogram of norms is a one at the bin of the norm of the device's update before it was clipped.
The bins are the same for every task: two for each power of two, from 2^-16 to 2^16.

Refused: sums that clients within these bounds cannot have made, and sums in which noise is all that
there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from papaya.config import MetricBounds
from papaya.config.privacy import NORMS_CLIP, EvaluationTerms, evaluation_clip
from papaya.errors import ProtocolError, UpdateRefused
from papaya.learning.evaluation import EvaluationResult, Share, admit_evaluation, client_sums
from papaya.learning.parameters import FLOAT32, FLOAT64, Tensor, Vector
from papaya.learning.weighting import clipped

BINS: Final = 64
_ZEROS: Final = 62
_VALUES: Final = 1  # where loss and metrics begin
_PER_OCTAVE: Final = 2
_FIRST_POWER: Final = -16
_MOST_DEVIATIONS: Final = 9  # noise that is not credible
_BIN_DEVIATIONS: Final = 2  # of a bin, below which it counts as empty
_SLACK: Final = 1e-4  # float32


def private_evaluation_length(metrics: int) -> int:
    """The length of a private evaluation's vector with this many metrics."""
    return _VALUES + 1 + metrics + _ZEROS


def private_evaluation(
    update: bytes, terms: EvaluationTerms, metrics: int, max_examples: int
) -> bytes:
    """What a device uploads, from its own evaluation vector. Raises UpdateRefused."""
    vector = np.frombuffer(update, FLOAT32)
    admit_evaluation([vector], max_examples, metrics)
    loss_sum, examples, *sums = client_sums(vector, metrics)
    means = [min(loss_sum / examples / terms.max_loss, 1.0), *(each / examples for each in sums)]
    weight = min(examples, terms.max_examples) / terms.max_examples
    made = np.zeros(private_evaluation_length(metrics), FLOAT32)
    made[: _VALUES + len(means)] = [weight, *(weight * (mean - 0.5) for mean in means)]
    return clipped(made, evaluation_clip(metrics)).tobytes()


def admit_private_evaluation(pieces: Sequence[Vector], metrics: int) -> None:
    """Raise UpdateRefused unless `private_evaluation` can return this vector."""
    weight, *rest = np.concatenate(pieces).astype(FLOAT64).tolist()
    values, zeros = rest[: 1 + metrics], rest[1 + metrics :]
    if not 0 < weight <= 1 or any(zeros):
        raise UpdateRefused("over_norm", f"a weight of {weight:g}, or a number without a meaning")
    if any(abs(value) > weight * (0.5 + _SLACK) for value in values):
        raise UpdateRefused("over_norm", "a loss or a metric is out of its bounds")


def summarize_private(
    sums: Tensor, members: int, terms: EvaluationTerms, metrics: Sequence[MetricBounds]
) -> EvaluationResult:
    """The result of these noised sums over so many devices. Raises ProtocolError."""
    expected = private_evaluation_length(len(metrics))
    if sums.shape != (expected,):
        raise ProtocolError(f"a private evaluation is {expected} numbers, not {sums.shape}")
    sigma = terms.deviation(len(metrics))
    weight, *values = sums[: _VALUES + 1 + len(metrics)].tolist()
    limits = np.full(expected, _MOST_DEVIATIONS * sigma)
    limits[: _VALUES + len(values)] += [members, *[members / 2] * len(values)]
    if not (np.abs(sums) <= limits * (1 + _SLACK)).all():
        raise ProtocolError("the evaluation contains sums that its clients cannot have made")
    if weight < terms.smallest_weight(len(metrics)):
        raise ProtocolError(
            f"the noise hides the result: a weight of {weight:.3g} with noise of {sigma:.3g}; "
            "evaluate with more clients or a larger share of the budget"
        )
    found, deviations = {}, {}
    ranges = {"loss": (0.0, terms.max_loss)} | {
        each.name: (each.low, each.high) for each in metrics
    }
    for (name, (low, high)), total in zip(ranges.items(), values, strict=True):
        mean = min(max(total / weight, -0.5), 0.5)
        found[name] = low + (high - low) * (mean + 0.5)
        # Of a quotient of two independent sums, to the first order.
        deviations[name] = (high - low) * sigma / weight * math.hypot(1, mean)
    loss = found.pop("loss")
    examples = weight * terms.max_examples
    return EvaluationResult(all=Share(0, members, examples, loss, found, deviations))


def norm_bin(norm: float) -> int:
    """The bin of an update with this norm; norms out of range are in the first or the last."""
    if norm <= 0:
        return 0
    power = math.floor(_PER_OCTAVE * (math.log2(norm) - _FIRST_POWER))
    return min(max(power, 0), BINS - 1)


def upper_edge(index: int) -> float:
    """The norms of a bin are below this."""
    return math.pow(2.0, _FIRST_POWER + (index + 1) / _PER_OCTAVE)


def one_hot(norm: float) -> bytes:
    """What a device uploads for a histogram of norms."""
    found = np.zeros(BINS, FLOAT32)
    found[norm_bin(norm)] = NORMS_CLIP
    return found.tobytes()


def admit_one_hot(pieces: Sequence[Vector]) -> None:
    """Raise UpdateRefused unless `one_hot` can return this vector."""
    found = np.concatenate(pieces)
    if np.count_nonzero(found) != 1 or found.max() != NORMS_CLIP:
        raise UpdateRefused("over_norm", "one device is in one bin of a histogram")


def histogram(sums: Tensor, members: int, terms: EvaluationTerms) -> tuple[float, ...]:
    """The noised count of each bin. Raises ProtocolError."""
    most = members + _MOST_DEVIATIONS * terms.noise_multiplier
    if sums.shape != (BINS,) or not (np.abs(sums) <= most * (1 + _SLACK)).all():
        raise ProtocolError("the histogram contains counts that its clients cannot have made")
    return tuple(float(count) for count in sums)


class ProposedClip(NamedTuple):
    """`bins`: lower edge, upper edge and noised count of those that the noise does not hide."""

    clip: float
    bins: tuple[tuple[float, float, float], ...]


def proposed_clip(
    counts: Sequence[float], deviation: float, quantile: float
) -> ProposedClip | None:
    """The upper edge of the bin with this quantile of norms; None if the noise hides all bins.

    Bins within twice the noise count as empty: there are many of them, and their noise adds up.
    """
    kept = [(i, count) for i, count in enumerate(counts) if count > _BIN_DEVIATIONS * deviation]
    if not kept:
        return None
    so_far = np.cumsum([count for _, count in kept])
    index, _ = kept[int(np.argmax(so_far >= quantile * so_far[-1]))]
    bins = tuple((upper_edge(i - 1) if i else 0.0, upper_edge(i), count) for i, count in kept)
    return ProposedClip(float(f"{upper_edge(index):.3g}"), bins)
