"""How long client updates are, and what fixed point makes of them: from both a clip is chosen.

Paper, appendix "Fixed Point Conversion": "the parties need to estimate the scale of the model
updates to aggregate, the desired accuracy to properly pick the parameters". A clip below most
updates changes the learning; a clip far above them wastes levels. Suggested is the norm that one
update in a hundred exceeds, rounded up.

The errors are of the mean update that a server step takes, at the task's own K: the bound of
`papaya/secagg/fixed_point.py`, and what rounding gives in practice, where errors of K clients are
independent and uniform. Unless weights are equal, a client's values are weighted by its examples ÷
max_examples (or the cap) before they are rounded, so few examples per client cost precision.

Uploads in the clear may have 16 or 8 bits for each number (`papaya/learning/compression.py`). Their
error is measured on the updates of version 1; that of masked words of 16 bits in `masked_words.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from papaya.config import TaskConfig
from papaya.config.upload_bits import UploadBits
from papaya.learning.compression import decode_update, encode_update
from papaya.learning.parameters import Vector
from papaya.learning.weighting import clipped, counted_examples
from papaya.secagg import fixed_point

LEAST_UPDATES: Final = 30  # of fewer, a 99th percentile is the longest: chance
_MEASURED_VALUES: Final = 500_000  # in all updates together, but at least of four
_LEVELS: Final = (50, 90, 95, 99, 100)


class Norms(Struct, frozen=True):
    """Quantiles of the L2 norms of the first client updates, before any clip."""

    updates: int
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float


class Precision(Struct, frozen=True):
    """Of one coordinate of the mean update under secure aggregation.

    `levels` are steps to either side of zero, of which the model needs `needed`. `step` is one of
    them for a client of full weight. `error_bound` is the most by which the mean can
    miss, `error` the root mean square; `coordinate` that of a median client update, to compare.
    """

    clip: float
    clipped: float
    levels: int
    needed: int
    step: float
    error_bound: float
    error: float
    coordinate: float

    @property
    def is_enough(self) -> bool:
        return self.levels >= self.needed


class RoundingError(Struct, frozen=True):
    """What uploads in fewer bits do to updates in the clear: the L2 norm of the error as a share of
    the norm of what is rounded. `update`: root mean square over clients. `mean`: of their mean.
    """

    update: float
    mean: float


def measured_updates(length: int) -> int:
    """On how many updates of this length errors are measured."""
    return max(4, _MEASURED_VALUES // length)


def rounding_errors(
    updates: npt.NDArray[np.float32], clip: float | None = None
) -> dict[int, RoundingError]:
    """Of the first of these updates, by the number of bits; empty if they are all zero."""
    count = measured_updates(updates.shape[1])
    chosen = [u if clip is None else clipped(u, clip) for u in updates[:count]]
    exact = np.stack(chosen).astype(np.float64)
    if not np.isfinite(exact).all() or not exact.mean(axis=0).any():
        return {}
    return {16: _rounding_error(exact, chosen, 16), 8: _rounding_error(exact, chosen, 8)}


def _rounding_error(
    exact: npt.NDArray[np.float64], updates: Sequence[Vector], bits: UploadBits
) -> RoundingError:
    encoded = (encode_update(update, bits, seed) for seed, update in enumerate(updates))
    errors = np.stack([decode_update([e], exact.shape[1], bits) for e in encoded]) - exact
    return RoundingError(
        update=float(np.linalg.norm(errors) / np.linalg.norm(exact)),
        mean=float(np.linalg.norm(errors.mean(axis=0)) / np.linalg.norm(exact.mean(axis=0))),
    )


def norms_of(found: Sequence[float]) -> Norms | None:
    """None if no client trained."""
    if not len(found):
        return None
    return Norms(len(found), *np.percentile(np.array(found), _LEVELS).tolist())


def suggested_clip(norms: Norms) -> float:
    """Two digits are as much as a sample of norms can tell."""
    if norms.p99 <= 0:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(norms.p99)) - 1)
    return float(f"{math.ceil(norms.p99 / unit - 1e-9) * unit:.3g}")


def mean_weight(task: TaskConfig, examples: npt.NDArray[np.int64]) -> float:
    """The mean weight of clients with these numbers of examples, as a share of the full weight."""
    if not len(examples):
        return 0.0
    full = counted_examples(task, task.heaviest_examples)  # 1 if weights are equal
    return float(np.minimum(examples, full).mean()) / full


def precision(
    task: TaskConfig,
    length: int,
    weight: float,
    found: Sequence[float],
    clip: float | None = None,
) -> Precision | None:
    """At this clip, or at the suggested one; `weight` is their `mean_weight`. None if no client
    trained, or too few to suggest a clip, or if K leaves no level.
    """
    norms = norms_of(found)
    goal = task.aggregation_goal
    levels = fixed_point.levels(goal)
    if norms is None or levels < 1:
        return None
    if clip is None:
        if norms.updates < LEAST_UPDATES:
            return None
        clip = suggested_clip(norms)
    step = clip / levels
    total_weight = goal * weight
    return Precision(
        clip=clip,
        clipped=float(np.mean(np.array(found) > clip)),
        levels=levels,
        needed=fixed_point.needed_levels(length, task.heaviest_examples),
        step=step,
        error_bound=fixed_point.error_bound(goal, goal, clip) / total_weight,
        error=step * math.sqrt(goal / 12) / total_weight,
        coordinate=norms.p50 / math.sqrt(length),
    )
