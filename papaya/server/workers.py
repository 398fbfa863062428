"""Threads that carry out an aggregator's heavy work (paper, "Parallel Model Aggregation").

    "placing it into an in-memory queue [...] the ID of the thread performing intermediate
    aggregation is hashed to choose one of the intermediate aggregates"

    loop ── perform(work) ──▶ lanes (papaya/server/work_order.py) ──▶ threads ──▶ shards, blobs
         ◀── deliver(result) ──

A blob that cannot be written is tried again until it can: its result is told only afterwards, and
no thread waits for it meanwhile. A missing blob, and any error that nobody expected, are told as
Lost; what was given for the task before it is restored is then let go, because the machine loads
the task again and asks for those updates once more. The queue needs no bound of its own: the
machine's upload slots are its bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Condition, Lock, Thread
from time import perf_counter
from typing import Protocol

from msgspec import Struct

from papaya.aggregator.masked_sum import Tsa
from papaya.aggregator.shards import Pieces, Shards, UploadChunks
from papaya.aggregator.work import (
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
from papaya.server.buffers import BufferPool as BufferPool
from papaya.server.work_order import FoldJob, LoneJob, WorkOrder

logger = logging.getLogger("papaya.workers")

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0

HeavyWork = GetOffers | Forget | Keep | Fold | Snapshot | Restore | Step | Drop | DeleteBlobs


class BlobStore(Protocol):
    """`put` is durable when it returns, `get` raises MissingBlob. Threads may share it."""

    def put(self, key: BlobKey, data: bytes | Pieces) -> None: ...

    def get(self, key: BlobKey) -> bytes: ...

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
    """What workers need: a shard for each thread, locks, and buffers that go back to their pool."""
    return Shards(threads, kernel=fastest(), lock=Lock, release=pool.give_back, tsa=tsa)


def _unobserved(seconds: float, work: str) -> None:
    """Nobody keeps times."""


class Workers:
    """To be made and called on the event loop, where results are delivered too."""

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
        """`observe` is told, on any thread, how long a fold, snapshot, step or restore took."""
        self.counters = Counters()
        self._observe = observe
        self._shards = shards
        self._blobs = blobs
        self._deliver = deliver
        self._first_retry_s = first_retry_s
        self._loop = asyncio.get_running_loop()
        self._changed = Condition()  # its lock guards everything below, and the counters
        self._lanes = WorkOrder()
        self._again: list[LoneJob] = []
        self._lost: dict[TaskId, int] = {}
        self._is_closing = False
        self._is_stopped = False
        self._retries: dict[LoneJob, asyncio.TimerHandle] = {}  # of the loop alone
        self._idle = asyncio.Event()
        # Offers are asked for beside all other work: nothing waits for them but clients.
        self._offers = ThreadPoolExecutor(1, "papaya-offers")
        self._threads = [
            Thread(target=self._run, args=(i,), name=f"papaya-worker-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queue_length(self) -> int:
        """Complete uploads that wait to be folded."""
        with self._changed:
            return self._lanes.waiting_folds

    # -- on the loop ------------------------------------------------------------------------

    def perform(self, work: HeavyWork) -> None:
        """Uploads change at once; everything else happens on threads, in the order of its task."""
        match work:
            case GetOffers():
                self._offers.submit(self._get_offers, work)
            case Forget():
                self._offers.submit(self._forget, work)
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

    def _get_offers(self, work: GetOffers) -> None:
        try:
            offered = self._shards.get_offers(work)
        except Exception as error:
            logger.exception("offers for %s", work.config.task)
            offered = Offered(work.config.task, work.seq, problem=str(error) or repr(error))
        self._call(self._deliver_all, [offered])

    def _forget(self, work: Forget) -> None:
        try:
            self._shards.forget(work)
        except Exception:
            logger.exception("the TSA and %s, which is over", work.config.task)

    def _give(self, task: TaskId, given: tuple[Fold, UploadChunks] | LoneJob) -> None:
        with self._changed:
            self._idle.clear()
            self._lanes.put(task, given)
            self._changed.notify()

    async def close(self) -> None:
        """Finish what was given, then stop. What cannot be written now is not told."""
        with self._changed:
            self._is_closing = True
        for job in list(self._retries):
            self._try_again(job)
        await self.drain()
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._offers.shutdown(wait=True, cancel_futures=True)
        for thread in self._threads:
            thread.join()  # it has nothing left to do

    async def drain(self) -> None:
        """Until nothing is left to do, and the results have given nothing new."""
        while True:
            while not self._lanes.is_idle:
                await self._idle.wait()
            await asyncio.sleep(0)  # what was told before this is delivered now
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
        with self._changed:
            self._again.append(job)
            self._changed.notify()

    def _become_idle(self) -> None:
        if self._lanes.is_idle:
            self._idle.set()

    # -- on the threads ---------------------------------------------------------------------

    def _run(self, index: int) -> None:
        shard = index % self._shards.count
        while (job := self._next()) is not None:
            if isinstance(job, FoldJob):
                self._fold(job, shard)
                self._done(job)
            elif self._work_alone(job):
                self._done(job)

    def _next(self) -> FoldJob | LoneJob | None:
        with self._changed:
            while not self._is_stopped:
                job = self._again.pop() if self._again else self._lanes.next()
                if job is not None:
                    return job
                self._changed.wait()
        return None

    def _done(self, job: FoldJob | LoneJob) -> None:
        with self._changed:
            self._lanes.done(job)
            self._changed.notify_all()
            is_idle = self._lanes.is_idle
        if is_idle:
            self._call(self._become_idle)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is gone: there is nobody left to tell
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
        refused = sum(folded.refused is not None for folded in results)
        with self._changed:
            self.counters.updates += len(results)
            self.counters.refused += refused
            config = job.given[0][0].config
            self.counters.folded_bytes += (len(results) - refused) * config.model_bytes
        self._observe(perf_counter() - began_at, "fold")
        self._call(self._deliver_all, results)

    def _work_alone(self, job: LoneJob) -> bool:
        """Whether it is done with; if not, it will be tried again."""
        if job.seq is not None and self._is_lost(job.task, job.seq):
            if isinstance(job.work, Snapshot | Step):
                return True
            with self._changed:
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
            if job.result is not None:
                self._call(self._deliver_all, [job.result])
        return True

    def _compute(self, job: LoneJob) -> None:
        """Everything but writing. It may be done again from the start."""
        job.began_at = perf_counter()
        shards, work = self._shards, job.work
        match work:
            case Snapshot():
                cut = shards.cut(work)
                with self._changed:
                    self._lanes.open(job)
                    self._changed.notify_all()
                job.result, job.unwritten = shards.encode(cut)
            case Step():
                job.result, job.unwritten = shards.step(work, self._blobs.get)
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
        """Garbage that stays harms nobody, and the next holder sweeps it."""
        try:
            delete()
        except (OSError, OperatorError) as error:
            self._complain(job, error, "left behind")

    def _write(self, job: LoneJob) -> None:
        key, data = job.unwritten[0]
        self._blobs.put(key, data)
        job.unwritten = job.unwritten[1:]
        pieces = [data] if isinstance(data, bytes) else data
        with self._changed:
            self.counters.written_bytes += sum(memoryview(piece).nbytes for piece in pieces)

    def _count(self, job: LoneJob) -> None:
        took_s = perf_counter() - job.began_at
        if isinstance(job.work, Snapshot | Step | Restore):
            self._observe(took_s, type(job.work).__name__.lower())
        with self._changed:
            if isinstance(job.work, Step):
                self.counters.steps += 1
                self.counters.step_seconds += took_s
            elif isinstance(job.work, Snapshot):
                self.counters.snapshots += 1

    def _will_try_again(self, job: LoneJob, error: OSError | OperatorError) -> bool:
        """Unless the workers close: then it is not told, so nobody believes that it happened."""
        job.attempts += 1
        with self._changed:
            is_over = self._is_closing
        self._complain(job, error, "given up, for the server stops" if is_over else "trying again")
        if not is_over:
            self._call(self._try_later, job)
        return not is_over

    def _complain(self, job: LoneJob, error: OSError | OperatorError, then: str) -> None:
        with self._changed:
            self.counters.storage_errors += 1
        kind = type(job.work).__name__
        hint = error.hint if isinstance(error, PapayaError) else "look at the disk"
        logger.warning("%s of %s: %s; %s (hint: %s)", kind, job.task, error, then, hint)

    # -- what is lost -----------------------------------------------------------------------

    def _is_lost(self, task: TaskId, seq: int) -> bool:
        with self._changed:
            return self._lost.get(task) == seq

    def _lose(self, task: TaskId, seq: int | None, error: Exception) -> None:
        if isinstance(error, MissingBlob):
            logger.warning("work of %s: %s (hint: %s)", task, error, error.hint)
        else:
            logger.error("work of %s failed unexpectedly", task, exc_info=error)
        if seq is None:
            return  # blobs that stay undeleted harm nobody
        with self._changed:
            self.counters.lost += 1
            is_known = self._lost.get(task) == seq
            self._lost[task] = seq
        if not is_known:
            self._call(self._deliver_all, [Lost(task, seq, str(error) or repr(error))])
