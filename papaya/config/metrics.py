"""The metrics that devices compute beside the loss in an evaluation, and the targets of stop rules.

A metric is a number for each example, and its mean by examples is what a server shows. Devices
upload sums of integers, so a metric needs bounds: a batch whose mean is outside them counts as the
nearer bound. Names and bounds are part of what an owner signs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from papaya.config.checks import Settings, require

MAX_METRICS: Final = 16
MAX_BOUND: Final = 1e9
PERPLEXITY: Final = "perplexity"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
# Columns of the history, and the beginnings of those for clients with much data.
_COLUMNS = ("version", "created", "members", "examples", "clients", "staleness", "loss", PERPLEXITY)
_PREFIXES = ("p75_", "p99_")


class MetricBounds(Struct, frozen=True):
    """The name of a metric, and the range of its values for one example."""

    name: str
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        require(
            _NAME.fullmatch(self.name) is not None,
            "metrics.name",
            self.name,
            "invalid name of a metric: use 1-32 of a-z, 0-9 and '_', starting with a letter",
            "rename the metric, for example top5_accuracy",
        )
        require(
            self.name not in _COLUMNS and not self.name.startswith(_PREFIXES),
            "metrics.name",
            self.name,
            "is the name of a column in the history of every task",
            "set perplexity=True to show exp(loss)" if self.name == PERPLEXITY else "rename it",
        )
        require(
            -MAX_BOUND <= self.low < self.high <= MAX_BOUND,
            f"metrics.{self.name}",
            (self.low, self.high),
            f"needs bounds low < high, from {-MAX_BOUND:g} to {MAX_BOUND:g}",
            "give the range of its values for one example: Metric(function, low=0, high=1)",
        )


def check_metrics(metrics: Sequence[MetricBounds]) -> None:
    """Refuse two metrics of one name, and more metrics than an evaluation can have."""
    names = [metric.name for metric in metrics]
    require(
        len(dict.fromkeys(names)) == len(names),
        "metrics",
        names,
        "must name each metric once",
        "rename one of them",
    )
    require(
        len(names) <= MAX_METRICS,
        "metrics",
        len(names),
        f"must be at most {MAX_METRICS} metrics",
        "remove some of them: every metric makes the upload of an evaluation longer",
    )


class MetricTarget(Settings, frozen=True, kw_only=True):
    """The value that a metric has to reach: at or above one value, or at or below one."""

    name: str
    above: float | None = None
    below: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.above, self.below) if value is not None]
        require(
            len(given) == 1 and math.isfinite(given[0]),
            "stop.target_metric",
            (self.above, self.below),
            "needs either `above` or `below`, a finite number",
            f'for example MetricTarget(name="{self.name}", above=0.9)',
        )

    def is_reached(self, value: float) -> bool:
        if self.above is not None:
            return value >= self.above
        assert self.below is not None
        return value <= self.below

    def __str__(self) -> str:
        way, value = ("above", self.above) if self.above is not None else ("below", self.below)
        return f"{way} {value:g}"
