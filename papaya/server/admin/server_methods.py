"""Whether the servers can combine updates as a task asks, and keep its blobs.

Refused: extensions that this server does not have or allow, buffers of single updates that are too
large to store, and, while servers of two versions run, settings and frozen tensors that an earlier
version does not know. As with the first private task, no server of an earlier version starts after
the first task with one of these.
"""

from __future__ import annotations

from papaya.config import Aggregation, Staleness, TaskConfig, Weighting
from papaya.learning.aggregation_rules import takes_members
from papaya.learning.methods import require_methods
from papaya.messages.storage import Transaction
from papaya.server.admin.private_tasks import require_newest_format
from papaya.server.admin.problems import Conflict
from papaya.server.admin.service import AdminService

_MB = 1_000_000


async def require_server_methods(service: AdminService, config: TaskConfig) -> Transaction:
    """What the transaction with this task needs too. Raises ConfigError or Conflict."""
    require_methods(config)
    most_mb, needed = service.max_members_mb, config.members_bytes
    if takes_members(config) and needed > most_mb * _MB:
        raise Conflict(
            f"aggregation.kind = {config.aggregation.kind!r} stores {config.aggregation_goal} "
            f"updates of {config.model_bytes / _MB:,.1f} MB for each version: {needed / _MB:,.0f} "
            f"MB, and the servers allow {most_mb:,} MB",
            hint="lower aggregation_goal, use mean, or raise max_members_mb in the server's file",
        )
    if config.requirements.frozen_file:
        # It does not know the field, so the blob would be one that no row names.
        return await require_newest_format(
            service, "an earlier version would delete the frozen tensors of this task"
        )
    combining = (config.staleness, config.weighting, config.aggregation, config.upload_bits)
    optimizer = config.optimizer
    is_known = optimizer.is_built_in and optimizer.averaged == 0
    if is_known and combining == (Staleness(), Weighting(), Aggregation(), 32):
        return Transaction()
    return await require_newest_format(
        service, "an earlier version would combine the updates of this task differently"
    )
