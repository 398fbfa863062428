"""Stops training in the whole cluster, and resumes it.

    maintenance   no client is assigned; clients that train may finish
    stopped       also, all tasks are taken from their aggregators: from this transaction on,
                  nothing is acknowledged and no version is made

Both are one row, which the leader reads at once. Devices that check in are told to come back at the
announced end. Nothing that was acknowledged is lost. Tasks keep their own states.
"""

from __future__ import annotations

from papaya.messages.audit_trail import Attempt
from papaya.messages.storage import (
    FENCES,
    MAINTENANCE_KEY,
    TASKS,
    FenceRow,
    MaintenanceRow,
    Row,
    TaskRow,
    Transaction,
    fence_key,
)
from papaya.server.admin.problems import Conflict
from papaya.server.admin.service import AdminService
from papaya.server.admin.views import BeginMaintenance

_ATTEMPTS = 10


async def begin(service: AdminService, request: BeginMaintenance, attempt: Attempt) -> None:
    """Begin, or change what was announced. Repeated if a task is placed at the same time."""
    outcome = "refused"
    for _ in range(_ATTEMPTS):
        found = await service.state.read((MAINTENANCE_KEY, TASKS, FENCES))
        old, now = found.get(MAINTENANCE_KEY), service.now()
        row = MaintenanceRow(
            old.since if isinstance(old, MaintenanceRow) else now,
            0.0 if request.for_s is None else now + request.for_s,
            request.is_stopped,
            attempt.actor,
            attempt.why,
        )
        change = Transaction(require=((MAINTENANCE_KEY, old),), put=((MAINTENANCE_KEY, row),))
        if request.is_stopped:
            change = _release_all(change, found)
        outcome = await service.trail.transact(attempt, change)
        if outcome != "refused":
            break
    service.settle(outcome)


def _release_all(change: Transaction, found: dict[str, Row]) -> Transaction:
    """With a new fence for each task: its holder can write nothing more. Also for tasks that nobody
    holds: a leader that has not read the row yet may be placing one.
    """
    require, put = list(change.require), list(change.put)
    for row in found.values():
        if isinstance(row, TaskRow) and not row.is_over:
            key = fence_key(row.config.task)
            fence = found.get(key)
            if isinstance(fence, FenceRow):
                require.append((key, fence))
                put.append((key, FenceRow(fence.seq + 1, "", 0)))
    return Transaction(tuple(require), tuple(put))


async def end(service: AdminService, attempt: Attempt) -> None:
    found = (await service.state.read((MAINTENANCE_KEY,))).get(MAINTENANCE_KEY)
    if found is None:
        raise Conflict("there is no maintenance to end", hint="papaya status")
    change = Transaction(require=((MAINTENANCE_KEY, found),), delete=(MAINTENANCE_KEY,))
    await service.write(change, attempt)
