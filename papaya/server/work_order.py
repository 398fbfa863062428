"""The order of heavy work: what may run now (papaya/aggregator/work.py, "in the order given").

Each task has a lane. Folds of a lane run at once with each other, up to eight of one buffer
together. Everything else runs alone in its lane: nothing begins before what was given earlier, and

    Snapshot             waits for the folds before it; folds behind it wait for the cut
    Restore, Drop        wait for the folds before them; folds behind them wait for the end
    Step, DeleteBlobs    let folds pass

It has no threads and no locks of its own: the workers hold theirs around every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from papaya.aggregator.shards import Pieces, UploadChunks
from papaya.aggregator.work import DeleteBlobs, Drop, Fold, Restore, Snapshot, Step
from papaya.messages.base import BlobKey, Message, TaskId

TOGETHER: Final = 8  # as many streams as the compiled kernel reads at once


class FoldJob(NamedTuple):
    """Uploads for one buffer."""

    task: TaskId
    given: list[tuple[Fold, UploadChunks]]


class LoneJob:
    """Work that is alone in its lane, and how far it has come."""

    def __init__(self, task: TaskId, work: Snapshot | Restore | Step | Drop | DeleteBlobs) -> None:
        self.task = task
        self.work = work
        self.attempts = 0
        self.result: Message | None = None
        self.unwritten: Sequence[tuple[BlobKey, bytes | Pieces]] = []
        self.is_computed = False
        self.began_at = 0.0

    @property
    def seq(self) -> int | None:
        return None if isinstance(self.work, DeleteBlobs) else self.work.seq

    @property
    def lets_folds_pass(self) -> bool:
        return isinstance(self.work, Step | DeleteBlobs)


class _Lane:
    __slots__ = ("folding", "is_open", "lone", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[Fold, UploadChunks] | LoneJob] = deque()
        self.folding = 0
        self.lone: LoneJob | None = None
        self.is_open = True

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.folding and self.lone is None

    def next(self, task: TaskId) -> FoldJob | LoneJob | None:
        if not self.waiting:
            return None
        first = self.waiting[0]
        if not isinstance(first, LoneJob):
            if not self.is_open:
                return None
            self.folding += 1
            return FoldJob(task, list(self._alike(first[0])))
        if self.lone is not None or (self.folding and not first.lets_folds_pass):
            return None
        self.waiting.popleft()
        self.lone = first
        self.is_open = first.lets_folds_pass
        return first

    def _alike(self, first: Fold) -> Iterator[tuple[Fold, UploadChunks]]:
        for _ in range(TOGETHER):
            head = self.waiting[0] if self.waiting else None
            if not isinstance(head, tuple) or _buffer_of(head[0]) != _buffer_of(first):
                return
            self.waiting.popleft()
            yield head


def _buffer_of(fold: Fold) -> tuple[int, int]:
    return fold.seq, fold.target


class WorkOrder:
    """All work that was given and is not done. Tasks take turns."""

    def __init__(self) -> None:
        self._lanes: dict[TaskId, _Lane] = {}

    @property
    def is_idle(self) -> bool:
        return not self._lanes

    @property
    def waiting_folds(self) -> int:
        waiting = (given for lane in self._lanes.values() for given in lane.waiting)
        return sum(not isinstance(given, LoneJob) for given in waiting)

    def put(self, task: TaskId, given: tuple[Fold, UploadChunks] | LoneJob) -> None:
        self._lanes.setdefault(task, _Lane()).waiting.append(given)

    def next(self) -> FoldJob | LoneJob | None:
        """Something that may run now, or None. To be followed by `done`."""
        for task, lane in self._lanes.items():
            job = lane.next(task)
            if job is not None:
                self._lanes[task] = self._lanes.pop(task)  # to the end: the others are next
                return job
        return None

    def open(self, job: LoneJob) -> None:
        """The cut is made: folds behind it may begin while its blob is written."""
        self._lanes[job.task].is_open = True

    def done(self, job: FoldJob | LoneJob) -> None:
        lane = self._lanes[job.task]
        if isinstance(job, FoldJob):
            lane.folding -= 1
        else:
            lane.lone, lane.is_open = None, True
        if lane.is_idle:
            del self._lanes[job.task]
