"""Training of a torch task's clients: in this process, in spawned ones, or on a Ray cluster.

Each process has a `ClientTrainer`. Other processes load the task file themselves (shipped_task.py).
Work is sent in shares: examples as bytes, and each model once per share.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import structs

from papaya.errors import PapayaError
from papaya.learning.definition import ClientSGD
from papaya.learning.evaluation import summarize
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.task import LoadedTask
from papaya.learning.torch.compiled_engine import CompiledEngine
from papaya.learning.torch.compiled_gradient import Library
from papaya.learning.torch.engine import TorchEngine
from papaya.sim.draws import Floats
from papaya.sim.jobs import worker_killed
from papaya.sim.ray_jobs import RayFuture, RayPool
from papaya.study.workloads.base import Matrix
from papaya.study.workloads.shipped_task import ShippedTask

_Job = TypeVar("_Job", "ClientWork", "JudgedClient")
_Result = TypeVar("_Result")

_SHARES_PER_PROCESS: Final = 4


class ClientWork(NamedTuple):
    """One client's work. Clients of one version share its array, also when they are sent."""

    device: int
    model: Vector
    examples: list[bytes]
    seed: int
    state: bytes = b""


class JudgedClient(NamedTuple):
    """What one client is judged on, and its personal tensors."""

    examples: list[bytes]
    state: bytes


TrainedClients: TypeAlias = tuple[Matrix, list[bytes]]
"""A row of each client's update, and the personal tensors of each."""


class ClientTrainer:
    """The engine of one process, rebuilt when a sweep changes how clients train."""

    def __init__(self, loaded: LoadedTask, library: Library | None = None) -> None:
        self._loaded = loaded
        self._library = library
        self._engine = TorchEngine(loaded)
        self._sgd: ClientSGD | None = None

    @property
    def keeps_state(self) -> bool:
        return self._engine.keeps_state

    def train(self, jobs: Sequence[ClientWork], sgd: ClientSGD) -> TrainedClients:
        if sgd != self._sgd:
            plain = structs.replace(
                self._loaded.task, client=sgd, clip=None, privacy=None, secure_aggregation=None
            )
            self._engine = self._make(replace(self._loaded, task=plain))
            self._sgd = sgd
        if isinstance(self._engine, CompiledEngine) and self._engine.is_compiled:
            with self._blaming((f"device {job.device}", job.examples) for job in jobs):
                return self._engine.train_all(jobs), [b""] * len(jobs)
        updates = np.empty((len(jobs), self._loaded.manifest.length), FLOAT32)
        states = []
        for row, job in zip(updates, jobs, strict=True):
            self._engine.device_state = job.state
            with self._blaming([(f"device {job.device}", job.examples)]):
                update, _ = self._engine.train(job.model, job.examples, job.seed)
            row[:] = np.frombuffer(update, FLOAT32)
            states.append(self._engine.device_state)
        return updates, states

    def _make(self, loaded: LoadedTask) -> TorchEngine:
        if self._library is None:
            return TorchEngine(loaded)
        return CompiledEngine(loaded, self._library)

    def results(
        self, parameters: Vector, clients: Sequence[JudgedClient], settings: ClientSGD
    ) -> Floats:
        """A row for each client: its mean loss, then its mean of each metric. With these settings,
        whatever this process has trained with before, or has read in its copy of the file.
        """
        bounds = self._loaded.task.metric_bounds
        found = np.empty((len(clients), 1 + len(bounds)))
        trains = self._engine.task
        self._engine.task = structs.replace(trains, client=settings)
        try:
            for row, client in enumerate(clients):
                examples, self._engine.device_state = client.examples, client.state
                with self._blaming([(f"judged client {row}", examples)]):
                    sums = self._engine.evaluate(parameters, examples, len(examples))
                share = summarize(np.frombuffer(sums, FLOAT32), metrics=bounds).all
                found[row] = (share.loss, *share.metrics.values())
        finally:
            self._engine.task = trains
        return found

    @contextmanager
    def _blaming(self, clients: Iterable[tuple[str, Sequence[bytes]]]) -> Iterator[None]:
        """The owner's code failed: say where, and on which example if one alone is enough."""
        try:
            yield
        except PapayaError:
            raise
        except Exception as error:
            for whose, examples in clients:
                for number, example in enumerate(examples):
                    self._loaded.try_on([example], f"example {number} of {whose}")
                self._loaded.try_on(examples, f"all {len(examples)} examples of {whose}")
                if self._loaded.task.train is not None:
                    raise self._loaded.loop_failed(error, f"examples of {whose}") from error
            raise


class BegunShares:
    """Clients that the workers train, in shares."""

    def __init__(
        self, workers: TrainingWorkers, shares: Sequence[Future[TrainedClients] | RayFuture]
    ) -> None:
        self._workers = workers
        self._shares = shares

    def updates(self) -> Matrix:
        return self.result()[0]

    def result(self) -> TrainedClients:
        parts = [self._workers.result(share) for share in self._shares]
        updates = [updates for updates, _ in parts]
        states = [state for _, states in parts for state in states]
        return np.concatenate([*updates, np.empty((0, self._workers.length), FLOAT32)]), states

    def cancel(self) -> None:
        if not self._workers.is_broken:
            for share in self._shares:
                share.cancel()


class TrainingWorkers:
    """Other processes that train and judge clients. `close` ends them."""

    def __init__(
        self, loaded: LoadedTask, library: Library | None, processes: int, ray: str | None
    ) -> None:
        self._shipped = ShippedTask.of(loaded)
        self._library = library
        self.length = loaded.manifest.length
        # A process was killed: the pool ends all work, and fails if someone cancels some of it.
        self.is_broken = False
        self._pool: ProcessPoolExecutor | RayPool
        if ray is not None:
            self._pool = RayPool(ray)
            self.count = self._pool.workers
        else:
            self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
            self.count = processes
        # What trains with these settings. A cluster is sent each of them once.
        self._trainings: dict[ClientSGD, Callable[[list[ClientWork]], TrainedClients]] = {}

    def begin(self, work: list[ClientWork], sgd: ClientSGD, together: int) -> BegunShares:
        """`together`: how many clients, with these, are begun at once."""
        if sgd not in self._trainings:
            # Encoded once, because it is sent with each share.
            encoded = msgspec.json.encode(sgd)
            self._trainings[sgd] = partial(_train, self._shipped, self._library, encoded)
        count = self._most_shares * len(work) // max(1, together)
        return BegunShares(self, self._submit(self._trainings[sgd], _shares(work, count)))

    def results(
        self, parameters: Vector, clients: list[JudgedClient], settings: ClientSGD
    ) -> Floats:
        judge = partial(judged_in_worker, self._shipped, self._library, parameters, settings)
        shares = self._submit(judge, _shares(clients, self._most_shares))
        return np.concatenate([self.result(share) for share in shares])

    def _submit(
        self, work: Callable[[list[_Job]], _Result], shares: list[list[_Job]]
    ) -> list[Future[_Result] | RayFuture]:
        with self._noticing_the_killed():
            return [self._pool.submit(work, share) for share in shares]

    def result(self, share: Future[_Result] | RayFuture) -> _Result:
        with self._noticing_the_killed():
            result: _Result = share.result()
        return result

    @contextmanager
    def _noticing_the_killed(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool as error:
            self.is_broken = True
            raise worker_killed("--training-processes") from error

    @property
    def _most_shares(self) -> int:
        return self.count * _SHARES_PER_PROCESS

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _shares(work: list[_Job], count: int) -> list[list[_Job]]:
    """Neighbours together, so that they come back in order, and about as many examples each."""
    if not work:
        return []
    done = np.cumsum([len(job.examples) for job in work])
    count = max(1, min(len(work), count))
    edges = np.searchsorted(done, done[-1] * np.arange(1, count) / count)
    cuts = np.unique(np.concatenate([[0], edges, [len(work)]])).tolist()
    return [work[first:last] for first, last in pairwise(cuts)]


# -- in a worker ----------------------------------------------------------------------------------


@cache
def _own(shipped: ShippedTask, library: Library | None) -> ClientTrainer:
    """The trainer of a worker process."""
    return ClientTrainer(shipped.load(), library)


@cache
def _settings(encoded: bytes) -> ClientSGD:
    return msgspec.json.decode(encoded, type=ClientSGD)


def _train(
    shipped: ShippedTask, library: Library | None, sgd: bytes, work: list[ClientWork]
) -> TrainedClients:
    return _own(shipped, library).train(work, _settings(sgd))


def judged_in_worker(
    shipped: ShippedTask,
    library: Library | None,
    parameters: Vector,
    settings: ClientSGD,
    clients: list[JudgedClient],
) -> Floats:
    return _own(shipped, library).results(parameters, clients, settings)
