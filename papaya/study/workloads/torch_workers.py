"""Training of a torch task's clients: in this process, in spawned ones, or on a Ray cluster.

Each process has a `ClientTrainer`. Other processes load the task file themselves (shipped_task.py).
Work is sent in shares: examples as bytes, and each model once per share.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import structs

from papaya.errors import PapayaError
from papaya.learning.definition import ClientSGD
from papaya.learning.evaluation import summarize
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.task import LoadedTask
from papaya.learning.torch.compiled_engine import CompiledEngine
from papaya.learning.torch.compiled_gradient import Library
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.processor import CPU
from papaya.sim.draws import Floats
from papaya.sim.jobs import end_with_parent, worker_killed
from papaya.sim.ray_jobs import RayFuture, RayPool, wait_for_one
from papaya.study.workloads.base import Matrix
from papaya.study.workloads.shipped_task import ShippedTask

_Client = TypeVar("_Client")

_SHARES_PER_PROCESS: Final = 4

Way: TypeAlias = Library | torch.device
"""How clients train: with a compiled gradient, or with PyTorch's operators on a processor."""


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

    def __init__(self, loaded: LoadedTask, way: Way = CPU) -> None:
        self._loaded = loaded
        self._way = way
        self._engine = TorchEngine(loaded, CPU if isinstance(way, Library) else way)
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
        if isinstance(self._way, Library):
            return CompiledEngine(loaded, self._way)
        return TorchEngine(loaded, self._way)

    def results(
        self, parameters: Vector, clients: Sequence[JudgedClient], settings: ClientSGD
    ) -> Floats:
        """A row for each client: its mean loss and its mean of each metric over all its examples.
        With these settings, whatever this process has trained with before, or has read in its copy
        of the file. `max_examples` limits training, not judging.
        """
        bounds = self._loaded.task.metric_bounds
        found = np.empty((len(clients), 1 + len(bounds)))
        trains = self._engine.task
        most = max((len(client.examples) for client in clients), default=1)
        judges = structs.replace(settings, max_examples=max(settings.max_examples, most))
        self._engine.task = structs.replace(trains, client=judges)
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


class _Share:
    """Clients that one worker trains or judges, one after the other.

    What they need is read when the share is sent. If that fails, whoever asks for its result hears
    of it.
    """

    def __init__(self, work: Callable[[Any], Any], read: Callable[[], Any]) -> None:
        self._work = work
        self._read = read
        self.future: Future[Any] | RayFuture | None = None  # after it was sent
        self._problem: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self._problem is not None or (self.future is not None and self.future.done())

    def send(self, pool: ProcessPoolExecutor | RayPool) -> None:
        try:
            self.future = pool.submit(self._work, self._read())
        except Exception as problem:
            self._problem = problem

    def result(self) -> Any:
        if self._problem is not None:
            raise self._problem
        assert self.future is not None
        return self.future.result()


class BegunShares:
    """Clients that the workers train."""

    def __init__(self, workers: TrainingWorkers, shares: list[_Share]) -> None:
        self._workers = workers
        self._shares = shares

    def updates(self) -> Matrix:
        return self.result()[0]

    def result(self) -> TrainedClients:
        parts: list[TrainedClients] = self._workers.results_of(self._shares)
        updates = [updates for updates, _ in parts]
        states = [state for _, states in parts for state in states]
        return np.concatenate([*updates, np.empty((0, self._workers.length), FLOAT32)]), states

    def cancel(self) -> None:
        self._workers.drop(self._shares)


class TrainingWorkers:
    """Other processes that train and judge clients. `close` ends them.

    A few shares per process are sent at a time. The others wait here, where they can be dropped and
    need no memory for examples.
    """

    def __init__(self, loaded: LoadedTask, way: Way, processes: int, ray: str | None) -> None:
        self._shipped = ShippedTask.of(loaded)
        self._way = way
        self.length = loaded.manifest.length
        self._pool: ProcessPoolExecutor | RayPool
        self._pipe: tuple[Connection, ...] = ()  # its second end keeps local processes alive
        if ray is not None:
            self._pool = RayPool(ray)
            self.count = self._pool.workers
        else:
            spawn = multiprocessing.get_context("spawn")
            self._pipe = spawn.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(processes, spawn, end_with_parent, self._pipe[:1])
            self.count = processes
        # What trains with these settings, encoded once, because it is sent with each share.
        self._trainings: dict[ClientSGD, Callable[[list[ClientWork]], TrainedClients]] = {}
        self._waiting: deque[_Share] = deque()
        self._sent: list[_Share] = []
        self._has_worked = False

    def parts(self, examples: Sequence[int], together: int) -> list[slice]:
        """Neighbours together, so that they come back in order, and about as many examples each.
        `together`: how many clients, with these, are begun at once.
        """
        if not examples:
            return []
        done = np.cumsum(examples)
        count = min(len(examples), max(1, self._most_sent * len(examples) // together))
        edges = np.searchsorted(done, done[-1] * np.arange(1, count) / count)
        cuts = np.unique(np.concatenate([[0], edges, [len(examples)]])).tolist()
        return [slice(first, last) for first, last in pairwise(cuts)]

    def begin(self, reads: Sequence[Callable[[], list[ClientWork]]], sgd: ClientSGD) -> BegunShares:
        """Train shares of clients, each of which is read when it is sent."""
        if sgd not in self._trainings:
            encoded = msgspec.json.encode(sgd)
            self._trainings[sgd] = partial(_train, self._shipped, self._way, encoded)
        shares = [_Share(self._trainings[sgd], read) for read in reads]
        self._waiting.extend(shares)
        self._send()
        return BegunShares(self, shares)

    def results(
        self, parameters: Vector, clients: list[JudgedClient], settings: ClientSGD
    ) -> Floats:
        """What `ClientTrainer.results` returns. Goes before the training that waits."""
        judge = partial(judged_in_worker, self._shipped, self._way, parameters, settings)
        parts = self.parts([len(client.examples) for client in clients], len(clients))
        shares = [_Share(judge, partial(part_of, clients, part)) for part in parts]
        self._waiting.extendleft(reversed(shares))
        return np.concatenate(self.results_of(shares))

    def results_of(self, shares: list[_Share]) -> list[Any]:
        """In their order. Sends what waits while these are not done."""
        self._send()
        while not all(share.is_done for share in shares):
            wait_for_one([share.future for share in self._sent if share.future is not None])
            self._send()
        try:
            results = [share.result() for share in shares]
        except BrokenProcessPool as error:
            raise worker_killed("--training-processes", self._has_worked) from error
        self._has_worked = True
        return results

    def _send(self) -> None:
        self._sent = [share for share in self._sent if not share.is_done]
        while self._waiting and len(self._sent) < self._most_sent:
            share = self._waiting.popleft()
            share.send(self._pool)
            if not share.is_done:
                self._sent.append(share)

    def drop(self, shares: list[_Share]) -> None:
        """Those that were not sent yet; the others end by themselves."""
        self._waiting = deque(share for share in self._waiting if share not in shares)

    @property
    def _most_sent(self) -> int:
        return self.count * _SHARES_PER_PROCESS

    def close(self, *, at_once: bool = False) -> None:
        """`at_once`: without waiting for what the processes are doing."""
        if at_once:
            self._close_pipe()
        self._pool.shutdown(cancel_futures=True)
        self._close_pipe()

    def _close_pipe(self) -> None:
        for end in self._pipe:
            end.close()


def part_of(clients: list[_Client], part: slice) -> list[_Client]:
    return clients[part]


# -- in a worker ----------------------------------------------------------------------------------


@cache
def _own(shipped: ShippedTask, way: Way) -> ClientTrainer:
    """The trainer of a worker process."""
    return ClientTrainer(shipped.load(), way)


@cache
def _settings(encoded: bytes) -> ClientSGD:
    return msgspec.json.decode(encoded, type=ClientSGD)


def _train(shipped: ShippedTask, way: Way, sgd: bytes, work: list[ClientWork]) -> TrainedClients:
    return _own(shipped, way).train(work, _settings(sgd))


def judged_in_worker(
    shipped: ShippedTask,
    way: Way,
    parameters: Vector,
    settings: ClientSGD,
    clients: list[JudgedClient],
) -> Floats:
    return _own(shipped, way).results(parameters, clients, settings)
