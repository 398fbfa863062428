"""The differences between SyncFL and AsyncFL (paper, "Switching between SyncFL and AsyncFL").

    "Switching from SyncFL to AsyncFL in our system requires three small changes in behavior: client
    demand computation, handling of stale clients, and model aggregation."

No machine checks the regime of a task outside this file.
"""

from __future__ import annotations

from papaya.config import SyncFL, TaskConfig


def client_demand(config: TaskConfig, active: int, completed: int, closing: bool) -> int:
    """AsyncFL: C − active. SyncFL: C − completed − active, where C includes over-selection.

    While a SyncFL round is closing, clients cannot join it, and the next round has no model yet.
    """
    if isinstance(config.regime, SyncFL):
        return 0 if closing else config.concurrency - completed - active
    return config.concurrency - active


def oldest_allowed(max_staleness: int, version: int) -> int:
    """The oldest initial version that is not too stale when `version` is the newest.

    SyncFL: "When a server model update is performed in SyncFL, users that are still training are
    aborted". AsyncFL: "users that are still training continue normally, unless their staleness
    would exceed maximum staleness".
    """
    return max(0, version - max_staleness)


def accepts(config: TaskConfig, initial_version: int, target: int) -> bool:
    """May an update from `initial_version` become part of version `target`?

    SyncFL only aggregates updates that start from the version before. AsyncFL accepts any:
    staleness was checked when the client reported.
    """
    return initial_version == target - 1 or not isinstance(config.regime, SyncFL)


def admits_joins(config: TaskConfig, closing: bool) -> bool:
    """SyncFL: clients join the current round only, and not once it is full."""
    return not (closing and isinstance(config.regime, SyncFL))


def ends_round_when_full(config: TaskConfig) -> bool:
    """SyncFL: when K updates are in, all other clients of the round are aborted."""
    return isinstance(config.regime, SyncFL)


def open_buffers(config: TaskConfig) -> int:
    """Model aggregation: AsyncFL fills a second buffer while a version is being written."""
    return 1 if isinstance(config.regime, SyncFL) else 2
