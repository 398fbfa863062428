"""Checks of configuration values; a failed one names field, value, problem and remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, Final, SupportsFloat, get_args, get_type_hints

from msgspec import Struct, StructMeta, structs, to_builtins

from papaya.errors import ConfigError

MAX_COUNT = 2**31
# Servers add several times, and write the sum to a row. A row is JSON, which has no infinity: it
# could not be read again. So large because rows that an earlier version has written must be valid.
MAX_S = 1e300
FIELDS_LISTED: Final = "docs/configuration.md lists every field of TaskConfig"
_NUMBER: Final = re.compile(r"[+-]?[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?")


def require(holds: bool, field: str, value: object, problem: str, remedy: str) -> None:
    if not holds:
        raise ConfigError.of(field, value, problem, remedy)


def require_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """Decoding a file checks it too; a configuration made in Python is only checked here."""
    if value not in choices:
        meant = get_close_matches(str(value).lower(), choices, n=1, cutoff=0.4)
        remedy = f"did you mean {meant[0]!r}?" if meant else f"for example {choices[0]!r}"
        raise ConfigError.of(field, value, f"is not one of {', '.join(choices)}", remedy)


def require_number(field: str, value: object) -> None:
    is_quoted = isinstance(value, str) and _NUMBER.fullmatch(value)
    remedy = f"leave out the quotes: {value}" if is_quoted else f"set {field} to a number"
    require(isinstance(value, SupportsFloat), field, value, "must be a number", remedy)


def require_numbers(settings: Struct, group: str = "") -> None:
    """Check the types of all fields that are numbers, before values are compared."""
    values = structs.asdict(settings)
    for name, types in _number_fields(type(settings)).items():
        value = values[name]
        if type(value) not in types:  # which may have that of None or UNSET
            require_number(f"{group}{name}", value)
            is_whole = float in types or not isinstance(value, float) or value.is_integer()
            remedy = f"round {group}{name}"
            require(is_whole, f"{group}{name}", value, "must be a whole number", remedy)


@cache
def _number_fields(kind: type[Struct]) -> dict[str, tuple[object, ...]]:
    """The names of these fields, and the types that they may have."""
    hints = get_type_hints(kind)
    types = {name: get_args(hints[name]) or (hints[name],) for name in kind.__struct_fields__}
    return {name: parts for name, parts in types.items() if int in parts or float in parts}


def require_count(field: str, value: int) -> None:
    require_number(field, value)
    require(
        1 <= value <= MAX_COUNT,
        field,
        value,
        f"must be at least 1 and at most {MAX_COUNT}",
        f"set {field} to a positive integer",
    )


def require_positive_s(field: str, value: float) -> None:
    require_number(field, value)
    require(
        0 < value <= MAX_S,
        field,
        value,
        f"must be above zero and at most {MAX_S:g} seconds",
        f"set {field} to a positive number of seconds",
    )


def unknown_setting(
    problem: str, name: str, known: Sequence[str], listed: str = FIELDS_LISTED
) -> ConfigError:
    """An error whose hint has the setting that was probably meant, and where all are listed."""
    # People leave the group out: versions is stop.versions.
    meant = [each for each in known if each.endswith(f".{name}")]
    meant += get_close_matches(name, known, n=1)
    return ConfigError(problem, hint=f"did you mean {meant[0]}? {listed}" if meant else listed)


class _SettingsMeta(StructMeta):
    """Refuses unknown fields at construction; structs themselves raise a bare TypeError."""

    if not TYPE_CHECKING:  # type checkers take the signature from the fields

        def __call__(cls, *values: Any, **fields: Any) -> Any:
            known = cls.__struct_fields__
            for name in fields:
                if name not in known:
                    given = f"{cls.__name__}({name}={fields[name]!r:.40})"
                    listed = f"its fields are {', '.join(known)}"
                    problem = f"{given}: there is no setting {name}"
                    raise unknown_setting(problem, name, known, listed)
            return super().__call__(*values, **fields)


class Settings(Struct, frozen=True, metaclass=_SettingsMeta):
    """The base of settings that people write in Python."""


def as_written(settings: Struct) -> dict[str, object]:
    """The settings without those that have their default values, as a person would write them.

    For a server of the last release: it refuses a field that it does not know, also if the value
    changes nothing.
    """
    config = settings.__struct_config__
    found: dict[str, object] = {}
    if config.tag_field is not None:
        found[config.tag_field] = config.tag
    values = structs.asdict(settings)
    for field in structs.fields(settings):
        value = values[field.name]
        if field.required or value != field.default:
            is_group = isinstance(value, Struct)
            found[field.encode_name] = as_written(value) if is_group else to_builtins(value)
    return found


def require_known_fields(written: object, read: object, place: str = "") -> None:
    """Refuse fields that people have written and that were not read.

    Stored settings and messages between servers may have fields of a later version, so decoding
    ignores unknown ones. What people write must not have any: a misspelt name would have no effect.
    `written`: the document as it was given. `read`: the same, after it was decoded.
    """
    if isinstance(written, Mapping) and isinstance(read, Mapping):
        for name, value in written.items():
            if name not in read:
                problem = f"unknown field `{name}`" + (f" - at `${place}`" if place else "")
                raise unknown_setting(problem, str(name), [*map(str, read)])
            require_known_fields(value, read[name], f"{place}.{name}")
    elif isinstance(written, list | tuple) and isinstance(read, list | tuple):
        for value, found in zip(written, read, strict=False):
            require_known_fields(value, found, place)
