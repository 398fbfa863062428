"""Threads that carry out an aggregator's heavy work (paper, "Parallel Model Aggregation").

    "This update is then pushed into an in-memory queue on the Aggregator. A different thread
    drains the queue [...] the ID of the thread performing intermediate aggregation is hashed to
    choose one of the intermediate aggregates."

    loop ── perform(work) ──▶ WorkOrder, one lane per task ──▶ threads ──▶ shards, blobs
         ◀── deliver(result) ──

`work_order.py` says which jobs may run, `crew.py` has the threads. There are as many threads of
tasks in the clear as there are shards. Folds and steps of secure tasks call the TSA, which may not
answer for a while, so each secure task has threads of its own for them, and one more for its other
requests. No other task waits for these threads, neither tasks in the clear nor tasks of another
TSA. To add updates or to apply a step, every thread takes a shard, and waits until one is free. It
holds none while it waits for the TSA or for a blob.

If no thread can start for a secure task, its work waits, and the machine is told after the third
failed attempt. From then on its updates are given back as if the TSA did not answer, because they
would hold memory that all tasks share. While the server closes, the threads of tasks in the clear
do this work, after their own.

Writing a blob is retried until it succeeds, without blocking a thread. Delayed is delivered after
the third failed attempt and after each later one, and the result when the write succeeds. A missing
blob or an unexpected error is delivered as Lost. The task's earlier work is then skipped until
Restore, because the machine loads the task again and asks for those updates again. The queue needs
no bound of its own: the machine's memory for uploads bounds it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from queue import LifoQueue
from threading import Lock, RLock
from time import perf_counter
from typing import Final, Protocol

from msgspec import Struct, field

from papaya.aggregator.masked_sum import Tsa
from papaya.aggregator.shards import Pieces, Shards
from papaya.aggregator.work import (
    Delayed,
    DeleteBlobs,
    Drop,
    Fold,
    Folded,
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
from papaya.server.crew import FIRST_RETRY_S, Crew, CrewJob, call_on, retry_delay_s
from papaya.server.logs import Trouble
from papaya.server.work_order import FoldJob, Given, LoneJob, WorkOrder, task_of

logger = logging.getLogger("papaya.workers")

_NO_THREAD: Final = "no thread can start for this task: its aggregator is at a limit on threads"
# Failed attempts after which the machine is told. Single errors of a bucket are usual.
TOLD_FROM: Final = 3
# Threads of one secure task. The TSA has one thread, so more of them would only wait for it.
TSA_THREADS: Final = 4
TSA_THREAD_LIFE_S = 10.0  # a thread ends after this time without work

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


class _Threadless(Struct):
    """A secure task for which no thread can start."""

    trouble: Trouble
    lanes: set[str] = field(default_factory=set)
    is_lasting: bool = False  # TOLD_FROM attempts have failed
    seq: int = 0  # the newest one that the machine was told about


class FreeShards:
    """The numbers of shards that no thread uses. Taking one waits until one is free."""

    def __init__(self, count: int) -> None:
        self._free: LifoQueue[int] = LifoQueue()  # so that few of them are used if few are needed
        for number in reversed(range(count)):
            self._free.put(number)

    @contextmanager
    def __call__(self) -> Iterator[int]:
        number = self._free.get()
        try:
            yield number
        finally:
            self._free.put(number)


def threaded_shards(threads: int, pool: BufferPool, tsa: Tsa | None = None) -> Shards:
    """Shards for worker threads: one per thread, with locks; buffers go back to their pool."""
    return Shards(
        threads,
        kernel=fastest(),
        lock=Lock,
        take_shard=FreeShards(threads),
        take_place=FreeShards(threads),
        release=pool.give_back,
        tsa=tsa,
        entropy=os.urandom,
    )


def _unobserved(seconds: float, work: str) -> None:
    """No-op."""


def _unexpected(error: BaseException) -> str:
    """For owners of tasks. The text of the error may have paths and addresses: see _tell_delay."""
    return f"unexpected error ({type(error).__name__}): see the log of the aggregator"


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
        self._order = WorkOrder()
        # The threads that call no TSA, and those of each lane that has work for them.
        self._clear = Crew(
            "papaya-worker", threads, self._find_in_the_clear, self._lock, self._loop
        )
        self._callers: dict[str, Crew] = {}
        self._callers_size = min(threads, TSA_THREADS)
        self._threadless: dict[TaskId, _Threadless] = {}
        self._lost: dict[TaskId, int] = {}
        # Trouble with the blobs of a task that has not ended.
        self._troubles: dict[TaskId, Trouble] = {}
        self._is_closing = False
        self._retries: dict[LoneJob, asyncio.TimerHandle] = {}  # used on the loop only
        self._idle = asyncio.Event()
        with self._lock:
            self._clear.fill()

    @property
    def queue_length(self) -> int:
        """Complete uploads that wait to be folded."""
        with self._lock:
            return self._order.waiting_folds

    @property
    def problem(self) -> str:
        """Of a task whose blobs cannot be read or written, or for which no thread can start,
        without details; empty if there is none.
        """
        with self._lock:
            threadless = (task for task, found in self._threadless.items() if found.is_lasting)
            task = next(threadless, None)
            return self._order.problem or (
                "" if task is None else f"no thread can start for task {task}"
            )

    # -- on the loop ------------------------------------------------------------------------

    def perform(self, work: HeavyWork) -> None:
        """Change uploads now; run everything else on threads, in the order of its task."""
        match work:
            case Keep():
                self._shards.keep(work)
            case Fold():
                self._give(work.config.task, (work, self._shards.take(work)))
            case Drop():
                self._shards.drop_uploads(work.task, work.session)
                if work.session is None:
                    self._give_alone(LoneJob(work.task, work))
            case Snapshot():
                self._give_alone(LoneJob(work.task, work))
            case Restore() | Step() | GetOffers() | Forget():
                self._give_alone(LoneJob(work.config.task, work))
            case DeleteBlobs():
                if work.blobs:
                    self._give_alone(LoneJob(work.blobs[0].split("/")[0], work))

    def _give_alone(self, job: LoneJob) -> None:
        self._give(job.lane, job)

    def _give(self, lane: str, given: Given) -> None:
        with self._lock:
            self._idle.clear()
            self._order.put(lane, given)
            self._wake(lane)

    async def close(self) -> None:
        """Finish all given work, then stop. Work whose blobs cannot be written has no result."""
        with self._lock:
            self._is_closing = True
            for lane in self._order:
                self._wake(lane)
        for job in list(self._retries):
            self._try_again(job)
        await self.drain()
        with self._lock:
            crews = (self._clear, *self._callers.values())
            for crew in crews:
                crew.stop()
        for crew in crews:
            await crew.ended()

    async def drain(self) -> None:
        """Wait until no work is left, including work that results lead to."""
        while True:
            while not self._order.is_idle:
                await self._idle.wait()
            await asyncio.sleep(0)  # deliver the results that were scheduled before this
            if self._order.is_idle:
                return

    def _deliver_all(self, messages: list[Message]) -> None:
        for message in messages:
            try:
                self._deliver(message)
            except Exception:
                logger.exception("%s could not be delivered", type(message).__name__)

    def _try_later(self, job: LoneJob) -> None:
        delay_s = 0.0 if self._is_closing else retry_delay_s(job.attempts, self._first_retry_s)
        self._retries[job] = self._loop.call_later(delay_s, self._try_again, job)

    def _try_again(self, job: LoneJob) -> None:
        self._retries.pop(job).cancel()
        with self._lock:
            self._order.again(job)
            self._wake(job.lane)

    def _give_folds_back(self, lane: str) -> None:
        """No thread can start for this lane: its updates wait with their clients, as they do for a
        TSA that does not answer.
        """
        with self._lock:
            if self._is_closing:
                return  # see _find_in_the_clear
            given = self._order.take_folds(lane)
            self._wake(lane)  # what was behind them
        for _, upload in given:
            self._shards.release(upload)
        self._deliver_all(
            [
                Folded(work.config.task, work.seq, work.target, work.session, is_unanswered=True)
                for work, _ in given
            ]
        )
        self._become_idle()

    def _become_idle(self) -> None:
        if self._order.is_idle:
            self._idle.set()

    # -- the threads; call all of this with the lock held -------------------------------------

    def _wake(self, lane: str) -> None:
        """Wake threads for the work of this lane that may run now."""
        if self._order.may_start(lane, for_tsa=False):
            self._clear.wake()
        if self._order.may_start(lane, for_tsa=True):
            self._crew_of(lane).wake()
            if self._is_closing:
                self._clear.wake()  # see _find_in_the_clear

    def _crew_of(self, lane: str) -> Crew:
        if lane not in self._callers:
            self._callers = {k: crew for k, crew in self._callers.items() if crew.is_in_use}
            self._callers[lane] = Crew(
                f"papaya-tsa-{lane}",
                self._callers_size if lane == task_of(lane) else 1,  # requests take turns
                partial(self._find_for_tsa, lane),
                self._lock,
                self._loop,
                life_s=TSA_THREAD_LIFE_S,
                first_retry_s=self._first_retry_s,
                on_limit=partial(self._on_limit, lane),
            )
        return self._callers[lane]

    def _on_limit(self, lane: str, attempts: int, why: str | None) -> None:
        task = task_of(lane)
        found = self._threadless.setdefault(task, _Threadless(Trouble("threads", task)))
        if why is None:
            found.lanes.remove(lane)
            if not found.lanes:
                del self._threadless[task]
                found.trouble.ends()
                self._tell_threads(task, found.seq, "")
            return
        found.lanes.add(lane)
        found.trouble.begins(why)
        if attempts >= TOLD_FROM:
            found.is_lasting = True
            found.seq = max(found.seq, self._order.newest_seq(lane))
            self._tell_threads(task, found.seq, _NO_THREAD)
            self._call(self._give_folds_back, lane)

    def _stop_starting(self, task: TaskId) -> None:
        """The task has left. Only requests that wait for a thread still need one: the TSA may have
        to forget the task. A later holder of the task may wait already: for it, the delay is over.
        """
        if (found := self._threadless.pop(task, None)) is not None:
            found.trouble.ends()
            self._tell_threads(task, found.seq, "")
            for lane in found.lanes:
                self._callers.pop(lane).stop()
                self._wake(lane)

    def _tell_threads(self, task: TaskId, seq: int, reason: str) -> None:
        if seq:
            self._call(self._deliver_all, [Delayed(task, seq, reason, "threads")])

    def _find_in_the_clear(self) -> CrewJob | None:
        for lane in self._order:
            if (job := self._take(lane, for_tsa=False)) is not None:
                return job
        if not self._is_closing:
            return None
        # Closing must not wait for a thread that cannot start. No client waits any more, so threads
        # in the clear may call the TSA, if there is nothing else to do.
        for lane in self._order:
            crew = self._callers.get(lane)
            has_threads = crew is not None and crew.size > 0
            if not has_threads and (job := self._take(lane, for_tsa=True)) is not None:
                return job
        return None

    def _find_for_tsa(self, lane: str) -> CrewJob | None:
        return self._take(lane, for_tsa=True)

    def _take(self, lane: str, *, for_tsa: bool) -> CrewJob | None:
        job = self._order.take(lane, for_tsa=for_tsa)
        if job is None:
            return None
        self._wake(lane)  # the next work of this lane may run at the same time
        return partial(self._work, job)

    # -- on the threads -----------------------------------------------------------------------

    def _work(self, job: FoldJob | LoneJob) -> None:
        is_over = True
        try:
            if isinstance(job, FoldJob):
                self._fold(job)
            elif isinstance(job.work, GetOffers):
                self._get_offers(job.work)
            elif isinstance(job.work, Forget):
                self._shards.forget(job.work)
            else:
                is_over = self._work_alone(job)
        except BaseException as error:  # an extension of the servers may call sys.exit
            self._lose(job.task, job.seq, error)
        if not is_over:
            return  # it will be tried again
        with self._lock:
            if isinstance(job, LoneJob) and isinstance(job.work, Drop):
                self._stop_starting(job.task)
            self._order.done(job)
            self._wake(job.lane)
            is_idle = self._order.is_idle
        if is_idle:
            self._call(self._become_idle)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        call_on(self._loop, function, *arguments)

    def _get_offers(self, work: GetOffers) -> None:
        task, manifest = work.config.task, work.config.manifest
        with self._lock:
            found = self._threadless.get(task)
            is_held_up = found is not None and found.is_lasting and task in found.lanes
        if is_held_up:
            # Clients would use the offers for updates that are given back.
            offered = Offered(
                task, work.seq, problem=_NO_THREAD, is_unanswered=True, manifest=manifest
            )
            self._call(self._deliver_all, [offered])
            return
        try:
            offered = self._shards.get_offers(work)
        except Exception as error:
            logger.exception("cannot get offers for %s", task)
            offered = Offered(task, work.seq, problem=_unexpected(error), manifest=manifest)
        self._call(self._deliver_all, [offered])

    def _fold(self, job: FoldJob) -> None:
        if self._is_lost(job.task, job.seq):
            for _, upload in job.given:
                self._shards.release(upload)
            return
        began_at = perf_counter()
        results = self._shards.fold_all(job.given)
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
                    self._order.open(job)
                    self._wake(job.lane)
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
        with self._lock:
            is_over = self._is_closing
            trouble = self._troubles.setdefault(job.task, Trouble("blobs", job.task))
        trouble.begins(f"{type(job.work).__name__.lower()}: {error}")
        self._complain(job, error, "giving up, the server is stopping" if is_over else "will retry")
        if not is_over:
            if job.attempts >= TOLD_FROM:
                self._tell_delay(job)
            self._call(self._try_later, job)
        return not is_over

    def _tell_delay(self, job: LoneJob) -> None:
        """Without details: errors of storage have paths and addresses, and owners of tasks read
        this. The log has them.
        """
        # Only steps and restores read blobs, and they read before they write. Calls to the TSA do
        # not raise OSError.
        done = "written" if job.is_computed else "read"
        with self._lock:
            job.problem = f"blobs of task {job.task} cannot be {done}"
            # The job may be an earlier holder's. The newest one waits for it, until its Restored.
            seq = self._order.newest_seq(job.lane)
        if seq:
            delayed = Delayed(job.task, seq, f"blobs cannot be {done}")
            self._call(self._deliver_all, [delayed])

    def _complain(self, job: LoneJob, error: OSError | OperatorError, then: str) -> None:
        with self._lock:
            self.counters.storage_errors += 1
        kind = type(job.work).__name__
        hint = error.hint if isinstance(error, PapayaError) else "check the disk"
        logger.warning("%s of %s: %s; %s (hint: %s)", kind, job.task, error, then, hint)

    # -- lost work --------------------------------------------------------------------------

    def _is_lost(self, task: TaskId, seq: int) -> bool:
        with self._lock:
            return self._lost.get(task) == seq

    def _lose(self, task: TaskId, seq: int | None, error: BaseException) -> None:
        if isinstance(error, MissingBlob):
            logger.warning("work of %s: %s (hint: %s)", task, error, error.hint)
        else:
            logger.error("work of %s failed unexpectedly", task, exc_info=error)
        if seq is None:
            return  # no harm is done if blobs are not deleted, or the TSA remembers a task
        with self._lock:
            self.counters.lost += 1
            is_known = self._lost.get(task) == seq
            self._lost[task] = seq
        if not is_known:
            reason = str(error) if isinstance(error, MissingBlob) else _unexpected(error)
            self._call(self._deliver_all, [Lost(task, seq, reason)])
