"""What an optimizer's configuration refuses, and choices that do not exist, with what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from papaya.config import OptimizerConfig, TaskConfig
from papaya.errors import ConfigError

NAN, INF = math.nan, math.inf


def refusal(**values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**values)
    return caught.value


@pytest.mark.parametrize("field", ["rate", "epsilon"])
@pytest.mark.parametrize("value", [0.0, -1e-3, NAN, INF])
def test_an_impossible_rate_or_epsilon_is_refused(field: str, value: float) -> None:
    error = refusal(**{field: value})
    assert str(error).startswith(f"optimizer.{field} = {value!r}: ")
    assert "default of fedadam" in error.hint


@pytest.mark.parametrize("field", ["momentum", "beta1", "beta2"])
@pytest.mark.parametrize("value", [1.0, 1.5, -0.1, NAN, INF])
def test_an_impossible_moment_is_refused(field: str, value: float) -> None:
    error = refusal(**{field: value})
    assert str(error).startswith(f"optimizer.{field} = {value!r}: ")
    assert "[0, 1)" in error.hint


@pytest.mark.parametrize("kind", ["Fed SGD", "", None])
def test_a_kind_that_cannot_exist_is_refused_with_those_that_do(kind: Any) -> None:
    """Nothing decodes a configuration that is written in Python."""
    error = refusal(kind=kind)
    kinds = "fedavg, fedsgd, fedadam, fedyogi, fedadagrad"
    assert str(error).startswith(f"optimizer.kind = {kind!r}: is not one of {kinds}, nor ")


def test_only_extensions_have_parameters() -> None:
    assert "optimizer.parameters" in str(refusal(parameters=(("decay", 0.1),)))
    assert OptimizerConfig(kind="lamb", parameters=(("decay", 0.1),)).is_built_in is False


@pytest.mark.parametrize(
    ("field", "value", "choices"),
    [("durability", "never", "commit, step"), ("over_clip", None, "refuse, clip")],
)
def test_so_are_other_choices_of_a_task(field: str, value: Any, choices: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} = {value!r}: is not one of {choices}"):
        TaskConfig(task="next-word", concurrency=100, model_length=10, **{field: value})
