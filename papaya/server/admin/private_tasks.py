"""What a private task needs from the servers; otherwise its guarantee would not hold.

Refused: a private task in the clear if tokens do not identify devices, and any private task while
servers of two versions run. The first private task raises the format of the cluster
(`papaya/server/formats.py`), so that no server of an earlier version starts from then on.
"""

from __future__ import annotations

import papaya
from papaya.config import TaskConfig
from papaya.messages.base import NodeId
from papaya.messages.storage import Transaction
from papaya.server.admin.problems import Conflict
from papaya.server.admin.service import AdminService
from papaya.server.formats import Formats


async def require_privacy(service: AdminService, config: TaskConfig) -> Transaction:
    """What the transaction with this task needs too. Raises Conflict if the servers cannot keep the
    promise of the task.
    """
    if config.privacy is None:
        return Transaction()
    # Without identities a device can be in one sum several times, which costs more than its ledger
    # charges. Under secure aggregation the TSA refuses it.
    if config.secure_aggregation is None and not service.identifies_devices:
        raise Conflict(
            "a private task without secure aggregation needs tokens that identify devices",
            hint='set device_tokens = "signed" in the server\'s file, or use secure_aggregation',
        )
    # An aggregator of an earlier version does not know `privacy`.
    return await require_newest_format(
        service,
        "a private task needs servers of one version, because an earlier one may add no noise",
    )


async def require_newest_format(service: AdminService, why: str) -> Transaction:
    """Raises the format of the cluster, so that no earlier version starts after this."""
    nodes = await require_one_version(service, why)
    rows = await service.state.read(Formats.prefixes)
    found = Formats().with_private_tasks(rows, nodes)
    if found is None:
        raise Conflict(
            "a server does not know the settings of this task",
            hint="finish the upgrade: papaya status",
        )
    return found


async def require_one_version(service: AdminService, why: str) -> tuple[NodeId, ...]:
    """The live servers, and all coordinators. Raises Conflict while servers of two versions run."""
    # Coordinators that do not lead write rows of tasks too.
    versions = await service.versions_of_servers(service.coordinators)
    others = [node for node, version in versions.items() if version != papaya.__version__]
    if others:
        theirs = versions[others[0]] or "0.4.0"
        raise Conflict(
            f"{others[0]} runs {theirs}, this server {papaya.__version__}: {why}",
            hint="finish the upgrade, then run the command again: papaya status",
        )
    return tuple(versions)
