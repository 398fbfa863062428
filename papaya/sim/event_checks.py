"""Checks that servers log what happens: each event once, and no others.

The log of a coordinator must agree with what the coordinator does: whether it leads, and who holds
each task. Of all servers together, no fence and no dropped buffer is logged twice. A line may be
missing only if the server died between a commit and its log line.
"""

from __future__ import annotations

from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.held_task import TaskPhase
from papaya.coordinator.coordinator import Coordinator
from papaya.messages.base import NodeId, TaskId
from papaya.messages.events import (
    BufferDropped,
    LeadershipGained,
    LeadershipLost,
    ServerEvent,
    TaskFound,
    TaskMoved,
    TaskPlaced,
    TaskReleased,
    VersionPublished,
)
from papaya.sim.hosts import SimulatedHost
from papaya.sim.secure_checks import demand
from papaya.sim.storage import Writer

_Process = tuple[NodeId, int]


class EventAuditor:
    """What the logs of all servers say, and whether it is true."""

    def __init__(self) -> None:
        # By process: the epoch that it says it leads, and the fence and holder of each task.
        self._led: dict[_Process, int] = {}
        self._fences: dict[_Process, dict[TaskId, tuple[int, NodeId]]] = {}
        # Who told of a fence, and of a version or a dropped buffer.
        self._told_fences: dict[tuple[TaskId, int], _Process] = {}
        self._told_versions: dict[tuple[TaskId, int], bool] = {}
        # Buffers whose versions are committed and not told yet: their writers, and the fence.
        self._untold: dict[tuple[TaskId, int], tuple[Writer, int, bool]] = {}

    def on_logged(self, host: SimulatedHost, event: ServerEvent) -> None:
        process = (host.node, host.boots)
        match event:
            case LeadershipGained(epoch=epoch):
                demand(not self._led.get(process), f"{host.node} says twice that it leads")
                self._led[process] = epoch
            case LeadershipLost(epoch=epoch):
                told = self._led.pop(process, 0)
                demand(told == epoch, f"{host.node} ends epoch {epoch}, but said {told}")
            case TaskFound(task=task, seq=seq, holder=holder):
                self._fences.setdefault(process, {})[task] = (seq, holder)
            case TaskPlaced() | TaskMoved():
                self._on_fence(process, event.task, event.seq, event.holder)
            case TaskReleased():
                self._on_fence(process, event.task, event.seq, "")
            case VersionPublished() | BufferDropped():
                self._on_version(event)

    def _on_fence(self, process: _Process, task: TaskId, seq: int, holder: NodeId) -> None:
        twice = self._told_fences.setdefault((task, seq), process)
        is_new = self._fences.get(process, {}).get(task, (0, ""))[0] != seq
        demand(twice == process and is_new, f"fence {seq} of {task} is told twice")
        self._fences.setdefault(process, {})[task] = (seq, holder)

    def _on_version(self, event: VersionPublished | BufferDropped) -> None:
        key = (event.task, event.version)
        demand(key not in self._told_versions, f"version {key} is told twice")
        is_dropped = isinstance(event, BufferDropped)
        self._told_versions[key] = is_dropped
        demand(key in self._untold, f"version {key} is told, but it is not committed")
        _, _, was_dropped = self._untold.pop(key)
        demand(was_dropped == is_dropped, f"version {key} is told with a wrong outcome")

    def on_version(
        self, writer: Writer, task: TaskId, version: int, seq: int, *, is_dropped: bool
    ) -> None:
        """The state store has a new version that this holder made."""
        self._untold[task, version] = (writer, seq, is_dropped)

    def after_event(self, host: SimulatedHost) -> None:
        machine = host.machine
        if isinstance(machine, Coordinator):
            self._check_coordinator(host, machine)
        elif isinstance(machine, Aggregator):
            self._check_aggregator(host, machine)

    def _check_coordinator(self, host: SimulatedHost, machine: Coordinator) -> None:
        process, own = (host.node, host.boots), machine.leadership
        leads = own.epoch if own.leads(host.now) else 0
        told = self._led.get(process, 0)
        demand(told == leads, f"{host.node} leads epoch {leads}, but its log says {told}")
        if not machine.acts(host.now):
            return
        known = self._fences.get(process, {})
        for task in machine.rows.tasks:
            fence = machine.rows.fences[task]
            seq, holder = fence.seq, fence.aggregator
            said = known.get(task)
            # A fence that is raised while nobody holds the task changes nothing to tell.
            is_told = said == (seq, holder) or (said is not None and said[1] == holder == "")
            demand(is_told, f"{host.node} knows fence {seq} of {task}, its log says {said}")

    def _check_aggregator(self, host: SimulatedHost, machine: Aggregator) -> None:
        """A holder that knows of a version has told it."""
        for (task, version), (writer, seq, _) in list(self._untold.items()):
            held = machine.tasks.get(task)
            if writer != (host.node, machine.boot) or held is None or held.fence.seq != seq:
                continue
            knows = held.phase is TaskPhase.SERVING and held.ledger.version >= version
            demand(not knows, f"{host.node} has not told of version {version} of {task}")
