"""Evaluation: loss, metrics, examples and clients per bucket of data volume; and when a task ends.

Paper, "Sampling bias and fairness": a model is judged for all clients and for those with much
data, the 75th and the 99th percentile of the number of training examples. Percentile p means
clients at or above it.

A device fills only its own bucket, so sums over devices need no list of devices. The edges are the
same for every task, so a device learns nothing about others from them. A percentile is widened to
the whole bucket that it falls into; `Share.clients` is the number of clients there.

All numbers are integers: losses are in units of `LOSS_UNIT`, and numbers above `EVALUATION_CLIP`
are split into digits. So fixed point neither rounds nor clamps, and sums are exact with and without
secure aggregation. A reported mean loss is wrong by at most `error_bound`. A metric is counted from
its lower bound, in units of `METRIC_UNIT` of its range.

    a bucket   5 digits: sum of losses | 3 digits: examples | clients | 4 digits for each metric

A client's weight in the mean is its number of examples. `admit_evaluation` refuses more examples
than the task allows a client, losses below zero or above `MAX_LOSS`, and metrics above their upper
bound, so no single upload can end a task. False values within these bounds count.

Refused: sums of another length, negative counts, examples without clients, no clients at all, and
sums that clients within those bounds cannot have made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from papaya.config import MetricBounds, StopRule
from papaya.config.evaluation import EVALUATION_CLIP
from papaya.errors import Diverged, InvariantError, OperatorError, ProtocolError, UpdateRefused
from papaya.learning.parameters import FLOAT32, FLOAT64, Tensor, Vector

# The smallest data volume of each bucket: powers of two, because volumes are heavy-tailed.
BUCKETS: Final = (0, *(2**power for power in range(1, 16)))
LOSS_UNIT: Final = 2.0**-24
METRIC_UNIT: Final = 2.0**-21
_BASE: Final = int(EVALUATION_CLIP) + 1
# The digits of a bucket, the lowest first. There are enough for MAX_LOSS and the largest metric on
# each of 2^31 examples.
_LOSS: Final = slice(0, 5)
_EXAMPLES: Final = slice(5, 8)
_CLIENTS: Final = 8
_METRICS: Final = 9
_METRIC_DIGITS: Final = 4
# The largest mean loss of a client; larger ones are reduced to it. Log-losses are far below it;
# scale other kinds of loss.
MAX_LOSS: Final = 1000.0
_ROUNDED: Final = 1 + 2.0**-16  # sums that went through float32
_MOST_FINITE: Final = 700.0  # exp of more is not a float64


def evaluation_length(metrics: int = 0) -> int:
    """The length of an evaluation's vector with this many metrics."""
    return _columns(metrics) * len(BUCKETS)


def metric_count(length: int) -> int:
    """The number of metrics in a vector of this length."""
    return (length // len(BUCKETS) - _METRICS) // _METRIC_DIGITS


def _columns(metrics: int) -> int:
    return _METRICS + _METRIC_DIGITS * metrics


EVALUATION_LENGTH: Final = evaluation_length()
"""Without metrics."""


class Share(msgspec.Struct, frozen=True):
    """The clients with at least `from_volume` training examples, and how the model does there.

    `deviations`: the standard deviation of the noise in `loss` and in each metric, if there is any.
    """

    from_volume: int
    clients: float
    examples: float
    loss: float
    metrics: dict[str, float] = {}
    deviations: dict[str, float] = {}

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < _MOST_FINITE else math.inf


class EvaluationResult(msgspec.Struct, frozen=True):
    """The mean loss and metrics by examples: over all clients, and over those with much data.

    With noise, only over all clients.
    """

    all: Share
    p75: Share | None = None
    p99: Share | None = None


def with_deviation(value: float, deviation: float | None) -> str:
    """A value in words, with the standard deviation of its noise if it has any."""
    return f"{value:.4g}" if deviation is None else f"{value:.4g} ± {deviation:.2g}"


def bucket(volume: int) -> int:
    """The index of the bucket for a device with this many training examples."""
    if volume < 0:
        raise InvariantError(f"volume = {volume}: must be at least 0")
    return max(index for index, edge in enumerate(BUCKETS) if edge <= volume)


def evaluation_vector(
    volume: int, loss_sum: float, examples: int, metrics: Sequence[float] = ()
) -> Vector:
    """What one device uploads: its sums in the bucket of its data volume, zero elsewhere.

    `metrics`: sums over the examples, each scaled to 0 at the lower bound and 1 at the upper one.
    """
    if math.isnan(loss_sum):
        raise Diverged("the loss on held-out data is not a number", hint="check the newest version")
    if loss_sum < 0:
        raise OperatorError(
            f"the mean loss on held-out data is {loss_sum / examples:g}, below zero",
            hint="add a constant to the loss of the task's file, so that none is negative",
        )
    units = round(min(loss_sum, MAX_LOSS * examples) / LOSS_UNIT)
    row = [*_digits(units, _LOSS), *_digits(examples, _EXAMPLES), 1]
    for index, value in enumerate(metrics):
        units = round(min(max(value, 0.0), float(examples)) / METRIC_UNIT)
        row += _digits(units, _metric(index))
    table = np.zeros((len(BUCKETS), len(row)), FLOAT32)
    table[bucket(volume)] = row
    return table.reshape(-1)


class EvaluationSums:
    """The loss and the metrics of one device, added up batch by batch."""

    def __init__(self, metrics: Sequence[MetricBounds] = ()) -> None:
        self._bounds = metrics
        self.examples = 0
        self.loss_sum = 0.0
        # Scaled to 0 at the lower bound and 1 at the upper one.
        self.metric_sums = [0.0] * len(metrics)

    def add(self, examples: int, loss: float, metrics: Sequence[float]) -> None:
        """Add a batch by its means."""
        self.examples += examples
        self.loss_sum += examples * loss
        for index, (bounds, value) in enumerate(zip(self._bounds, metrics, strict=True)):
            if math.isnan(value):
                raise Diverged(
                    f"metric {bounds.name} is not a number on held-out data",
                    hint="return a number for every example, for example 0.0",
                )
            within = min(max(value, bounds.low), bounds.high)
            self.metric_sums[index] += examples * (within - bounds.low) / (bounds.high - bounds.low)

    def vector(self, volume: int) -> Vector:
        """What the device uploads."""
        return evaluation_vector(volume, self.loss_sum, self.examples, self.metric_sums)


def error_bound(share: Share) -> float:
    """The largest error of a reported mean loss.

    Each client rounds its sum once, to a unit; the result is rounded to float32.
    """
    return LOSS_UNIT / 2 * share.clients / share.examples + 2.0**-22 * share.loss


def admit_evaluation(pieces: Sequence[Vector], max_examples: int, metrics: int = 0) -> None:
    """Raise UpdateRefused unless `evaluation_vector` can return this vector."""
    table = np.concatenate(pieces).astype(FLOAT64).reshape(-1, _columns(metrics))
    filled = table[np.any(table != 0, axis=1)]
    if len(filled) != 1:
        raise UpdateRefused("over_norm", f"{len(filled)} buckets are filled by one client")
    if (filled != np.rint(filled)).any() or (filled < 0).any() or (filled >= _BASE).any():
        raise UpdateRefused("over_norm", f"not whole numbers from 0 to {_BASE - 1}")
    loss_sum, examples, clients, *values = (float(value) for value in _totals(filled, metrics)[0])
    if clients != 1 or not 1 <= examples <= max_examples:
        raise UpdateRefused(
            "over_norm", f"one client counts as {clients:g}, with {examples:g} examples"
        )
    if loss_sum > MAX_LOSS * examples:
        raise UpdateRefused("over_norm", f"a loss of {loss_sum / examples:g} is out of bounds")
    if any(value > examples for value in values):
        raise UpdateRefused("over_norm", "a metric is above its upper bound")


def client_sums(vector: Vector, metrics: int = 0) -> tuple[float, ...]:
    """Of one client's vector: the sum of losses, the examples, and the sums of scaled metrics."""
    table = _totals(vector.astype(FLOAT64).reshape(-1, _columns(metrics)), metrics)
    loss_sum, examples, _, *sums = (float(total) for total in table.sum(axis=0))
    return loss_sum, examples, *sums


def summarize(
    sums: Tensor, max_examples: int = 2**32, metrics: Sequence[MetricBounds] = ()
) -> EvaluationResult:
    """The result of these sums over devices. Raises ProtocolError."""
    count = len(metrics)
    if sums.shape != (evaluation_length(count),):
        raise ProtocolError(
            f"an evaluation is {evaluation_length(count)} numbers, not {sums.shape}"
        )
    # Integers that were divided and multiplied again in float32.
    counted = np.rint(sums.astype(FLOAT64)).reshape(-1, _columns(count))
    if not np.isfinite(counted).all() or (counted < 0).any():
        raise ProtocolError("the evaluation contains a count below zero, NaN or infinity")
    table = _totals(counted, count)
    loss, examples, clients = table[:, 0], table[:, 1], table[:, 2]
    if (examples[clients == 0] != 0).any():
        raise ProtocolError("the evaluation counts examples but no clients")
    if (examples > clients * max_examples * _ROUNDED).any():
        raise ProtocolError(f"the evaluation counts more than {max_examples} examples of a client")
    if (loss > MAX_LOSS * examples * _ROUNDED).any():
        raise ProtocolError(f"the evaluation has a mean loss above {MAX_LOSS:g}")
    if (table[:, 3:] > examples[:, None] * _ROUNDED).any():
        raise ProtocolError("the evaluation has a metric above its upper bound")
    if (counted > clients[:, None] * (_BASE - 1) * _ROUNDED).any():
        raise ProtocolError("the evaluation contains digits that its clients cannot have uploaded")
    if not examples.sum() > 0:
        raise ProtocolError("the evaluation contains no examples")
    return EvaluationResult(
        all=_from_bucket(table, 0, metrics),
        p75=_from_bucket(table, _percentile(table, 0.75), metrics),
        p99=_from_bucket(table, _percentile(table, 0.99), metrics),
    )


def _metric(index: int) -> slice:
    """The digits of a metric in a bucket."""
    first = _columns(index)
    return slice(first, first + _METRIC_DIGITS)


def _digits(number: int, where: slice) -> list[int]:
    """The digits of a number, the lowest first."""
    found = []
    for _ in range(where.start, where.stop):
        number, digit = divmod(number, _BASE)
        found.append(digit)
    if number:
        raise InvariantError("an evaluation with more examples than a task can allow")
    return found


def _totals(digits: Tensor, metrics: int) -> Tensor:
    """Of each bucket: the sum of losses, the examples, the clients, the sums of metrics."""

    def number(where: slice) -> Tensor:
        return digits[:, where] @ float(_BASE) ** np.arange(where.stop - where.start)

    columns = [LOSS_UNIT * number(_LOSS), number(_EXAMPLES), digits[:, _CLIENTS]]
    columns += [METRIC_UNIT * number(_metric(index)) for index in range(metrics)]
    return np.stack(columns, axis=1)


def _percentile(table: Tensor, share: float) -> int:
    """The highest bucket such that at least 1 - share of all clients are in it or above."""
    at_or_above = np.cumsum(table[::-1, 2])[::-1]
    wanted = (1 - share) * at_or_above[0] * (1 - 1e-9)  # 1 - 0.99 is a little above 0.01
    counted = np.cumsum(table[::-1, 1])[::-1] > 0
    return int(np.nonzero((at_or_above >= wanted) & counted)[0].max())


def _from_bucket(table: Tensor, first: int, metrics: Sequence[MetricBounds]) -> Share:
    totals = [float(total) for total in table[first:].sum(axis=0)]
    loss_sum, examples, clients, *sums = totals
    means = {
        bounds.name: bounds.low + (bounds.high - bounds.low) * min(1.0, total / examples)
        for bounds, total in zip(metrics, sums, strict=True)
    }
    return Share(BUCKETS[first], clients, examples, loss_sum / examples, means)


def verdict(
    rule: StopRule,
    submitted: float,
    now: float,
    losses: Sequence[float],
    metrics: Mapping[str, float] | None = None,
    first_version: float | None = None,
) -> str | None:
    """Why the task ends now, or None. The aggregator enforces the number of versions.

    `losses`: one for each evaluation since the task began or was rolled back, oldest first;
    `metrics`: of the last one. `first_version`: when the first version after version 0 was made;
    None if there is none. `hours` count from the submission, `training_hours` from the first
    version (docs/adr/0097), pauses included. Results are not smoothed: a single good evaluation
    reaches a target.
    """
    if rule.target_loss is not None and losses and losses[-1] <= rule.target_loss:
        return f"loss {losses[-1]:.4g} has reached the target of {rule.target_loss:g}"
    target = rule.target_metric
    value = None if target is None else (metrics or {}).get(target.name)
    if target is not None and value is not None and target.is_reached(value):
        return f"{target.name} {value:.4g} has reached the target: {target}"
    if rule.patience is not None and evaluations_without_gain(losses) >= rule.patience:
        return f"no improvement on loss {min(losses):.4g} in {rule.patience} evaluations"
    if rule.hours is not None and now >= submitted + 3600 * rule.hours:
        return f"reached the limit of {rule.hours:g} hours"
    limit = rule.training_hours
    if limit is not None and first_version is not None and now >= first_version + 3600 * limit:
        return f"reached the limit of {limit:g} hours since the first version"
    return None


def evaluations_without_gain(losses: Sequence[float]) -> int:
    """How many evaluations came after the first one with the lowest loss."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0
