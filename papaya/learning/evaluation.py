"""Evaluation: loss, examples and clients per bucket of data volume; and the rules that end a task.

Paper, "Sampling bias and fairness": a model is judged for all clients and for those with much
data, the 75th and the 99th percentile of the number of training examples. Percentile p means
clients at or above it.

A device fills only its own bucket, so sums over devices need no list of devices. The edges are the
same for every task, so a device learns nothing about others from them. A percentile is widened to
the whole bucket that it falls into; `Share.clients` is the number of clients there.

All numbers are integers: losses are in units of `LOSS_UNIT`, and numbers above `EVALUATION_CLIP`
are split into digits. So fixed point neither rounds nor clamps, and sums are exact with and without
secure aggregation. A reported mean loss is wrong by at most `error_bound`.

A client's weight in the mean is its number of examples. `admit_evaluation` refuses more examples
than the task allows a client, and losses below zero or above `MAX_LOSS`, so no single upload can
end a task. False values within these bounds count.

Refused: sums of another length, negative counts, examples without clients, no clients at all, and
sums that clients within those bounds cannot have made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from papaya.config import StopRule
from papaya.config.task import EVALUATION_CLIP
from papaya.errors import Diverged, InvariantError, OperatorError, ProtocolError, UpdateRefused
from papaya.learning.parameters import FLOAT32, FLOAT64, Tensor, Vector

# The smallest data volume of each bucket: powers of two, because volumes are heavy-tailed.
BUCKETS: Final = (0, *(2**power for power in range(1, 16)))
LOSS_UNIT: Final = 2.0**-24
_BASE: Final = int(EVALUATION_CLIP) + 1
# The digits of a bucket, the lowest first: the sum of losses, the examples, and last the clients.
# There are enough for MAX_LOSS on each of 2^31 examples.
_LOSS: Final = slice(0, 5)
_EXAMPLES: Final = slice(5, 8)
_COLUMNS: Final = 9
EVALUATION_LENGTH: Final = _COLUMNS * len(BUCKETS)
# The largest mean loss of a client; larger ones are reduced to it. Log-losses are far below it;
# scale other kinds of loss.
MAX_LOSS: Final = 1000.0
_ROUNDED: Final = 1 + 2.0**-16  # sums that went through float32
_MOST_FINITE: Final = 700.0  # exp of more is not a float64


class Share(msgspec.Struct, frozen=True):
    """The clients with at least `from_volume` training examples, and how the model does there."""

    from_volume: int
    clients: float
    examples: float
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < _MOST_FINITE else math.inf


class EvaluationResult(msgspec.Struct, frozen=True):
    """The mean loss by examples: over all clients, and over those with much data."""

    all: Share
    p75: Share
    p99: Share


def bucket(volume: int) -> int:
    """The index of the bucket for a device with this many training examples."""
    if volume < 0:
        raise InvariantError(f"volume = {volume}: must be at least 0")
    return max(index for index, edge in enumerate(BUCKETS) if edge <= volume)


def evaluation_vector(volume: int, loss_sum: float, examples: int) -> Vector:
    """What one device uploads: its sums in the bucket of its data volume, zero elsewhere."""
    if math.isnan(loss_sum):
        raise Diverged("the loss on held-out data is not a number", hint="check the newest version")
    if loss_sum < 0:
        raise OperatorError(
            f"the mean loss on held-out data is {loss_sum / examples:g}, below zero",
            hint="add a constant to the loss of the task's file, so that none is negative",
        )
    units = round(min(loss_sum, MAX_LOSS * examples) / LOSS_UNIT)
    table = np.zeros((len(BUCKETS), _COLUMNS), FLOAT32)
    table[bucket(volume)] = (*_digits(units, _LOSS), *_digits(examples, _EXAMPLES), 1)
    return table.reshape(-1)


def error_bound(share: Share) -> float:
    """The largest error of a reported mean loss.

    Each client rounds its sum once, to a unit; the result is rounded to float32.
    """
    return LOSS_UNIT / 2 * share.clients / share.examples + 2.0**-22 * share.loss


def admit_evaluation(pieces: Sequence[Vector], max_examples: int) -> None:
    """Raise UpdateRefused unless `evaluation_vector` can return this vector."""
    table = np.concatenate(pieces).astype(FLOAT64).reshape(-1, _COLUMNS)
    filled = table[np.any(table != 0, axis=1)]
    if len(filled) != 1:
        raise UpdateRefused("over_norm", f"{len(filled)} buckets are filled by one client")
    if (filled != np.rint(filled)).any() or (filled < 0).any() or (filled >= _BASE).any():
        raise UpdateRefused("over_norm", f"not whole numbers from 0 to {_BASE - 1}")
    loss_sum, examples, clients = (float(value) for value in _totals(filled)[0])
    if clients != 1 or not 1 <= examples <= max_examples:
        raise UpdateRefused(
            "over_norm", f"one client counts as {clients:g}, with {examples:g} examples"
        )
    if loss_sum > MAX_LOSS * examples:
        raise UpdateRefused("over_norm", f"a loss of {loss_sum / examples:g} is out of bounds")


def summarize(sums: Tensor, max_examples: int = 2**32) -> EvaluationResult:
    """The result of these sums over devices. Raises ProtocolError."""
    if sums.shape != (EVALUATION_LENGTH,):
        raise ProtocolError(f"an evaluation is {EVALUATION_LENGTH} numbers, not {sums.shape}")
    # Integers that were divided and multiplied again in float32.
    counted = np.rint(sums.astype(FLOAT64)).reshape(-1, _COLUMNS)
    if not np.isfinite(counted).all() or (counted < 0).any():
        raise ProtocolError("the evaluation contains a count below zero, NaN or infinity")
    table = _totals(counted)
    loss, examples, clients = table.T
    if (examples[clients == 0] != 0).any():
        raise ProtocolError("the evaluation counts examples but no clients")
    if (examples > clients * max_examples * _ROUNDED).any():
        raise ProtocolError(f"the evaluation counts more than {max_examples} examples of a client")
    if (loss > MAX_LOSS * examples * _ROUNDED).any():
        raise ProtocolError(f"the evaluation has a mean loss above {MAX_LOSS:g}")
    if (counted > clients[:, None] * (_BASE - 1) * _ROUNDED).any():
        raise ProtocolError("the evaluation contains digits that its clients cannot have uploaded")
    if not examples.sum() > 0:
        raise ProtocolError("the evaluation contains no examples")
    return EvaluationResult(
        all=_from_bucket(table, 0),
        p75=_from_bucket(table, _percentile(table, 0.75)),
        p99=_from_bucket(table, _percentile(table, 0.99)),
    )


def _digits(number: int, where: slice) -> list[int]:
    """The digits of a number, the lowest first."""
    found = []
    for _ in range(where.start, where.stop):
        number, digit = divmod(number, _BASE)
        found.append(digit)
    if number:
        raise InvariantError("an evaluation with more examples than a task can allow")
    return found


def _totals(digits: Tensor) -> Tensor:
    """Of each bucket: the sum of losses, the examples, the clients."""
    worth = float(_BASE) ** np.arange(_COLUMNS)
    loss = LOSS_UNIT * (digits[:, _LOSS] * worth[: _LOSS.stop]).sum(axis=1)
    examples = (digits[:, _EXAMPLES] * worth[: _EXAMPLES.stop - _EXAMPLES.start]).sum(axis=1)
    return np.stack((loss, examples, digits[:, -1]), axis=1)


def _percentile(table: Tensor, share: float) -> int:
    """The highest bucket such that at least 1 - share of all clients are in it or above."""
    at_or_above = np.cumsum(table[::-1, 2])[::-1]
    wanted = (1 - share) * at_or_above[0] * (1 - 1e-9)  # 1 - 0.99 is a little above 0.01
    counted = np.cumsum(table[::-1, 1])[::-1] > 0
    return int(np.nonzero((at_or_above >= wanted) & counted)[0].max())


def _from_bucket(table: Tensor, first: int) -> Share:
    loss_sum, examples, clients = (float(total) for total in table[first:].sum(axis=0))
    return Share(BUCKETS[first], clients, examples, loss_sum / examples)


def verdict(rule: StopRule, submitted: float, now: float, losses: Sequence[float]) -> str | None:
    """Why the task ends now, or None. The aggregator enforces the number of versions.

    `losses`: one for each evaluation since the task began or was rolled back, oldest first. Hours
    count from the submission, pauses included. Losses are not smoothed: a single good evaluation
    reaches a target.
    """
    if rule.target_loss is not None and losses and losses[-1] <= rule.target_loss:
        return f"loss {losses[-1]:.4g} has reached the target of {rule.target_loss:g}"
    if rule.patience is not None and evaluations_without_gain(losses) >= rule.patience:
        return f"no improvement on loss {min(losses):.4g} in {rule.patience} evaluations"
    if rule.hours is not None and now >= submitted + 3600 * rule.hours:
        return f"reached the limit of {rule.hours:g} hours"
    return None


def evaluations_without_gain(losses: Sequence[float]) -> int:
    """How many evaluations came after the first one with the lowest loss."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0
