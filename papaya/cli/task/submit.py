"""`papaya task submit my_task.py`: from the owner's file to a running task.

The file is imported here, on the owner's machine. What is sent is its hash, the configuration,
names and shapes of tensors and the initial parameters: nothing that a server or a device could run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from papaya.cli.admin_client import add_connection, client_for, task_path
from papaya.cli.output import Commands, add_format, note, plural, print_data, print_json, whole
from papaya.config import TaskConfig
from papaya.errors import ConfigError, OperatorError
from papaya.server.admin.views import NewTask, Stored, TaskView

_NOT_TO_SET = {
    "task": "use --name",
    "model_length": "it follows from the model",
    "evaluates": "use papaya task evaluate",
    "requirements.module": "it is the hash of the file",
    "requirements.engine": "it follows from the file",
}


def add_to(actions: Commands) -> None:
    parser = actions.add_parser(
        "submit",
        help="start a task from a Python file",
        description="Start a task from a Python file that ends in `task = Task(...)`.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("file", type=Path, help="the task; devices need the same file")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="start from this safetensors file"
    )
    parser.add_argument("--name", metavar="NAME", help="instead of the task's own name")
    parser.add_argument(
        "--seed", type=whole(0), default=0, metavar="S", help="of the initial parameters"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change one setting, as in concurrency=50, regime=sync, stop.versions=100",
    )
    add_connection(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from papaya.learning import parameters
    from papaya.learning.task import load_task  # runs the owner's file, imports torch

    client = client_for(options)
    loaded = load_task(options.file)
    config = changed(loaded.config(), options.name, options.set)
    for warning in [*config.warnings(), *refusals(loaded.config(), config)]:
        note(f"warning: {warning}")
    vector = loaded.initial_parameters(seed=options.seed, checkpoint=options.checkpoint)
    data = parameters.encode(vector, {"task": config.task, "version": "0"})
    note(f"sending {config.model_length:,} parameters")
    place = task_path(config.task, f"parameters?model_length={config.model_length}")
    stored = client.put(place, data, Stored)
    new = NewTask(config, stored.parameters, loaded.manifest.tensors)
    view = client.post("/admin/tasks", new, TaskView)
    if options.format == "json":
        print_json(view)
    else:
        clients = plural(config.concurrency, "client")
        print_data(f"{view.task} is {view.state}: {clients} at a time")
        note(f"\nwatch it: papaya task watch {view.task}")
    return 0


def refusals(file: TaskConfig, submitted: TaskConfig) -> list[str]:
    """What devices that have the file as it is will not take part in, in words for its owner."""
    if file.secure_aggregation is None and submitted.secure_aggregation is None:
        return []
    if file.secure_aggregation is None or submitted.secure_aggregation is None:
        found = ["secure aggregation is not what the file says"]
    else:
        found = [
            f"{name} = {getattr(submitted, name)}, the file says {getattr(file, name)}"
            for name in ("clip", "max_examples", "max_staleness")
            if getattr(submitted, name) != getattr(file, name)
        ]
        if (submitted.threshold or 0) < (file.threshold or 0):
            found.append(f"sums of {submitted.threshold}, the file says {file.threshold} or more")
    advice = "devices that have this file will refuse the task. Change the file instead of --set"
    return [f"{difference}: {advice}, and give devices that file" for difference in found]


def changed(config: TaskConfig, name: str | None, settings: list[str]) -> TaskConfig:
    """The configuration with another name and some fields set to other values."""
    document: dict[str, Any] = msgspec.to_builtins(config)
    if name is not None:
        document["task"] = name
    for setting in settings:
        _set(document, setting)
    try:
        return msgspec.convert(document, TaskConfig)
    except msgspec.ValidationError as error:
        hint = "docs/configuration.md lists every field of TaskConfig"
        raise ConfigError(f"--set: {error}", hint=hint) from error


def _set(document: dict[str, Any], setting: str) -> None:
    field, equals, text = setting.partition("=")
    if not equals:
        raise OperatorError(f"--set {setting!r} has no value", hint="write --set concurrency=50")
    if field in _NOT_TO_SET:
        raise OperatorError(f"--set cannot change {field}", hint=_NOT_TO_SET[field])
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    if field == "regime" and isinstance(value, str):
        value = {"type": value}
    *path, last = field.split(".")
    for name in path:
        if not isinstance(document.get(name), dict):
            document[name] = {}
        document = document[name]
    document[last] = value
