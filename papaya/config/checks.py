"""Checks of configuration values; a failed one names field, value, problem and remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Final, SupportsFloat, get_args, get_type_hints

from msgspec import Struct, structs

from papaya.errors import ConfigError

MAX_COUNT = 2**31
_NUMBER: Final = re.compile(r"[+-]?[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?")


def require(holds: bool, field: str, value: object, problem: str, remedy: str) -> None:
    if not holds:
        raise ConfigError.of(field, value, problem, remedy)


def require_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """Decoding a file checks it too; a configuration made in Python is only checked here."""
    if value not in choices:
        meant = get_close_matches(str(value), choices, n=1, cutoff=0.4)
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
        math.isfinite(value) and value > 0,
        field,
        value,
        "must be finite and above zero seconds",
        f"set {field} to a positive number of seconds",
    )


def require_known_fields(written: object, read: object, place: str = "") -> None:
    """Refuse fields that people have written and that were not read.

    Stored settings and messages between servers may have fields of a later version, so decoding
    ignores unknown ones. What people write must not have any: a misspelt name would have no effect.
    `written`: the document as it was given. `read`: the same, after it was decoded.
    """
    if isinstance(written, Mapping) and isinstance(read, Mapping):
        for name, value in written.items():
            if name not in read:
                meant = get_close_matches(str(name), map(str, read), n=1)
                hint = f"did you mean {meant[0]}? " if meant else ""
                raise ConfigError(
                    f"unknown field `{name}`" + (f" - at `${place}`" if place else ""),
                    hint=f"{hint}docs/configuration.md lists every field of TaskConfig",
                )
            require_known_fields(value, read[name], f"{place}.{name}")
    elif isinstance(written, list | tuple) and isinstance(read, list | tuple):
        for value, found in zip(written, read, strict=False):
            require_known_fields(value, found, place)
