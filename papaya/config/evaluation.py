"""When a task is evaluated, when it ends, and what an evaluation task evaluates."""

from __future__ import annotations

import math

from msgspec import Struct

from papaya.config.checks import MAX_COUNT, MAX_S, Settings, require, require_count, require_numbers
from papaya.config.metrics import MetricBounds, MetricTarget, check_metrics
from papaya.config.privacy import EvaluationTerms

# Evaluations under secure aggregation: the largest whole number that one client may upload in one
# place, small enough for the fixed point of every aggregation goal, and the maximum staleness of a
# task that has a single version. Devices compare them with the offer they get.
EVALUATION_CLIP = 2.0**13 - 1
EVALUATION_MAX_STALENESS = 1


class StopRule(Settings, frozen=True, kw_only=True):
    """The task ends when the first of these is reached. With none it runs until it is cancelled."""

    versions: int | None = None
    hours: float | None = None
    training_hours: float | None = None
    target_loss: float | None = None
    patience: int | None = None
    target_metric: MetricTarget | None = None

    def __post_init__(self) -> None:
        require_numbers(self, "stop.")
        for field in ("versions", "patience"):
            value = getattr(self, field)
            if value is not None:
                require_count(f"stop.{field}", value)
        for field in ("hours", "training_hours"):
            limit = getattr(self, field)
            require(
                limit is None or (math.isfinite(limit) and limit > 0),
                f"stop.{field}",
                limit,
                "must be finite and above zero",
                "leave it out to run without a time limit",
            )
        require(
            self.target_loss is None or math.isfinite(self.target_loss),
            "stop.target_loss",
            self.target_loss,
            "must be finite",
            "leave it out, or set the mean loss per example at which to stop",
        )


class EvaluationPlan(Settings, frozen=True, kw_only=True):
    """Evaluate every `every_versions` versions on the held-out data of `clients` devices.

    An evaluation is a task of its own that pins one version, with the same selection and the same
    upload (docs/adr/0016). Its clients upload sums of losses, so under secure aggregation the
    server does not see the result of a single device. Stop rules use the results.
    """

    every_versions: int = 10
    clients: int = 20
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        require_numbers(self, "evaluation.")
        for field in ("every_versions", "clients"):
            require_count(f"evaluation.{field}", getattr(self, field))
        require(
            0 < self.timeout_s <= MAX_S,
            "evaluation.timeout_s",
            self.timeout_s,
            f"must be above zero and at most {MAX_S:g}",
            "set how long an evaluation may wait for its clients",
        )


class Evaluated(Struct, frozen=True):
    """What an evaluation task evaluates: one version of another task, pinned by its blob.

    `private`: the bounds and the noise, if the task is private. `norms`: not how good the version
    is, but a histogram of the norms of updates.
    """

    task: str
    version: int
    parameters: str
    model_length: int
    max_examples: int = MAX_COUNT
    """How many examples one client may use: as many as in the task that is evaluated."""
    metrics: tuple[MetricBounds, ...] = ()
    private: EvaluationTerms | None = None
    norms: bool = False

    def __post_init__(self) -> None:
        for field in ("model_length", "max_examples"):
            require_count(f"evaluates.{field}", getattr(self, field))
        check_metrics(self.metrics)
