"""Learning along a trace: the sums and steps of the aggregator, with updates that are trained.

The order of members, their weights, their staleness and their start versions are the trace's, the
sum and the step are those of `papaya.learning`: no rule of the protocol is written here again. The
members of one version are trained in one batch, each from the version that it had downloaded, or by
other processes as soon as that version is there (training_ahead.py). A version is forgotten when
the last member that starts from it has trained. A trace that is still
being recorded (followed_trace.py) does not tell which member that is: then versions are kept for as
long as the maximum staleness allows.

Refused: an update that the server would refuse (it would have counted another one instead), so a
run that diverges ends here with what it learnt until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, structs

from papaya.aggregator.private_sum import noised_mean
from papaya.config import (
    Aggregation,
    OptimizerConfig,
    Privacy,
    SecureAggregation,
    Staleness,
    TaskConfig,
    Weighting,
)
from papaya.config.upload_bits import UploadBits
from papaya.errors import Diverged, UpdateRefused
from papaya.learning.aggregation_rules import (
    BufferMembers,
    combined,
    damped,
    shortened,
    takes_members,
)
from papaya.learning.compression import decode_update, encode_update
from papaya.learning.definition import ClientSGD
from papaya.learning.entry_points import load_used
from papaya.learning.kernels import fastest
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import (
    Admitted,
    Contribution,
    WeightedSum,
    admit,
    clipped,
    counted_examples,
)
from papaya.secagg.noise import KEY_BYTES as NOISE_KEY_BYTES
from papaya.sim.draws import Floats, splitmix64
from papaya.study.checkpoint import Checkpoints, LearningState
from papaya.study.followed_trace import FollowedTrace
from papaya.study.masked_words import (
    MaskedClient,
    MaskedRounding,
    masked_rounding,
    mean_in_16_bits,
    parameters_in_16_bits,
)
from papaya.study.precision import RoundingError, measured_updates, rounding_errors
from papaya.study.trace import Trace
from papaya.study.training_ahead import TrainingAhead
from papaya.study.workloads.base import (
    BeginsTraining,
    KeepsDeviceStates,
    Matrix,
    Quality,
    Workload,
)

EVALUATIONS = 200
NORMS_KEPT = 4096
STAYS = 3
_ROUNDING = 0x726F756E64  # sets these random numbers apart from those of workloads
_SURELY = 1 - 1e-6


class Rates(Struct, frozen=True):
    """What a sweep varies along one trace."""

    client: ClientSGD
    optimizer: OptimizerConfig = OptimizerConfig()
    clip: float | None = None
    staleness: Staleness = Staleness()
    weighting: Weighting = Weighting()
    aggregation: Aggregation = Aggregation()
    privacy: Privacy | None = None
    upload_bits: UploadBits = 32
    masked: bool = False
    """Is the task secure? It matters for words of fewer than 32 bits only."""

    def task(self, recorded: TaskConfig) -> TaskConfig:
        """A recorded task, with these settings. A device reports what it has trained on, and the
        server counts no more than the task allows.
        """
        return structs.replace(
            recorded,
            max_examples=min(self.client.max_examples, recorded.max_examples),
            clip=self.clip,
            max_participations=None if self.privacy else recorded.max_participations,
            optimizer=self.optimizer,
            staleness=self.staleness,
            weighting=self.weighting,
            aggregation=self.aggregation,
            privacy=self.privacy,
            requirements=structs.replace(recorded.requirements, upload_bits=self.upload_bits),
            secure_aggregation=SecureAggregation()
            if self.masked and self.upload_bits != 32
            else None,
        )


class Point(Struct, frozen=True):
    """A judged version."""

    version: int
    hours: float
    updates: int
    trips: int
    quality: Quality


class Curve(Struct, frozen=True):
    """How a model got better. `diverged` says why learning ended early, if it did.

    `norms` are the L2 norms of the first client updates. `rounding`: what fewer bits would make of
    the updates in version 1, by the number of bits. `masked`: what masked words of 16 bits would.
    """

    workload: str
    rates: Rates
    points: tuple[Point, ...]
    norms: tuple[float, ...]
    diverged: str | None = None
    rounding: dict[int, RoundingError] = {}
    masked: MaskedRounding | None = None

    def reached(self, loss: float) -> Point | None:
        """The first judged version whose loss for all clients is at most this, and stays there
        on average over the next: a single lucky version does not count.
        """
        losses = np.array([point.quality.all for point in self.points])
        for index in range(len(losses) - STAYS + 1):
            if losses[index] <= loss and losses[index : index + STAYS].mean() <= loss:
                return self.points[index]
        return None


class Judging:
    """Judges version 0, the last, and `evaluations` versions in between, as they come.

    It ends early when `target` is reached and kept, when the target can no longer be reached by
    the deadline, or when a loss is not finite.
    """

    def __init__(
        self,
        workload: Workload,
        last: int,
        evaluations: int,
        target: float | None,
        deadline_h: float = math.inf,
    ) -> None:
        count = min(last, evaluations)
        self.due: list[int] = np.rint(np.linspace(0, last, count + 1)).astype(int).tolist()
        self.points: list[Point] = []
        self.parameters: Vector | None = None  # of the last point
        self.diverged: str | None = None
        self._workload = workload
        self._target = target
        self._deadline_h = deadline_h
        self._streak = 0

    @property
    def is_over(self) -> bool:
        return self.diverged is not None or self._streak > STAYS or self._is_too_late

    @property
    def _is_too_late(self) -> bool:
        """The newest point is past the deadline, and neither it nor the one before it meets the
        target. So no later point can show that it was reached in time (`Curve.reached`).
        """
        if self._target is None or not self.points or self.points[-1].hours <= self._deadline_h:
            return False
        return all(point.quality.all > self._target for point in self.points[1 - STAYS :])

    def judge(
        self, parameters: Vector, *, version: int, seconds: float, updates: int, trips: int
    ) -> None:
        quality = self._workload.evaluate(parameters)
        if not quality.is_finite:
            self.diverged = f"the loss of version {version} is not finite"
            return
        self.points.append(Point(version, seconds / 3600, updates, trips, quality))
        self.parameters = parameters
        is_there = self._target is not None and quality.all <= self._target
        self._streak = self._streak + 1 if is_there else 0

    @contextmanager
    def until_diverged(self) -> Iterator[None]:
        """What a client or a server refuses because of its numbers ends learning, not the program.

        A configuration that cannot be trained, or data that is not there, is another matter.
        """
        try:
            yield
        except (Diverged, UpdateRefused) as error:
            self.diverged = str(error)

    @property
    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        model = b"" if self.parameters is None else self.parameters.tobytes()
        points = msgspec.to_builtins(self.points)
        return {"points": points, "parameters": model, "streak": self._streak}

    def restore(self, state: dict[str, Any]) -> None:
        self.points = msgspec.convert(state["points"], list[Point])
        self.parameters = np.frombuffer(state["parameters"], FLOAT32).copy()
        self._streak = state["streak"]

    def curve(self, rates: Rates, norms: list[float]) -> Curve:
        points = tuple(self.points)
        return Curve(self._workload.name, rates, points, tuple(norms[:NORMS_KEPT]), self.diverged)


def learn(
    trace: Trace | FollowedTrace,
    workload: Workload,
    rates: Rates,
    *,
    target: float | None = None,
    deadline_h: float = math.inf,
    evaluations: int = EVALUATIONS,
    until: int | None = None,
    progress: Callable[[int, int], None] = lambda trained, judged: None,
    judged: Callable[[int, Vector], None] | None = None,
    checkpoints: Checkpoints | None = None,
    resumed: Callable[[int, int], None] = lambda trained, judged: None,
    rounding: bool = True,
) -> Curve:
    """Replay the trace to its end, or until version `until`, or until `target` is reached and
    kept, or until it is certain that the target is not reached within `deadline_h` hours.

    Judged are version 0, the last, and `evaluations` versions in between; `judged` is called with
    each of them. `progress` is called with the numbers of clients that are trained and of versions
    that are judged. With `checkpoints`, learning continues after the version that was kept last:
    `judged` is called with the last version that was judged before, and `resumed` with the numbers
    before.
    """
    last = trace.versions if until is None else min(until, trace.versions)
    judging = Judging(workload, last, evaluations, target, deadline_h)
    due = frozenset(judging.due)
    learner = _Learner(trace, workload, rates, last, rounding)
    if checkpoints is not None and (found := checkpoints.load()) is not None:
        learner.restore(found)
        judging.restore(found.judging)
        if judged is not None and judging.parameters is not None:
            judged(judging.points[-1].version, judging.parameters)
        resumed(int(trace.until(found.version).first[found.version + 1]), len(judging.points))
    with judging.until_diverged(), closing(learner.versions()) as versions:
        for version, parameters in versions:
            known = trace.until(version)
            trained = int(known.first[version + 1])
            progress(trained, len(judging.points))
            if version in due:
                judging.judge(
                    parameters,
                    version=version,
                    seconds=float(known.created_s[version]),
                    updates=trained,
                    trips=int(known.trips[version]),
                )
                progress(trained, len(judging.points))
                if judged is not None and judging.diverged is None:
                    judged(version, parameters)
            if judging.is_over:
                break
            if checkpoints is not None and version < last:
                checkpoints.save_if_due(lambda: learner.state(judging))
    curve = judging.curve(rates, learner.norms)
    return structs.replace(curve, rounding=learner.rounding, masked=learner.masked)


class _Learner:
    """The server's side of learning: every version in turn, from version 0 on."""

    def __init__(
        self,
        trace: Trace | FollowedTrace,
        workload: Workload,
        rates: Rates,
        last: int,
        is_rounding_wanted: bool,
    ) -> None:
        self.norms: list[float] = []
        self.rounding: dict[int, RoundingError] = {}
        self.masked: MaskedRounding | None = None
        self._trace = trace
        self._workload = workload
        self._rates = rates
        self._last = last
        self._is_rounding_wanted = is_rounding_wanted
        self._task = rates.task(trace.task)
        load_used(self._task)
        self._optimizer = server_optimizer(rates.optimizer)
        self._state = self._optimizer.initial_state(workload.length)
        # Versions from which clients still train, and the newest one.
        self._models: dict[int, Vector] = {}
        self._version = -1

    def versions(self) -> Generator[tuple[int, Vector], None, None]:
        """Those that were not yet made."""
        if self._version < 0:
            self._version, self._models = 0, {0: self._workload.initial(self._trace.seed)}
            yield 0, self._models[0]
        last_use = _last_use(self._trace, self._last) if isinstance(self._trace, Trace) else None
        ahead = self._training_ahead()
        try:
            for version in range(self._version + 1, self._last + 1):
                trace = self._trace.until(version)
                updates = self._updates(trace, version, ahead)
                if version == 1 and self._is_rounding_wanted:
                    self._measure_rounding(trace, updates)
                step = _step(trace, self._task, version, updates, self.norms)
                parameters, self._state = self._optimizer.step(
                    self._models[version - 1], step, self._state
                )
                self._version, self._models[version] = version, parameters
                for old in self._unused(version, last_use):
                    self._models.pop(old, None)
                yield version, parameters
        finally:
            if ahead is not None:
                ahead.cancel()

    def _training_ahead(self) -> TrainingAhead | None:
        workload = self._workload
        if not isinstance(workload, BeginsTraining) or not workload.workers:
            return None
        return TrainingAhead(workload, self._rates.client, self._last, self._trace.task.concurrency)

    def _updates(self, trace: Trace, version: int, ahead: TrainingAhead | None) -> Matrix:
        """Those of the version's members."""
        if ahead is not None:
            ahead.begin(trace, self._models, version - 1)
            return ahead.updates(trace, version)
        members = trace.members(version)
        starts, index = np.unique(trace.start[members], return_inverse=True)
        chosen = [self._models[start] for start in starts.tolist()]
        return self._workload.train(chosen, index, trace.clients.take(members), self._rates.client)

    def _measure_rounding(self, trace: Trace, updates: Matrix) -> None:
        """Of the first updates of version 1."""
        self.rounding = rounding_errors(updates, self._task.clip)
        if self.rounding:  # otherwise they are not finite, or zero
            count = measured_updates(updates.shape[1])
            clients = _clients(trace, self._task, 1, updates)[:count]
            norms = np.sqrt(np.einsum("ij,ij->i", updates, updates, dtype=np.float64))
            self.masked = masked_rounding(self._task, clients, norms.tolist())

    def _unused(self, version: int, last_use: dict[int, list[int]] | None) -> list[int]:
        """Versions from which no client trains after this one."""
        if last_use is not None:
            return last_use.get(version, [])
        oldest = version - self._trace.task.max_staleness
        return [old for old in self._models if old < oldest]

    def state(self, judging: Judging) -> LearningState:
        return LearningState(
            version=self._version,
            models={version: model.tobytes() for version, model in self._models.items()},
            optimizer=self._optimizer.encode_state(self._state),
            norms=self.norms,
            rounding=self.rounding,
            masked=self.masked,
            judging=judging.state,
            device_states=self._workload.device_states
            if isinstance(self._workload, KeepsDeviceStates)
            else {},
        )

    def restore(self, found: LearningState) -> None:
        self._version, self.norms = found.version, list(found.norms)
        self.rounding, self.masked = found.rounding, found.masked
        if isinstance(self._workload, KeepsDeviceStates):
            self._workload.device_states = dict(found.device_states)
        self._models = {
            version: np.frombuffer(model, FLOAT32).copy() for version, model in found.models.items()
        }
        self._state = self._optimizer.decode_state(found.optimizer, self._workload.length)


def _step(
    trace: Trace, task: TaskConfig, version: int, updates: Matrix, norms: list[float]
) -> Vector:
    """What the server optimizer gets: the members of the version, combined by the task's rule."""
    members = trace.members(version)
    weights = [counted_examples(task, n) for n in trace.clients.examples[members].tolist()]
    lengths = np.sqrt(np.einsum("ij,ij->i", updates, updates, dtype=np.float64))
    norms += lengths[: max(0, NORMS_KEPT - len(norms))].tolist()
    if task.is_secure:
        return _masked_mean(trace, task, version, updates, lengths)
    if task.upload_bits != 32:
        updates = _rounded(trace, task, version, updates)
        lengths = np.sqrt(np.einsum("ij,ij->i", updates, updates, dtype=np.float64))
    given = [
        Contribution(shortened(update, task.aggregation), n, staleness, task.staleness)
        for update, n, staleness in zip(
            _admitted(updates, lengths, task.clip),
            weights,
            trace.staleness[members].tolist(),
            strict=True,
        )
    ]
    if takes_members(task):
        matrix = np.stack([damped(each) for each in given])
        return combined(task.aggregation, BufferMembers.of_matrix(weights, matrix))
    total = WeightedSum.zero(updates.shape[1])
    total.add_all(given, fastest())
    if task.privacy is None:
        return total.mean()
    key = sha256(f"noise/{trace.seed}/{version}".encode()).digest()[:NOISE_KEY_BYTES]
    return noised_mean(task, total, len(given), key)


def _masked_mean(
    trace: Trace, task: TaskConfig, version: int, updates: Matrix, lengths: Floats
) -> Vector:
    """What the server unmasks of the updates that devices clip and mask in words of 16 bits."""
    assert task.clip is not None
    _admitted(updates, lengths, task.clip)  # refuses what is not finite
    clients = [
        structs.replace(client, update=clipped(client.update, task.clip))
        for client in _clients(trace, task, version, updates)
    ]
    return mean_in_16_bits(parameters_in_16_bits(task, updates.shape[1]), clients)


def _clients(trace: Trace, task: TaskConfig, version: int, updates: Matrix) -> list[MaskedClient]:
    members = trace.members(version)
    examples = trace.clients.examples[members].tolist()
    staleness = trace.staleness[members].tolist()
    seeds = _rounding_seeds(trace, version)
    rows = zip(updates, examples, staleness, seeds, strict=True)
    return [MaskedClient(u, min(n, task.max_examples), s, seed) for u, n, s, seed in rows]


def _rounding_seeds(trace: Trace, version: int) -> list[int]:
    clients = trace.clients.take(trace.members(version))
    pairs = zip(clients.device.tolist(), clients.participation.tolist(), strict=True)
    seed = trace.seed ^ _ROUNDING
    return [splitmix64(splitmix64(seed, device), visit) for device, visit in pairs]


def _rounded(trace: Trace, task: TaskConfig, version: int, updates: Matrix) -> Matrix:
    """What the server reads of the updates that devices clip and upload in fewer bits."""
    rounded = np.empty_like(updates)
    for row, seed in enumerate(_rounding_seeds(trace, version)):
        update = updates[row] if task.clip is None else clipped(updates[row], task.clip)
        encoded = encode_update(update, task.upload_bits, seed, task.clip)
        rounded[row] = decode_update([encoded], update.size, task.upload_bits)
    return rounded


def _admitted(updates: Matrix, lengths: Floats, clip: float | None) -> list[Admitted]:
    """What the server makes of what the devices clip.

    Whether `admit` takes an update depends on its norm alone: of those that are surely not
    clipped, the longest stands for all.
    """
    is_short = lengths < math.inf if clip is None else lengths < clip * _SURELY
    admitted = [Admitted([row], 1.0) for row in updates]
    looked_at = np.flatnonzero(~is_short).tolist()
    if is_short.any():
        looked_at.append(int(np.argmax(np.where(is_short, lengths, -1.0))))
    for row in looked_at:
        update = updates[row] if clip is None else clipped(updates[row], clip)
        admitted[row] = admit([update.data], update.size, clip)
    return admitted


def _last_use(trace: Trace, last: int) -> dict[int, list[int]]:
    """version -> versions from which no client trains after it, so that they can be forgotten.

    The newest version is always needed for the next step; it is never listed under itself.
    """
    final: dict[int, int] = {version: version + 1 for version in range(last)}
    for version in range(1, last + 1):
        for start in np.unique(trace.start[trace.members(version)]).tolist():
            final[start] = max(final[start], version)
    found: dict[int, list[int]] = {}
    for start, version in final.items():
        found.setdefault(version, []).append(start)
    return found
