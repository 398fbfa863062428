"""Any torch module as a workload: the owner's task file, trained by the engine that devices run.

One module is made and reused for every client. A client's batches are in the order that the engine
draws from its seed, which is hashed from (seed, device, participation); so an update is a function
of the start model and the client, and the same bits in one process or in many.

With `processes` above 1 workers are spawned, or with `ray` work on a cluster; each loads the task
file itself (shipped_task.py). Examples are read here and sent as bytes, so the data source may be
anything.

With a `library` (papaya/learning/torch/compiled_gradient.py) steps use a compiled gradient: the
same bits again in one process or in many, but not those of steps without it.

If the task has personal tensors, each client of the data has its own. They change with each update
that is trained, in the order in which updates are counted, and a judged client is judged with its
own. So an update is a function of the client's earlier ones too.

The task's own clip is left to the replay: a sweep looks at the norms of updates to choose one.

Refused (OperatorError): a source that gives a wrong number of examples, a task file that changed
since it was loaded, and all that the engine refuses; ConfigError: an example on which the owner's
code fails. A client that diverges ends the call.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from types import TracebackType
from typing import Final, Self, TypeVar

import numpy as np
from msgspec import structs

from papaya.errors import OperatorError, PapayaError
from papaya.learning.definition import ClientSGD
from papaya.learning.evaluation import summarize
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.task import LoadedTask
from papaya.learning.torch.compiled_engine import CompiledEngine
from papaya.learning.torch.compiled_gradient import Library
from papaya.learning.torch.engine import TorchEngine
from papaya.sim.draws import Floats, Ints, counters, splitmix64, splitmix64_words
from papaya.sim.ray_jobs import RayPool
from papaya.study.workloads.base import Clients, Matrix, Quality, quality
from papaya.study.workloads.shipped_task import ShippedTask

ExamplesOf = Callable[[int, int], list[bytes]]
"""examples_of(device, n): the device's n examples, always the same ones."""

JudgedOn = Callable[[int], list[bytes]]
"""judged_on(device): the device's examples that are not trained on; at least one."""

_Job = TypeVar("_Job", bound=Sized)

_ORDER: Final = 111  # apart from the quantities of `Population` and of other workloads
_SHARES_PER_PROCESS: Final = 4


class TorchWorkload:
    """A loaded task, its data, and `held_out` clients on which versions are judged.

    They are judged on what `judged_on` gives; without it on the examples they would train on, which
    is fair only if they never train.

    Use it in a `with` statement, or `close` it, when it has processes.
    """

    def __init__(
        self,
        loaded: LoadedTask,
        examples_of: ExamplesOf,
        held_out: Clients,
        *,
        judged_on: JudgedOn | None = None,
        client_of: Callable[[int], int] = int,
        seed: int = 0,
        processes: int = 1,
        ray: str | None = None,
        library: Library | None = None,
    ) -> None:
        """`client_of`: whose data a device has; such devices share personal tensors."""
        self.loaded = loaded
        self.held_out = held_out
        self._examples_of = examples_of
        self._judged_on = judged_on
        self._client_of = client_of
        # The personal tensors of clients that have trained.
        self.device_states: dict[int, bytes] = {}
        self._order = splitmix64(seed, _ORDER)
        self._library = library
        self._trainer = _Trainer(loaded, library)
        self._shipped = ShippedTask.of(loaded) if processes > 1 or ray is not None else None
        self._pool = _pool(processes, ray)
        self._processes = self._pool.workers if isinstance(self._pool, RayPool) else processes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def name(self) -> str:
        return self.loaded.task.name

    @property
    def length(self) -> int:
        return self.loaded.manifest.length

    def initial(self, seed: int) -> Vector:
        """Version 0, of a run in which no client has trained yet."""
        self.device_states = {}
        return self.loaded.initial_parameters(seed=seed)

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        jobs = [
            _Training(device, models[index], self._examples(device, n, sgd.max_examples), seed)
            for index, device, n, seed in zip(
                start.tolist(),
                clients.device.tolist(),
                clients.examples.tolist(),
                self._seeds(clients),
                strict=True,
            )
        ]
        if not self._trainer.keeps_state:
            return self._train(jobs, sgd)[0]
        updates = np.empty((len(jobs), self.length), FLOAT32)
        owners = [self._client_of(job.device) for job in jobs]
        for rows in _in_turn(owners):
            kept = [self.device_states.get(owners[row], b"") for row in rows]
            wave = [replace(jobs[row], state=state) for row, state in zip(rows, kept, strict=True)]
            updates[rows], states = self._train(wave, sgd)
            self.device_states |= zip((owners[row] for row in rows), states, strict=True)
        return updates

    def _train(self, jobs: list[_Training], sgd: ClientSGD) -> tuple[Matrix, list[bytes]]:
        if self._pool is None or self._shipped is None:
            return self._trainer.train(jobs, sgd)
        train = partial(_train, self._shipped, self._library, sgd)
        parts = list(self._pool.map(train, _shares(jobs, self._processes)))
        updates = [updates for updates, _ in parts]
        states = [state for _, states in parts for state in states]
        return np.concatenate([*updates, np.empty((0, self.length), FLOAT32)]), states

    def evaluate(self, parameters: Vector) -> Quality:
        results = self.client_results(parameters)
        losses, *metrics = (quality(column, self.held_out.examples) for column in results.T)
        names = (bounds.name for bounds in self.loaded.task.metric_bounds)
        return structs.replace(losses, metrics=dict(zip(names, metrics, strict=True)))

    def client_results(self, parameters: Vector) -> Floats:
        """A row for each judged client: its mean loss, then its mean of each metric."""
        owners = map(self._client_of, self.held_out.device.tolist())
        states = [self.device_states.get(owner, b"") for owner in owners]
        examples = list(map(_Judged, self._held_out_examples, states))
        client = self.loaded.task.client
        if self._pool is None or self._shipped is None:
            return self._trainer.results(parameters, examples, client)
        judge = partial(_results, self._shipped, self._library, parameters, client)
        parts = self._pool.map(judge, _shares(examples, self._processes))
        return np.concatenate(list(parts))

    @cached_property
    def _held_out_examples(self) -> list[list[bytes]]:
        if self._judged_on is not None:
            return [self._judged_on(device) for device in self.held_out.device.tolist()]
        most = self.loaded.task.client.max_examples
        pairs = zip(self.held_out.device.tolist(), self.held_out.examples.tolist(), strict=True)
        return [self._examples(device, n, most) for device, n in pairs]

    def _examples(self, device: int, n: int, most: int) -> list[bytes]:
        wanted = min(n, most)
        found = self._examples_of(device, wanted)
        if len(found) != wanted:
            raise OperatorError(
                f"the data source gives {len(found)} examples of device {device}, not {wanted}",
                hint="make examples_of(device, n) return n examples: a device's weight is n",
            )
        return found

    def _seeds(self, clients: Clients) -> list[int]:
        of_device = splitmix64_words(np.uint64(self._order), counters(clients.device))
        seeds: list[int] = splitmix64_words(of_device, counters(clients.participation)).tolist()
        return seeds


@dataclass(frozen=True, slots=True)
class _Training:
    """One client's work. Clients of one version share its array, also when they are sent."""

    device: int
    model: Vector
    examples: list[bytes]
    seed: int
    state: bytes = b""

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What one client is judged on, and its personal tensors."""

    examples: list[bytes]
    state: bytes

    def __len__(self) -> int:
        return len(self.examples)


class _Trainer:
    """The engine of one process, rebuilt when a sweep changes how clients train."""

    def __init__(self, loaded: LoadedTask, library: Library | None = None) -> None:
        self._loaded = loaded
        self._library = library
        self._engine = TorchEngine(loaded)
        self._sgd: ClientSGD | None = None

    @property
    def keeps_state(self) -> bool:
        return self._engine.keeps_state

    def train(self, jobs: Sequence[_Training], sgd: ClientSGD) -> tuple[Matrix, list[bytes]]:
        """A row of each client's update, and the personal tensors of each."""
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
        self, parameters: Vector, clients: Sequence[_Judged], settings: ClientSGD
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


def _in_turn(owners: Sequence[int]) -> Iterator[list[int]]:
    """Rows in groups: those of one owner are in different groups, in order."""
    seen: Counter[int] = Counter()
    turns: dict[int, list[int]] = {}
    for row, owner in enumerate(owners):
        turns.setdefault(seen[owner], []).append(row)
        seen[owner] += 1
    yield from turns.values()


def _shares(work: list[_Job], processes: int) -> list[list[_Job]]:
    """Neighbours together, so that they come back in order, and about as many examples each."""
    if not work:
        return []
    done = np.cumsum([len(job) for job in work])
    count = min(len(work), processes * _SHARES_PER_PROCESS)
    edges = np.searchsorted(done, done[-1] * np.arange(1, count) / count)
    cuts = np.unique(np.concatenate([[0], edges, [len(work)]])).tolist()
    return [work[first:last] for first, last in pairwise(cuts)]


def _pool(processes: int, ray: str | None) -> ProcessPoolExecutor | RayPool | None:
    if ray is not None:
        return RayPool(ray)
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, spawn) if processes > 1 else None


@cache
def _own(shipped: ShippedTask, library: Library | None) -> _Trainer:
    """The trainer of a worker process."""
    return _Trainer(shipped.load(), library)


def _train(
    shipped: ShippedTask, library: Library | None, sgd: ClientSGD, jobs: list[_Training]
) -> tuple[Matrix, list[bytes]]:
    return _own(shipped, library).train(jobs, sgd)


def _results(
    shipped: ShippedTask,
    library: Library | None,
    parameters: Vector,
    settings: ClientSGD,
    clients: list[_Judged],
) -> Floats:
    return _own(shipped, library).results(parameters, clients, settings)
