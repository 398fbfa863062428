"""A driver, blobs and tasks for the tests of the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from threading import Event, Lock, Thread, enumerate, get_ident
from typing import Any, Literal

import numpy as np

from papaya.aggregator.masked_sum import Tsa
from papaya.aggregator.shards import Pieces, Shards, initial_blobs
from papaya.aggregator.work import Fold, Keep, Snapshot, Snapshotted, Step
from papaya.config import AsyncFL, OptimizerConfig, SecureAggregation, TaskConfig
from papaya.errors import MissingBlob
from papaya.learning.kernels import NUMPY, Kernel
from papaya.learning.parameters import FLOAT32, Tensor, Vector
from papaya.learning.weighting import WeightedSum
from papaya.messages.base import BlobKey, Message, TaskId
from papaya.messages.storage import Member, RecordRow, VersionRow
from papaya.server.buffers import BufferPool
from papaya.server.workers import FreeShards, Workers

LENGTH = 4
CHUNK_BYTES = 8
PATIENCE_S = 120.0


def worker_threads(name: str = "papaya-") -> list[Thread]:
    """The threads of workers whose name begins with `name`."""
    names = ("papaya-worker", "papaya-tsa")
    found = (thread for thread in enumerate() if thread.name.startswith(names))
    return [thread for thread in found if thread.name.startswith(name)]


def a_task(task: TaskId) -> TaskConfig:
    """Its step adds the mean."""
    return TaskConfig(
        task=task,
        concurrency=100,
        model_length=LENGTH,
        regime=AsyncFL(50),
        optimizer=OptimizerConfig(kind="fedavg"),
    )


WORDS, OTHER = a_task("words"), a_task("other")
SECURE = TaskConfig(
    task="next-word",
    concurrency=20,
    model_length=8,
    regime=AsyncFL(aggregation_goal=2),
    clip=1.0,
    secure_aggregation=SecureAggregation(),
)
SNAPSHOT = Snapshot("words", 1, (1,))


class MemoryBlobs:
    """What is put is kept. `failures` are raised by the next puts, one each.

    `block` makes every put, or every get, wait; `blocked` waits until one does.
    """

    def __init__(self, *configs: TaskConfig) -> None:
        self.blobs: dict[BlobKey, bytes] = {}
        self.failures: list[Exception | None] = []
        self._blocked_call = ""
        self._is_blocked = Event()
        self._may_go_on = Event()
        self._lock = Lock()
        self.first: dict[TaskId, list[BlobKey]] = {}
        for config in configs:
            blobs = initial_blobs(config, np.zeros(LENGTH, FLOAT32))
            self.blobs |= dict(blobs)
            self.first[config.task] = [key for key, _ in blobs]

    def block(self, call: Literal["put", "get"]) -> None:
        self._is_blocked.clear()
        self._may_go_on.clear()
        self._blocked_call = call

    def unblock(self) -> None:
        self._blocked_call = ""
        self._may_go_on.set()

    async def blocked(self) -> None:
        assert await asyncio.to_thread(self._is_blocked.wait, PATIENCE_S)

    def _pass(self, call: str) -> None:
        if call == self._blocked_call:
            self._is_blocked.set()
            assert self._may_go_on.wait(PATIENCE_S)

    def put(self, key: BlobKey, data: bytes | Pieces) -> None:
        self._pass("put")
        with self._lock:
            failure = self.failures.pop(0) if self.failures else None
            if failure is not None:
                raise failure
            self.blobs[key] = data if isinstance(data, bytes) else b"".join(data)

    def get(self, key: BlobKey) -> bytes:
        self._pass("get")
        with self._lock:
            if key not in self.blobs:
                raise MissingBlob(f"blob {key} is missing")
            return self.blobs[key]

    def get_part(self, key: BlobKey, start: int, end: int) -> bytes:
        return self.get(key)[start:end]

    def delete(self, key: BlobKey) -> None:
        with self._lock:
            self.blobs.pop(key, None)

    def sweep(self, task: TaskId, below_seq: int, keep: Set[BlobKey]) -> None:
        with self._lock:
            for key in list(self.blobs):
                owner, seq, _ = key.split("/")
                if owner == task and int(seq) < below_seq and key not in keep:
                    del self.blobs[key]


class Driver:
    """Workers with pooled buffers; `told` is what they delivered, on the loop."""

    def __init__(
        self,
        blobs: MemoryBlobs,
        threads: int,
        kernel: Kernel = NUMPY,
        buffers: int = 1000,
        tsa: Tsa | None = None,
    ) -> None:
        self.told: list[Message] = []
        self.blobs = blobs
        self.pool = BufferPool(buffers, CHUNK_BYTES)
        self.times: list[str] = []
        self._loop_thread = get_ident()
        self._news = asyncio.Event()
        shards = Shards(
            threads,
            kernel=kernel,
            lock=Lock,
            take_shard=FreeShards(threads),
            take_place=FreeShards(threads),
            release=self.pool.give_back,
            tsa=tsa,
        )
        self.workers = Workers(
            shards,
            blobs,
            self._deliver,
            threads,
            observe=lambda seconds, work: self.times.append(work),
            first_retry_s=0.001,
        )

    def _deliver(self, message: Message) -> None:
        assert get_ident() == self._loop_thread
        self.told.append(message)
        self._news.set()

    async def until(self, kind: type[Message], count: int = 1) -> None:
        while len(self.of(kind)) < count:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), PATIENCE_S)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]

    def upload(self, task: TaskId, session: str, values: list[float]) -> None:
        data = np.array(values, FLOAT32).tobytes()
        for offset in range(0, len(data), CHUNK_BYTES):
            view = self.pool.take(CHUNK_BYTES)
            assert view is not None
            view[:] = data[offset : offset + CHUNK_BYTES]
            self.workers.perform(Keep(task, session, offset, view, len(data)))  # type: ignore[arg-type]

    def fold(self, config: TaskConfig, session: str, values: list[float], target: int = 1) -> None:
        self.upload(config.task, session, values)
        self.workers.perform(Fold(config, 1, target, session, 1, 0))


def run(
    test: Callable[[Driver], Awaitable[None]],
    blobs: MemoryBlobs,
    threads: int = 1,
    kernel: Kernel = NUMPY,
    buffers: int = 1000,
    tsa: Tsa | None = None,
) -> Driver:
    """Runs the test and closes the workers, whatever happens."""

    async def whole() -> Driver:
        driver = Driver(blobs, threads, kernel, buffers, tsa)
        try:
            await asyncio.wait_for(test(driver), PATIENCE_S)
        finally:
            blobs.unblock()
            await asyncio.wait_for(driver.workers.close(), PATIENCE_S)
        return driver

    return asyncio.run(whole())


def the_sum(blobs: MemoryBlobs, told: Snapshotted) -> list[float]:
    [found] = told.sums
    return list(WeightedSum.decode(blobs.blobs[found.blob], LENGTH).vector)


def record_of(told: Snapshotted) -> RecordRow:
    [found] = told.sums
    members = tuple(Member(session, 0, 0, 1, 0.0) for session in found.sessions)
    return RecordRow(found.target, found.blob, members, found.weight)


def step_of(blobs: MemoryBlobs, told: Snapshotted) -> Step:
    first, optimizer = blobs.first["words"]
    return Step(WORDS, 1, VersionRow(0, first, 0, 0.0), optimizer, record_of(told))


class CountingKernel(Kernel):
    """Notes how many updates share a pass; waits, or raises, when it is told to."""

    name = "counting"

    def __init__(self) -> None:
        self.passes: list[int] = []
        self.failures: list[BaseException] = []
        self.is_waiting, self.may_go_on = Event(), Event()
        self.may_go_on.set()

    def _add(self, total: Tensor, deltas: Sequence[Vector], factors: Sequence[float]) -> None:
        self.is_waiting.set()
        assert self.may_go_on.wait(PATIENCE_S)
        if self.failures:
            raise self.failures.pop()
        self.passes.append(len(deltas))
        for delta, factor in zip(deltas, factors, strict=True):
            total += delta * np.float32(factor)
