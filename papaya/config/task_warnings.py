"""Settings of a task that are valid but unwise, in words for the task's owner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from papaya.config.evaluation import EvaluationPlan
from papaya.config.privacy import EvaluationTerms, PrivacyTerms
from papaya.config.regime import AsyncFL, SyncFL
from papaya.secagg.damping import PAPERS
from papaya.secagg.unmask import chance_of_random_words

if TYPE_CHECKING:
    from papaya.config.task import TaskConfig

_STALENESS_OF_DEVICES = 1000  # the default limit of a device's own policy
_RARE = 2.0**-32
_COARSE = 0.05  # of the clip


def unwise(task: TaskConfig) -> Iterator[str]:
    yield from _unwise_regime(task)
    if task.participation_gap_s == 0:
        yield (
            "participation_gap_s = 0: one device may take part again immediately, "
            "so a threshold or a privacy budget no longer counts devices"
        )
    if task.is_secure:
        yield from _unwise_staleness(task)
    yield from _unwise_rounding(task)
    if task.privacy is not None:
        yield from _unwise_privacy(task, task.privacy.terms)
    if not task.aggregation.is_mean:
        yield (
            f"aggregation.kind = {task.aggregation.kind!r}: the servers may store the single "
            f"updates of a version until it is made: {task.aggregation_goal} x "
            f"{task.model_bytes / 1e6:,.1f} MB = {task.members_bytes / 1e6:,.0f} MB, and those "
            "of the next one meanwhile"
        )
    if task.durability == "step":
        yield (
            "durability = 'step': acknowledged updates of an open buffer are lost in a crash, "
            "or when the outcome of its commit is unknown"
        )


def _unwise_rounding(task: TaskConfig) -> Iterator[str]:
    error, most = task.rounding_error, task.heaviest_examples
    if error is None:
        return
    if error > _COARSE:
        yield (
            f"requirements.upload_bits = 16: {task.rounding_error_in_words}; a smaller "
            "aggregation_goal, a smaller model or 32 bits reduce it"
        )
    elif task.weighting.kind != "equal":
        yield (
            f"requirements.upload_bits = 16 with weights by examples: rounding changes the "
            f"mean by more than {100 * _COARSE:.0f} % of the clip if clients have fewer than "
            f"{math.ceil(most * error / _COARSE)} examples on average; equal weights, or a "
            "weighting.cap near the usual number of examples, avoid that"
        )


def _unwise_regime(task: TaskConfig) -> Iterator[str]:
    goal, concurrency = task.aggregation_goal, task.concurrency
    if isinstance(task.regime, AsyncFL):
        if goal < concurrency / 100:
            yield (
                f"aggregation_goal = {goal} is below 1 % of concurrency = {concurrency}: "
                f"staleness will be about {concurrency // goal}; the paper advises 10-30 %"
            )
        if goal > concurrency:
            yield (
                f"aggregation_goal = {goal} is above concurrency = {concurrency}: each version "
                f"waits for {math.ceil(goal / concurrency)} clients per slot, one after the "
                "other; the paper advises 10-30 %"
            )
        if task.max_staleness < 4 * concurrency / goal:
            yield (
                f"max_staleness = {task.max_staleness} is below 4 x concurrency / "
                f"aggregation_goal = {4 * concurrency / goal:.0f}: slow clients will be "
                "aborted and the model biased against them"
            )
    if task.regime == SyncFL(over_selection=0.0) and concurrency > 100:
        yield (
            "over_selection = 0: each round waits for its slowest client, or for "
            f"training_timeout_s = {task.training_timeout_s:g}"
        )


def _unwise_staleness(task: TaskConfig) -> Iterator[str]:
    """What devices of a secure task refuse, unless their owners allow it."""
    limit, damping = task.max_staleness, task.staleness.damping
    allowed = PAPERS.factor(_STALENESS_OF_DEVICES)
    if limit > _STALENESS_OF_DEVICES:
        yield (
            f"max_staleness = {limit} with secure aggregation: devices refuse tasks that allow "
            f"more than {_STALENESS_OF_DEVICES}, unless their owners raise maximum_staleness"
        )
    elif damping is not None and (smallest := damping.factor(limit)) < allowed:
        yield (
            f"staleness.kind = {task.staleness.kind!r} damps an update by up to {smallest:.2g} "
            f"at max_staleness = {limit}: with secure aggregation, devices refuse less than "
            f"{allowed:.2g} unless their owners raise maximum_staleness"
        )


def _unwise_privacy(task: TaskConfig, terms: PrivacyTerms) -> Iterator[str]:
    goal = task.aggregation_goal
    noise = terms.noise_multiplier * math.sqrt(task.model_length)
    ratio = noise / (goal * terms.expected_weight)
    if ratio > 1:
        yield (
            f"the noise of a step is about {ratio:.3g} times as large as its largest signal: "
            f"noise_multiplier = {terms.noise_multiplier:g}, {task.model_length} parameters, "
            f"aggregation_goal = {goal}, expected_weight = {terms.expected_weight:g}; a larger "
            "goal, fewer participations or a larger epsilon reduce it"
        )
    if terms.delta * 10 * task.concurrency > 1:
        yield (
            f"privacy.delta = {terms.delta:g} is large for a fleet with {task.concurrency} "
            "clients at a time: with this probability there is no guarantee; use less than one "
            "divided by the number of devices"
        )
    if (parameters := task.public_parameters) is None:
        yield (
            "privacy without secure aggregation: the operator of the servers sees every "
            "update and is trusted to add the noise"
        )
    elif (chance := chance_of_random_words(goal, parameters)) > _RARE:
        yield (
            f"a model of {task.model_length} parameters is too small to detect an update of "
            f"random words: such a sum passes with a probability of up to {chance:.2g}"
        )
    if terms.evaluation is not None and task.evaluation is not None:
        yield from _unwise_evaluation(task, terms.evaluation, task.evaluation)


def _unwise_evaluation(
    task: TaskConfig, terms: EvaluationTerms, plan: EvaluationPlan
) -> Iterator[str]:
    needed = math.ceil(terms.smallest_weight(len(task.metrics)))
    clients = max(plan.clients, task.threshold or 1)
    if clients < needed:
        yield (
            f"the noise hides the results of evaluations by {clients} clients: with "
            f"privacy.evaluation.noise_multiplier = {terms.noise_multiplier:.3g}, {needed} "
            f"clients are needed, more if they have fewer than {terms.max_examples} held-out "
            "examples; raise evaluation.clients or privacy.evaluation.share"
        )
