"""Evaluations under secure aggregation say what the same clients would say in the clear.

From a device's numbers to an owner's, by the very code of both sides: for every goal of a wide
range, for clients with very much and very little to say, within `error_bound` of the true mean.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from papaya.config import AsyncFL, EvaluationPlan, MetricBounds, SecureAggregation, TaskConfig
from papaya.errors import ConfigError
from papaya.learning.evaluation import (
    MAX_LOSS,
    EvaluationSums,
    Share,
    error_bound,
    evaluation_length,
    evaluation_vector,
    summarize,
)
from papaya.messages.owner import evaluation_config
from papaya.messages.storage import VersionRow
from papaya.secagg.parameters import EXTRA_WORDS, MAX_GOAL, PublicParameters
from papaya.secagg.words import WORD, Words
from tests.unit.secagg.builders import Deployment, decoded, encoded

MOST = 3000
A_VERSION = VersionRow(3, "next-word/1/version-3", 1, 0.0)


class Clients(NamedTuple):
    """The loss sums and the held-out examples of many, and how many a task allows."""

    losses: npt.NDArray[np.float64]
    examples: npt.NDArray[np.int64]
    max_examples: int

    def truth(self, count: int) -> float:
        return math.fsum(self.losses[:count]) / int(self.examples[:count].sum())


def mixed() -> Clients:
    """Losses and data volumes over many orders of magnitude, as clients have them."""
    rng = np.random.default_rng(7)
    examples = np.minimum(1500, np.exp(rng.uniform(0, 8, MOST))).astype(np.int64)
    losses = np.exp(rng.uniform(-9, 6.9, MOST)) * examples.astype(np.float64)
    return Clients(losses, examples, 1500)


def alike(loss: float, examples: int, max_examples: int) -> Clients:
    losses = np.full(MOST, loss * examples, np.float64)
    return Clients(losses, np.full(MOST, examples), max_examples)


POPULATIONS = {
    "mixed": mixed(),
    "one example each, hardly a loss": alike(0.001, 1, 1500),
    "five examples each": alike(3.0, 5, 1500),
    "half a million examples each": alike(5.0, 500_000, 500_000),
    "all that a client can upload": alike(MAX_LOSS, 2**31, 2**31),
}


@cache
def parameters_for(goal: int, metrics: tuple[MetricBounds, ...] = ()) -> PublicParameters:
    """Of the evaluation of a task with this threshold."""
    task = TaskConfig(
        task="next-word",
        concurrency=2 * goal,
        model_length=10_000,
        regime=AsyncFL(aggregation_goal=goal, max_staleness=50),
        clip=1.0,
        secure_aggregation=SecureAggregation(),
        metrics=metrics,
    )
    plan, length = EvaluationPlan(clients=2), evaluation_length(len(metrics))
    found = evaluation_config(task, A_VERSION, plan, length).public_parameters
    assert found is not None
    assert found.aggregation_goal == goal
    return found


def told(
    words: Words,
    parameters: PublicParameters,
    max_examples: int,
    metrics: tuple[MetricBounds, ...] = (),
) -> Share:
    """What an owner reads: the mean as the version of the evaluation keeps it, times K."""
    goal = parameters.aggregation_goal
    mean = decoded(words, goal, parameters).mean()
    return summarize(mean.astype(np.float64) * goal, max_examples, metrics).all


def check(share: Share, clients: Clients, count: int) -> None:
    assert share.clients == count
    assert share.examples == pytest.approx(clients.examples[:count].sum(), rel=2.0**-22, abs=0)
    assert abs(share.loss - clients.truth(count)) <= error_bound(share)


@pytest.mark.parametrize("who", POPULATIONS)
def test_every_goal_up_to_thousands_is_told_the_true_mean(who: str) -> None:
    clients = POPULATIONS[who]
    uploads = np.array(
        [
            evaluation_vector(0, float(loss), int(n))
            for loss, n in zip(clients.losses, clients.examples, strict=True)
        ]
    )
    filled = np.flatnonzero(uploads.any(axis=0))
    uploads = np.ascontiguousarray(uploads[:, filled])
    for goal in range(2, MOST + 1):
        parameters = parameters_for(goal)
        values = uploads[:goal].reshape(-1)
        each = encoded(values, parameters.scale, parameters.most_steps)
        words = np.zeros(parameters.vector_words, WORD)
        words[filled] = each.reshape(goal, -1).sum(axis=0, dtype=WORD)
        words[-EXTRA_WORDS:] = (goal * parameters.levels, goal)
        check(told(words, parameters, clients.max_examples), clients, goal)


@pytest.mark.parametrize("goal", [2, 4, 100, 1000])
def test_devices_that_seal_and_a_tsa_that_releases(goal: int) -> None:
    """The same with masks: nothing between a device's upload and the mean is left out."""
    clients = POPULATIONS["mixed"]
    deployment = Deployment(parameters_for(goal))
    sealed = [
        deployment.accept(deployment.sealed(evaluation_vector(0, float(loss), int(n)), 1))
        for loss, n in zip(clients.losses[:goal], clients.examples[:goal], strict=True)
    ]
    words = deployment.unmasked(sealed)
    check(told(words, deployment.parameters, clients.max_examples), clients, goal)


@pytest.mark.parametrize("goal", [2, 300])
def test_masked_metrics_have_the_true_mean(goal: int) -> None:
    bounds = (MetricBounds("accuracy"), MetricBounds("error", -5.0, 40.0))
    rng, deployment = np.random.default_rng(goal), Deployment(parameters_for(goal, bounds))
    examples = rng.integers(1, 2000, goal)
    values = rng.uniform((0.0, -5.0), (1.0, 40.0), (goal, 2))
    sealed = []
    for n, each in zip(examples.tolist(), values.tolist(), strict=True):
        sums = EvaluationSums(bounds)
        sums.add(n, 1.0, each)
        sealed.append(deployment.accept(deployment.sealed(sums.vector(0), 1)))

    share = told(deployment.unmasked(sealed), deployment.parameters, 2000, bounds)

    assert share.clients == goal
    means = np.average(values, axis=0, weights=examples)
    for metric, mean in zip(bounds, means, strict=True):
        assert share.metrics[metric.name] == pytest.approx(
            mean, abs=1e-6 * (metric.high - metric.low)
        )


def test_an_evaluation_of_more_clients_than_can_be_released_is_refused_at_submission() -> None:
    parameters_for(MAX_GOAL)
    with pytest.raises(ConfigError, match="aggregation_goal"):
        parameters_for(MAX_GOAL + 1)
