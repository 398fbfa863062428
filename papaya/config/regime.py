"""The two regimes of a task (paper, appendix "Switching between SyncFL and AsyncFL").

The switch "can be done via a configuration change". What differs between them while a task runs is
in `papaya/aggregator/regime.py`.
"""

from __future__ import annotations

from papaya.config.checks import Settings, require_numbers


class AsyncFL(Settings, frozen=True, tag="async"):
    """A new version after every K updates; clients never wait for each other."""

    aggregation_goal: int | None = None
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        require_numbers(self, "regime.")


class SyncFL(Settings, frozen=True, tag="sync"):
    """Rounds of clients that all start from the current version."""

    over_selection: float = 0.3

    def __post_init__(self) -> None:
        require_numbers(self, "regime.")
