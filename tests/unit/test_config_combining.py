"""Settings that say how updates are combined: weights, staleness functions, rules."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from papaya.config import (
    AsyncFL,
    Privacy,
    SecureAggregation,
    Staleness,
    TaskConfig,
    Weighting,
)
from papaya.errors import ConfigError

PRIVACY = Privacy(clip=1.0, max_participations=1, delta=1e-6, noise_multiplier=1.0)


def a_config(**changes: Any) -> TaskConfig:
    fields: dict[str, Any] = {"task": "t", "concurrency": 20, "model_length": 4}
    return TaskConfig(**(fields | changes))


def secure(**changes: Any) -> TaskConfig:
    return a_config(secure_aggregation=SecureAggregation(), clip=1.0, **changes)


def refusal(make: Any, **fields: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make(**fields)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kind": "hinges"}, "staleness.kind"),
        ({"kind": "Mine"}, "staleness.kind"),
        ({"exponent": -0.5}, "staleness.exponent"),
        ({"exponent": float("nan")}, "staleness.exponent"),
        ({"kind": "hinge", "slope": -1.0}, "staleness.slope"),
        ({"kind": "constant", "grace": -1}, "staleness.grace"),
        ({"parameters": (("a", 1.0),)}, "staleness.parameters"),
        ({"kind": "mine", "parameters": (("a", 1.0), ("a", 2.0))}, "staleness.parameters"),
        ({"kind": "mine", "parameters": (("A b", 1.0),)}, "staleness.parameters"),
        ({"kind": "mine", "parameters": (("a", float("inf")),)}, "staleness.parameters"),
    ],
)
def test_a_staleness_function_that_cannot_work(fields: dict[str, Any], field: str) -> None:
    assert str(refusal(Staleness, **fields)).startswith(f"{field} = ")


def test_a_misspelt_name_is_not_taken_for_an_extension() -> None:
    error = refusal(Staleness, kind="polynomal")
    assert error.hint == "did you mean 'polynomial'?"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kind": "capped"}, "weighting.cap"),
        ({"cap": 5}, "weighting.cap"),
        ({"kind": "capped", "cap": 0}, "weighting.cap"),
        ({"kind": "uniform"}, "weighting.kind"),
    ],
)
def test_weights_that_cannot_work(fields: dict[str, Any], field: str) -> None:
    assert str(refusal(Weighting, **fields)).startswith(f"{field} = ")


def test_a_cap_is_at_most_max_examples() -> None:
    capped = Weighting("capped", 11)
    assert "weighting.cap" in str(refusal(a_config, weighting=capped, max_examples=10))
    a_config(weighting=capped, max_examples=11)


def test_the_weights_of_a_private_task_are_those_of_its_privacy() -> None:
    error = refusal(a_config, privacy=PRIVACY, weighting=Weighting("equal"))
    assert "privacy.weighting" in error.hint


@pytest.mark.parametrize("make", [secure, lambda **changes: a_config(privacy=PRIVACY, **changes)])
def test_secure_and_private_tasks_use_no_extension(make: Any) -> None:
    assert "staleness.kind" in str(refusal(make, staleness=Staleness("mine")))
    make(staleness=Staleness("hinge"))


def test_the_public_parameters_of_secure_tasks() -> None:
    ordinary = secure().public_parameters
    assert ordinary is not None
    assert (ordinary.weighting, ordinary.max_examples) == ("examples", 1500)
    equal = secure(weighting=Weighting("equal"), staleness=Staleness("constant")).public_parameters
    assert equal is not None
    assert (equal.weighting, equal.damping.kind) == ("equal", "constant")
    capped = secure(weighting=Weighting("capped", 20)).public_parameters
    assert capped is not None
    assert (capped.weighting, capped.max_examples) == ("examples", 20)


def test_settings_survive_storage() -> None:
    config = a_config(
        regime=AsyncFL(2),
        staleness=Staleness("mine", parameters=(("a", 2.0),)),
        weighting=Weighting("equal"),
    )
    found = msgspec.json.decode(msgspec.json.encode(config), type=TaskConfig)
    assert found == config
    assert found.staleness != Staleness("mine", parameters=(("a", 3.0),))
