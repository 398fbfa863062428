"""Learning inside the loop: the same machines, with real models and real bytes through them.

A replay (replay.py) relies on the protocol never looking into an update. Here nothing is assumed:
devices download the versions that servers wrote and upload what they trained, sealed if the task is
secure, and the aggregator sums and steps. It is slower than a replay and gives the same model, so
tests use it to check the replay.

Training is late and in batches. When a client is due and its update is missing, it is trained
together with other clients that have downloaded their version, the next due first. Clients that
will drop out or time out, or that are already too stale, are not trained. So most trained clients
are counted. Only the updates and versions of clients in flight are kept in memory.

Refused: several tasks, and an update that the server would refuse. Such an update ends the run, as
it ends a replay: when all clients diverge, no version would ever follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec import structs

from papaya.aggregator.aggregator import Aggregator
from papaya.client.work import Finish, Train
from papaya.config import StopRule, TaskConfig
from papaya.errors import Diverged, InvariantError
from papaya.learning import parameters
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.weighting import admit, clipped, norm
from papaya.messages.base import BlobKey, SessionId
from papaya.messages.storage import ConsumedRow, Row, Transaction, VersionRow, version_key
from papaya.sim.behaviour import Behaviour
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.devices import SimulatedDevice
from papaya.sim.observer import Observer
from papaya.sim.population import Visit
from papaya.sim.storage import Writer
from papaya.study.replay import EVALUATIONS, Curve, Judging, Rates
from papaya.study.trace import MOST_HOURS, Recorder
from papaya.study.workloads.base import Clients, Workload

_BATCH: Final = 64
_STEP_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A client that downloads or trains, and the version that it holds."""

    visit: Visit
    version: int
    key: BlobKey
    encoded: bytes
    ready_s: float
    due_s: float
    is_hopeless: bool


class LearningRun(Behaviour, Observer):
    """A cluster with one task, whose devices train `workload`. `trained` counts clients.

    The task takes its length, its optimizer and its limits from the workload and the rates. At
    most `batch` clients are trained together. `observers` see the run as well.
    """

    def __init__(
        self,
        config: ClusterConfig,
        workload: Workload,
        rates: Rates,
        seed: int,
        *,
        batch: int = _BATCH,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.workload = workload
        self.rates = rates
        self.trained = 0
        self.norms: list[float] = []  # of the updates in versions, before the clip
        self.recorder = Recorder()
        self._batch = batch
        self._in_flight: dict[SessionId, _InFlight] = {}
        self._updates: dict[SessionId, bytes] = {}  # trained, and not uploaded yet
        self._norms_of: dict[SessionId, float] = {}  # of those that may still be counted
        config = _learnable(config, workload, rates)
        self.task = config.tasks[0]
        # The recorder comes first: below, a session that it has forgotten is not counted.
        Cluster(config, seed, observers=[self.recorder, self, *observers], behaviour=self)

    @property
    def version(self) -> int:
        return self.recorder.version

    def parameters(self) -> Vector:
        """Of the newest version."""
        row = self.cluster.state.rows[version_key(self.task.task, self.version)]
        assert isinstance(row, VersionRow)
        return parameters.decode(self.cluster.blobs.get(row.parameters), self.task.model_length)

    def halted_because(self) -> str:
        """Why the task's aggregator has stopped; empty if it has not."""
        machines = (host.machine for host in self.cluster.hosts.values() if host.is_alive)
        held = (m.tasks.get(self.task.task) for m in machines if isinstance(m, Aggregator))
        return next((task.halted_because for task in held if task and task.halted_because), "")

    # -- behaviour --------------------------------------------------------------------------

    def initial(self, task: TaskConfig, seed: int) -> Vector:
        return self.workload.initial(seed)

    def train(self, device: SimulatedDevice, work: Train) -> bytes:
        if work.session not in self._updates:
            self._train_with(work.session)
        encoded = self._updates.pop(work.session)
        update = np.frombuffer(encoded, FLOAT32)
        self._norms_of[work.session] = norm(update)
        if self.rates.clip is not None:
            update = clipped(update, self.rates.clip)
        admit([update.data], update.size, self.rates.clip)
        return encoded if self.rates.clip is None else update.tobytes()

    # -- hooks ------------------------------------------------------------------------------

    def on_assigned(self, device: SimulatedDevice) -> None:
        joined, visit, now = device.machine.joined, device.visit, self.cluster.engine.now
        assert joined is not None
        blob = self.cluster.blobs.blobs.get(joined.parameters)
        if blob is None:
            return  # the download will fail
        ready_s = now + visit.latency_s
        due_s = ready_s + visit.execution_s
        is_hopeless = visit.drops_at is not None or due_s - now > joined.training_timeout_s
        self._in_flight[joined.session] = _InFlight(
            visit, joined.version, joined.parameters, blob.data, ready_s, due_s, is_hopeless
        )

    def on_departed(self, device: SimulatedDevice, finish: Finish | None) -> None:
        joined = device.machine.joined
        if joined is not None:
            self._in_flight.pop(joined.session, None)
            self._updates.pop(joined.session, None)
            if not self.recorder.may_be_counted(joined.session):
                self._norms_of.pop(joined.session, None)

    def on_transaction(
        self, writer: Writer, transaction: Transaction, before: dict[str, Row]
    ) -> None:
        for key, row in transaction.put:
            if isinstance(row, ConsumedRow) and key not in before:
                self.norms += [self._norms_of.pop(member.session) for member in row.members]

    # -- training in batches ----------------------------------------------------------------

    def _train_with(self, session: SessionId) -> None:
        """This client, and those after it that have downloaded and will probably be counted."""
        wanted = self._in_flight.pop(session)
        others = [pair for pair in self._in_flight.items() if self._is_worth_it(pair[1])]
        others.sort(key=lambda pair: pair[1].due_s)
        chosen = [(session, wanted), *others[: self._batch - 1]]
        held = [client for _, client in chosen]
        models = {client.key: client.encoded for client in held}
        rows = {key: row for row, key in enumerate(models)}
        updates = self.workload.train(
            [parameters.decode(data, self.task.model_length) for data in models.values()],
            np.array([rows[client.key] for client in held], np.int64),
            _clients([client.visit for client in held]),
            self.rates.client,
        )
        self.trained += len(chosen)
        for (owner, _), update in zip(chosen, updates, strict=True):
            self._in_flight.pop(owner, None)
            self._updates[owner] = update.tobytes()

    def _is_worth_it(self, client: _InFlight) -> bool:
        is_stale = self.version - client.version > self.task.max_staleness
        return client.ready_s <= self.cluster.engine.now and not client.is_hopeless and not is_stale


def learn_in_loop(
    config: ClusterConfig,
    workload: Workload,
    rates: Rates,
    seed: int,
    *,
    updates: int,
    target: float | None = None,
    evaluations: int = EVALUATIONS,
    hours: float = MOST_HOURS,
) -> Curve:
    """Run until `updates` are counted (rounded up to a version), for at most `hours`, or until
    `target` is reached and kept. Versions are judged as in a replay.
    """
    run = LearningRun(config, workload, rates, seed)
    last = math.ceil(updates / run.task.aggregation_goal)
    judging = Judging(workload, last, evaluations, target)
    with judging.until_diverged():
        for version in judging.due:
            if judging.is_over or not _reach(run, version, 3600 * hours):
                break
            judging.judge(
                run.parameters(),
                version=version,
                seconds=run.cluster.engine.now if version else 0.0,
                updates=run.recorder.counted,
                trips=run.recorder.trips,
            )
    return judging.curve(rates, run.norms)


def _reach(run: LearningRun, version: int, until_s: float) -> bool:
    """Run until the version is there, to the event; False if it is not by then."""
    engine = run.cluster.engine
    while run.version < version and engine.now < until_s:
        slice_s = min(engine.now + _STEP_S, until_s)
        run.cluster.run(slice_s, lambda: run.version >= version)
        if reason := run.halted_because():
            raise Diverged(reason)
    return run.version >= version


def _learnable(config: ClusterConfig, workload: Workload, rates: Rates) -> ClusterConfig:
    """Judging is the workload's, and the end of a run its caller's: not the task's."""
    if len(config.tasks) != 1:
        raise InvariantError(f"one task learns at a time, not {len(config.tasks)}")
    task = structs.replace(
        config.tasks[0],
        model_length=workload.length,
        optimizer=rates.optimizer,
        clip=rates.clip,
        max_examples=rates.client.max_examples,
        staleness=rates.staleness,
        weighting=rates.weighting,
        aggregation=rates.aggregation,
        evaluation=None,
        stop=StopRule(),
    )
    return structs.replace(config, tasks=(task,))


def _clients(visits: list[Visit]) -> Clients:
    columns = zip(*((v.device, v.participation, v.examples) for v in visits), strict=True)
    return Clients(*(np.array(column, np.int64) for column in columns))
