"""What the leader knows from the rows alone: tasks, their holders, and what selectors are told.

Rows decide which tasks there are and who holds them. Everything here is made again when they are
read; nothing comes from reports.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from papaya.config import Requirements, TaskConfig
from papaya.messages.base import Boot, NodeId, TaskId
from papaya.messages.control import Advertised, CandidateOffer, Route
from papaya.messages.selection import DeviceClass
from papaya.messages.storage import (
    MAINTENANCE_KEY,
    FenceRow,
    MaintenanceRow,
    Row,
    ShareRow,
    TaskRow,
    fence_key,
    share_key,
)

# How long selectors are told that a task has ended: longer than its clients keep asking. And how
# many such tasks they are told of at most: those that ended last.
_OVER_IS_TOLD_S = 3600.0
_MAX_OVER = 256


class Catalogue(Struct, frozen=True):
    """The part of SelectorOrders that changes rarely."""

    number: int
    advertised: tuple[Advertised, ...] = ()
    routes: tuple[Route, ...] = ()
    over: tuple[TaskId, ...] = ()


class KnownRows:
    """The rows as last read, with the placements that were committed since."""

    def __init__(self) -> None:
        # Tasks that are not over, ended tasks that selectors are told of, and who holds each task.
        self.tasks: dict[TaskId, TaskRow] = {}
        self.over: tuple[TaskId, ...] = ()
        self.fences: dict[TaskId, FenceRow] = {}
        # Meanwhile all tasks are paused, and none is placed if training is stopped.
        self.maintenance: MaintenanceRow | None = None
        # Weights and priorities that differ from the defaults.
        self.shares: dict[TaskId, ShareRow] = {}

        # Tasks by holder and its boot; empty if it has to be made again.
        self._holders: dict[tuple[NodeId, Boot], list[TaskId]] = {}
        # Which tasks fit a device class.
        self._compatible: dict[DeviceClass, dict[TaskId, None]] = {}
        # What selectors are told; None if it has to be made again. The number of a catalogue never
        # repeats.
        self._catalogue: Catalogue | None = None
        self._last_catalogue = Catalogue(0)

    def load(self, now: float, found: Mapping[str, Row]) -> None:
        rows = {r.config.task: r for r in found.values() if isinstance(r, TaskRow)}
        ended = {
            task: row.ended
            for task, row in rows.items()
            if row.is_over and now < row.ended + _OVER_IS_TOLD_S
        }
        told = frozenset(sorted(ended, key=ended.__getitem__)[-_MAX_OVER:])
        self.over = tuple(task for task in ended if task in told)
        maintenance = found.get(MAINTENANCE_KEY)
        self.maintenance = maintenance if isinstance(maintenance, MaintenanceRow) else None
        self.tasks = {
            task: row if self.maintenance is None else replace(row, state="paused")
            for task, row in rows.items()
            if not row.is_over
        }
        # Drop the fences of tasks whose rows were deleted.
        self.fences = {task: fence for task, fence in self.fences.items() if task in rows}
        for task in self.tasks:
            fence, known = found.get(fence_key(task)), self.fences.get(task)
            # A placement may have been committed after this snapshot: keep the higher fence.
            if isinstance(fence, FenceRow) and (known is None or fence.seq >= known.seq):
                self.fences[task] = fence
        self.shares = {
            task: share
            for task, row in self.tasks.items()
            if isinstance(share := found.get(share_key(_trained(row))), ShareRow)
        }
        self._compatible.clear()
        self._holders.clear()
        self._catalogue = None

    def place(self, task: TaskId, fence: FenceRow) -> None:
        """A placement was committed."""
        self.fences[task] = fence
        self._holders.clear()
        self._catalogue = None

    def run_of(self, task: TaskId) -> int:
        row = self.tasks.get(task)
        return 0 if row is None else row.run

    def by_holder(self) -> dict[tuple[NodeId, Boot], list[TaskId]]:
        if not self._holders:
            for task in self.tasks:
                fence = self.fences[task]
                self._holders.setdefault((fence.aggregator, fence.boot), []).append(task)
        return self._holders

    def compatible_tasks(self, device_class: DeviceClass) -> dict[TaskId, None]:
        found = self._compatible.get(device_class)
        if found is None:
            found = self._compatible[device_class] = dict.fromkeys(
                task for task, row in self.tasks.items() if self._offer(row).fits(device_class)
            )
        return found

    # -- what selectors are told ------------------------------------------------------------

    def catalogue(self) -> Catalogue:
        """Has the next number if anything in it has changed. 0 is that of a selector without one,
        so the first number is 1 although there may be no tasks.
        """
        if self._catalogue is None:
            last = self._last_catalogue
            made = Catalogue(last.number, self._advertised(), self._assignment_map(), self.over)
            if made != last or last.number == 0:
                made = replace(made, number=last.number + 1)
            self._catalogue = self._last_catalogue = made
        return self._catalogue

    def _advertised(self) -> tuple[Advertised, ...]:
        """The tasks that selectors may offer to devices."""
        return tuple(self._offer(row) for row in self.tasks.values() if row.state == "running")

    def _offer(self, row: TaskRow) -> Advertised:
        config = row.config
        needs, candidate = self._requirements(config), self._candidate(row)
        return Advertised(config.task, needs, config.is_secure, candidate)

    def _requirements(self, config: TaskConfig) -> Requirements:
        """An evaluation follows the newest bundle of the task that it evaluates."""
        pinned = config.evaluates
        evaluated = None if pinned is None else self.tasks.get(pinned.task)
        return (config if evaluated is None else evaluated.config).requirements

    def _candidate(self, row: TaskRow) -> CandidateOffer | None:
        """Of the rollout of this task, or of the task that it evaluates."""
        trained = self.tasks.get(_trained(row), row)
        if row.candidate is None or trained.candidate is None:
            return None
        return CandidateOffer(trained.candidate.config.requirements, trained.candidate.share)

    def _assignment_map(self) -> tuple[Route, ...]:
        """Paper, appendix "Failure Recovery": "assignment maps (model training task to
        corresponding aggregator identity) refreshed from coordinator on every report".

        A paused task keeps its route: clients that have joined finish.
        """
        return tuple(
            Route(task, fence.aggregator, fence.seq)
            for task, fence in self.fences.items()
            if task in self.tasks and fence.aggregator
        )


def _trained(row: TaskRow) -> TaskId:
    """The task itself, or the task that it evaluates."""
    pinned = row.config.evaluates
    return row.config.task if pinned is None else pinned.task
