"""Threads that carry out an aggregator's heavy work (paper, "Parallel Model Aggregation").

    "This update is then pushed into an in-memory queue on the Aggregator. A different thread
    drains the queue [...] the ID of the thread performing intermediate aggregation is hashed to
    choose one of the intermediate aggregates."

    loop ── perform(work) ──▶ WorkOrder, one lane per task ──▶ threads ──▶ shards, blobs
         ◀── deliver(result) ──

Order (papaya/aggregator/work.py): the folds of a task run at the same time as each other, up to
eight of one buffer in one call. Everything else runs alone in its lane, after all earlier work:

    Snapshot             waits for earlier folds; later folds wait until the sum is cut
    Restore, Drop        wait for earlier folds; later folds wait until they are done
    Step, DeleteBlobs    do not hold up folds

Folds and steps of secure tasks call the TSA, which may not answer for a while. Each secure task has
threads of its own for them, and one more for offers. So no other task waits, neither tasks in the
clear nor tasks of another TSA. These threads start when there is work, and end when there has been
none for a while. At a limit on threads (pids.max, TasksMax, ulimit -u) the work waits for a thread
that its task already has, or until one can start.

Writing a blob is retried until it succeeds, without blocking a thread. Delayed is delivered after
each attempt that fails, and the result at the end. A missing blob or an unexpected error is
delivered as Lost. The task's earlier work is then skipped until Restore, because the machine loads
the task again and asks for those updates again. The queue needs no bound of its own: the machine's
memory for uploads bounds it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from threading import Condition, Lock, RLock, Thread, current_thread
from time import perf_counter
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from papaya.aggregator.masked_sum import Tsa
from papaya.aggregator.shards import Pieces, Shards, UploadChunks
from papaya.aggregator.work import (
    Delayed,
    DeleteBlobs,
    Drop,
    Fold,
    Forget,
    GetOffers,
    Keep,
    Lost,
    Offered,
    Restore,
    Restored,
    Snapshot,
    Step,
)
from papaya.errors import MissingBlob, OperatorError, PapayaError
from papaya.learning.kernels import fastest
from papaya.messages.base import BlobKey, Message, TaskId
from papaya.server.buffers import BufferPool
from papaya.server.logs import Trouble

logger = logging.getLogger("papaya.workers")

TOGETHER: Final = 8  # streams that the compiled kernel reads at once
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
_MAX_REASON: Final = 256  # characters of an error that are reported
# Threads of one secure task. The TSA has one thread, so more of them would only wait for it.
TSA_THREADS: Final = 4
TSA_THREAD_LIFE_S = 10.0  # a thread ends after this time without work
THREAD_RETRY_S = 1.0  # after a thread could not start

HeavyWork = GetOffers | Forget | Keep | Fold | Snapshot | Restore | Step | Drop | DeleteBlobs


class BlobStore(Protocol):
    """`put` is durable when it returns, `get` raises MissingBlob. Threads may share it."""

    def put(self, key: BlobKey, data: bytes | Pieces) -> None: ...

    def get(self, key: BlobKey) -> bytes: ...

    def get_part(self, key: BlobKey, start: int, end: int) -> bytes: ...

    def delete(self, key: BlobKey) -> None: ...

    def sweep(self, task: TaskId, below_seq: int, keep: Set[BlobKey]) -> None: ...


class Counters(Struct):
    """Since the start, for metrics. Threads add to them under the workers' lock."""

    updates: int = 0
    refused: int = 0
    folded_bytes: int = 0
    snapshots: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    written_bytes: int = 0
    storage_errors: int = 0
    lost: int = 0


def threaded_shards(threads: int, pool: BufferPool, tsa: Tsa | None = None) -> Shards:
    """Shards for worker threads: one per thread, with locks; buffers go back to their pool."""
    return Shards(
        threads,
        kernel=fastest(),
        lock=Lock,
        release=pool.give_back,
        tsa=tsa,
        entropy=os.urandom,
    )


def _unobserved(seconds: float, work: str) -> None:
    """No-op."""


class FoldJob(NamedTuple):
    """Uploads for one buffer."""

    task: TaskId
    given: list[tuple[Fold, UploadChunks]]


class LoneJob:
    """Work that runs alone in its lane, and its progress."""

    def __init__(self, task: TaskId, work: Snapshot | Restore | Step | Drop | DeleteBlobs) -> None:
        self.task = task
        self.work = work
        self.attempts = 0
        self.result: Message | None = None
        self.unwritten: Sequence[tuple[BlobKey, bytes | Pieces]] = []
        self.is_computed = False
        self.began_at = 0.0
        # Which blobs cannot be read or written, without details; empty if nothing has failed.
        self.problem = ""

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

    def next(self, task: TaskId, calls_tsa: bool) -> FoldJob | LoneJob | None:
        if not self.waiting:
            return None
        first = self.waiting[0]
        if _calls_tsa(first) != calls_tsa:
            return None
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


def _calls_tsa(given: tuple[Fold, UploadChunks] | LoneJob) -> bool:
    """Folds and steps of secure tasks do."""
    work = given.work if isinstance(given, LoneJob) else given[0]
    return isinstance(work, Fold | Step) and work.config.secure_aggregation is not None


def _buffer_of(fold: Fold) -> tuple[int, int]:
    return fold.seq, fold.target


class WorkOrder:
    """All work that is not done yet. Tasks take turns. Not thread-safe: the workers lock it."""

    def __init__(self) -> None:
        self._lanes: dict[TaskId, _Lane] = {}

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

    def put(self, task: TaskId, given: tuple[Fold, UploadChunks] | LoneJob) -> None:
        self._lanes.setdefault(task, _Lane()).waiting.append(given)

    def head(self, task: TaskId) -> tuple[Fold, UploadChunks] | LoneJob | None:
        """The next work of this task."""
        lane = self._lanes.get(task)
        return lane.waiting[0] if lane is not None and lane.waiting else None

    def next(self, caller: TaskId | None) -> FoldJob | LoneJob | None:
        """A job that may run now, or None. Call `done` with it afterwards.

        `caller`: take only work of this secure task that calls the TSA. None: take work of any
        task that does not call a TSA.
        """
        if caller is not None:
            found = self._lanes.get(caller)
            return None if found is None else found.next(caller, calls_tsa=True)
        for task, lane in self._lanes.items():
            job = lane.next(task, calls_tsa=False)
            if job is not None:
                self._lanes[task] = self._lanes.pop(task)  # the other tasks are next
                return job
        return None

    def open(self, job: LoneJob) -> None:
        """The sum is cut: later folds may start while the blob is written."""
        self._lanes[job.task].is_open = True

    def done(self, job: FoldJob | LoneJob) -> None:
        lane = self._lanes[job.task]
        if isinstance(job, FoldJob):
            lane.folding -= 1
        else:
            lane.lone, lane.is_open = None, True
        if lane.is_idle:
            del self._lanes[job.task]


class _Crew:
    """A group of threads that take jobs from the same place. The workers' lock guards it."""

    def __init__(self, lock: RLock) -> None:
        self.changed = Condition(lock)  # there may be work
        self.again: list[LoneJob] = []
        self.size = 0
        self.is_at_limit = False  # the last thread could not start; a retry is scheduled


class Workers:
    """Create and call it on the event loop; results are delivered there too."""

    def __init__(
        self,
        shards: Shards,
        blobs: BlobStore,
        deliver: Callable[[Message], None],
        threads: int,
        *,
        observe: Callable[[float, str], None] = _unobserved,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        """`observe` gets the seconds of each fold, snapshot, step and restore, on any thread."""
        self.counters = Counters()
        self._observe = observe
        self._shards = shards
        self._blobs = blobs
        self._deliver = deliver
        self._first_retry_s = first_retry_s
        self._loop = asyncio.get_running_loop()
        self._lock = RLock()  # guards the fields below and the counters
        self._lanes = WorkOrder()
        # The threads that call no TSA, and those of each secure task that has work for them.
        self._clear = _Crew(self._lock)
        self._callers: dict[TaskId, _Crew] = {}
        self._callers_size = min(threads, TSA_THREADS)
        # Requests to the TSA that are no jobs, for each task whose thread for them is running, or
        # could not start yet.
        self._asked: dict[TaskId, deque[GetOffers | Forget]] = {}
        self._threads: list[Thread] = []
        self._lost: dict[TaskId, int] = {}
        # Storage trouble of a task that has not ended.
        self._troubles: dict[TaskId, Trouble] = {}
        self._is_closing = False
        self._is_stopped = False
        self._retries: dict[LoneJob, asyncio.TimerHandle] = {}  # used on the loop only
        self._idle = asyncio.Event()
        with self._lock:
            for _ in range(threads):
                self._enlarge(self._clear, "papaya-worker", None)

    @property
    def queue_length(self) -> int:
        """Complete uploads that wait to be folded."""
        with self._lock:
            return self._lanes.waiting_folds

    @property
    def problem(self) -> str:
        """Which blobs cannot be read or written, without details; empty if there is no problem."""
        with self._lock:
            return self._lanes.problem

    # -- on the loop ------------------------------------------------------------------------

    def perform(self, work: HeavyWork) -> None:
        """Change uploads now; run everything else on threads, in the order of its task."""
        match work:
            case GetOffers() | Forget():
                self._ask(work)
            case Keep():
                self._shards.keep(work)
            case Fold():
                self._give(work.config.task, (work, self._shards.take(work)))
            case Drop():
                self._shards.drop_uploads(work.task, work.session)
                if work.session is None:
                    self._give(work.task, LoneJob(work.task, work))
            case Snapshot():
                self._give(work.task, LoneJob(work.task, work))
            case Restore() | Step():
                self._give(work.config.task, LoneJob(work.config.task, work))
            case DeleteBlobs():
                if work.blobs:
                    task = work.blobs[0].split("/")[0]
                    self._give(task, LoneJob(task, work))

    def _ask(self, work: GetOffers | Forget) -> None:
        """Use one thread per task: only clients of the same task wait for its offers."""
        task = work.config.task
        with self._lock:
            is_first = task not in self._asked
            self._asked.setdefault(task, deque()).append(work)
            if is_first:
                self._start_asking(task)

    def _start_asking(self, task: TaskId) -> None:
        with self._lock:
            if self._is_stopped:
                return
            try:
                self._start(f"papaya-offers-{task}", self._ask_all, task)
            except RuntimeError as error:
                self._start_later(self._start_asking, task, error)

    def _give(self, task: TaskId, given: tuple[Fold, UploadChunks] | LoneJob) -> None:
        with self._lock:
            self._idle.clear()
            self._lanes.put(task, given)
            self._crew_for(task, given).changed.notify()

    def _crew_for(self, task: TaskId, given: tuple[Fold, UploadChunks] | LoneJob) -> _Crew:
        if not _calls_tsa(given):
            return self._clear
        crew = self._callers.setdefault(task, _Crew(self._lock))
        if crew.size < self._callers_size and not crew.is_at_limit:
            self._enlarge_callers(task, crew)
        return crew

    def _enlarge_callers(self, task: TaskId, crew: _Crew) -> None:
        try:
            self._enlarge(crew, f"papaya-tsa-{task}", task)
        except RuntimeError as error:
            crew.is_at_limit = True
            self._start_later(self._retry_callers, task, error)
            if self._is_closing:
                self._clear.changed.notify()  # see _find_job

    def _retry_callers(self, task: TaskId) -> None:
        with self._lock:
            crew = self._callers.get(task)
            if crew is None or self._is_stopped:
                return
            crew.is_at_limit = False
            if crew.size == 0:
                self._enlarge_callers(task, crew)

    def _start_later(
        self, start: Callable[[TaskId], None], task: TaskId, error: RuntimeError
    ) -> None:
        """A thread could not start: call `start` again on the loop. Called on any thread."""
        logger.warning(
            "cannot start a thread for the TSA of task %s: %s; will retry "
            "(hint: raise pids.max, TasksMax or ulimit -u)",
            task,
            error,
        )
        self._call(self._loop.call_later, THREAD_RETRY_S, start, task)

    def _enlarge(self, crew: _Crew, name: str, caller: TaskId | None) -> None:
        self._start(f"{name}-{crew.size}", self._run, crew.size, caller)
        crew.size += 1

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Call it with the lock held: the thread may remove itself from the list.

        Raises RuntimeError at a limit on threads.
        """
        thread = Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _get_offers(self, work: GetOffers) -> None:
        try:
            offered = self._shards.get_offers(work)
        except Exception as error:
            logger.exception("cannot get offers for %s", work.config.task)
            problem, manifest = str(error) or repr(error), work.config.manifest
            offered = Offered(work.config.task, work.seq, problem=problem, manifest=manifest)
        self._call(self._deliver_all, [offered])

    def _forget(self, work: Forget) -> None:
        try:
            self._shards.forget(work)
        except Exception:
            logger.exception("cannot tell the TSA to forget task %s", work.config.task)

    async def close(self) -> None:
        """Finish all given work, then stop. Work whose blobs cannot be written has no result."""
        with self._lock:
            self._is_closing = True
        for job in list(self._retries):
            self._try_again(job)
        await self.drain()
        with self._lock:
            self._is_stopped = True
            for crew in (self._clear, *self._callers.values()):
                crew.changed.notify_all()
            threads = tuple(self._threads)
        # On a thread: a call to the TSA for offers may need the loop before it ends.
        await asyncio.to_thread(_join, threads)

    async def drain(self) -> None:
        """Wait until no work is left, including work that results lead to."""
        while True:
            while not self._lanes.is_idle:
                await self._idle.wait()
            await asyncio.sleep(0)  # deliver the results that were scheduled before this
            if self._lanes.is_idle:
                return

    def _deliver_all(self, messages: list[Message]) -> None:
        for message in messages:
            try:
                self._deliver(message)
            except Exception:
                logger.exception("%s could not be delivered", type(message).__name__)

    def _try_later(self, job: LoneJob) -> None:
        delay_s = min(self._first_retry_s * 2 ** (job.attempts - 1), LONGEST_RETRY_S)
        delay_s = 0.0 if self._is_closing else delay_s
        self._retries[job] = self._loop.call_later(delay_s, self._try_again, job)

    def _try_again(self, job: LoneJob) -> None:
        self._retries.pop(job).cancel()
        with self._lock:
            crew = self._crew_for(job.task, job)
            crew.again.append(job)
            crew.changed.notify()

    def _become_idle(self) -> None:
        if self._lanes.is_idle:
            self._idle.set()

    # -- on the threads ---------------------------------------------------------------------

    def _run(self, index: int, caller: TaskId | None) -> None:
        shard = index % self._shards.count
        while (job := self._next(caller)) is not None:
            if isinstance(job, FoldJob):
                self._fold(job, shard)
                self._done(job)
            elif self._work_alone(job):
                self._done(job)

    def _next(self, caller: TaskId | None) -> FoldJob | LoneJob | None:
        """Wait for work. None means that the thread has to end."""
        life_s = None if caller is None else TSA_THREAD_LIFE_S
        is_over = False
        with self._lock:
            crew = self._clear if caller is None else self._callers[caller]
            while not self._is_stopped:
                job = self._find_job(crew, caller)
                if job is not None:
                    return job
                if is_over:
                    self._leave(crew, caller)
                    return None
                is_over = not crew.changed.wait(life_s)
        return None

    def _find_job(self, crew: _Crew, caller: TaskId | None) -> FoldJob | LoneJob | None:
        job = crew.again.pop() if crew.again else self._lanes.next(caller)
        if job is None and crew is self._clear and self._is_closing:
            # Closing must not wait for a thread that cannot start. No client waits any more, so
            # threads in the clear may call the TSA.
            unstaffed = [pair for pair in self._callers.items() if pair[1].size == 0]
            found = (self._find_job(other, task) for task, other in unstaffed)
            job = next((job for job in found if job is not None), None)
        return job

    def _leave(self, crew: _Crew, caller: TaskId | None) -> None:
        self._threads.remove(current_thread())
        crew.size -= 1
        if crew.size == 0 and caller is not None:
            del self._callers[caller]

    def _ask_all(self, task: TaskId) -> None:
        while (work := self._next_asked(task)) is not None:
            if isinstance(work, GetOffers):
                self._get_offers(work)
            else:
                self._forget(work)

    def _next_asked(self, task: TaskId) -> GetOffers | Forget | None:
        """None means that the thread has to end."""
        with self._lock:
            if self._asked[task] and not self._is_stopped:
                return self._asked[task].popleft()
            del self._asked[task]
            self._threads.remove(current_thread())
            return None

    def _notify_waiting(self, task: TaskId) -> None:
        """Work of this task that had to wait may run now. If there is none, wake no thread."""
        head = self._lanes.head(task)
        if head is not None:
            self._crew_for(task, head).changed.notify_all()

    def _done(self, job: FoldJob | LoneJob) -> None:
        with self._lock:
            self._lanes.done(job)
            self._notify_waiting(job.task)
            is_idle = self._lanes.is_idle
        if is_idle:
            self._call(self._become_idle)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _fold(self, job: FoldJob, shard: int) -> None:
        seq = job.given[0][0].seq
        if self._is_lost(job.task, seq):
            for _, upload in job.given:
                self._shards.release(upload)
            return
        began_at = perf_counter()
        try:
            results = self._shards.fold_all(job.given, shard)
        except Exception as error:
            self._lose(job.task, seq, error)
            return
        answered = [folded for folded in results if not folded.is_unanswered]
        refused = sum(folded.refused is not None for folded in answered)
        with self._lock:
            self.counters.updates += len(answered)
            self.counters.refused += refused
            config = job.given[0][0].config
            self.counters.folded_bytes += (len(answered) - refused) * config.model_bytes
        self._observe(perf_counter() - began_at, "fold")
        self._call(self._deliver_all, results)

    def _work_alone(self, job: LoneJob) -> bool:
        """Return False if the job will be tried again."""
        if job.seq is not None and self._is_lost(job.task, job.seq):
            if isinstance(job.work, Snapshot | Step):
                return True
            with self._lock:
                del self._lost[job.task]
        try:
            if not job.is_computed:
                self._compute(job)
                job.is_computed = True
            while job.unwritten:
                self._write(job)
        except MissingBlob as error:
            self._lose(job.task, job.seq, error)
        except (OSError, OperatorError) as error:
            return not self._will_try_again(job, error)
        except Exception as error:
            self._lose(job.task, job.seq, error)
        else:
            self._count(job)
            with self._lock:
                trouble = self._troubles.pop(job.task, None)
            if trouble is not None:
                trouble.ends()
            if job.result is not None:
                self._call(self._deliver_all, [job.result])
        return True

    def _compute(self, job: LoneJob) -> None:
        """Everything except writing blobs. Repeating it after an error is safe."""
        job.began_at = perf_counter()
        shards, work = self._shards, job.work
        match work:
            case Snapshot():
                cut = shards.cut(work)
                with self._lock:
                    self._lanes.open(job)
                    self._notify_waiting(job.task)
                job.result, job.unwritten = shards.encode(cut)
            case Step():
                job.result, job.unwritten = shards.step(work, self._blobs.get, self._blobs.get_part)
            case Restore():
                task, keep = work.config.task, frozenset(work.garbage_except)
                self._tidy(job, partial(self._blobs.sweep, task, work.seq, keep))
                shards.restore(work, self._blobs.get)
                job.result = Restored(task, work.seq)
            case Drop():
                shards.drop_sums(work.task, work.seq)
            case DeleteBlobs():
                for key in work.blobs:
                    self._tidy(job, partial(self._blobs.delete, key))

    def _tidy(self, job: LoneJob, delete: Callable[[], None]) -> None:
        """Delete garbage. A failure is only logged: the next holder sweeps the folder."""
        try:
            delete()
        except (OSError, OperatorError) as error:
            self._complain(job, error, "not deleted")

    def _write(self, job: LoneJob) -> None:
        key, data = job.unwritten[0]
        self._blobs.put(key, data)
        job.unwritten = job.unwritten[1:]
        pieces = [data] if isinstance(data, bytes) else data
        with self._lock:
            self.counters.written_bytes += sum(memoryview(piece).nbytes for piece in pieces)

    def _count(self, job: LoneJob) -> None:
        took_s = perf_counter() - job.began_at
        if isinstance(job.work, Snapshot | Step | Restore):
            self._observe(took_s, type(job.work).__name__.lower())
        with self._lock:
            if isinstance(job.work, Step):
                self.counters.steps += 1
                self.counters.step_seconds += took_s
            elif isinstance(job.work, Snapshot):
                self.counters.snapshots += 1

    def _will_try_again(self, job: LoneJob, error: OSError | OperatorError) -> bool:
        """Schedule a retry, unless the workers are closing; the job then has no result."""
        job.attempts += 1
        # Only steps and restores read blobs, and they read before they write.
        done = "written" if job.is_computed else "read"
        with self._lock:
            is_over = self._is_closing
            job.problem = f"blobs of task {job.task} cannot be {done}"
        self._complain(job, error, "giving up, the server is stopping" if is_over else "will retry")
        if not is_over:
            if job.seq is not None:
                reason = f"blobs cannot be {done}: {error}"[:_MAX_REASON]
                self._call(self._deliver_all, [Delayed(job.task, job.seq, reason)])
            self._call(self._try_later, job)
        return not is_over

    def _complain(self, job: LoneJob, error: OSError | OperatorError, then: str) -> None:
        with self._lock:
            self.counters.storage_errors += 1
            trouble = self._troubles.setdefault(job.task, Trouble("blobs", job.task))
        kind = type(job.work).__name__
        trouble.begins(f"{kind.lower()}: {error}")
        hint = error.hint if isinstance(error, PapayaError) else "check the disk"
        logger.warning("%s of %s: %s; %s (hint: %s)", kind, job.task, error, then, hint)

    # -- lost work --------------------------------------------------------------------------

    def _is_lost(self, task: TaskId, seq: int) -> bool:
        with self._lock:
            return self._lost.get(task) == seq

    def _lose(self, task: TaskId, seq: int | None, error: Exception) -> None:
        if isinstance(error, MissingBlob):
            logger.warning("work of %s: %s (hint: %s)", task, error, error.hint)
        else:
            logger.error("work of %s failed unexpectedly", task, exc_info=error)
        if seq is None:
            return  # undeleted blobs do no harm
        with self._lock:
            self.counters.lost += 1
            is_known = self._lost.get(task) == seq
            self._lost[task] = seq
        if not is_known:
            self._call(self._deliver_all, [Lost(task, seq, str(error) or repr(error))])


def _join(threads: Sequence[Thread]) -> None:
    for thread in threads:
        thread.join()
