"""Checks that no task has more clients, active or on their way, than it may have."""

from __future__ import annotations

from typing import NamedTuple

from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.held_task import HeldTask, TaskPhase
from papaya.messages.base import Message, SessionId, TaskId
from papaya.messages.control import SelectorOrders, SelectorReport
from papaya.messages.storage import FenceRow, fence_key
from papaya.sim.cluster import Cluster
from papaya.sim.hosts import SimulatedHost
from papaya.sim.secure_checks import demand


class _Lease(NamedTuple):
    """`epoch`: of the leader that granted it. `seq`: of the holder it is for."""

    epoch: int
    seq: int
    confirm_by: float


class SlotAuditor:
    """Active clients and clients on their way stay within C, also when the leader changes.

    A client is on its way from its assignment until it joins, until its selector returns it
    unfilled, or until it is too late by the holder's clock. Once a holder follows a new leader,
    earlier assignments have no claim to a slot and do not count.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._leases: dict[TaskId, dict[SessionId, _Lease]] = {}

    def on_sent(self, message: Message) -> None:
        if isinstance(message, SelectorReport):
            for session in message.unfilled:
                for leases in self._leases.values():
                    leases.pop(session, None)
        elif isinstance(message, SelectorOrders):
            for assignment in message.assignments:
                lease = _Lease(message.epoch, assignment.seq, assignment.confirm_by)
                leases = self._leases.setdefault(assignment.task, {})
                leases.update(dict.fromkeys(assignment.sessions, lease))
                self._check_holder(assignment.task)

    def after_event(self, host: SimulatedHost) -> None:
        if isinstance(host.machine, Aggregator):
            for held in host.machine.tasks.values():
                self._check(host, host.machine, held)

    def _check_holder(self, task: TaskId) -> None:
        fence = self._cluster.state.rows[fence_key(task)]
        assert isinstance(fence, FenceRow)
        host = self._cluster.hosts.get(fence.aggregator)  # none: a revision has just ended its hold
        if host is not None and host.is_alive and isinstance(host.machine, Aggregator):
            held = host.machine.tasks.get(task)
            if held is not None:
                self._check(host, host.machine, held)

    def _check(self, host: SimulatedHost, aggregator: Aggregator, held: HeldTask) -> None:
        leases = self._leases.get(held.task)
        if not leases or held.phase is not TaskPhase.SERVING:
            return
        known = held.sessions
        for session, lease in list(leases.items()):
            is_late = lease.seq == held.fence.seq and lease.confirm_by < host.now
            has_moved = lease.seq < held.fence.seq
            if is_late or has_moved or session in known.active or session in known.ended:
                del leases[session]
        on_their_way = sum(
            lease.seq == held.fence.seq and lease.epoch >= aggregator.epoch
            for lease in leases.values()
        )
        active, limit = len(known.active), held.config.concurrency
        # A revision may lower C below the number of active clients: then nobody may be on the way.
        demand(
            not on_their_way or active + on_their_way <= limit,
            f"{held.task} at {host.node} has {active} active clients, and {on_their_way} are on "
            f"their way, above its concurrency of {limit}",
        )
