"""A sum is believed only if honest clients can have made it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from papaya.secagg.errors import Implausible
from papaya.secagg.unmask import check_plausible, decode_sum, unmask
from papaya.secagg.words import WORD, Words
from tests.unit.secagg.builders import a_task

TASK = a_task()
LEVELS = TASK.levels


def a_sum(members: int = 3) -> Words:
    """Of clients at the very limit."""
    words = [members * LEVELS, -members * LEVELS, 0, 1, -1, members * LEVELS, members]
    return np.array(words, "<i8").astype(WORD)


def test_the_limits_themselves_are_plausible() -> None:
    for members in (2, 3, 4):
        found = decode_sum(a_sum(members), members, TASK)
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
        decode_sum(change(a_sum()), 3, TASK)
    assert caught.value.reason == reason


@pytest.mark.parametrize("members", [0, 1, 5])
def test_a_sum_of_too_few_or_too_many(members: int) -> None:
    with pytest.raises(Implausible) as caught:
        check_plausible(a_sum(members), members, TASK)
    assert caught.value.reason == "members"


def test_unmasking_is_subtraction_in_the_group() -> None:
    masked = np.array([5, 0, 2**32 - 1], WORD)
    unmask(masked, np.array([6, 1, 2**32 - 1], WORD))
    assert masked.tolist() == [2**32 - 1, 2**32 - 1, 0]
