"""A sum is believed only if honest clients can have made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.learning.weighting import clipped
from papaya.secagg.errors import Implausible
from papaya.secagg.parameters import MAX_GOAL, PublicParameters
from papaya.secagg.participant import weight_and_damping
from papaya.secagg.unmask import Unmasking, give_in_blocks, unmask
from papaya.secagg.words import BLOCK, WORD, Words
from tests.unit.secagg.builders import a_task, decoded, encoded

TASK = a_task()
LEVELS = TASK.levels


def a_sum(members: int = 3) -> Words:
    """Of clients at the very limit: each at the clip, in the same direction."""
    words = [members * LEVELS, 0, 0, 1, -1, members * LEVELS, members]
    return np.array(words, "<i8").astype(WORD)


def test_the_limits_themselves_are_plausible() -> None:
    for members in (2, 3, 4):
        found = decoded(a_sum(members), members, TASK)
        assert found.weight == members
        assert found.vector.tolist()[:3] == [members, 0, 0]


def changed(position: int, value: int) -> Callable[[Words], Words]:
    def change(words: Words) -> Words:
        words[position] = value % 2**32
        return words

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(-1, 2), "constant"),
        (changed(-1, 4), "constant"),
        (changed(-1, -3), "constant"),
        (changed(-2, 0), "weight"),
        (changed(-2, -1), "weight"),
        (changed(-2, 3 * LEVELS + 1), "weight"),
        (changed(0, 3 * LEVELS + 1), "coordinate"),
        (changed(4, -3 * LEVELS - 1), "coordinate"),
        (changed(2, 2**31), "coordinate"),
        (lambda words: words[:-1], "length"),
        (lambda words: words.reshape(1, -1), "length"),
    ],
)
def test_each_rule_has_its_reason(change: Callable[[Words], Words], reason: str) -> None:
    with pytest.raises(Implausible) as caught:
        decoded(change(a_sum()), 3, TASK)
    assert caught.value.reason == reason


@pytest.mark.parametrize("members", [0, 1, 5])
def test_a_sum_of_too_few_or_too_many(members: int) -> None:
    with pytest.raises(Implausible) as caught:
        decoded(a_sum(members), members, TASK)
    assert caught.value.reason == "members"


def test_unmasking_is_subtraction_in_the_group() -> None:
    masks = np.arange(7, dtype=WORD) * np.uint32(0x9E3779B9)
    masked = a_sum() + masks
    before = masked.copy()
    assert (
        unmask(masked, masks, 3, TASK).vector.tolist() == decoded(a_sum(), 3, TASK).vector.tolist()
    )
    assert np.array_equal(masked, before)


def test_masks_of_another_length_are_refused() -> None:
    with pytest.raises(Implausible) as caught:
        unmask(a_sum(), np.zeros(1, WORD), 3, TASK)
    assert caught.value.reason == "length"


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, BLOCK + 4])
def test_every_coordinate_is_looked_at(at: int) -> None:
    task = a_task(length=BLOCK + 5)
    words = np.zeros(task.vector_words, WORD)
    words[-2:] = (1, 3)
    assert not decoded(words, 3, task).vector.any()
    words[at] = 2**31
    with pytest.raises(Implausible) as caught:
        decoded(words, 3, task)
    assert caught.value.reason == "coordinate"


def masks_for(words: Words) -> tuple[Words, Words]:
    masks: Words = np.arange(words.size, dtype=WORD) * np.uint32(0x9E3779B9)
    return words + masks, masks


@pytest.mark.parametrize("sizes", [(7,), (1, 6), (5, 2), (6, 1), (4, 2, 1), (1,) * 7])
def test_masks_come_off_whatever_blocks_they_arrive_in(sizes: tuple[int, ...]) -> None:
    masked, masks = masks_for(a_sum())
    unmasking = Unmasking(masked, 3, TASK)
    start = 0
    for size in sizes:
        unmasking.take(start, masks[start : start + size])
        start += size
    found = unmasking.result()
    assert found.vector.tolist() == decoded(a_sum(), 3, TASK).vector.tolist()
    assert (found.weight, found.members) == (3.0, 3)


def test_masks_that_arrive_again_from_the_start_replace_what_came_before() -> None:
    """A connection broke: what it had brought of another answer must leave no trace."""
    masked, masks = masks_for(a_sum())
    unmasking = Unmasking(masked, 3, TASK)
    unmasking.take(0, np.zeros(3, WORD))  # would be implausible
    give_in_blocks(masks, unmasking.take)
    assert unmasking.result().vector.tolist() == decoded(a_sum(), 3, TASK).vector.tolist()


@pytest.mark.parametrize("start", [1, 2, 4, 6])
def test_masks_out_of_place_are_refused(start: int) -> None:
    masked, masks = masks_for(a_sum())
    unmasking = Unmasking(masked, 3, TASK)
    unmasking.take(0, masks[:3])
    with pytest.raises(Implausible) as caught:
        unmasking.take(start, masks[start:])
    assert caught.value.reason == "length"


def test_a_sum_whose_masks_are_not_all_there_is_not_told() -> None:
    masked, masks = masks_for(a_sum())
    unmasking = Unmasking(masked, 3, TASK)
    unmasking.take(0, masks[:-1])
    with pytest.raises(Implausible) as caught:
        unmasking.result()
    assert caught.value.reason == "length"


def test_the_mean_is_the_sum_by_its_weight() -> None:
    words = a_sum()
    assert decoded(words, 3, TASK).mean().tolist()[:3] == [1.0, 0.0, 0.0]
    words[:3] = (LEVELS, 0, 0)
    assert decoded(words, 3, TASK).mean()[0] == np.float32(1 / 3)
    words[-2] = LEVELS  # a weight of one
    found = decoded(words, 3, TASK)
    assert found.mean().tolist() == found.vector.tolist()


# --- The norm -----------------------------------------------------------------------------------

LONG = a_task(length=64, aggregation_goal=4, threshold=4)
COARSE = a_task(length=64, aggregation_goal=MAX_GOAL, threshold=4, max_examples=16_000)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(-1, 1, width=32), min_size=64, max_size=64),
            st.integers(1, 200),
            st.integers(0, 8),
        ),
        min_size=4,
        max_size=4,
    ),
    st.sampled_from([LONG, COARSE]),
)
def test_no_honest_clients_are_ever_refused(drawn: list[Any], task: PublicParameters) -> None:
    """Also with hardly a level left: there rounding is a large part of the norm."""
    total = np.zeros(task.vector_words, np.int64)
    for values, n, s in drawn:
        update = clipped(np.array(values, np.float32), task.clip)
        weight, damping = weight_and_damping(task, n, s)
        factor = weight * damping * (task.levels / task.clip)
        words = encoded(update, factor, task.levels).view(np.int32)
        total += [*words.tolist(), round(weight * task.levels), 1]
    if total[-2]:
        decoded(total.astype(WORD), 4, task)


def test_a_sum_is_no_longer_than_its_weight_times_the_clip() -> None:
    words = np.zeros(LONG.vector_words, WORD)
    words[:4] = 2 * LONG.levels  # each far below members x clip; together exactly 4 x clip
    words[-2:] = (4 * LONG.levels, 4)
    assert decoded(words, 4, LONG).vector[0] == 2.0
    words[4] = LONG.levels // 4
    with pytest.raises(Implausible) as caught:
        decoded(words, 4, LONG)
    assert caught.value.reason == "norm"
    words[4] = 0
    words[-2] = 3 * LONG.levels
    with pytest.raises(Implausible) as caught:
        decoded(words, 4, LONG)
    assert caught.value.reason == "norm"


@pytest.mark.parametrize("seed", range(50))
def test_noise_under_a_right_weight_and_a_right_constant_is_found_out(seed: int) -> None:
    """The levels of K members fill the group, so single coordinates can tell nothing: 64 of them
    are too long together with a probability of 1 - 2^-129.
    """
    noise = np.random.default_rng(seed).integers(0, 2**32, LONG.vector_words, dtype=WORD)
    noise[-2:] = (4 * LONG.levels, 4)
    with pytest.raises(Implausible):
        decoded(noise, 4, LONG)


def test_an_evaluation_has_no_norm() -> None:
    """Its clip bounds each number by itself."""
    task = a_task(weighting="none", clip=7.0)
    words = np.zeros(task.vector_words, WORD)
    words[:5] = 3 * 7
    words[-2:] = (3 * task.levels, 3)
    assert decoded(words, 3, task).vector.tolist() == [21.0] * 5
    words[2] += 1
    with pytest.raises(Implausible) as caught:
        decoded(words, 3, task)
    assert caught.value.reason == "coordinate"
