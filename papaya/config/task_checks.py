"""Checks of a task's settings. A value that cannot work raises ConfigError.

The error has the field, the value and a remedy. Settings with a class of their own check
themselves; here are those of the task, and those that have to agree with each other.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Literal, get_args

from papaya.config.checks import (
    MAX_COUNT,
    require,
    require_choice,
    require_count,
    require_numbers,
    require_positive_s,
)
from papaya.config.combining import Weighting
from papaya.config.metrics import PERPLEXITY, check_metrics
from papaya.config.regime import AsyncFL, SyncFL
from papaya.errors import ConfigError
from papaya.secagg import fixed_point
from papaya.secagg.errors import ParametersError
from papaya.secagg.parameters import MAX_GOAL, MIN_PRIVATE_GOAL
from papaya.secagg.words import RING_16, RING_32

if TYPE_CHECKING:
    from papaya.config.task import SecureAggregation, TaskConfig

OverClip = Literal["refuse", "clip"]
Durability = Literal["commit", "step"]
MAX_MODEL_LENGTH = 2**30
_TASK_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_FLOAT32_MAX = 3.4028234663852886e38
_FLOAT32_TINY = 1.1754943508222875e-38


def check_task(task: TaskConfig) -> None:
    _check_size(task)
    _check_regime(task)
    _check_times(task)
    _check_participation(task)
    _check_lifecycle(task)
    _check_weighting(task)
    _check_aggregation(task)
    _check_upload_bits(task)
    if task.privacy is not None:
        _check_privacy(task)
    if task.secure_aggregation is not None:
        _check_secure_aggregation(task, task.secure_aggregation)


def _check_size(task: TaskConfig) -> None:
    require(
        _TASK_ID.fullmatch(task.task) is not None,
        "task",
        task.task,
        "invalid task id: use 1 to 64 characters of a-z, 0-9, '-' and '_', starting with a letter "
        "or a digit",
        "rename the task, for example next-word-2",
    )
    for field, value in (
        ("concurrency", task.concurrency),
        ("model_length", task.model_length),
        ("max_examples", task.max_examples),
        ("keep_versions", task.keep_versions),
    ):
        require_count(field, value)
    require(
        task.model_length <= MAX_MODEL_LENGTH,
        "model_length",
        task.model_length,
        f"is above the limit of {MAX_MODEL_LENGTH} parameters (4 GiB)",
        "train a smaller model, or a part of it",
    )
    require_choice("over_clip", task.over_clip, get_args(OverClip))
    require_choice("durability", task.durability, get_args(Durability))
    require(
        task.clip is None or (math.isfinite(task.clip) and task.clip > 0),
        "clip",
        task.clip,
        "must be finite and above zero",
        "leave clip out, or take a high quantile of the update norms",
    )


def _check_regime(task: TaskConfig) -> None:
    is_regime = isinstance(task.regime, AsyncFL | SyncFL)
    remedy = "write regime=AsyncFL() or regime=SyncFL()"
    require(is_regime, "regime", task.regime, "must be an AsyncFL or a SyncFL", remedy)
    require_numbers(task.regime, "regime.")
    match task.regime:
        case SyncFL(over_selection=over_selection):
            require(
                math.isfinite(over_selection) and over_selection >= 0,
                "regime.over_selection",
                over_selection,
                "must be finite and at least 0",
                "use 0 for no over-selection, or 0.3 as in the paper",
            )
        case AsyncFL(aggregation_goal=goal, max_staleness=limit):
            require(
                goal is None or 1 <= goal <= MAX_COUNT,
                "regime.aggregation_goal",
                goal,
                f"must be from 1 to {MAX_COUNT}",
                f"leave it out for 10 % of concurrency ({max(1, task.concurrency // 10)})",
            )
            require(
                limit is None or 0 <= limit <= MAX_COUNT,
                "regime.max_staleness",
                limit,
                f"must be from 0 to {MAX_COUNT}",
                "leave it out, or set at least 4 x concurrency / aggregation_goal",
            )


def _check_times(task: TaskConfig) -> None:
    for field, value in (
        ("training_timeout_s", task.training_timeout_s),
        ("upload_timeout_s", task.upload_timeout_s),
        ("commit_interval_s", task.commit_interval_s),
    ):
        require_positive_s(field, value)


def _check_participation(task: TaskConfig) -> None:
    require(
        math.isfinite(task.participation_gap_s) and task.participation_gap_s >= 0,
        "participation_gap_s",
        task.participation_gap_s,
        "must be finite and not negative",
        "use 3600, or 0 in a demonstration",
    )
    require(
        task.max_participations is None or task.max_participations >= 1,
        "max_participations",
        task.max_participations,
        "must be at least 1",
        "leave it out for no limit, or set at least 1",
    )


def _check_lifecycle(task: TaskConfig) -> None:
    target = task.stop.target_metric
    rules = (task.stop.target_loss, task.stop.patience, target)
    require(
        task.evaluation is not None or all(rule is None for rule in rules),
        "stop",
        task.stop,
        "target_loss, target_metric and patience need the results of evaluations",
        "set evaluation, for example EvaluationPlan(every_versions=10)",
    )
    check_metrics(task.metrics)
    names = [*(metric.name for metric in task.metrics), *[PERPLEXITY] * task.perplexity]
    require(
        target is None or target.name in names,
        "stop.target_metric.name",
        None if target is None else target.name,
        f"is not a metric of the task, which has {', '.join(names) or 'none'}",
        "define it in the task's file: metrics={…}, or perplexity=True",
    )
    require(
        task.evaluates is None or task.evaluation is None,
        "evaluation",
        task.evaluation,
        "an evaluation task cannot be evaluated itself",
        "leave evaluation out",
    )


def _check_weighting(task: TaskConfig) -> None:
    cap = task.weighting.cap
    require(
        cap is None or cap <= task.max_examples,
        "weighting.cap",
        cap,
        f"is above max_examples = {task.max_examples}, which no weight exceeds",
        "choose a smaller cap, or leave weighting out",
    )
    require(
        task.privacy is None or task.weighting == Weighting(),
        "weighting",
        task.weighting,
        "the weights of a private task are a setting of its privacy",
        "set privacy.weighting to equal or capped instead",
    )
    require(
        not task.is_bound or task.staleness.is_built_in,
        "staleness.kind",
        task.staleness.kind,
        "devices and the noise of a private task rely on the function, so it cannot be an "
        "extension of the servers",
        "use polynomial, hinge or constant",
    )


def _check_aggregation(task: TaskConfig) -> None:
    rule = task.aggregation
    if rule.is_mean:
        return
    require(
        not task.is_secure,
        "aggregation.kind",
        rule.kind,
        "needs single updates, and secure aggregation reveals only their sum",
        "use mean; a clip bounds what one device can change",
    )
    require(
        task.privacy is None,
        "aggregation.kind",
        rule.kind,
        "the noise of a private task hides one update in a sum, not in another function",
        "use mean; privacy.clip bounds what one device can change",
    )
    require(
        task.durability == "commit",
        "durability",
        task.durability,
        f"with the rule {rule.kind}, updates are written before they are acknowledged",
        "use commit, or aggregation.kind=mean",
    )
    require(
        task.weighting.kind == "equal" or not rule.ignores_weights,
        "weighting.kind",
        task.weighting.kind,
        f"the rule {rule.kind} counts all updates the same: a client states its examples "
        "itself, so weights would undo the protection",
        "set weighting.kind=equal",
    )
    goal, trim = task.aggregation_goal, rule.trim
    require(
        rule.kind != "trimmed_mean" or rule.trimmed(goal) >= 1,
        "aggregation.trim",
        trim,
        f"trims nothing from {goal} updates",
        f"use at least {1 / goal:.3g}, or a larger aggregation goal",
    )


def _check_upload_bits(task: TaskConfig) -> None:
    bits, field = task.requirements.upload_bits, "requirements.upload_bits"
    require(bits in (8, 16, 32), field, bits, "is not 8, 16 or 32", "use 8, 16 or 32")
    require(
        bits != 8 or not task.is_secure,
        field,
        bits,
        "masked updates have words of 32 or 16 bits: 8 would leave no levels for a sum",
        "use 16, or leave out secure_aggregation",
    )
    require(
        bits == 32 or not task.is_secure or task.privacy is None,
        field,
        bits,
        "masked words of 16 bits have no room for noise: rounding at random makes updates "
        "longer than the clip that the noise is scaled to",
        "leave it out, or leave out privacy",
    )


def _check_privacy(task: TaskConfig) -> None:
    require(
        task.aggregation_goal >= MIN_PRIVATE_GOAL,
        "aggregation_goal",
        task.aggregation_goal,
        f"must be at least {MIN_PRIVATE_GOAL} with privacy",
        "the members of a sum share the noise: use a hundred or more",
    )
    require(
        task.evaluation is None or task.privacy is None or task.privacy.evaluation is not None,
        "evaluation",
        task.evaluation,
        "evaluations of a private task need noise too",
        "set privacy.evaluation, for example PrivateEvaluation(share=0.1)",
    )


def _check_private_parameters(task: TaskConfig) -> None:
    try:
        parameters = task.public_parameters
    except ParametersError as error:
        raise ConfigError(
            str(error),
            hint="lower aggregation_goal, or choose epsilon, clip or the model differently",
        ) from error
    assert parameters is not None


def _check_secure_aggregation(task: TaskConfig, secure: SecureAggregation) -> None:
    goal = task.aggregation_goal
    if secure.threshold is not None:
        require(
            1 <= secure.threshold <= goal,
            "secure_aggregation.threshold",
            secure.threshold,
            f"must be at most aggregation_goal = {goal}"
            if secure.threshold > goal
            else "must be at least 1",
            f"leave it out for {goal}, or choose it between 1 and {goal}",
        )
    if task.clip is None:
        raise ConfigError.of(
            "clip",
            None,
            "secure aggregation needs a norm bound",
            "set clip: the fixed-point encoding is scaled to it",
        )
    if task.privacy is not None:
        _check_private_parameters(task)
        return
    ring = RING_16 if task.upload_bits == 16 else RING_32
    levels = fixed_point.levels(goal, ring)
    needed = fixed_point.needed_levels(task.model_length, task.heaviest_examples, ring)
    largest = min(fixed_point.largest_goal(needed, ring), MAX_GOAL)
    remedy = f"lower aggregation_goal (or concurrency) below {largest + 1}"
    if ring == RING_16:
        remedy += ", or use requirements.upload_bits=32"
    require(
        levels >= needed,
        "aggregation_goal",
        goal,
        f"leaves {max(0, levels)} fixed-point levels in {ring.bits} bits for a model of "
        f"{task.model_length} parameters, which needs {needed}",
        remedy,
    )
    require(
        goal <= MAX_GOAL,
        "aggregation_goal",
        goal,
        f"the TSA releases sums of at most {MAX_GOAL} clients",
        remedy,
    )
    step = task.clip / levels
    require(
        step >= _FLOAT32_TINY and goal * task.clip <= _FLOAT32_MAX,
        "clip",
        task.clip,
        "leaves no fixed-point precision: the sum or one step of the grid is not a float32",
        "choose a clip near the norm of real updates, usually between 0.01 and 100",
    )
    is_counted = float(task.clip).is_integer() and task.clip <= levels
    require(
        task.evaluates is None or is_counted,
        "clip",
        task.clip,
        f"must be a whole number of at most {levels}",
        "lower evaluation.clients",
    )
