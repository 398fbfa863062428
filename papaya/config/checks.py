"""How configuration refuses a value: with its field, the value, the problem and the remedy."""

from __future__ import annotations

import math

from papaya.errors import ConfigError

MAX_COUNT = 2**31


def require(holds: bool, field: str, value: object, problem: str, remedy: str) -> None:
    if not holds:
        raise ConfigError.of(field, value, problem, remedy)


def require_count(field: str, value: int) -> None:
    require(
        1 <= value <= MAX_COUNT,
        field,
        value,
        f"must be at least 1 and at most {MAX_COUNT}",
        f"set {field} to a positive integer",
    )


def require_positive_s(field: str, value: float) -> None:
    require(
        math.isfinite(value) and value > 0,
        field,
        value,
        "a time must be finite and longer than zero seconds",
        f"set {field} to a positive number of seconds",
    )
