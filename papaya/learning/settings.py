"""Settings of a task by `--set FIELD=VALUE`, for all commands that take a task file.

Fields that begin with `client.` are those of the client's training, which the owner signs. All
others are those of `TaskConfig`. Refused (ConfigError): unknown fields, with a similar one, and
values of another type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, structs

from papaya.config import TaskConfig
from papaya.config.checks import FIELDS_LISTED, require_known_fields, unknown_setting
from papaya.errors import ConfigError, OperatorError
from papaya.learning.definition import ADAM_DEFAULTS, ClientSGD

if TYPE_CHECKING:
    from papaya.learning.task import LoadedTask

_CLIENT = "client."
_NOT_TO_SET = {
    "task": "papaya task submit TASK.py --name NAME",
    "model_length": "the model determines it: change the model in the file",
    "evaluates": "papaya task evaluate TASK",
    "requirements.module": "it is the hash of the file: change the file",
    "requirements.engine": "use --engine",
    "requirements.engine_version": "the engine determines it: use --engine",
}

_TAGGED = ("regime", "schedule")  # their kind is enough: regime=sync


class GivenSettings(NamedTuple):
    """What `--set` has given: for the task, and for the client's training without `client.`."""

    task: tuple[str, ...]
    client: tuple[str, ...]

    @classmethod
    def of(cls, settings: Sequence[str]) -> GivenSettings:
        ours = tuple(s.removeprefix(_CLIENT) for s in settings if s.startswith(_CLIENT))
        return cls(tuple(s for s in settings if not s.startswith(_CLIENT)), ours)


def changed_client(client: ClientSGD, settings: Sequence[str]) -> ClientSGD:
    """The client's training with these fields changed; they come without `client.`."""
    document: dict[str, Any] = msgspec.to_builtins(client)
    if any(setting.partition("=")[0] == "optimizer" for setting in settings):
        for field in ADAM_DEFAULTS:
            document.pop(field, None)  # of the previous optimizer
    known = _known(ClientSGD)
    hint = f"its fields are {', '.join(known)}"
    for setting in settings:
        field, equals, text = setting.partition("=")
        if field not in known:
            problem = f"--set client.{setting}: there is no setting client.{field}"
            fields = [f"{_CLIENT}{name}" for name in known]
            raise unknown_setting(problem, f"{_CLIENT}{field}", fields, hint)
        if not equals:
            raise _without_value(f"client.{field}")
        _put(document, field, text)
    try:
        return msgspec.convert(document, ClientSGD)
    except msgspec.ValidationError as error:
        raise _explained(str(error), ClientSGD, settings, hint, _CLIENT) from error


def with_client(loaded: LoadedTask, settings: Sequence[str]) -> LoadedTask:
    """The task with these settings of the client's training."""
    client = changed_client(loaded.task.client, settings)
    return replace(loaded, task=structs.replace(loaded.task, client=client))


def changed(config: TaskConfig, name: str | None, settings: Sequence[str]) -> TaskConfig:
    """The configuration with this name, if any, and these fields changed."""
    document: dict[str, Any] = msgspec.to_builtins(config)
    if name is not None:
        document["task"] = name
    if config.privacy is not None:  # both are settings of the privacy
        document["clip"] = document["max_participations"] = None
    for setting in settings:
        _set(document, setting)
    try:
        found = msgspec.convert(document, TaskConfig)
    except msgspec.ValidationError as error:
        raise _explained(str(error), TaskConfig, settings, FIELDS_LISTED) from error
    try:
        require_known_fields(document, msgspec.to_builtins(found))
    except ConfigError as error:
        raise _explained(str(error), TaskConfig, settings, FIELDS_LISTED) from error
    return found


_NOT_OF_TYPE = re.compile(r"Expected `(?P<expected>.+?)`, got")
_NOT_A_CHOICE = re.compile(r"Invalid (?:enum )?value '?(?P<value>.*?)'?(?: - at|$)")
_UNKNOWN = re.compile(r"unknown field `(?P<name>\w+)`")
_PLACE = re.compile(r" - at `\$\.(?P<field>[\w.]+)`")
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


def _explained(
    problem: str, kind: type[Struct], settings: Sequence[str], hint: str, group: str = ""
) -> ConfigError:
    """The setting that cannot be decoded, in plain words."""
    place = _PLACE.search(problem)
    field = place["field"] if place is not None else ""
    given = {setting.partition("=")[0]: setting for setting in settings}
    wrong = given.get(field) or given.get(field.rpartition(".")[0], field)
    if found := _NOT_OF_TYPE.search(problem):
        expected = found["expected"].split(" | ")
        problem = f"must be {' or '.join(_TYPES.get(name, name) for name in expected)}"
    elif (found := _NOT_A_CHOICE.search(problem)) and (choices := _choices(kind, field)):
        problem = f"is not one of {', '.join(choices)}"
        if close := get_close_matches(found["value"], choices, n=1, cutoff=0.4):
            hint = f"did you mean {close[0]}? {hint}"
    elif found := _UNKNOWN.search(problem):
        wrong = given.get(f"{field}.{found['name']}", wrong)
        problem = f"this {field} has no setting {found['name']}"
    return ConfigError(f"--set {group}{wrong}: {_PLACE.sub('', problem)}", hint=hint)


def _choices(kind: Any, field: str) -> list[str]:
    """The values that a field may have: tags of structs in a union, or those of a Literal."""
    *path, last = field.split(".")
    for name in path:
        kind = _fields(kind).get(name)
    if last in _tags(kind):
        return [str(each.__struct_config__.tag) for each in _structs(kind)]
    literal = _fields(kind).get(last)
    parts = [literal, *get_args(literal)]
    return [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]


def _without_value(field: str) -> OperatorError:
    return OperatorError(f"--set {field} has no value", hint=f"--set {field}=…")


def _fields(kind: Any) -> dict[str, Any]:
    """The fields of a struct, or of all structs in a union, by name."""
    return {name: found for each in _structs(kind) for name, found in get_type_hints(each).items()}


def _structs(kind: Any) -> list[type[Struct]]:
    kinds = [kind, *get_args(kind)]
    return [each for each in kinds if isinstance(each, type) and issubclass(each, Struct)]


def _known(kind: type[Struct]) -> list[str]:
    """Every name that --set takes: concurrency, regime, regime.over_selection, ..."""
    found = []
    for name, inner in _fields(kind).items():
        found += [name, *(f"{name}.{each}" for each in (*_tags(inner), *_names(inner)))]
    return list(dict.fromkeys(found))  # structs of a union share fields


def _names(kind: Any) -> list[str]:
    """The fields of a struct and of the structs in it."""
    return [each for inner in _structs(kind) for each in _known(inner)]


def _tags(kind: Any) -> list[str]:
    """The field that selects one struct of a union, if there are several."""
    tags = (each.__struct_config__.tag_field for each in _structs(kind))
    return list(dict.fromkeys(tag for tag in tags if tag is not None))


def _check_known(field: str, setting: str) -> None:
    known = [n for n in _known(TaskConfig) if n not in _NOT_TO_SET and n[:10] != "evaluates."]
    if field not in known:
        raise unknown_setting(f"--set {setting}: there is no setting {field}", field, known)


def _set(document: dict[str, Any], setting: str) -> None:
    field, equals, text = setting.partition("=")
    if field in _NOT_TO_SET:
        raise OperatorError(f"--set cannot change {field}", hint=_NOT_TO_SET[field])
    _check_known(field, setting)
    if not equals:
        raise _without_value(field)
    _put(document, field, text)


def _put(document: dict[str, Any], field: str, text: str) -> None:
    value = _value(text)
    if field in _TAGGED and isinstance(value, str):
        value = {"type": value}
    *path, last = field.split(".")
    for name in path:
        if not isinstance(document.get(name), dict):
            document[name] = {}
        document = document[name]
    document[last] = value


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
