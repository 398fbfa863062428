"""The oracle of the chaos runs decodes each number of updates, and finds each kind of error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np
import pytest
from msgspec import structs

from papaya.config import Staleness
from papaya.device.load import LoadOutcome
from tests.chaos.loopback import CLEAR
from tests.chaos.oracle import DAMPING, Model, judge

_LENGTH = 16
_LARGEST_STALENESS = 1000


def factor(staleness: int, damping: Staleness = DAMPING) -> float:
    function = damping.damping
    assert function is not None
    return function.factor(staleness)


def told(
    number: int, ending: str = "counted", staleness: Sequence[int] = (0,), task: str = CLEAR.task
) -> LoadOutcome:
    return LoadOutcome(task, f"session-{number}", number, tuple(staleness), ending, "", 0.0)


def model(
    digits: dict[int, float],
    is_open: frozenset[str] = frozenset(),
    lost: frozenset[str] = frozenset(),
) -> Model:
    found = np.zeros(_LENGTH)
    for number, value in digits.items():
        found[number] = value
    return Model(CLEAR, 7, found, is_open, lost)


def problems(
    digits: dict[int, float], *outcomes: LoadOutcome, is_open: frozenset[str] = frozenset()
) -> str:
    return "\n".join(judge(model(digits, is_open), outcomes).problems)


def test_what_was_told_is_in_the_model() -> None:
    outcomes = (
        told(0),
        told(1, staleness=(3, 8)),
        told(2, "discarded"),
        told(3, "aborted"),
        told(4, "vanished"),
        told(5, "vanished", (2,)),
        told(6, task="another"),
    )
    assert problems({0: 1.0, 1: factor(8), 5: factor(2)}, *outcomes) == ""


def test_one_that_is_counted_twice_does_not_hide_one_that_is_not_counted() -> None:
    found = problems({0: 2.0}, told(0), told(1))
    assert "session-0 (number 0), told 'counted': counted 2 times" in found
    assert "session-1 (number 1), told 'counted': counted 0 times" in found


@pytest.mark.parametrize("ending", ["discarded", "aborted"])
def test_what_was_refused_is_not_counted(ending: str) -> None:
    assert "counted 1 times" in problems({0: 1.0}, told(0, ending))
    assert "counted 1 times" in problems({}, told(0, ending), is_open=frozenset({"session-0"})), (
        "it is in a masked buffer that is still open"
    )


def test_an_update_is_not_in_a_version_and_in_an_open_masked_buffer() -> None:
    members = frozenset({"session-0"})
    assert problems({}, told(0), is_open=members) == ""
    assert "counted 2 times" in problems({0: 1.0}, told(0), is_open=members)


def test_an_update_whose_fate_nobody_knows_is_counted_once_at_most() -> None:
    assert "counted 2 times" in problems({0: 2 * factor(5)}, told(0, "vanished", (5,)))


def test_members_of_a_buffer_that_was_given_up_are_lost_and_not_a_problem() -> None:
    verdict = judge(model({}, lost=frozenset({"session-0"})), [told(0)])
    assert (verdict.problems, verdict.lost) == ([], 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.5, 1.01, factor(1) + 2e-4])
def test_a_coordinate_that_no_number_of_updates_explains(value: float) -> None:
    assert "explained by no number of updates" in problems({0: value}, told(0, staleness=(0, 1)))


@pytest.mark.parametrize("value", [math.nan, 1.0, -1.0])
def test_a_coordinate_that_no_device_has_used(value: float) -> None:
    assert "1 coordinates that no device used, the first 9" in problems({9: value}, told(0, "x"))


@pytest.mark.parametrize("times", [5, 100, 16_000_000])
def test_a_digit_does_not_overflow(times: int) -> None:
    """As float32, as in a model."""
    value = float(np.float32(times / CLEAR.aggregation_goal)) * CLEAR.aggregation_goal
    assert f"counted {times} times" in problems({0: value}, told(0))


def test_rounding_of_a_float_model_is_far_below_what_is_decoded() -> None:
    for staleness in range(0, _LARGEST_STALENESS, 7):
        value = float(np.float32(factor(staleness) / CLEAR.aggregation_goal))
        found = problems({0: value * CLEAR.aggregation_goal}, told(0, staleness=(staleness,)))
        assert found == ""


def test_the_damping_of_the_tests_is_never_ambiguous() -> None:
    """One update is above 0.5 and at most 1; two are above 1, whatever their staleness is."""
    smallest = factor(_LARGEST_STALENESS)
    assert smallest > 0.5
    assert max(factor(s) for s in range(_LARGEST_STALENESS + 1)) == 1.0
    granted = (0, 3, 4, 17, _LARGEST_STALENESS)
    for times in (1, 2):
        for each in combinations_with_replacement(granted, times):
            value = sum(map(factor, each))
            verdict = judge(model({0: value}), [told(0, "vanished", granted)])
            assert verdict.told.get("vanished", {times: 1}) == {times: 1}, each
            assert bool(verdict.problems) == (times == 2)


def test_an_ambiguous_coordinate_is_a_problem() -> None:
    """With the paper's damping, one update of staleness 0 is as much as two of staleness 3."""
    papers = structs.replace(CLEAR, staleness=Staleness())
    verdict = judge(model({0: 1.0})._replace(config=papers), [told(0, staleness=(0, 3))])
    assert "explained 1 times or 2 times" in verdict.problems[0]
