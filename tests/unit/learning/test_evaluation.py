"""Evaluations: one device fills one bucket; sums give the means that a list of devices would."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.config import MetricBounds
from papaya.config.checks import MAX_COUNT
from papaya.config.evaluation import EVALUATION_CLIP
from papaya.errors import Diverged, InvariantError, OperatorError, ProtocolError, UpdateRefused
from papaya.learning.evaluation import (
    BUCKETS,
    EVALUATION_LENGTH,
    MAX_LOSS,
    METRIC_UNIT,
    EvaluationSums,
    Share,
    admit_evaluation,
    bucket,
    error_bound,
    evaluation_length,
    evaluation_vector,
    metric_count,
    summarize,
)

devices = st.lists(
    st.tuples(st.integers(0, 100_000), st.integers(0, 1000), st.integers(1, 50)),
    min_size=1,
    max_size=40,
)


def the_sums(found: list[tuple[int, int, int]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    total = np.zeros(EVALUATION_LENGTH)
    for volume, loss_sum, examples in found:
        total += evaluation_vector(volume, loss_sum, examples)
    return total


@given(st.integers(0, 10**9))
def test_a_bucket_is_the_last_whose_edge_is_not_above_the_volume(volume: int) -> None:
    index = bucket(volume)
    assert BUCKETS[index] <= volume
    assert index + 1 == len(BUCKETS) or volume < BUCKETS[index + 1]


def test_one_device_fills_its_own_bucket_only() -> None:
    """12.5 is 2^24 x 12.5 units, which is 8192^2 x 3 and 8192 x 1024 units."""
    table = evaluation_vector(5, 12.5, 4).reshape(len(BUCKETS), -1)
    assert table[bucket(5)].tolist() == [0, 1024, 3, 0, 0, 4, 0, 0, 1]
    assert np.count_nonzero(table) == 4
    assert table.dtype == np.dtype("<f4")


@given(st.floats(0, MAX_LOSS), st.integers(1, MAX_COUNT))
def test_what_is_uploaded_are_whole_numbers_that_fit_their_places(
    loss: float, examples: int
) -> None:
    vector = evaluation_vector(0, loss * examples, examples)
    assert (vector == np.rint(vector)).all()
    assert vector.min() >= 0
    assert vector.max() <= EVALUATION_CLIP
    found = summarize(vector.astype(float)).all
    assert found.examples == examples
    assert abs(found.loss - loss) <= error_bound(found)


@given(devices)
def test_means_are_by_examples_over_the_clients_at_or_above_a_percentile(
    found: list[tuple[int, int, int]],
) -> None:
    result = summarize(the_sums(found))
    for share, wanted in ((result.all, 1.0), (result.p75, 0.25), (result.p99, 0.01)):
        assert share is not None
        members = [device for device in found if device[0] >= share.from_volume]
        assert share.clients == len(members)
        assert share.examples == sum(examples for _, _, examples in members)
        loss = sum(loss for _, loss, _ in members) / share.examples
        assert share.loss == pytest.approx(loss)
        assert share.perplexity == pytest.approx(math.exp(loss) if loss < 700 else math.inf)
        assert len(members) >= wanted * len(found) * (1 - 1e-6)
        # No higher edge would do, except that the share for all starts at the first bucket.
        higher = [edge for edge in BUCKETS if edge > share.from_volume]
        if wanted < 1 and higher:
            above = [device for device in found if device[0] >= higher[0]]
            assert len(above) < wanted * len(found)


def test_the_heaviest_client_of_a_hundred_is_the_99th_percentile() -> None:
    result = summarize(the_sums([(10, 1, 1)] * 99 + [(5000, 60, 20)]))
    assert result.p99 == Share(from_volume=4096, clients=1, examples=20, loss=3.0)
    assert result.p75 is not None
    assert result.p75.clients == 100, "a bucket is not split"


def test_counts_that_went_through_a_float32_mean_are_whole_again() -> None:
    sums = the_sums([(10, 5, 3)] * 3 + [(100, 5, 3)] * 4)
    mean = (sums / 7).astype(np.float32)
    assert (mean.astype(float) * 7 != sums).any()
    found = summarize(mean.astype(float) * 7).all
    assert (found.clients, found.examples) == (7, 21)


def columns(loss: float, examples: float, clients: float) -> Any:
    return np.tile([loss] * 5 + [examples] * 3 + [clients], len(BUCKETS))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda sums: sums[:-1], "144 numbers"),
        (lambda sums: sums * np.nan, "NaN"),
        (lambda sums: -sums, "below zero"),
        (lambda sums: sums * 0, "no examples"),
        (lambda sums: sums * columns(1, 1, 0), "no clients"),
        (lambda sums: sums * columns(1, 51, 1), "more than 100 examples"),
        (lambda sums: sums * columns(1e6, 1, 1), "above 1000"),
        (lambda sums: sums * columns(-1, 1, 1), "below zero"),
        (lambda sums: sums + columns(1, 0, 0) * 9000 * (sums > 0), "cannot have uploaded"),
    ],
)
def test_unusable_sums_are_refused(change, complaint: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ProtocolError, match=complaint):
        summarize(change(the_sums([(3, 2, 2)])), max_examples=100)


def test_a_device_cannot_have_fewer_than_no_examples() -> None:
    with pytest.raises(InvariantError, match="-1"):
        evaluation_vector(-1, 0.0, 1)


# -- what one client may upload -----------------------------------------------------------------


@given(
    volume=st.integers(0, 10**9),
    loss=st.floats(0, 1e30),
    examples=st.integers(1, 1500),
    cut=st.integers(0, EVALUATION_LENGTH),
)
def test_what_devices_make_is_admitted(volume: int, loss: float, examples: int, cut: int) -> None:
    vector = evaluation_vector(volume, loss * examples, examples)
    admit_evaluation([vector[:cut], vector[cut:]], max_examples=1500)
    found = summarize(vector.astype(np.float64), max_examples=1500)
    assert found.all.loss == pytest.approx(min(loss, MAX_LOSS), rel=1e-9, abs=2.0**-24)


ABSURD: dict[str, list[tuple[int, tuple[float, float, float]]]] = {
    "a loss far below zero": [(3, (-1e6, 1, 1))],
    "a loss below zero": [(3, (-1.0, 1, 1))],
    "a loss that is not in units": [(3, (0.5, 1, 1))],
    "a loss far above": [(3, (1e6, 1, 1))],
    "a loss above": [(3, (251, 1, 1))],  # one in this place is worth 4
    "more examples than a client has": [(3, (1.0, 1501, 1))],
    "no examples": [(3, (1.0, 0, 1))],
    "half an example": [(3, (1.0, 0.5, 1))],
    "fewer than none": [(3, (1.0, -20, 1))],
    "many clients": [(3, (1.0, 20, 19))],
    "no client": [(3, (1.0, 20, 0))],
    "minus one client": [(3, (1.0, 20, -1))],
    "two buckets": [(3, (1.0, 20, 1)), (4, (1.0, 20, 1))],
    "nothing": [],
}


@pytest.mark.parametrize("what", ABSURD)
def test_what_no_device_makes_is_refused(what: str) -> None:
    table = np.zeros((len(BUCKETS), 9), np.float32)
    for row, (loss, examples, clients) in ABSURD[what]:
        table[row, [2, 5, 8]] = loss, examples, clients
    with pytest.raises(UpdateRefused):
        admit_evaluation([table.reshape(-1)], max_examples=1500)


def test_what_these_tables_say_without_a_mistake_is_admitted() -> None:
    table = np.zeros((len(BUCKETS), 9), np.float32)
    table[3, [2, 5, 8]] = 1.0, 20, 1
    admit_evaluation([table.reshape(-1)], max_examples=1500)
    assert summarize(table.reshape(-1)).all == Share(0, 1, 20, 4.0 / 20)


def test_a_loss_that_is_no_number_is_not_uploaded() -> None:
    with pytest.raises(OperatorError, match="not a number"):
        evaluation_vector(10, math.nan, 2)


def test_a_device_does_not_hide_a_loss_below_zero() -> None:
    with pytest.raises(OperatorError, match="below zero") as refused:
        evaluation_vector(10, -3.0, 2)
    assert "add a constant" in refused.value.hint


# -- metrics ------------------------------------------------------------------------------------

METRICS = (MetricBounds("accuracy"), MetricBounds("error", -20.0, 100.0))

batches = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0, 10), st.floats(0, 1), st.floats(-20, 100)),
    min_size=1,
    max_size=5,
)


@given(st.lists(st.tuples(st.integers(0, 100_000), batches), min_size=1, max_size=10))
def test_means_of_metrics_are_by_examples_for_all_clients_and_for_those_with_much_data(
    found: list[tuple[int, list[tuple[int, float, float, float]]]],
) -> None:
    total = np.zeros(evaluation_length(len(METRICS)))
    for volume, parts in found:
        sums = EvaluationSums(METRICS)
        for examples, loss, accuracy, error in parts:
            sums.add(examples, loss, (accuracy, error))
        vector = sums.vector(volume)
        admit_evaluation([vector], 1000, len(METRICS))
        total += vector

    result = summarize(total, metrics=METRICS)

    for share in (result.all, result.p75, result.p99):
        assert share is not None
        members = [part for volume, each in found if volume >= share.from_volume for part in each]
        weights = [part[0] for part in members]
        assert share.examples == sum(weights)
        means = np.average([part[1:] for part in members], axis=0, weights=weights)
        assert share.loss == pytest.approx(means[0], abs=1e-6)
        for bounds, mean in zip(METRICS, means[1:], strict=True):
            unit = METRIC_UNIT * (bounds.high - bounds.low)
            assert share.metrics[bounds.name] == pytest.approx(mean, abs=unit)


def test_without_metrics_the_vector_is_what_it_was() -> None:
    assert evaluation_length() == EVALUATION_LENGTH == 144
    for count in (0, 1, 16):
        assert metric_count(evaluation_length(count)) == count
    sums = EvaluationSums()
    sums.add(4, 3.125, ())
    assert sums.vector(5).tobytes() == evaluation_vector(5, 12.5, 4).tobytes()


def test_a_metric_follows_the_clients_in_its_bucket() -> None:
    """Accuracy 0.75 on 4 examples is 3 x 2^21 units, which is 8192 x 768."""
    vector = evaluation_vector(5, 12.5, 4, [3.0])
    table = vector.reshape(len(BUCKETS), -1)
    assert table[bucket(5)].tolist() == [0, 1024, 3, 0, 0, 4, 0, 0, 1, 0, 768, 0, 0]


@pytest.mark.parametrize(("value", "counted"), [(1.5, 1.0), (-0.5, 0.0), (math.inf, 1.0)])
def test_a_metric_outside_its_bounds_counts_as_the_nearer_one(value: float, counted: float) -> None:
    sums = EvaluationSums(METRICS[:1])
    sums.add(3, 1.0, (value,))
    vector = sums.vector(0)
    admit_evaluation([vector], 10, 1)
    assert summarize(vector.astype(float), metrics=METRICS[:1]).all.metrics == {"accuracy": counted}


def test_a_metric_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(Diverged, match="metric error is not a number"):
        EvaluationSums(METRICS).add(3, 1.0, (0.5, math.nan))


def test_a_false_metric_is_refused() -> None:
    table = evaluation_vector(5, 12.5, 4, [3.0]).reshape(len(BUCKETS), -1)
    table[bucket(5), 10] += 257  # just above 1 on each example
    with pytest.raises(UpdateRefused, match="above its upper bound"):
        admit_evaluation([table.reshape(-1)], 1500, 1)
    with pytest.raises(ProtocolError, match="above its upper bound"):
        summarize(table.reshape(-1).astype(float), metrics=METRICS[:1])
    with pytest.raises(ProtocolError, match="208 numbers"):
        summarize(evaluation_vector(5, 12.5, 4).astype(float), metrics=METRICS[:1])
