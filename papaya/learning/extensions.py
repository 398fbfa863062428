"""Server optimizers, aggregation rules and staleness functions that are not part of Papaya.

A task names them, and passes them numbers; their code is on the servers. It gets here in two ways:
as a Python entry point (`entry_points.py`), or, in a program of one's own, by `add`. Nothing comes
from the wire. Refused (ConfigError): a name that this process does not have.

    server_optimizers     a subclass of `ServerOptimizer`
    aggregation_rules     a subclass of `SumRule` or `MembersRule`
    staleness_functions   a function of the staleness, with the task's parameters by name
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import Any, Final, Literal, get_args

from papaya.config import Staleness, TaskConfig
from papaya.config.combining import DAMPINGS, RULES
from papaya.config.optimizer import OPTIMIZERS
from papaya.errors import ConfigError

ExtensionGroup = Literal["server_optimizers", "aggregation_rules", "staleness_functions"]
GROUPS: Final[tuple[ExtensionGroup, ...]] = get_args(ExtensionGroup)

_BUILT_IN: Final[dict[ExtensionGroup, tuple[str, ...]]] = {
    "server_optimizers": OPTIMIZERS,
    "aggregation_rules": RULES,
    "staleness_functions": DAMPINGS,
}
_FIELDS: Final[dict[ExtensionGroup, str]] = {
    "server_optimizers": "optimizer.kind",
    "aggregation_rules": "aggregation.kind",
    "staleness_functions": "staleness.kind",
}
_known: Final[dict[tuple[ExtensionGroup, str], Any]] = {}


def add(group: ExtensionGroup, name: str, extension: Any) -> None:
    """Make an extension known to this process. A second one replaces the first."""
    _known[group, name] = extension


def has(group: ExtensionGroup, name: str) -> bool:
    return (group, name) in _known


def find(group: ExtensionGroup, name: str) -> Any:
    found = _known.get((group, name))
    if found is None:
        raise ConfigError(
            f"there is no {group.replace('_', ' ').removesuffix('s')} {name!r} here",
            hint=f"{meant(group, name)}the operator has to install a package with the entry point "
            f'{name} in the group papaya.{group}, and to allow it: extensions = ["{group}:{name}"]',
        )
    return found


def meant(group: ExtensionGroup, name: str) -> str:
    """The beginning of a hint: the built-in name that may have been misspelt, or all of them."""
    names = _BUILT_IN[group]
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    start = f"did you mean {close[0]}?" if close else f"built in are {', '.join(names)};"
    return f"{start} otherwise, "


def unknown_kind(group: ExtensionGroup, name: str) -> ConfigError:
    """For a task that names neither a built-in kind nor an extension that is installed."""
    problem = f"is not one of {', '.join(_BUILT_IN[group])}, nor an extension that is installed"
    remedy = f"{meant(group, name)}install a package with the entry point {name} in papaya.{group}"
    return ConfigError.of(_FIELDS[group], name, problem, remedy)


def used_by(config: TaskConfig) -> list[tuple[ExtensionGroup, str]]:
    """The extensions that a task names."""
    found: list[tuple[ExtensionGroup, str]] = []
    if not config.optimizer.is_built_in:
        found.append(("server_optimizers", config.optimizer.kind))
    if not config.aggregation.is_built_in:
        found.append(("aggregation_rules", config.aggregation.kind))
    if not config.staleness.is_built_in:
        found.append(("staleness_functions", config.staleness.kind))
    return found


def damping(function: Staleness, staleness: int) -> float:
    """The factor by a staleness function that is an extension."""
    compute = find("staleness_functions", function.kind)
    try:
        found = float(compute(staleness, **dict(function.parameters)))
    except Exception as error:
        raise ConfigError(
            f"the staleness function {function.kind} failed at {staleness}: {error!r}",
            hint=f"check staleness.parameters = {dict(function.parameters)}",
        ) from error
    # Above 1, an update could exceed the bounds that it was admitted by.
    if not (math.isfinite(found) and 0 <= found <= 1):
        raise ConfigError(
            f"the staleness function {function.kind} returned {found} for {staleness}",
            hint="it must return a number from 0 to 1",
        )
    return found
