"""Evaluations and histograms with noise: the values, their noise, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.aggregator.private_sum import noised_mean
from papaya.config import (
    AsyncFL,
    EvaluationPlan,
    EvaluationTerms,
    MetricBounds,
    Privacy,
    PrivateEvaluation,
    SecureAggregation,
    TaskConfig,
)
from papaya.config.privacy import evaluation_clip
from papaya.errors import OperatorError, ProtocolError, UpdateRefused
from papaya.learning.evaluation import EvaluationSums
from papaya.learning.parameters import FLOAT32, FLOAT64, Tensor
from papaya.learning.private_evaluation import (
    BINS,
    admit_one_hot,
    admit_private_evaluation,
    histogram,
    norm_bin,
    one_hot,
    private_evaluation,
    private_evaluation_length,
    proposed_clip,
    summarize_private,
    upper_edge,
)
from papaya.learning.weighting import WeightedSum, norm
from papaya.messages.owner import evaluation_config
from papaya.messages.storage import VersionRow
from tests.unit.secagg.builders import Deployment, decoded

METRICS = (MetricBounds("accuracy"), MetricBounds("error", -5.0, 40.0))
TERMS = EvaluationTerms(noise_multiplier=2.0, max_participations=3, max_loss=8.0, max_examples=20)
A_VERSION = VersionRow(3, "next-word/1/version-3", 1, 0.0)
LENGTH = private_evaluation_length(len(METRICS))


def a_task(goal: int, *, secure: bool, z: float = TERMS.noise_multiplier) -> TaskConfig:
    evaluation = PrivateEvaluation(
        noise_multiplier=z, max_participations=3, max_loss=8.0, max_examples=20
    )
    privacy = Privacy(
        clip=1.0, max_participations=10, delta=1e-7, epsilon=50.0, evaluation=evaluation
    )
    return TaskConfig(
        task="next-word",
        concurrency=2 * goal,
        model_length=10_000,
        regime=AsyncFL(aggregation_goal=goal, max_staleness=50),
        secure_aggregation=SecureAggregation() if secure else None,
        metrics=METRICS,
        privacy=privacy,
    )


def evaluated(examples: int, loss: float, *metrics: float) -> bytes:
    """What a trainer returns."""
    sums = EvaluationSums(METRICS)
    sums.add(examples, loss, metrics or (0.25, 10.0))
    return sums.vector(0).tobytes()


def upload(examples: int, loss: float, *metrics: float) -> Tensor:
    made = private_evaluation(evaluated(examples, loss, *metrics), TERMS, len(METRICS), 1500)
    return np.frombuffer(made, FLOAT32)


@given(
    st.integers(1, 1500),
    st.floats(0, 1000),
    st.floats(0, 1),
    st.floats(-5, 40),
)
def test_no_upload_exceeds_the_clip_and_the_server_admits_it(
    examples: int, loss: float, accuracy: float, error: float
) -> None:
    found = upload(examples, loss, accuracy, error)
    assert norm(found) <= evaluation_clip(len(METRICS))
    admit_private_evaluation([found], len(METRICS))
    weight = min(examples, 20) / 20
    wanted = [weight, *(weight * x for x in _centred(loss, accuracy, error))]
    assert found[:4].tolist() == pytest.approx(wanted, abs=1e-6)
    assert not found[4:].any()


def _centred(loss: float, accuracy: float, error: float) -> tuple[float, ...]:
    return min(loss / 8, 1) - 0.5, accuracy - 0.5, (error + 5) / 45 - 0.5


@pytest.mark.parametrize("secure", [True, False])
def test_a_result_has_the_weighted_means_and_the_noise_that_is_told(secure: bool) -> None:
    """By the code of both sides, in the TSA and in the clear. The draws are fixed."""
    goal, rng = 300, np.random.default_rng(1)
    config = evaluation_config(
        a_task(goal, secure=secure), A_VERSION, EvaluationPlan(clients=goal), LENGTH
    )
    assert config.aggregation_goal == goal
    n = rng.integers(1, 60, goal)
    values = rng.uniform((0.0, 0.0, -5.0), (9.0, 1.0, 40.0), (goal, 3))
    uploads = [upload(int(n[i]), *values[i].tolist()) for i in range(goal)]
    values[:, 0] = np.minimum(values[:, 0], 8.0)
    truth = np.average(values, axis=0, weights=np.minimum(n, 20))
    errors = []
    for draw in range(8):
        mean = _masked_mean(config, uploads) if secure else _clear_mean(config, uploads, draw)
        share = summarize_private(mean.astype(FLOAT64) * goal, goal, TERMS, METRICS).all
        found = (share.loss, *share.metrics.values())
        told = np.array(list(share.deviations.values()))
        assert list(share.deviations) == ["loss", "accuracy", "error"]
        errors.append((np.array(found) - truth) / told)
        assert share.clients == goal
        sigma = TERMS.noise_multiplier * evaluation_clip(2)
        assert share.examples == pytest.approx(np.minimum(n, 20).sum(), abs=5 * 20 * sigma)
        assert told[0] == pytest.approx(8 * sigma / np.minimum(n, 20).sum() * 20, rel=0.2)
        if secure:
            break  # one release of many masks; its noise has the tests of the TSA
    assert np.abs(errors).max() < 4
    if not secure:
        assert 0.5 < np.std(errors) < 1.6, "the told deviation is that of the noise"


def _masked_mean(config: TaskConfig, uploads: list[Tensor]) -> Tensor:
    parameters = config.public_parameters
    assert parameters is not None
    deployment = Deployment(parameters)
    words = deployment.unmasked([deployment.accept(deployment.sealed(u, 1)) for u in uploads])
    return decoded(words, len(uploads), parameters).mean()


def _clear_mean(config: TaskConfig, uploads: list[Tensor], draw: int) -> Tensor:
    total = WeightedSum.zero(LENGTH)
    for each in uploads:
        total.add(each, 1, 0)
    return noised_mean(config, total, len(uploads), bytes([draw] * 16))


def test_without_noise_for_evaluations_there_are_none() -> None:
    config = a_task(100, secure=True)
    privacy = Privacy(clip=1.0, max_participations=10, delta=1e-7, epsilon=8.0)
    plan = EvaluationPlan(clients=100)
    config = TaskConfig(
        task="next-word", concurrency=200, model_length=100, privacy=privacy, metrics=METRICS
    )
    with pytest.raises(OperatorError, match="no noise for evaluations") as caught:
        evaluation_config(config, A_VERSION, plan, LENGTH)
    assert "privacy.evaluation" in caught.value.hint
    public = TaskConfig(task="next-word", concurrency=200, model_length=100)
    with pytest.raises(OperatorError, match="not private"):
        evaluation_config(public, A_VERSION, plan, BINS, norms=True)


@pytest.mark.parametrize(
    ("index", "value"),
    [(0, 400.0), (0, -40.0), (1, 300.0), (3, math.nan), (40, 30.0), (70, math.inf)],
)
def test_sums_that_clients_cannot_have_made_are_refused(index: int, value: float) -> None:
    sums = upload(10, 2.0).astype(FLOAT64) * 300
    summarize_private(sums, 300, TERMS, METRICS)
    if index < sums.size:
        sums[index] = value
    else:
        sums = np.append(sums, value)
    with pytest.raises(ProtocolError):
        summarize_private(sums, 300, TERMS, METRICS)


def test_a_result_that_is_noise_only_is_refused() -> None:
    sums = upload(1, 2.0).astype(FLOAT64) * 100  # a weight of 5, noise of 2.65
    with pytest.raises(ProtocolError, match="the noise hides the result"):
        summarize_private(sums, 100, TERMS, METRICS)


@pytest.mark.parametrize(
    "change", [{0: 0.0}, {0: 1.5}, {0: -1.0}, {1: 0.9}, {3: -0.9}, {20: 0.1}, {0: math.nan}]
)
def test_uploads_in_the_clear_that_no_device_makes(change: dict[int, float]) -> None:
    found = upload(20, 2.0).copy()
    for index, value in change.items():
        found[index] = value
    with pytest.raises(UpdateRefused):
        admit_private_evaluation([found[:2], found[2:]], len(METRICS))


def test_a_vector_of_a_hostile_program_is_refused() -> None:
    with pytest.raises(UpdateRefused):
        private_evaluation(evaluated(2000, 1.0), TERMS, len(METRICS), 1500)


# -- histograms of norms ------------------------------------------------------------------------


@given(st.floats(0, 1e9))
def test_a_norm_is_in_its_bin(found: float) -> None:
    index = norm_bin(found)
    lower = 0.0 if index == 0 else upper_edge(index - 1)
    upper = math.inf if index == BINS - 1 else upper_edge(index)
    assert lower * (1 - 1e-12) <= found < upper * (1 + 1e-12)
    one = np.frombuffer(one_hot(found), FLOAT32)
    assert (one.size, norm(one), one[index]) == (BINS, 1.0, 1.0)
    admit_one_hot([one])


@pytest.mark.parametrize("values", [{}, {3: 1.0, 4: 1.0}, {3: 0.5}, {3: -1.0}])
def test_other_vectors_are_in_no_histogram(values: dict[int, float]) -> None:
    vector = np.zeros(BINS, FLOAT32)
    for index, value in values.items():
        vector[index] = value
    with pytest.raises(UpdateRefused):
        admit_one_hot([vector])


def test_the_proposed_clip_is_a_quantile_of_the_norms() -> None:
    """The norms are log-normal around 0.7; noise does not move the result by more than a bin."""
    rng, goal = np.random.default_rng(3), 2000
    norms = 0.7 * np.exp(0.6 * rng.standard_normal(goal))
    counts = np.zeros(BINS)
    for each in norms:
        counts[norm_bin(float(each))] += 1
    for quantile in (0.25, 0.5, 0.9):
        true = float(np.quantile(norms, quantile))
        for deviation in (0.0, 5.0):
            noised = histogram(counts + deviation * rng.standard_normal(BINS), goal, TERMS)
            found = proposed_clip(noised, deviation, quantile)
            assert found is not None
            assert true / math.sqrt(2) < found.clip < 2 * true
            assert all(low < high for low, high, _ in found.bins)


def test_a_histogram_of_noise_proposes_nothing() -> None:
    assert proposed_clip([0.5] * BINS, 1.0, 0.5) is None
    for sums in (np.zeros(BINS - 1), np.full(BINS, 1e6), np.full(BINS, math.nan)):
        with pytest.raises(ProtocolError):
            histogram(sums, 100, TERMS)


@pytest.mark.parametrize("norms", [False, True])
def test_what_devices_and_the_tsa_agree_on(norms: bool) -> None:
    length = BINS if norms else LENGTH
    config = a_task(100, secure=True)
    found = evaluation_config(config, A_VERSION, EvaluationPlan(clients=2), length, norms=norms)
    parameters: Any = found.public_parameters
    assert parameters.aggregation_goal == 100, "no smaller sum than the threshold"
    assert (parameters.scheme, parameters.noise_multiplier) == ("papaya-secagg-2", 2.0)
    assert parameters.max_participations == found.max_participations == 3
    assert parameters.clip == (1.0 if norms else math.sqrt(1.75))
    assert found.evaluates is not None
    assert found.evaluates.private == config.privacy.terms.evaluation  # type: ignore[union-attr]
