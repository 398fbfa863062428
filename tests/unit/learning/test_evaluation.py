"""Evaluations: one device fills one bucket; sums give the means that a list of devices would."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.errors import InvariantError, OperatorError, ProtocolError, UpdateRefused
from papaya.learning.evaluation import (
    BUCKETS,
    EVALUATION_LENGTH,
    MAX_LOSS,
    Share,
    admit_evaluation,
    bucket,
    evaluation_vector,
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
    table = evaluation_vector(5, 12.5, 4).reshape(-1, 3)
    assert table[bucket(5)].tolist() == [12.5, 4, 1]
    assert np.count_nonzero(table) == 3
    assert table.dtype == np.dtype("<f4")


@given(devices)
def test_means_are_by_examples_over_the_clients_at_or_above_a_percentile(
    found: list[tuple[int, int, int]],
) -> None:
    result = summarize(the_sums(found))
    for share, wanted in ((result.all, 1.0), (result.p75, 0.25), (result.p99, 0.01)):
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
    assert result.p75.clients == 100, "a bucket is not split"


def test_counts_that_went_through_a_float32_mean_are_whole_again() -> None:
    sums = the_sums([(10, 5, 3)] * 3 + [(100, 5, 3)] * 4)
    mean = (sums / 7).astype(np.float32)
    assert (mean.astype(float) * 7 != sums).any()
    found = summarize(mean.astype(float) * 7).all
    assert (found.clients, found.examples) == (7, 21)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda sums: sums[:-1], "48 numbers"),
        (lambda sums: sums * np.nan, "NaN"),
        (lambda sums: -sums, "below zero"),
        (lambda sums: sums * 0, "no examples"),
        (lambda sums: sums * np.tile([1, 1, 0], len(BUCKETS)), "of no client"),
        (lambda sums: sums * np.tile([1, 51, 1], len(BUCKETS)), "more than 100 examples"),
        (lambda sums: sums * np.tile([1e6, 1, 1], len(BUCKETS)), "above 1000"),
        (lambda sums: sums * np.tile([-1e6, 1, 1], len(BUCKETS)), "loss below zero"),
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
    assert found.all.loss == pytest.approx(min(loss, MAX_LOSS), rel=1e-5, abs=1e-30)


ABSURD: dict[str, list[tuple[int, tuple[float, float, float]]]] = {
    "a loss far below zero": [(3, (-1e6, 1, 1))],
    "a loss below zero": [(3, (-0.5, 1, 1))],
    "a loss far above": [(3, (1e6, 1, 1))],
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
    table = np.zeros((len(BUCKETS), 3), np.float32)
    for row, values in ABSURD[what]:
        table[row] = values
    with pytest.raises(UpdateRefused):
        admit_evaluation([table.reshape(-1)], max_examples=1500)


def test_a_device_does_not_hide_a_loss_below_zero() -> None:
    with pytest.raises(OperatorError, match="below zero") as refused:
        evaluation_vector(10, -3.0, 2)
    assert "add a constant" in refused.value.hint
