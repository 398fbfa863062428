"""When a rollout goes on and when it is rolled back: the rule, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from papaya.config import (
    AsyncFL,
    EvaluationPlan,
    MetricBounds,
    Requirements,
    SecureAggregation,
    SyncFL,
    TaskConfig,
)
from papaya.errors import OperatorError
from papaya.messages.rollout import check_candidate, check_plan, counts_of, judge
from papaya.messages.storage import ArmCounts, PointRow, RolloutPlan, RolloutRow, TaskRow
from papaya.sim.revisions import signed

PLAN = RolloutPlan(
    shares=(0.1, 1.0),
    tolerance=0.02,
    metric="accuracy",
    higher_is_better=True,
    evaluations=2,
    updates=10,
    failures=0.2,
    hours=2.0,
)
BASE = signed(
    TaskConfig(
        task="digits-000000000001",
        concurrency=8,
        model_length=4,
        regime=AsyncFL(4),
        evaluation=EvaluationPlan(every_versions=2, clients=4),
        metrics=(MetricBounds("accuracy"),),
        requirements=Requirements(engine="torch", owner="a" * 32),
    ),
    1,
)
ROW = TaskRow(BASE, name="digits")


def a_rollout(step: int = 0, **plan: Any) -> RolloutRow:
    return RolloutRow(
        plan=structs.replace(PLAN, **plan),
        candidate=BASE,
        revision=2,
        lease_until=0.0,
        fallback=b"",
        fallback_config=BASE,
        started=0.0,
        since=0.0,
        from_version=10,
        counts=ArmCounts(counted=100, others_counted=500),
        baseline=0.8,
        baseline_version=9,
        updated_at=10,
        step=step,
    )


def point(version: int, accuracy: float | None) -> PointRow:
    metrics = {} if accuracy is None else {"accuracy": accuracy}
    return PointRow(version, 0.0, 4, 40, 0.0, metrics=metrics)


def verdict(
    rollout: RolloutRow, *accuracies: float | None, now: float = 60.0, **counts: int
) -> str:
    """Of a step with these evaluations and this many participations since it began."""
    before = rollout.counts
    found = ArmCounts(
        counts.get("counted", 10) + before.counted,
        counts.get("failed", 0) + before.failed,
        counts.get("others_counted", 90) + before.others_counted,
        counts.get("others_failed", 0) + before.others_failed,
    )
    points = {10: point(10, 0.1)}  # from before the step: it says nothing about it
    points |= {11 + i: point(11 + i, value) for i, value in enumerate(accuracies)}
    decided = judge(rollout, points, found, now)
    return "" if decided is None else f"{decided.action}: {decided.why}"


def test_it_goes_on_after_enough_evaluations_and_updates() -> None:
    assert verdict(a_rollout(), 0.79, 0.81) == "go_on: accuracy 0.81"
    assert verdict(a_rollout(), 0.79, None) == "", "one evaluation is missing"
    assert verdict(a_rollout(step=1), 0.79, 0.81) == "go_on: accuracy 0.81"


def test_evaluations_from_before_its_updates_count_against_it_only() -> None:
    """A version may have been made before any update under the candidate was counted."""
    waiting = structs.replace(a_rollout(), updated_at=None)
    assert verdict(waiting, 0.9, 0.9, counted=9) == ""
    assert verdict(waiting, 0.7, counted=0).startswith("roll_back")
    later = structs.replace(a_rollout(), updated_at=12)
    assert verdict(later, 0.9, 0.9, 0.9) == "", "only the third is of a version after 12"
    assert verdict(later, 0.9, 0.9, 0.9, 0.9) == "go_on: accuracy 0.9"


@pytest.mark.parametrize("bad", [0.77, float("nan"), float("-inf")])
def test_one_bad_evaluation_rolls_it_back(bad: float) -> None:
    for step in (0, 1):
        found = verdict(a_rollout(step), 0.9, bad, 0.9)
        assert found == f"roll_back: accuracy {bad:.4g} at version 12, 0.8 before the rollout"


def test_the_loss_must_not_rise() -> None:
    rollout = structs.replace(a_rollout(metric="loss", higher_is_better=False), baseline=1.0)
    points = {11: structs.replace(point(11, None), loss=1.03)}
    decided = judge(rollout, points, rollout.counts, 60.0)
    assert decided is not None
    assert decided.action == "roll_back"
    points = {11: structs.replace(point(11, None), loss=0.5)}
    assert judge(rollout, points, rollout.counts, 60.0) is None


def test_a_candidate_whose_clients_fail_is_rolled_back_although_the_model_is_good() -> None:
    """Its updates are missing from the model, so no metric of the model can show it."""
    found = verdict(a_rollout(), 0.9, 0.9, counted=7, failed=4)
    assert found == "roll_back: 36 % of its participations fail, 0 % of the others"
    few = verdict(a_rollout(), 0.9, counted=5, failed=4)
    assert few == "", "nine participations are too few to judge"
    alike = verdict(a_rollout(), 0.9, counted=7, failed=4, others_counted=70, others_failed=40)
    assert alike == "", "the others fail as often"


def test_in_the_last_step_failures_are_compared_with_the_time_before() -> None:
    last = structs.replace(a_rollout(step=1), failing=0.1)
    found = verdict(last, 0.9, counted=60, failed=40)
    assert found == "roll_back: 40 % of its participations fail, 10 % before the rollout"
    assert verdict(last, 0.9, counted=75, failed=25) == ""


def test_a_step_that_gets_no_answer_in_time_is_rolled_back() -> None:
    late = 2 * 3600.0
    assert verdict(a_rollout(), 0.9, now=late - 1, counted=3) == ""
    found = verdict(a_rollout(), 0.9, now=late, counted=3)
    assert found == "roll_back: a step took 2 h: 3 of 10 updates, then 1 of 2 evaluations"
    assert verdict(a_rollout(step=1), now=late).endswith("then 0 of 2 evaluations")


def test_endings_are_divided_between_the_two_revisions() -> None:
    endings = {
        "counted": 50,
        "candidate_counted": 10,
        "candidate_failed": 3,
        "left_diverged": 5,
        "discarded_over_norm": 2,
        "aborted_stale": 40,
        "left_stopped": 30,
    }
    assert counts_of(endings) == ArmCounts(10, 3, 40, 4)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"shares": (0.1,)}, "the last one with all devices"),
        ({"shares": ()}, "one to 4 steps"),
        ({"shares": (0.1, 0.2, 0.3, 0.4, 1.0)}, "one to 4 steps"),
        ({"shares": (0.5, 0.1, 1.0)}, "larger than the one before"),
        ({"shares": (0.0, 1.0)}, "above 0"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"evaluations": 0}, "at least one"),
        ({"failures": 1.5}, "failures"),
        ({"hours": 200.0}, "hours"),
    ],
)
def test_plans_that_make_no_sense_are_refused(change: dict[str, Any], problem: str) -> None:
    check_plan(PLAN)
    with pytest.raises(OperatorError, match=problem):
        check_plan(structs.replace(PLAN, **change))


SECURE = structs.replace(BASE, clip=1.0, secure_aggregation=SecureAggregation(4))


@pytest.mark.parametrize(
    ("row", "change", "problem"),
    [
        (ROW, {"evaluation": None}, "no planned evaluations"),
        (ROW, {"metrics": ()}, "no metric accuracy"),
        (ROW, {"metrics": (MetricBounds("accuracy", 0, 2),)}, "cannot change metrics"),
        (ROW, {"evaluation": EvaluationPlan(clients=9)}, "cannot change evaluation"),
        (ROW, {"regime": SyncFL(0.0)}, "cannot change regime"),
        (ROW, {"requirements": Requirements(engine="other")}, "cannot change requirements"),
        (ROW, {"model_length": 5}, "cannot change model_length"),
        (structs.replace(ROW, state="cancelled"), {}, "is cancelled"),
        (structs.replace(ROW, config=SECURE), {}, "a secure task has one revision at a time"),
    ],
)
def test_candidates_that_cannot_be_given_to_a_share_are_refused(
    row: TaskRow, change: dict[str, Any], problem: str
) -> None:
    check_candidate(ROW, BASE, PLAN)
    with pytest.raises(OperatorError, match=problem):
        check_candidate(row, structs.replace(row.config, **change), PLAN)


def test_a_secure_task_can_be_watched_with_all_devices() -> None:
    row = structs.replace(ROW, config=SECURE)
    check_candidate(row, SECURE, structs.replace(PLAN, shares=(1.0,)))
