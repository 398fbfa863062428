"""Configuration: the impossible is refused with help, the unwise is said, the rest is kept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.config import (
    MAX_MODEL_LENGTH,
    AsyncFL,
    DeviceConfig,
    OptimizerConfig,
    Requirements,
    SecureAggregation,
    ServerConfig,
    StopRule,
    SyncFL,
    TaskConfig,
)
from papaya.config.checks import as_written, require_known_fields
from papaya.config.metrics import MetricBounds
from papaya.errors import ConfigError
from papaya.learning.definition import ClientSGD, Task

NAN, INF = math.nan, math.inf
Built = TaskConfig | ServerConfig | DeviceConfig | OptimizerConfig


def a_config(**changes: Any) -> TaskConfig:
    return TaskConfig(**{"task": "next-word", "concurrency": 1300, "model_length": 1000, **changes})


def refusal(kind: type[Built], **values: Any) -> ConfigError:
    whole = {"task": "next-word", "concurrency": 100, "model_length": 10}
    with pytest.raises(ConfigError) as caught:
        kind(**({**whole, **values} if kind is TaskConfig else values))
    return caught.value


# --- Values of another type


@pytest.mark.parametrize(
    ("kind", "field", "value", "problem"),
    [
        (AsyncFL, "aggregation_goal", "5", "regime.aggregation_goal = '5': must be a number"),
        (AsyncFL, "max_staleness", "9", "regime.max_staleness = '9': must be a number"),
        (AsyncFL, "aggregation_goal", 5.5, "= 5.5: must be a whole number"),
        (SyncFL, "over_selection", [0.3], "regime.over_selection = [0.3]: must be a number"),
        (SecureAggregation, "threshold", "2", "secure_aggregation.threshold = '2': must be a"),
        (Requirements, "min_memory_mb", "64", "requirements.min_memory_mb = '64': must be a"),
    ],
)
def test_a_part_of_a_task_refuses_another_type_when_it_is_made(
    kind: Callable[..., object], field: str, value: object, problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        kind(**{field: value})


# --- Impossible values

BAD_TIMES = [0, 0.0, -1.0, NAN, INF, -INF]
SECURE = {"secure_aggregation": SecureAggregation(), "clip": 1.0}

IMPOSSIBLE: list[tuple[dict[str, Any], str, object]] = [
    *[({"task": task}, "task", task) for task in ("", "-a", "_a", "A", "a b", "a/b", "ü", "a\n")],
    ({"task": 65 * "a"}, "task", 65 * "a"),
    *[({"concurrency": value}, "concurrency", value) for value in (0, -1, 2**31 + 1)],
    *[({"model_length": value}, "model_length", value) for value in (0, -1, MAX_MODEL_LENGTH + 1)],
    *[({"max_examples": value}, "max_examples", value) for value in (0, 2**31 + 1)],
    *[({"keep_versions": value}, "keep_versions", value) for value in (0, 2**31 + 1)],
    *[({"clip": value}, "clip", value) for value in (0.0, -1.0, NAN, INF)],
    *[
        ({"regime": SyncFL(over_selection=value)}, "regime.over_selection", value)
        for value in (-0.1, -1.0, NAN, INF)
    ],
    *[
        ({"regime": AsyncFL(aggregation_goal=value)}, "regime.aggregation_goal", value)
        for value in (0, -1, 2**31 + 1)
    ],
    *[
        ({"regime": AsyncFL(max_staleness=value)}, "regime.max_staleness", value)
        for value in (-1, 2**31 + 1)
    ],
    *[
        ({field: value}, field, value)
        for field in ("training_timeout_s", "upload_timeout_s")
        for value in (*BAD_TIMES, 1e301)
    ],
    *[({"commit_interval_s": value}, "commit_interval_s", value) for value in BAD_TIMES],
    *[({"participation_gap_s": value}, "participation_gap_s", value) for value in (-1.0, NAN, INF)],
    *[({"max_participations": value}, "max_participations", value) for value in (0, -1)],
    *[
        (
            {**SECURE, "secure_aggregation": SecureAggregation(threshold=value)},
            "secure_aggregation.threshold",
            value,
        )
        for value in (0, -1, 11)
    ],
    ({"secure_aggregation": SecureAggregation()}, "clip", None),
    ({**SECURE, "clip": 1e-37}, "clip", 1e-37),
    ({**SECURE, "clip": 1e38}, "clip", 1e38),
    ({**SECURE, "concurrency": 2**31}, "aggregation_goal", round(2**31 / 10)),
    ({**SECURE, "regime": AsyncFL(2**31), "concurrency": 1}, "aggregation_goal", 2**31),
]


@pytest.mark.parametrize(("values", "field", "value"), IMPOSSIBLE)
def test_an_impossible_task_is_refused_with_field_value_and_remedy(
    values: dict[str, Any], field: str, value: object
) -> None:
    error = refusal(TaskConfig, **values)
    assert str(error).startswith(f"{field} = {value!r}: ")
    assert len(error.hint.split()) >= 3


def test_a_number_that_no_float_can_hold_is_refused_like_any_other() -> None:
    """It arrives as plain digits in a submitted task, and half the rules divide by it."""
    assert str(refusal(TaskConfig, concurrency=10**400)).startswith("concurrency = 1000")


COUNTS = ["max_held", "chunk_bytes"]
SERVER_TIMES = [name for name in ServerConfig.__struct_fields__ if name not in COUNTS]
DEVICE_TIMES = [f for f in DeviceConfig.__struct_fields__ if f != "participation_floor_s"]


@pytest.mark.parametrize(
    ("kind", "field"),
    [(ServerConfig, field) for field in SERVER_TIMES]
    + [(DeviceConfig, field) for field in DEVICE_TIMES],
)
@pytest.mark.parametrize("value", BAD_TIMES)
def test_an_impossible_time_of_a_server_or_device_is_refused(
    kind: type[Built], field: str, value: float
) -> None:
    error = refusal(kind, **{field: value})
    assert str(error).startswith(f"{field} = {value!r}: ")
    assert ("use 1.5" if field == "pace" else field) in error.hint


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2**31 + 1])
def test_a_server_that_could_hold_nothing_or_everything_is_refused(field: str, value: int) -> None:
    assert str(refusal(ServerConfig, **{field: value})).startswith(f"{field} = {value}: ")
    smallest = 4 if field == "chunk_bytes" else 1
    least: dict[str, Any] = {field: smallest}
    assert getattr(ServerConfig(**least), field) == smallest


def test_a_retry_window_upside_down_is_refused() -> None:
    error = refusal(ServerConfig, min_retry_s=60.0, max_retry_s=30.0)
    assert str(error) == "min_retry_s = 60.0: is above max_retry_s = 30"
    assert ServerConfig(min_retry_s=30.0, max_retry_s=30.0).min_retry_s == 30.0


@pytest.mark.parametrize("value", [-1.0, NAN, INF])
def test_an_impossible_floor_of_a_device_is_refused(value: float) -> None:
    error = refusal(DeviceConfig, participation_floor_s=value)
    assert str(error).startswith(f"participation_floor_s = {value!r}: ")
    assert DeviceConfig(participation_floor_s=0).participation_floor_s == 0


# --- The edge of what is possible


@pytest.mark.parametrize(
    "values",
    [
        {"task": "a"},
        {"task": 64 * "9"},
        {"task": "a-b_c"},
        {"concurrency": 1},
        {"model_length": MAX_MODEL_LENGTH},
        {"max_examples": 1},
        {"keep_versions": 1},
        {"participation_gap_s": 0},
        {"max_participations": 1},
        {"regime": SyncFL(over_selection=0.0)},
        {"regime": AsyncFL(aggregation_goal=1)},
        {"regime": AsyncFL(max_staleness=0)},
        {**SECURE, "secure_aggregation": SecureAggregation(threshold=1)},
        {**SECURE, "secure_aggregation": SecureAggregation(threshold=130)},
    ],
)
def test_the_last_possible_value_is_accepted(values: dict[str, Any]) -> None:
    config = a_config(**values)
    assert {field: getattr(config, field) for field in values} == values


def test_a_threshold_above_the_goal_names_the_goal_it_can_never_reach() -> None:
    error = refusal(
        TaskConfig,
        clip=1.0,
        regime=AsyncFL(aggregation_goal=20),
        secure_aggregation=SecureAggregation(threshold=21),
    )
    assert "aggregation_goal = 20" in str(error)
    assert "between 1 and 20" in error.hint


def test_the_hint_on_the_goal_of_a_buffer_is_ten_percent_of_concurrency() -> None:
    assert "10 % of concurrency (10)" in refusal(TaskConfig, regime=AsyncFL(0)).hint


@pytest.mark.parametrize("model_length", [1, 1000, 10**6, 5 * 10**6])
def test_the_remedy_for_too_little_precision_works(model_length: int) -> None:
    """Who follows the hint to the letter must not be refused again."""
    too_many = AsyncFL(aggregation_goal=2**30)
    error = refusal(TaskConfig, **SECURE, model_length=model_length, regime=too_many)
    assert "fixed-point levels" in str(error)
    advised = int(error.hint.rsplit(" ", 1)[1]) - 1
    config = a_config(**SECURE, model_length=model_length, regime=AsyncFL(advised))
    assert config.aggregation_goal == advised


def test_a_goal_that_leaves_no_precision_in_the_clear_is_fine_there() -> None:
    assert a_config(regime=AsyncFL(aggregation_goal=2**31)).aggregation_goal == 2**31


# --- Defaults and what follows from them


@pytest.mark.parametrize(
    ("concurrency", "over_selection", "goal"),
    [(1300, 0.3, 1000), (130, 0.3, 100), (2600, 0.3, 2000), (1000, 0.0, 1000), (10, 0.3, 8)],
)
def test_the_goal_of_a_round(concurrency: int, over_selection: float, goal: int) -> None:
    regime = SyncFL(over_selection=over_selection)
    assert a_config(concurrency=concurrency, regime=regime).aggregation_goal == goal


@given(st.integers(1, 10**6), st.floats(0, 100))
def test_a_round_can_always_end(concurrency: int, over_selection: float) -> None:
    """K = round(C / (1 + o)) must be reachable by C clients, and at least one."""
    config = a_config(concurrency=concurrency, regime=SyncFL(over_selection))
    assert 1 <= config.aggregation_goal <= concurrency


@pytest.mark.parametrize(("concurrency", "goal"), [(1, 1), (4, 1), (16, 2), (1300, 130)])
def test_the_default_goal_is_a_tenth_of_concurrency(concurrency: int, goal: int) -> None:
    assert a_config(concurrency=concurrency).aggregation_goal == goal


def test_a_goal_above_concurrency_is_legal() -> None:
    config = a_config(concurrency=10, regime=AsyncFL(aggregation_goal=100))
    assert config.aggregation_goal == 100
    assert len(config.warnings()) == 1


@pytest.mark.parametrize(
    ("concurrency", "goal", "expected"), [(1300, 100, 208), (1300, 130, 160), (100, 100, 50)]
)
def test_the_default_maximum_staleness_grows_with_concurrency_over_goal(
    concurrency: int, goal: int, expected: int
) -> None:
    config = a_config(concurrency=concurrency, regime=AsyncFL(aggregation_goal=goal))
    assert config.max_staleness == expected
    assert a_config(regime=AsyncFL(max_staleness=7)).max_staleness == 7


def test_nobody_is_stale_in_a_round() -> None:
    assert a_config(regime=SyncFL()).max_staleness == 0


def test_the_defaults_of_a_task() -> None:
    config = a_config()
    assert config.regime == AsyncFL()
    assert config.optimizer == OptimizerConfig()
    assert config.optimizer.kind == "fedadam"
    assert config.requirements == Requirements()
    assert (config.secure_aggregation, config.threshold, config.clip) == (None, None, None)
    assert (config.training_timeout_s, config.upload_timeout_s) == (240, 120)
    assert (config.participation_gap_s, config.max_participations) == (3600, None)
    assert (config.durability, config.commit_interval_s) == ("commit", 0.25)
    assert (config.over_clip, config.max_examples) == ("refuse", 1500)


def test_the_threshold_is_the_goal_unless_set_lower() -> None:
    assert a_config(**SECURE).threshold == 130
    lower = {**SECURE, "secure_aggregation": SecureAggregation(threshold=20)}
    assert a_config(**lower).threshold == 20


def test_size_and_workload_of_a_task() -> None:
    config = a_config(concurrency=3, model_length=10)
    assert (config.model_bytes, config.workload) == (40, 120)


def test_one_heartbeat_and_the_rest_follows() -> None:
    config = ServerConfig(heartbeat_s=2.0)
    derived = (config.dead_after_s, config.confirm_by_s, config.leader_lease_s, config.recovery_s)
    assert derived == (6, 6, 6, 6)


def test_the_defaults_of_a_server_and_a_device() -> None:
    server, device = ServerConfig(), DeviceConfig()
    assert (server.heartbeat_s, server.hold_s, server.pace) == (10, 20, 1.5)
    assert (server.chunk_bytes, server.min_report_interval_s) == (2**20, 0.02)
    assert device.check_in_timeout_s > server.hold_s
    assert device.max_backoff_s < server.dead_after_s
    assert device.participation_floor_s == 3600


# --- Legal but unwise


def test_a_wise_configuration_has_no_warnings() -> None:
    assert a_config().warnings() == []
    assert a_config(regime=SyncFL()).warnings() == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"regime": AsyncFL(129), "concurrency": 13_000},
            ["aggregation_goal = 129 is below 1 % of concurrency = 13000"],
        ),
        (
            {"regime": AsyncFL(aggregation_goal=12)},
            ["aggregation_goal = 12 ", "about 108;", "10-30 %"],
        ),
        ({"regime": AsyncFL(100, max_staleness=51)}, ["max_staleness = 51 ", " = 52:", "biased"]),
        (
            {"regime": AsyncFL(21), "concurrency": 10},
            ["aggregation_goal = 21 is above concurrency = 10", "waits for 3 clients per slot"],
        ),
        ({"regime": SyncFL(0.0), "concurrency": 101}, ["over_selection = 0", "= 240"]),
        ({"participation_gap_s": 0}, ["participation_gap_s = 0", "devices"]),
        ({"durability": "step"}, ["durability = 'step'", "lost in a crash"]),
    ],
)
def test_an_unwise_value_is_named_with_what_will_happen(
    values: dict[str, Any], expected: list[str]
) -> None:
    [warning] = a_config(**values).warnings()
    assert [words for words in expected if words not in warning] == []


@pytest.mark.parametrize(
    "values",
    [
        {"regime": AsyncFL(aggregation_goal=130), "concurrency": 13_000},  # exactly 1 %
        {"regime": AsyncFL(100, max_staleness=52)},  # exactly 4 x 1300 / 100
        {"regime": SyncFL(over_selection=0.0), "concurrency": 100},
        {"participation_gap_s": 1.0},
        {"regime": AsyncFL(10), "concurrency": 10},
    ],
)
def test_the_last_wise_value_is_not_warned_about(values: dict[str, Any]) -> None:
    assert a_config(**values).warnings() == []


# --- As a document


def a_full_config() -> TaskConfig:
    return a_config(
        regime=SyncFL(over_selection=0.25),
        optimizer=OptimizerConfig(kind="fedyogi", rate=0.01, momentum=0.5, epsilon=1e-3),
        requirements=Requirements("torch", "ab12", min_memory_mb=512, labels=("eu", "phone")),
        secure_aggregation=SecureAggregation(threshold=20),
        clip=10.0,
        over_clip="clip",
        max_participations=3,
        durability="step",
    )


@pytest.mark.parametrize("config", [a_config(), a_config(**SECURE), a_full_config()])
def test_a_task_survives_the_way_through_json(config: TaskConfig) -> None:
    assert msgspec.json.decode(msgspec.json.encode(config), type=TaskConfig) == config


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"task": "no spaces"}, "task"),
        ({"training_timeout_s": 0}, "training_timeout_s"),
        ({"regime": {"type": "sync", "over_selection": -1}}, "regime.over_selection"),
        ({"optimizer": {"rate": -1}}, "optimizer.rate"),
        ({"secure_aggregation": {}}, "clip"),
    ],
)
def test_an_impossible_value_in_a_document_is_refused_in_the_same_words(
    values: dict[str, object], field: str
) -> None:
    document = {"task": "a", "concurrency": 100, "model_length": 10, **values}
    with pytest.raises(ConfigError, match=f"^{field} = ") as caught:
        msgspec.json.decode(msgspec.json.encode(document), type=TaskConfig)
    assert caught.value.hint


KINDS = [TaskConfig, AsyncFL, SyncFL, OptimizerConfig, Requirements, SecureAggregation]


@pytest.mark.parametrize("kind", [*KINDS, ServerConfig, DeviceConfig])
def test_a_misspelt_field_is_not_ignored_and_a_configuration_never_changes(kind: Any) -> None:
    """Settings of tasks are also read from rows, where fields of a later version are ignored."""
    good: Any = a_config() if kind is TaskConfig else kind()
    document = msgspec.to_builtins(good)
    assert msgspec.convert(document, kind) == good
    misspelt = {**document, "concurency": 5}
    with pytest.raises((ConfigError, msgspec.ValidationError), match="unknown field `concurency`"):
        require_known_fields(misspelt, msgspec.to_builtins(msgspec.convert(misspelt, kind)))
    with pytest.raises(AttributeError, match="immutable"):
        setattr(good, kind.__struct_fields__[0], 1)


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        ({}, {}),
        ({"clip": None, "stop": StopRule(training_hours=None)}, {}),
        ({"stop": StopRule(hours=2.0)}, {"stop": {"hours": 2.0}}),
        ({"regime": SyncFL()}, {"regime": {"type": "sync"}}),
        (
            {"metrics": (MetricBounds("a"),)},
            {"metrics": ({"name": "a", "low": 0.0, "high": 1.0},)},
        ),
        (
            {"clip": 1.0, "secure_aggregation": SecureAggregation()},
            {"clip": 1.0, "secure_aggregation": {}},
        ),
    ],
)
def test_settings_are_written_without_those_that_have_their_defaults(
    changes: dict[str, Any], written: dict[str, object]
) -> None:
    config = a_config(**changes)
    found = as_written(config)
    required = {"task": "next-word", "concurrency": 1300, "model_length": 1000}
    assert found == required | written
    assert msgspec.convert(found, TaskConfig) == config


def test_a_misspelt_field_in_a_list_is_not_ignored() -> None:
    written = {"metrics": [{"name": "accuracy"}, {"name": "length", "hihg": 9.0}]}
    read = msgspec.to_builtins(
        msgspec.convert(msgspec.to_builtins(a_config()) | written, TaskConfig)
    )
    with pytest.raises(ConfigError, match=r"unknown field `hihg` - at `\$.metrics`") as caught:
        require_known_fields(written, read)
    assert "did you mean high?" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "given", "problem", "meant"),
    [
        (Task, {"regine": 1}, "Task(regine=1): there is no setting regine", "regime"),
        (ClientSGD, {"rat": 0.1}, "ClientSGD(rat=0.1): there is no setting rat", "rate"),
        (StopRule, {"version": 3}, "StopRule(version=3): there is no setting version", "versions"),
        (TaskConfig, {"zzz": ""}, "TaskConfig(zzz=''): there is no setting zzz", ""),
    ],
)
def test_an_unknown_setting_in_python_is_told_as_on_the_command_line(
    kind: Any, given: dict[str, object], problem: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**given)
    assert str(caught.value) == problem
    listed = f"its fields are {', '.join(kind.__struct_fields__)}"
    assert caught.value.hint == (f"did you mean {meant}? {listed}" if meant else listed)
