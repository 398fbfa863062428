"""The owner's policies: which tasks may use a collection of examples, and how long it is kept.

Paper, "Client Runtime": the example store "enforces the data use and retention policy". Policies
are declared on the device, in TOML or by the app, and never by a server:

    [collections.keyboard]
    tasks = ["next-word", "emoji-*"]   # tasks that may train on it; none by default
    max_age_s = 2592000                # then an example is deleted
    max_count = 10000                  # the oldest go first
    max_bytes = 67108864

    [collections.keyboard.budget]      # differential privacy (docs/privacy.md); none by default
    epsilon = 8.0
    delta = 1e-7
    window_s = 7776000                 # renewed after so long; by default never

Nothing is allowed by default: no task may use a collection without `tasks`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import msgspec
from msgspec import Struct

from papaya.config.checks import require, require_count, require_positive_s
from papaya.errors import ConfigError
from papaya.privacy.accountant import mu_for
from papaya.secagg.parameters import MAX_DELTA, MIN_DELTA

MAX_COLLECTIONS = 256
MAX_PATTERNS = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class PrivacyBudget(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may be spent on a collection in any period of `window_s`; None: in all."""

    epsilon: float
    delta: float
    window_s: float | None = None

    def __post_init__(self) -> None:
        require(
            0 < self.epsilon < math.inf,
            "budget.epsilon",
            self.epsilon,
            "must be finite and above zero",
            "common values are from 1 to 10; smaller is more private",
        )
        require(
            MIN_DELTA <= self.delta <= MAX_DELTA,
            "budget.delta",
            self.delta,
            f"must be from {MIN_DELTA:g} to {MAX_DELTA:g}",
            "use less than one divided by the number of devices, for example 1e-7",
        )
        if self.window_s is not None:
            require_positive_s("budget.window_s", self.window_s)

    @property
    def rho(self) -> float:
        return mu_for(self.epsilon, self.delta) ** 2 / 2

    def begins(self, now: float) -> float:
        """Charges after this time count."""
        return -math.inf if self.window_s is None else now - self.window_s


class UsePolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Use and retention of one collection. `validation` and `test` are shares held out."""

    tasks: tuple[str, ...] = ()
    max_age_s: float = 30 * 86400.0
    max_count: int = 10_000
    max_bytes: int = 64 << 20
    validation: float = 0.1
    test: float = 0.1
    budget: PrivacyBudget | None = None

    def __post_init__(self) -> None:
        self._check_budget()
        require_positive_s("max_age_s", self.max_age_s)
        for field in ("max_count", "max_bytes"):
            require_count(field, getattr(self, field))
        held_out = (self.validation, self.test)
        require(
            all(0 <= share <= 1 for share in held_out) and sum(held_out) <= 1,
            "validation and test",
            held_out,
            "are shares of the examples and cannot be more than all of them",
            "use 0.1 for each",
        )
        require(
            len(self.tasks) <= MAX_PATTERNS and all(self.tasks),
            "tasks",
            self.tasks,
            f"must have at most {MAX_PATTERNS} tasks or patterns, none of them empty",
            'list tasks, for example ["next-word", "emoji-*"]',
        )

    def _check_budget(self) -> None:
        window_s = None if self.budget is None else self.budget.window_s
        require(
            window_s is None or window_s >= self.max_age_s,
            "budget.window_s",
            window_s,
            f"is shorter than max_age_s = {self.max_age_s:g}: an example could be used under two "
            "budgets",
            "make the window at least as long as examples are kept, or leave it out",
        )

    def allows(self, task: str) -> bool:
        return any(fnmatchcase(task, pattern) for pattern in self.tasks)


UsePolicies = Mapping[str, UsePolicy]


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    collections: dict[str, UsePolicy] = {}


def check_collections(policies: UsePolicies) -> None:
    require(
        len(policies) <= MAX_COLLECTIONS,
        "collections",
        len(policies),
        f"are more than {MAX_COLLECTIONS}",
        "keep examples of one kind in one collection",
    )
    for name in policies:
        require(
            _NAME.fullmatch(name) is not None,
            "collection",
            name,
            "invalid name of a collection: use 1-64 letters, digits, '-', '_' and '.'",
            "rename it, for example keyboard",
        )


def parse_policies(toml: bytes, where: str) -> dict[str, UsePolicy]:
    """The collections that a TOML file declares; `where` names the file in errors."""
    try:
        policies = msgspec.toml.decode(toml, type=_File).collections
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", hint=error.hint) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(
            f"invalid list of collections in {where}: {error}",
            hint='[collections.keyboard] with tasks = ["next-word"], max_age_s and max_count',
        ) from error
    check_collections(policies)
    return policies
