"""All that differs between the regimes (paper, "Switching between SyncFL and AsyncFL").

    "Switching from SyncFL to AsyncFL in our system requires three small changes in behavior: client
    demand computation, handling of stale clients, and model aggregation."

No machine outside this file asks which regime a task is in.
"""

from __future__ import annotations

from papaya.config import SyncFL, TaskConfig


def client_demand(config: TaskConfig, active: int, completed: int, closing: bool) -> int:
    """AsyncFL: C − active. SyncFL: C − completed − active, where C includes over-selection.

    While a SyncFL round closes nobody can join it and the next one has no model yet.
    """
    if isinstance(config.regime, SyncFL):
        return 0 if closing else config.concurrency - completed - active
    return config.concurrency - active


def oldest_allowed(max_staleness: int, version: int) -> int:
    """The oldest initial version that is not too stale at `version`.

    SyncFL: "When a server model update is performed in SyncFL, users that are still training are
    aborted". AsyncFL: "users that are still training continue normally, unless their staleness
    would exceed maximum staleness".
    """
    return max(0, version - max_staleness)


def accepts(config: TaskConfig, initial_version: int, target: int) -> bool:
    """May an update from `initial_version` become part of version `target`?

    SyncFL aggregates updates of exactly one version; AsyncFL any with frozen staleness in bounds.
    """
    return initial_version == target - 1 or not isinstance(config.regime, SyncFL)


def admits_joins(config: TaskConfig, closing: bool) -> bool:
    """SyncFL: a client joins only the current version, so not a round that is already full."""
    return not (closing and isinstance(config.regime, SyncFL))


def ends_round_when_full(config: TaskConfig) -> bool:
    """SyncFL: when K updates are in, every other client of the round is aborted at once."""
    return isinstance(config.regime, SyncFL)


def open_buffers(config: TaskConfig) -> int:
    """Model aggregation: AsyncFL fills the next buffer while a version is being written."""
    return 1 if isinstance(config.regime, SyncFL) else 2
