"""Settings that say how updates are combined: weights, staleness functions, rules."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from papaya.config import (
    Aggregation,
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
        ({"kind": "my own"}, "staleness.kind"),
        ({"kind": None}, "staleness.kind"),
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


# Rules.


def with_rule(**changes: Any) -> TaskConfig:
    weighting = Weighting("equal")
    return a_config(aggregation=Aggregation("median"), **({"weighting": weighting} | changes))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kind": "Krum"}, "aggregation.kind"),
        ({"kind": "trimmed_mean", "trim": 0.0}, "aggregation.trim"),
        ({"trim": 0.5}, "aggregation.trim"),
        ({"factor": 0.0}, "aggregation.factor"),
        ({"kind": "norm_bound", "factor": float("inf")}, "aggregation.factor"),
        ({"kind": "median", "parameters": (("a", 1.0),)}, "aggregation.parameters"),
    ],
)
def test_a_rule_that_cannot_work(fields: dict[str, Any], field: str) -> None:
    assert str(refusal(Aggregation, **fields)).startswith(f"{field} = ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secure_aggregation": SecureAggregation(), "clip": 1.0}, "reveals only their sum"),
        ({"privacy": PRIVACY, "weighting": Weighting()}, "hides one update in a sum"),
        ({"durability": "step"}, "written before they are acknowledged"),
        ({"weighting": Weighting()}, "counts all updates the same"),
    ],
)
def test_a_rule_is_refused_where_it_would_be_wrong(changes: dict[str, Any], reason: str) -> None:
    with_rule()
    assert reason in str(refusal(with_rule, **changes))


def test_a_trimmed_mean_trims_something() -> None:
    trimmed = Aggregation("trimmed_mean", trim=0.1)
    fields = {"weighting": Weighting("equal"), "aggregation": trimmed}
    error = refusal(a_config, regime=AsyncFL(9), **fields)
    assert "trims nothing from 9 updates" in str(error)
    a_config(regime=AsyncFL(10), **fields)


def test_what_a_rule_stores_is_shown() -> None:
    config = with_rule(model_length=5_000_000, regime=AsyncFL(20))
    [warning] = [found for found in config.warnings() if "aggregation.kind" in found]
    assert "20 x 20.0 MB = 400 MB" in warning
    assert config.members_bytes == 20 * 20_000_000


def test_a_function_that_devices_would_refuse_gives_a_warning() -> None:
    steep = secure(staleness=Staleness("hinge"), regime=AsyncFL(10, max_staleness=50))
    [warning] = [found for found in steep.warnings() if "staleness.kind" in found]
    assert "maximum_staleness" in warning
    gentle = secure(staleness=Staleness("hinge"), regime=AsyncFL(10, max_staleness=7))
    assert not [found for found in gentle.warnings() if "staleness.kind" in found]
