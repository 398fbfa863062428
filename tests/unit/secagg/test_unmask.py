"""A sum is believed only if honest clients can have made it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from papaya.secagg.errors import Implausible
from papaya.secagg.unmask import unmask
from papaya.secagg.words import BLOCK, WORD, Words
from tests.unit.secagg.builders import a_task, decoded

TASK = a_task()
LEVELS = TASK.levels


def a_sum(members: int = 3) -> Words:
    """Of clients at the very limit."""
    words = [members * LEVELS, -members * LEVELS, 0, 1, -1, members * LEVELS, members]
    return np.array(words, "<i8").astype(WORD)


def test_the_limits_themselves_are_plausible() -> None:
    for members in (2, 3, 4):
        found = decoded(a_sum(members), members, TASK)
        assert found.weight == members
        assert found.vector.tolist()[:3] == [members, -members, 0]


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
