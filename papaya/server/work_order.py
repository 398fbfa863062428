"""The order of heavy work: which jobs of a task may run now (papaya/aggregator/work.py).

Work waits in lanes. Each task has one, and a second one for its requests to the TSA that are not
about updates. The folds of a lane run at the same time, up to eight of one buffer in one call.
Of everything else, one job of a lane runs at a time, in order:

    Snapshot             waits for earlier folds; later folds wait until the sum is cut
    Restore, Drop        wait for earlier folds; later folds wait until they are done
    Step, DeleteBlobs    do not hold up folds
    GetOffers, Forget    in their own lane: only requests of the same task wait
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from papaya.aggregator.shards import Pieces, UploadChunks
from papaya.aggregator.work import (
    DeleteBlobs,
    Drop,
    Fold,
    Forget,
    GetOffers,
    Restore,
    Snapshot,
    Step,
)
from papaya.messages.base import BlobKey, Message, TaskId

TOGETHER: Final = 8  # streams that the compiled kernel reads at once

_REQUESTS: Final = "/requests"  # names of tasks have no slash

LoneWork = Snapshot | Restore | Step | Drop | DeleteBlobs | GetOffers | Forget


class FoldJob(NamedTuple):
    """Uploads for one buffer."""

    task: TaskId
    given: list[tuple[Fold, UploadChunks]]

    @property
    def lane(self) -> str:
        return self.task

    @property
    def seq(self) -> int:
        return self.given[0][0].seq


class LoneJob:
    """Work that runs alone in its lane, and its progress."""

    def __init__(self, task: TaskId, work: LoneWork) -> None:
        self.task = task
        self.work = work
        self.lane = task + _REQUESTS if isinstance(work, GetOffers | Forget) else task
        self.attempts = 0
        self.result: Message | None = None
        self.unwritten: Sequence[tuple[BlobKey, bytes | Pieces]] = []
        self.is_computed = False
        self.began_at = 0.0
        # Which blobs cannot be read or written, without details; empty if there is no problem.
        self.problem = ""

    @property
    def seq(self) -> int | None:
        return None if isinstance(self.work, DeleteBlobs | Forget) else self.work.seq

    @property
    def lets_folds_pass(self) -> bool:
        return isinstance(self.work, Step | DeleteBlobs)


def task_of(lane: str) -> TaskId:
    return lane.removesuffix(_REQUESTS)


Given = tuple[Fold, UploadChunks] | LoneJob


def calls_tsa(given: Given) -> bool:
    work = given.work if isinstance(given, LoneJob) else given[0]
    if isinstance(work, Fold | Step):
        return work.config.secure_aggregation is not None
    return isinstance(work, GetOffers | Forget)


class _Lane:
    __slots__ = ("again", "folding", "is_open", "lone", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Given] = deque()
        self.folding = 0
        self.lone: LoneJob | None = None
        self.again = False  # the lone job has failed, and may now be tried again
        self.is_open = True

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.folding and self.lone is None

    def head(self, *, for_tsa: bool) -> Given | None:
        if self.again and self.lone is not None and calls_tsa(self.lone) == for_tsa:
            return self.lone
        if not self.waiting or calls_tsa(self.waiting[0]) != for_tsa:
            return None
        first = self.waiting[0]
        if not isinstance(first, LoneJob):
            return first if self.is_open else None
        waits = self.lone is not None or (self.folding and not first.lets_folds_pass)
        return None if waits else first

    def take(self, head: Given) -> FoldJob | LoneJob:
        if not isinstance(head, LoneJob):
            self.folding += 1
            return FoldJob(head[0].config.task, list(self._alike(head[0])))
        if head is self.lone:
            self.again = False
        else:
            self.waiting.popleft()
            self.lone, self.is_open = head, head.lets_folds_pass
        return head

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
    """All work that is not done yet. Not thread-safe: the workers lock it."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}

    def __iter__(self) -> Iterator[str]:
        """The lanes, beginning with the one that has waited longest for its turn."""
        return iter(tuple(self._lanes))

    @property
    def is_idle(self) -> bool:
        return not self._lanes

    @property
    def waiting_folds(self) -> int:
        waiting = (given for lane in self._lanes.values() for given in lane.waiting)
        return sum(not isinstance(given, LoneJob) for given in waiting)

    @property
    def problem(self) -> str:
        """The problem of the first lane that has one; empty if there is none."""
        lone = (lane.lone for lane in self._lanes.values())
        return next((job.problem for job in lone if job is not None and job.problem), "")

    def put(self, lane: str, given: Given) -> None:
        self._lanes.setdefault(lane, _Lane()).waiting.append(given)

    def may_start(self, lane: str, *, for_tsa: bool) -> bool:
        """Whether work of this lane may run now. `for_tsa`: work that calls the TSA, or other."""
        found = self._lanes.get(lane)
        return found is not None and found.head(for_tsa=for_tsa) is not None

    def newest_seq(self, lane: str) -> int:
        """The highest sequence number of the work in this lane; 0 if there is none."""
        found = self._lanes.get(lane, _Lane())
        works = [given if isinstance(given, LoneJob) else given[0] for given in found.waiting]
        return max((work.seq or 0 for work in (*works, found.lone) if work is not None), default=0)

    def take_folds(self, lane: str) -> list[tuple[Fold, UploadChunks]]:
        """All folds that wait in this lane: they will not run."""
        found = self._lanes.get(lane, _Lane())
        folds = [given for given in found.waiting if not isinstance(given, LoneJob)]
        found.waiting = deque(given for given in found.waiting if isinstance(given, LoneJob))
        if found.is_idle:
            self._lanes.pop(lane, None)
        return folds

    def take(self, lane: str, *, for_tsa: bool) -> FoldJob | LoneJob | None:
        """The next job of this lane, if it may run now. Call `done` or `again` with it later."""
        found = self._lanes.get(lane)
        head = None if found is None else found.head(for_tsa=for_tsa)
        if found is None or head is None:
            return None
        self._lanes[lane] = self._lanes.pop(lane)  # the other lanes are next
        return found.take(head)

    def again(self, job: LoneJob) -> None:
        """The job has failed, and may now be tried again."""
        self._lanes[job.lane].again = True

    def open(self, job: LoneJob) -> None:
        """The sum is cut: later folds may start while the blob is written."""
        self._lanes[job.lane].is_open = True

    def done(self, job: FoldJob | LoneJob) -> None:
        lane = self._lanes[job.lane]
        if isinstance(job, FoldJob):
            lane.folding -= 1
        else:
            lane.lone, lane.is_open = None, True
        if lane.is_idle:
            del self._lanes[job.lane]
