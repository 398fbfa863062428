"""The paper's sentences on configuration: concurrency, aggregation goal, over-selection, times."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from papaya.config import (
    AsyncFL,
    SecureAggregation,
    ServerConfig,
    SyncFL,
    TaskConfig,
)
from papaya.errors import ConfigError
from papaya.secagg import fixed_point

PAPER_CONCURRENCY = 1300


def a_task(**changes: Any) -> TaskConfig:
    whole = {"task": "next-word", "concurrency": PAPER_CONCURRENCY, "model_length": 1000}
    return TaskConfig(**{**whole, **changes})


def test_two_parameters_make_a_task() -> None:
    """Experimental Setup: "Our system has two configuration parameters. First, for both SyncFL and
    AsyncFL tasks, concurrency specifies the maximum number of concurrently participating devices.
    Second, for AsyncFL tasks, K is the aggregation goal".
    """
    task = a_task(concurrency=1300, regime=AsyncFL(aggregation_goal=100))
    assert (task.concurrency, task.aggregation_goal) == (1300, 100)
    assert a_task(concurrency=1300, regime=SyncFL()).concurrency == 1300


@pytest.mark.parametrize("share", [0.10, 0.15, 0.20, 0.25, 0.30])
def test_ten_to_thirty_percent_of_concurrency_is_advised(share: float) -> None:
    """Experimental Setup: "choosing K to be 10-30% of concurrency works well in practice"."""
    goal = round(share * PAPER_CONCURRENCY)
    assert a_task(regime=AsyncFL(aggregation_goal=goal)).warnings() == []
    assert 0.10 <= a_task().aggregation_goal / PAPER_CONCURRENCY <= 0.30


def test_thirty_percent_over_selection_unless_otherwise_stated() -> None:
    """Experimental Setup: "unless otherwise stated, we use 30% over-selection with SyncFL to
    alleviate the impact stragglers".
    """
    assert SyncFL().over_selection == 0.3
    assert a_task(regime=SyncFL(over_selection=0.5)).regime == SyncFL(over_selection=0.5)


def test_1300_clients_with_over_selection_are_a_goal_of_1000() -> None:
    """Figure "Training curves": "aggregation goal = 1,000. We set concurrency = 1,300 for AsyncFL,
    SyncFL with over-selection." The text's "the aggregation goal in SyncFL is typically 1.3 x
    concurrency (30% over-selection)" reads, with this figure, as C = 1.3 x K.
    """
    assert a_task(concurrency=1300, regime=SyncFL()).aggregation_goal == 1000


def test_without_over_selection_concurrency_is_the_goal() -> None:
    """Figure "Training curves": "For SyncFL without over-selection, we set concurrency equal to
    aggregation goal."
    """
    task = a_task(concurrency=1000, regime=SyncFL(over_selection=0))
    assert task.aggregation_goal == task.concurrency == 1000


def test_in_asyncfl_the_goal_is_independent_of_concurrency() -> None:
    """Parallel Model Aggregation: "in AsyncFL it is independent of concurrency." """
    for concurrency in (130, 1300, 2300, 2600):
        task = a_task(concurrency=concurrency, regime=AsyncFL(aggregation_goal=100))
        assert task.aggregation_goal == 100


@pytest.mark.parametrize("goal", [100, 200, 500, 1000, 1300])
def test_the_papers_sweep_of_the_goal_is_legal(goal: int) -> None:
    """Server-Model Step Frequency: "We fix concurrency to be 1300 and vary aggregation goal (K)
    from 100 to 1300."
    """
    task = a_task(regime=AsyncFL(aggregation_goal=goal))
    assert task.aggregation_goal == goal
    assert task.warnings() == []


def test_switching_the_regime_is_one_line() -> None:
    """Switching between SyncFL and AsyncFL: "switching between SyncFL and AsyncFL can be done via a
    configuration change."
    """
    document = json.loads(msgspec.json.encode(a_task(regime=SyncFL())))
    document["regime"] = {"type": "async"}
    switched = msgspec.json.decode(json.dumps(document).encode(), type=TaskConfig)
    assert switched == a_task(regime=AsyncFL())
    assert msgspec.structs.replace(switched, regime=SyncFL()) == a_task(regime=SyncFL())


def test_maximum_staleness_is_configurable() -> None:
    """Handling Staleness: "the aggregator abort clients whose staleness is larger than a
    configurable parameter, maximum staleness."
    """
    assert a_task(regime=AsyncFL(max_staleness=7)).max_staleness == 7


def test_a_round_leaves_no_client_behind_it() -> None:
    """Aborting stale clients: "When a server model update is performed in SyncFL, users that are
    still training are aborted".
    """
    assert a_task(regime=SyncFL()).max_staleness == 0


def test_training_times_out_after_4_minutes() -> None:
    """Experimental Setup: "we set the timeout to 4 minutes"."""
    assert a_task().training_timeout_s == 4 * 60


def test_the_recovery_period_is_typically_30_s() -> None:
    """Failure Recovery: "After the leader election coordinator enters the recovery period
    (typically 30s)".
    """
    assert ServerConfig().recovery_s == 30


def test_failures_are_detected_after_several_missed_heartbeats() -> None:
    """Failure Recovery: "coordinator detects failures after several missed heartbeats"."""
    config = ServerConfig(heartbeat_s=7.0)
    assert 2 * config.heartbeat_s < config.dead_after_s == 3 * config.heartbeat_s


@pytest.mark.parametrize(("concurrency", "model_length"), [(2600, 1000), (1300, 2000)])
def test_the_workload_grows_with_concurrency_and_model_size(
    concurrency: int, model_length: int
) -> None:
    """Persistent Aggregator: "The Coordinator estimates this workload using the task concurrency
    and model size."
    """
    larger = a_task(concurrency=concurrency, model_length=model_length)
    assert larger.workload == 2 * a_task().workload


def test_a_threshold_that_no_buffer_can_reach_is_refused() -> None:
    """Ideal functionality: the sum is revealed "if |C1| >= t clients; otherwise, does nothing". A
    buffer holds K, so t > K would do nothing forever.
    """
    secure = {"clip": 1.0, "regime": AsyncFL(aggregation_goal=100)}
    assert a_task(**secure, secure_aggregation=SecureAggregation(100)).threshold == 100
    with pytest.raises(ConfigError, match=r"^secure_aggregation.threshold = 101: "):
        a_task(**secure, secure_aggregation=SecureAggregation(101))


@pytest.mark.parametrize("goal", [1, 2, 3, 100, 1000, 1300, 10**6])
def test_the_sum_of_a_full_buffer_never_wraps_around(goal: int) -> None:
    """Fixed Point Conversion: "To properly simulate the behavior of integer addition, wrap-round
    needs to be avoided." Rounding may add half a step to each update.
    """
    assert goal * (fixed_point.levels(goal) + 0.5) < 2**31


def test_the_scale_of_updates_must_be_known_before_they_are_masked() -> None:
    """Fixed Point Conversion: "the parties need to estimate the scale of the model updates to
    aggregate, the desired accuracy to properly pick the parameters including the scaling factor c".
    """
    with pytest.raises(ConfigError, match=r"^clip = None: "):
        a_task(secure_aggregation=SecureAggregation())
    with pytest.raises(ConfigError, match="fixed-point levels"):
        a_task(
            secure_aggregation=SecureAggregation(),
            clip=1.0,
            model_length=10**8,
            regime=AsyncFL(aggregation_goal=10**6),
        )
    assert fixed_point.scale(100, clip=2.0) == fixed_point.levels(100) / 2.0
