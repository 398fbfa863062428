"""Configuration of secure aggregation: what devices or the TSA would never take."""

from __future__ import annotations

from typing import Any

import pytest

from papaya.attestation.policy import DevicePolicy
from papaya.config import AsyncFL, Evaluated, SecureAggregation, TaskConfig
from papaya.errors import ConfigError
from papaya.secagg.parameters import MAX_GOAL
from papaya.secagg.participant import DEFAULT_MAXIMUM_STALENESS
from tests.unit.verifiable_log.builders import KEY


def a_config(**changes: Any) -> TaskConfig:
    settings: dict[str, Any] = {
        "task": "next-word",
        "concurrency": 1300,
        "model_length": 10_000,
        "secure_aggregation": SecureAggregation(),
        "clip": 1.0,
    }
    return TaskConfig(**(settings | changes))


def test_a_goal_that_the_tsa_could_never_release_is_refused() -> None:
    assert a_config(regime=AsyncFL(MAX_GOAL)).aggregation_goal == MAX_GOAL
    with pytest.raises(ConfigError, match=f"sums of at most {MAX_GOAL} clients") as caught:
        a_config(regime=AsyncFL(MAX_GOAL + 1))
    assert caught.value.hint.endswith(f"below {MAX_GOAL + 1}")


def test_more_staleness_than_devices_allow_is_said() -> None:
    assert DevicePolicy(log_key=str(KEY.verifier)).maximum_staleness == 1000
    assert DEFAULT_MAXIMUM_STALENESS == 1000
    assert a_config(regime=AsyncFL(130, max_staleness=1000)).warnings() == []
    [warning] = a_config(regime=AsyncFL(130, max_staleness=1001)).warnings()
    for words in ("max_staleness = 1001 ", "more than 1000", "maximum_staleness"):
        assert words in warning
    in_the_clear = a_config(regime=AsyncFL(130, max_staleness=1001), secure_aggregation=None)
    assert in_the_clear.warnings() == []


@pytest.mark.parametrize("clip", [0.5, 2.0**24])
def test_an_evaluation_that_would_round_or_clamp_is_refused(clip: float) -> None:
    evaluates = Evaluated("next-word", 3, "next-word/1/version-3", 10_000)
    with pytest.raises(ConfigError, match="must be a whole number"):
        a_config(regime=AsyncFL(130), clip=clip, evaluates=evaluates, max_examples=1)
