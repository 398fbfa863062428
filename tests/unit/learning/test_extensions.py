"""Extensions: code of the servers that a task names, with numbers as parameters."""

from __future__ import annotations

from typing import Any

import pytest

from papaya.config import AsyncFL, Staleness, TaskConfig
from papaya.errors import ConfigError
from papaya.learning import extensions
from papaya.learning.weighting import staleness_weight


def a_config(**changes: Any) -> TaskConfig:
    fields: dict[str, Any] = {"task": "t", "concurrency": 20, "model_length": 4}
    return TaskConfig(**(fields | changes))


def test_a_staleness_function_gets_the_parameters_of_the_task() -> None:
    extensions.add("staleness_functions", "geometric", lambda staleness, base: base**staleness)
    function = Staleness("geometric", parameters=(("base", 0.5),))
    assert [staleness_weight(s, function) for s in range(4)] == [1, 0.5, 0.25, 0.125]
    extensions.require_all(a_config(staleness=function))


def test_an_unknown_name_is_refused_with_what_the_operator_has_to_do() -> None:
    with pytest.raises(ConfigError, match="no staleness function 'elsewhere'") as caught:
        extensions.require_all(a_config(staleness=Staleness("elsewhere")))
    assert 'extensions = ["staleness_functions:elsewhere"]' in caught.value.hint


@pytest.mark.parametrize("found", [1.5, -0.1, float("nan"), float("inf"), "much"])
def test_a_function_that_returns_no_factor_is_refused(found: Any) -> None:
    """Also if it does so only for a staleness that is rare."""
    extensions.add(
        "staleness_functions", "broken", lambda staleness: found if staleness == 7 else 1
    )
    config = a_config(staleness=Staleness("broken"), regime=AsyncFL(2, max_staleness=9))
    with pytest.raises(ConfigError, match="broken"):
        extensions.require_all(config)


def test_parameters_that_the_function_does_not_have_are_refused() -> None:
    extensions.add("staleness_functions", "plain", lambda staleness: 1.0)
    with pytest.raises(ConfigError, match="plain") as caught:
        extensions.require_all(a_config(staleness=Staleness("plain", parameters=(("x", 1.0),))))
    assert "{'x': 1.0}" in caught.value.hint
