"""Writes docs/configuration.md from papaya/config, so that the page cannot drift from the code.

Types, defaults, derived values, warnings and refusals are asked of the code: each refusal on the
page is an error that was raised while the page was made. The meaning of a field is
written in `tools/configuration_meanings.py`; a field without one, or a meaning without its field,
stops the script.

    python -m tools.configuration_reference            write the page
    python -m tools.configuration_reference --check    exit 1 if the page is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Struct, structs

from papaya.config import (
    AsyncFL,
    Deployment,
    DeviceConfig,
    OptimizerConfig,
    SecureAggregation,
    ServerConfig,
    StopRule,
    SyncFL,
    TaskConfig,
)
from papaya.errors import ConfigError
from tools.configuration_meanings import MEANINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

TASK: dict[str, Any] = {"task": "next-word", "concurrency": 1300, "model_length": 1_000_000}
SECURE: dict[str, Any] = {"secure_aggregation": SecureAggregation(), "clip": 1.0}

# Values that cannot work, by struct. The page shows what the code says to each.
REFUSED: dict[type[Struct], list[dict[str, Any]]] = {
    TaskConfig: [
        {"task": "Next Word"},
        {"concurrency": 0},
        {"model_length": 2**31},
        {"regime": AsyncFL(aggregation_goal=0)},
        {"regime": AsyncFL(max_staleness=-1)},
        {"regime": SyncFL(over_selection=-0.1)},
        {"training_timeout_s": 0.0},
        {"max_examples": 0},
        {"clip": 0.0},
        {"participation_gap_s": -1.0},
        {"max_participations": 0},
        {"keep_versions": 0},
        {"secure_aggregation": SecureAggregation()},
        SECURE | {"secure_aggregation": SecureAggregation(threshold=131)},
        SECURE | {"concurrency": 1_000_000, "model_length": 100_000_000},
        SECURE | {"clip": 1e-35},
        {"stop": StopRule(target_loss=1.0)},
    ],
    Deployment: [
        {"devices": "8750"},
        {"device_tokens": "trust me"},
        {"tls_certificate": "papaya.pem"},
        {"fold_threads": 0},
    ],
    OptimizerConfig: [{"rate": 0.0}, {"beta1": 1.0}],
    ServerConfig: [
        {"heartbeat_s": 0.0},
        {"upload_slots": 0},
        {"chunk_bytes": 1001},
        {"min_retry_s": 60.0, "max_retry_s": 30.0},
    ],
    DeviceConfig: [{"give_up_s": 0.0}, {"participation_floor_s": -1.0}],
}

UNWISE: list[dict[str, Any]] = [
    {"regime": AsyncFL(aggregation_goal=10)},
    {"regime": AsyncFL(max_staleness=10)},
    {"regime": SyncFL(over_selection=0.0)},
    {"participation_gap_s": 0.0},
    {"durability": "step"},
]


TEMPLATE = """\
<!-- Written by tools/configuration_reference.py: change papaya/config or the script instead. -->

# Configuration

Four structs hold all that a person sets: one for a task (`papaya/config/task.py`), one for an
installation (`papaya/config/deployment.py`), and in it one for the servers and one for a device
(`papaya/config/server.py`). Times are in seconds (`_s`), sizes in
bytes (`_bytes`).

- A value that cannot work is refused, with its remedy. The tables of refusals below are what the
  code answered when this page was made.
- A field that does not exist is refused too, so a typing error cannot pass as a default.
- A value that works but is unwise gives a warning.

## A task: `TaskConfig`

{TaskConfig}
### `regime`, asynchronous: `AsyncFL`

{AsyncFL}
### `regime`, synchronous: `SyncFL`

{SyncFL}
### `optimizer`: `OptimizerConfig`

{OptimizerConfig}
### `requirements`: `Requirements`

{Requirements}
### `secure_aggregation`: `SecureAggregation`

{SecureAggregation}
### `stop`: `StopRule`

{StopRule}
### `evaluation`: `EvaluationPlan`

{EvaluationPlan}
### `evaluates`: `Evaluated`

{Evaluated}
### What follows from a task

For concurrency 1300, a million parameters, and every other field left out:

{task_derived}
### What is refused

{task_refused}
In the optimizer:

{optimizer_refused}
### What is unwise

`TaskConfig.warnings()` says, for one task each:

{task_unwise}
### A task as JSON

This is how a task is stored. Only `task`, `concurrency` and `model_length` have to be given. The
`type` of a regime is `async` or `sync`.

```json
{task_json}
```

## An installation: `Deployment`

`papaya serve` needs no file; `papaya serve --config papaya.toml` reads these fields from one.

{Deployment}
### What an installation refuses

{deployment_refused}
## The servers: `ServerConfig`

The table `[server]` of the file.

{ServerConfig}
### What follows from the heartbeat

{server_derived}
### What servers refuse

{server_refused}
## A device: `DeviceConfig`

{DeviceConfig}
### What a device refuses

{device_refused}"""


def type_text(annotation: Any) -> str:
    """An annotation as a person would write it."""
    if annotation is type(None):
        return "None"
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {type_text(get_args(annotation)[0])}"
    if options := get_args(annotation):
        return " or ".join(type_text(option) for option in options)
    return str(annotation.__name__)


def default_text(default: Any) -> str:
    if default is NODEFAULT:
        return "required"
    if isinstance(default, Struct):
        return f"`{type(default).__name__}()`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default!r}`"


def fields_table(config: type[Struct]) -> Iterator[str]:
    meanings, fields = MEANINGS[config], structs.fields(config)
    names = [field.name for field in fields]
    if names != list(meanings):
        raise SystemExit(
            f"error: {config.__name__} has the fields {names}, MEANINGS has {list(meanings)}\n\n"
            "hint: give each field its meaning, in the same order"
        )
    hints = get_type_hints(config)
    yield "| field | type | default | meaning |\n|---|---|---|---|\n"
    for field in fields:
        kind, default = type_text(hints[field.name]), default_text(field.default)
        yield f"| `{field.name}` | {kind} | {default} | {meanings[field.name]} |\n"


def derived_table(**columns: Struct) -> Iterator[str]:
    """The properties of one or more configurations of the same kind."""
    kind = type(next(iter(columns.values())))
    yield f"| value | {' | '.join(columns)} | meaning |\n|---|{'---|' * len(columns)}---|\n"
    for name, found in vars(kind).items():
        if isinstance(found, property):
            values = " | ".join(f"`{getattr(column, name)}`" for column in columns.values())
            meaning = (found.__doc__ or "").split("\n")[0]
            yield f"| `{name}` | {values} | {meaning} |\n"


def refusals_table(config: type[Struct]) -> Iterator[str]:
    yield "| refused | hint |\n|---|---|\n"
    required = TASK if config is TaskConfig else {}
    for values in REFUSED[config]:
        try:
            config(**(required | values))
        except ConfigError as error:
            yield f"| {error} | {error.hint} |\n"
        else:
            raise SystemExit(f"error: {config.__name__} no longer refuses {values}")


def warnings_list() -> Iterator[str]:
    for values in UNWISE:
        found = TaskConfig(**(TASK | values)).warnings()
        if len(found) != 1:
            raise SystemExit(f"error: {values} gives {len(found)} warnings, not one: {found}")
        yield f"- {found[0]}\n"


def reference(config: type[Struct]) -> str:
    """What the struct says of itself, and its fields."""
    summary = (config.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")
    return f"{summary}\n\n{''.join(fields_table(config))}"


def page() -> str:
    """The whole page."""
    task = TaskConfig(**TASK)
    synchronous = TaskConfig(**TASK, regime=SyncFL())
    sections = {config.__name__: reference(config) for config in MEANINGS}
    return TEMPLATE.format(
        **sections,
        task_derived="".join(derived_table(AsyncFL=task, SyncFL=synchronous)),
        task_refused="".join(refusals_table(TaskConfig)),
        optimizer_refused="".join(refusals_table(OptimizerConfig)),
        task_unwise="".join(warnings_list()),
        task_json=msgspec.json.format(msgspec.json.encode(task), indent=2).decode(),
        deployment_refused="".join(refusals_table(Deployment)),
        server_derived="".join(derived_table(default=ServerConfig())),
        server_refused="".join(refusals_table(ServerConfig)),
        device_refused="".join(refusals_table(DeviceConfig)),
    )


def main(arguments: list[str]) -> int:
    made = page()
    if arguments == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
            print(f"error: {PAGE.name} is not up to date", file=sys.stderr)
            print("\nhint: python -m tools.configuration_reference", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
