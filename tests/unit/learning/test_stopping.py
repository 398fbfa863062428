"""When a task ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.config import MetricTarget, StopRule
from papaya.learning.evaluation import evaluations_without_gain, verdict

LOSSES = st.lists(st.floats(0, 100), max_size=20)


@given(LOSSES)
def test_without_a_rule_a_task_never_ends(losses: list[float]) -> None:
    assert verdict(StopRule(), 0.0, 1e12, losses) is None


def test_hours_count_from_the_submission() -> None:
    rule = StopRule(hours=2)
    assert verdict(rule, 1000.0, 1000.0 + 7199, ()) is None
    assert verdict(rule, 1000.0, 1000.0 + 7200, ()) == "reached the limit of 2 hours"


def test_training_hours_count_from_the_first_version() -> None:
    rule = StopRule(training_hours=2)
    assert verdict(rule, 1000.0, 1e12, ()) is None, "there is no version"
    assert verdict(rule, 1000.0, 5000.0 + 7199, (), first_version=5000.0) is None
    why = verdict(rule, 1000.0, 5000.0 + 7200, (), first_version=5000.0)
    assert why == "reached the limit of 2 hours since the first version"


def test_the_last_evaluation_must_reach_the_target() -> None:
    rule = StopRule(target_loss=2.0)
    assert verdict(rule, 0.0, 1.0, ()) is None
    assert verdict(rule, 0.0, 1.0, (3.0, 2.01)) is None
    assert "2" in (verdict(rule, 0.0, 1.0, (3.0, 2.0)) or "")


@pytest.mark.parametrize(
    ("target", "reached", "missed"),
    [
        (MetricTarget(name="accuracy", above=0.9), 0.9, 0.899),
        (MetricTarget(name="accuracy", below=0.0), 0.0, 0.001),
    ],
)
def test_the_metric_of_the_last_evaluation_must_reach_the_target(
    target: MetricTarget, reached: float, missed: float
) -> None:
    rule = StopRule(target_metric=target)
    for metrics in ({}, {"accuracy": missed}, {"precision": reached}):
        assert verdict(rule, 0.0, 1.0, (1.0,), metrics) is None
    why = verdict(rule, 0.0, 1.0, (1.0,), {"accuracy": reached})
    assert why == f"accuracy {reached:g} has reached the target: {target}"


@given(LOSSES, st.integers(1, 5))
def test_patience_ends_when_the_last_evaluations_brought_nothing(
    losses: list[float], patience: int
) -> None:
    best, since = float("inf"), 0
    for loss in losses:  # the slow way
        best, since = (loss, 0) if loss < best else (best, since + 1)
    assert evaluations_without_gain(losses) == since
    ends = verdict(StopRule(patience=patience), 0.0, 1.0, losses) is not None
    assert ends == (since >= patience)


@pytest.mark.parametrize("versions", [1, 10])
def test_the_number_of_versions_is_not_decided_here(versions: int) -> None:
    assert verdict(StopRule(versions=versions), 0.0, 1.0, (1.0,) * versions) is None
