"""How the updates of a buffer become one step: their weights, their damping, the rule.

    step = rule of the updates, each multiplied by damping(staleness) and weighted by its weight

Each is chosen by name. A name that is not listed here is that of an extension: a Python entry point
that the operator of the servers has installed and allowed (docs/adr/0058).
"""

from __future__ import annotations

import math
import re
from typing import Final, Literal, get_args

from papaya.config.checks import Settings, require, require_choice, require_count, require_numbers
from papaya.errors import ConfigError
from papaya.secagg.damping import KINDS, Damping
from papaya.secagg.errors import ParametersError

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")

ExtensionParameters = tuple[tuple[str, float], ...]
"""What an extension gets from the task's owner: numbers by name."""
DAMPINGS: Final = KINDS
WeightingKind = Literal["examples", "equal", "capped"]


def require_name(field: str, name: str, built_in: tuple[str, ...]) -> None:
    """A known name, or one that an extension may have."""
    require(
        _NAME.fullmatch(str(name)) is not None,
        field,
        name,
        f"is not one of {', '.join(built_in)}, nor the name of an extension",
        "the name of an extension has 1 to 64 characters of a-z, 0-9 and _, starting with a letter",
    )


def require_parameters(field: str, parameters: ExtensionParameters, *, is_built_in: bool) -> None:
    require(
        not (is_built_in and parameters),
        f"{field}.parameters",
        parameters,
        "are for extensions only",
        f"use the other settings of {field}",
    )
    for name, value in parameters:
        require(
            _NAME.fullmatch(name) is not None and math.isfinite(value),
            f"{field}.parameters",
            (name, value),
            "must be pairs of a name and a finite number",
            "names have 1 to 64 characters of a-z, 0-9 and _, starting with a letter",
        )
    require(
        len(dict(parameters)) == len(parameters),
        f"{field}.parameters",
        parameters,
        "has a name twice",
        "give each name once",
    )


class Staleness(Settings, frozen=True):
    """The factor by which an update is damped, from its staleness s.

    `polynomial`: (1 + s) to the power of -`exponent`; the default is the paper's 1/√(1 + s).
    `hinge`: 1 up to `grace`, then 1 / (1 + `slope` × (s - `grace`)). `constant`: 1.
    """

    kind: str = "polynomial"
    exponent: float = 0.5
    slope: float = 10.0
    grace: int = 4
    parameters: ExtensionParameters = ()

    def __post_init__(self) -> None:
        require_numbers(self, "staleness.")
        require_name("staleness.kind", self.kind, DAMPINGS)
        require_parameters("staleness", self.parameters, is_built_in=self.is_built_in)
        for kind in DAMPINGS:  # also the settings of functions that are not used
            try:
                self._damping(kind)
            except ParametersError as error:
                field = error.reason.rpartition(".")[2]
                raise ConfigError.of(
                    f"staleness.{field}",
                    getattr(self, field),
                    str(error).partition(": ")[2],
                    f"leave staleness.{field} out to take its default",
                ) from error

    @property
    def is_built_in(self) -> bool:
        return self.kind in DAMPINGS

    @property
    def damping(self) -> Damping | None:
        """The function; None if it is an extension."""
        return self._damping(self.kind) if self.is_built_in else None

    def _damping(self, kind: str) -> Damping:
        match kind:
            case "polynomial":
                return Damping(kind, float(self.exponent))
            case "hinge":
                return Damping(kind, 0.0, float(self.slope), self.grace)
        return Damping(kind, 0.0)


class Weighting(Settings, frozen=True):
    """How much an update counts before it is damped.

    `examples`: its examples, at most `max_examples`. `equal`: 1. `capped`: its examples, at most
    `cap`; the client may train on more.
    """

    kind: WeightingKind = "examples"
    cap: int | None = None

    def __post_init__(self) -> None:
        require_numbers(self, "weighting.")
        require_choice("weighting.kind", self.kind, get_args(WeightingKind))
        require(
            (self.cap is not None) == (self.kind == "capped"),
            "weighting.cap",
            self.cap,
            f"belongs to the kind capped, not {self.kind}"
            if self.cap is not None
            else "is missing: capped weights need it",
            "set weighting.kind=capped and weighting.cap, or neither",
        )
        if self.cap is not None:
            require_count("weighting.cap", self.cap)


RULES: Final = ("mean", "trimmed_mean", "median", "norm_bound")


class Aggregation(Settings, frozen=True):
    """How the updates of a buffer are combined.

    `mean`: their weighted mean. The other rules need the single updates, which the servers store
    until the version is made. `median`: of each coordinate. `trimmed_mean`: the mean of each
    coordinate without the `trim` share of the smallest and of the largest values. `norm_bound`: the
    weighted mean of updates that are shortened to `factor` times the median norm of the buffer.
    """

    kind: str = "mean"
    trim: float = 0.1
    factor: float = 1.0
    parameters: ExtensionParameters = ()

    def __post_init__(self) -> None:
        require_numbers(self, "aggregation.")
        require_name("aggregation.kind", self.kind, RULES)
        require_parameters("aggregation", self.parameters, is_built_in=self.is_built_in)
        require(
            0 < self.trim < 0.5,
            "aggregation.trim",
            self.trim,
            "must be above 0 and below 0.5",
            "choose the share of updates that may be wrong, for example 0.1",
        )
        require(
            math.isfinite(self.factor) and self.factor > 0,
            "aggregation.factor",
            self.factor,
            "must be finite and above zero",
            "use 1.0 for the median norm itself",
        )

    @property
    def is_built_in(self) -> bool:
        return self.kind in RULES

    @property
    def is_mean(self) -> bool:
        return self.kind == "mean"

    @property
    def ignores_weights(self) -> bool:
        """Does a built-in rule count all updates the same?"""
        return self.kind in ("trimmed_mean", "median")

    def trimmed(self, members: int) -> int:
        """How many of the smallest values are left out, and of the largest. `trim` is meant as it
        is written: 0.29 of 100 are 29, although the product of the floats is below 29.
        """
        return min(math.floor(round(self.trim * members, 9)), (members - 1) // 2)

    @property
    def stored_as(self) -> str:
        """Settings with the same value store their buffers in the same way."""
        if self.is_mean:
            return "sum"
        return "members" if self.is_built_in else self.kind
