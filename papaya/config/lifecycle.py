"""When a task is evaluated and when it ends. Refuses a rule that could never hold.

DESIGN: evaluation is a task of its own kind that pins one version, with the same selection and the
same upload; what it uploads are sums of losses, so a server sees no device's result by itself when
secure aggregation is on. The owner's stop rules read those results.
"""

from __future__ import annotations

import math

from msgspec import Struct

from papaya.config.checks import MAX_COUNT, require, require_count

# Of evaluations under secure aggregation: the largest whole number that one client may upload in
# one place, which the fixed point of every goal has room for; and one version is all there is.
# Devices compare them with what they are offered.
EVALUATION_CLIP = 2.0**13 - 1
EVALUATION_MAX_STALENESS = 1


class StopRule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A task ends when the first of these is reached; with none it runs until it is cancelled."""

    versions: int | None = None
    hours: float | None = None
    target_loss: float | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        for field in ("versions", "patience"):
            value = getattr(self, field)
            if value is not None:
                require_count(f"stop.{field}", value)
        require(
            self.hours is None or (math.isfinite(self.hours) and self.hours > 0),
            "stop.hours",
            self.hours,
            "must be finite and above zero",
            "leave it out to run without a limit of time",
        )
        require(
            self.target_loss is None or math.isfinite(self.target_loss),
            "stop.target_loss",
            self.target_loss,
            "must be finite",
            "leave it out, or set the mean loss per example that is good enough",
        )


class EvaluationPlan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Evaluate every so many versions on the held-out data of `clients` devices."""

    every_versions: int = 10
    clients: int = 20
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for field in ("every_versions", "clients"):
            require_count(f"evaluation.{field}", getattr(self, field))
        require(
            math.isfinite(self.timeout_s) and self.timeout_s > 0,
            "evaluation.timeout_s",
            self.timeout_s,
            "must be finite and above zero",
            "set how long an evaluation may wait for its clients",
        )


class Evaluated(Struct, frozen=True, forbid_unknown_fields=True):
    """What an evaluation task evaluates: one version of another task, pinned by its blob."""

    task: str
    version: int
    parameters: str
    model_length: int
    max_examples: int = MAX_COUNT
    """That one client may judge it by: those of the task that it evaluates."""

    def __post_init__(self) -> None:
        for field in ("model_length", "max_examples"):
            require_count(f"evaluates.{field}", getattr(self, field))
