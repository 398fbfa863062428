"""Any torch module as a workload: the owner's task file, trained by the engine that devices run.

One module is made and reused for every client. A client's batches are in the order that the engine
draws from its seed, which is hashed from (seed, device, participation); so an update is a function
of the start model and the client, and the same bits in one process or in many.

With `processes` above 1, or with `ray`, other processes train the clients (torch_workers.py).
Examples are read here and sent as bytes, so the data source may be anything.

`way` is a compiled gradient (papaya/learning/torch/compiled_gradient.py) or a processor. With a
compiled gradient, bits are the same in one process or in many, but not those of steps without it. A
GPU may round differently each time.

If the task has personal tensors, each client of the data has its own. They change with each update
that is trained, in the order in which updates are counted, and a judged client is judged with its
own. So an update is a function of the client's earlier ones too.

The task's own clip is left to the replay: a sweep looks at the norms of updates to choose one.

Refused (OperatorError): a source that gives a wrong number of examples, a task file that changed
since it was loaded, and all that the engine refuses; ConfigError: an example on which the owner's
code fails. A client that diverges ends the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from types import TracebackType
from typing import Final, Self

import numpy as np
from msgspec import structs

from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.task import LoadedTask
from papaya.learning.torch.processor import CPU
from papaya.sim.draws import Floats, Ints, counters, splitmix64, splitmix64_words
from papaya.study.workloads.base import Clients, Matrix, MeansByVolume, Quality, quality
from papaya.study.workloads.torch_workers import (
    BegunShares,
    ClientTrainer,
    ClientWork,
    JudgedClient,
    TrainedClients,
    TrainingWorkers,
    Way,
    part_of,
)

ExamplesOf = Callable[[int, int], list[bytes]]
"""examples_of(device, n): the device's n examples, always the same ones."""

JudgedOn = Callable[[int], list[bytes]]
"""judged_on(device): the device's examples that are not trained on; at least one."""

_ORDER: Final = 111  # apart from the quantities of `Population` and of other workloads


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
        way: Way = CPU,
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
        self._trainer = ClientTrainer(loaded, way)
        self._workers = (
            TrainingWorkers(loaded, way, processes, ray)
            if processes > 1 or ray is not None
            else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(at_once=error is not None)

    def close(self, *, at_once: bool = False) -> None:
        """End the worker processes. `at_once`: without waiting for what they are doing."""
        if self._workers is not None:
            self._workers.close(at_once=at_once)

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

    @property
    def workers(self) -> int:
        """0 if clients keep personal tensors: these change in the order of the versions."""
        return 0 if self._workers is None or self._trainer.keeps_state else self._workers.count

    def begin(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD, together: int
    ) -> BegunShares:
        assert self._workers is not None
        examples = np.minimum(clients.examples, sgd.max_examples).tolist()
        reads = [
            partial(self._work, models, start[part], clients.take(part), sgd)
            for part in self._workers.parts(examples, together)
        ]
        return self._workers.begin(reads, sgd)

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        work = self._work(models, start, clients, sgd)
        if not self._trainer.keeps_state:
            return self._train(work, sgd)[0]
        updates = np.empty((len(work), self.length), FLOAT32)
        owners = [self._client_of(client.device) for client in work]
        for rows in _in_turn(owners):
            kept = [self.device_states.get(owners[row], b"") for row in rows]
            wave = [work[row]._replace(state=state) for row, state in zip(rows, kept, strict=True)]
            updates[rows], states = self._train(wave, sgd)
            self.device_states |= zip((owners[row] for row in rows), states, strict=True)
        return updates

    def _work(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> list[ClientWork]:
        return [
            ClientWork(device, models[index], self._examples(device, n, sgd.max_examples), seed)
            for index, device, n, seed in zip(
                start.tolist(),
                clients.device.tolist(),
                clients.examples.tolist(),
                self._seeds(clients),
                strict=True,
            )
        ]

    def _train(self, work: list[ClientWork], sgd: ClientSGD) -> TrainedClients:
        if self._workers is None:
            return self._trainer.train(work, sgd)
        parts = self._workers.parts([len(client.examples) for client in work], len(work))
        return self._workers.begin([partial(part_of, work, part) for part in parts], sgd).result()

    def evaluate(self, parameters: Vector) -> Quality:
        results = self.client_results(parameters)
        losses, *metrics = (quality(column, self.held_out.examples) for column in results.T)
        means = (MeansByVolume(m.all, m.p75, m.p99, m.all_by_clients) for m in metrics)
        names = (bounds.name for bounds in self.loaded.task.metric_bounds)
        return structs.replace(losses, metrics=dict(zip(names, means, strict=True)))

    def client_results(self, parameters: Vector) -> Floats:
        """A row for each judged client: its mean loss, then its mean of each metric."""
        owners = map(self._client_of, self.held_out.device.tolist())
        states = [self.device_states.get(owner, b"") for owner in owners]
        examples = list(map(JudgedClient, self._held_out_examples, states))
        client = self.loaded.task.client
        judge = self._trainer if self._workers is None else self._workers
        return judge.results(parameters, examples, client)

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


def _in_turn(owners: Sequence[int]) -> Iterator[list[int]]:
    """Rows in groups: those of one owner are in different groups, in order."""
    seen: Counter[int] = Counter()
    turns: dict[int, list[int]] = {}
    for row, owner in enumerate(owners):
        turns.setdefault(seen[owner], []).append(row)
        seen[owner] += 1
    yield from turns.values()
