"""The swarm: random clusters under random faults, first for safety, then healed for liveness.

One seed picks everything: the cluster's shape, its tasks, the fleet, the faults and their times. A
failure is a seed; the same seed gives the same trace hash in any process. `plant` breaks one rule
on purpose, to show that the swarm would notice.
"""

from __future__ import annotations

import traceback
from array import array
from contextlib import nullcontext
from math import nan
from pathlib import PurePath
from random import Random

from msgspec import Struct, structs

from papaya.aggregator.sessions import ticket_life_s
from papaya.aggregator.upload import needed_bytes
from papaya.client.work import Seal, Sealed, Train
from papaya.config import (
    Aggregation,
    AsyncFL,
    DeviceConfig,
    OptimizerConfig,
    Privacy,
    Requirements,
    SecureAggregation,
    ServerConfig,
    SyncFL,
    TaskConfig,
    Weighting,
)
from papaya.config.privacy import PrivateWeighting
from papaya.config.upload_bits import UploadBits
from papaya.errors import PapayaError
from papaya.messages.base import SessionId
from papaya.messages.selection import Capabilities
from papaya.sim.behaviour import EncodedMessages
from papaya.sim.bugs import planted
from papaya.sim.checkers import Auditor
from papaya.sim.cluster import Cluster, ClusterConfig, DeviceKind
from papaya.sim.devices import SimulatedDevice
from papaya.sim.evaluations import EvaluationOwner, evaluation_upload_bytes
from papaya.sim.faults import Faults, Hostile
from papaya.sim.maintenance import MaintenanceOperator
from papaya.sim.network import NetworkConfig
from papaya.sim.population import PopulationConfig
from papaya.sim.revisions import STALENESS_FUNCTIONS, RevisionOwner, RolloutOwner, signed
from papaya.sim.storage import StorageConfig

_LABELS = ("red", "green", "blue")
_NEW_VERSIONS = 2
_MAX_EVENTS = 3_000_000
_OPERATED_EVERY, _OPERATED = 10, 7  # seeds 7, 17, 27, …
_OPEN_BUFFERS = 2
_SMALL_FLEET = 100
_CLIP = 64.0
_WITH_METHODS = 7  # seeds that end in it: the others keep their traces
_WITH_DIRECT_UPLOADS = 8  # seeds that end in it
_WITH_16_BITS = 3
_WITH_FEWER_BITS = 1
_CAP = 5  # at most the least max_examples of a revision
"""Above the norm of every update that a simulated device makes."""


class SwarmResult(Struct, frozen=True):
    """`failure` is None for a seed that kept every promise."""

    seed: int
    trace_hash: str
    events: int
    virtual_s: float
    versions: int
    failure: str | None
    configuration: str
    evaluations: int = 0
    """Evaluations that have a result."""


class SwarmBehaviour(EncodedMessages):
    """Devices that diverge and devices that lie, chosen by their session."""

    def train(self, device: SimulatedDevice, work: Train) -> bytes:
        """One device in sixteen has diverged: its update must be refused, or not leave it."""
        update = super().train(device, work)
        is_diverged = work.session[0] == "0"
        return array("f", [nan] * (len(update) // 4)).tobytes() if is_diverged else update

    def seal(self, device: SimulatedDevice, work: Seal, rng: Random) -> Sealed:
        done = super().seal(device, work, rng)
        assert device.machine.joined is not None
        if _lies(device.machine.joined.session):
            return Sealed(done.update[::-1], done.sealed)
        return done


def _lies(session: SessionId) -> bool:
    """One device in 256 sends a vector that its seed does not unmask."""
    return session[:2] == "11"


def run_seed(seed: int, plant: str | None = None) -> SwarmResult:
    """Run one seed to its end or to the first broken promise. Raises nothing."""
    rng = Random(f"swarm/{seed}")
    config = random_cluster(rng)
    if Random(f"folds/{seed}").random() < 0.125:
        config = _with_overtaking_folds(config)
    if seed % 10 == _WITH_DIRECT_UPLOADS:
        config = structs.replace(config, direct_uploads=True)
    config = _with_privacy(config, Random(f"privacy/{seed}"))
    if seed % 10 in (_WITH_16_BITS, _WITH_FEWER_BITS):
        config = _with_fewer_bits(config, are_masked=seed % 10 == _WITH_16_BITS)
    if seed % 10 == _WITH_METHODS:
        config = _with_methods(config, Random(f"methods/{seed}"))
    evaluations = Random(f"evaluations/{seed}")
    evaluates = evaluations.random() < 0.5 and any(task.privacy is None for task in config.tasks)
    if evaluates:
        config = _with_room_for_evaluations(config)
    revisions = Random(f"revisions/{seed}")
    # Rollouts and maintenance have seeds of their own, so that they do not hide what others show.
    is_operated = seed % _OPERATED_EVERY == _OPERATED
    if is_operated:
        config = structs.replace(config, is_identified=True)
    revises = revisions.random() < 0.5 or is_operated
    if revises:
        config = structs.replace(config, tasks=tuple(signed(task, 0) for task in config.tasks))
    operations = Random(f"operations/{seed}")
    auditor, hostile = Auditor(_lies), Hostile()
    cluster = Cluster(config, seed, observers=(auditor, hostile), behaviour=SwarmBehaviour())
    failure = None
    with planted(plant) if plant is not None else nullcontext():
        try:
            if evaluates:
                EvaluationOwner(cluster, evaluations)
            if revises:
                RevisionOwner(cluster, revisions, _faults_until(config))
            if is_operated:
                RolloutOwner(cluster, operations, _faults_until(config))
                MaintenanceOperator(cluster, operations, _faults_until(config))
            _run(cluster, auditor, hostile, rng, evaluates=evaluates)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = next(frame for frame in reversed(frames) if frame.name != "demand")
            failure = (
                f"{type(error).__name__} at {cluster.engine.now:.3f} s: {error} "
                f"({PurePath(where.filename).name}:{where.lineno})"
            )
    return SwarmResult(
        seed=seed,
        trace_hash=auditor.trace_hash,
        events=cluster.engine.events,
        virtual_s=cluster.engine.now,
        versions=sum(books.version for books in auditor.books.values()),
        failure=failure,
        configuration=_describe(config),
        evaluations=auditor.evaluations,
    )


def _run(
    cluster: Cluster, auditor: Auditor, hostile: Hostile, rng: Random, *, evaluates: bool
) -> None:
    heartbeat_s = cluster.config.server.heartbeat_s
    faults_until = _faults_until(cluster.config)
    Faults(cluster, rng, faults_until, mean_gap_s=rng.choice((1, 3, 8)) * heartbeat_s)
    hostile.start(rng, faults_until)
    cluster.run(faults_until)
    _check_liveness(auditor, evaluates=evaluates)
    auditor.check_acknowledged()


def _faults_until(config: ClusterConfig) -> float:
    return 60 * config.server.heartbeat_s


def _check_liveness(auditor: Auditor, *, evaluates: bool) -> None:
    """After faults stop, every task reaches new versions within a bounded virtual time, clients
    hear that they were counted, and an evaluation gets its result.
    """
    cluster = auditor.cluster
    healed_at = cluster.engine.now
    counted = auditor.endings.get("counted", 0)
    results = auditor.evaluations + 1 if evaluates else 0
    tasks = [task.task for task in cluster.config.tasks]
    goals = {task: auditor.books[task].steps + _NEW_VERSIONS for task in tasks}

    def all_live() -> bool:
        if cluster.engine.events > _MAX_EVENTS:
            raise PapayaError(
                f"the run did not end after {_MAX_EVENTS} events; probably an endless loop"
            )
        heard = auditor.endings.get("counted", 0) > counted
        if not heard or auditor.evaluations < results:
            return False
        return all(auditor.books[t].steps >= goal for t, goal in goals.items())

    current = [auditor.books[task] for task in tasks]
    terms = tuple(config for books in current for config in books.terms.values())
    cluster.run(healed_at + liveness_bound_s(cluster.config.server, terms), all_live)
    if auditor.endings.get("counted", 0) == counted:
        raise PapayaError("after the faults stopped, no client was told that its update counts")
    if auditor.evaluations < results:
        raise PapayaError("after the faults stopped, no evaluation got a result")
    for task, goal in goals.items():
        if auditor.books[task].steps < goal:
            raise PapayaError(
                f"task {task} made {_NEW_VERSIONS - goal + auditor.books[task].steps} of "
                f"{_NEW_VERSIONS} new versions in {cluster.engine.now - healed_at:.0f} s after "
                "the faults stopped"
            )


def liveness_bound_s(server: ServerConfig, tasks: tuple[TaskConfig, ...]) -> float:
    """Election, recovery and failure detection, then the slowest way to fill the buffers.

    Buffers that were open when the TSA crashed are dropped, some of them only when full. Buffers of
    a replaced manifest are given up after the lifetime of a ticket at the latest.
    """
    settle_s = 3 * server.leader_lease_s + server.recovery_s + 4 * server.dead_after_s
    per_version_s = max(
        (task.training_timeout_s + server.dead_after_s + 30.0)
        * (1 + task.aggregation_goal / task.concurrency)
        for task in tasks
    )
    is_secure = any(task.is_secure for task in tasks)
    dropped = _OPEN_BUFFERS if is_secure else 0
    if is_secure and any(task.manifest for task in tasks):
        settle_s += max(ticket_life_s(task, server) for task in tasks)
    return settle_s + (_NEW_VERSIONS + 1 + dropped) * per_version_s


def random_cluster(rng: Random) -> ClusterConfig:
    heartbeat_s = rng.choice((1.0, 2.0))
    tasks = tuple(_random_task(rng, f"task-{i}") for i in range(rng.randint(1, 3)))
    hold_s = rng.choice((2.0, 5.0))
    uploads, chunk_bytes = rng.choice((3, 16)), rng.choice((8, 1 << 20))
    return ClusterConfig(
        tasks=tasks,
        upload_bytes=uploads * max(needed_bytes(task, chunk_bytes) for task in tasks),
        server=ServerConfig(
            heartbeat_s=heartbeat_s,
            hold_s=hold_s,
            chunk_bytes=chunk_bytes,
            min_retry_s=1.0,
            max_retry_s=30.0,
        ),
        device=DeviceConfig(
            request_timeout_s=heartbeat_s,
            check_in_timeout_s=10.0,
            backoff_s=heartbeat_s / 8,
            max_backoff_s=heartbeat_s / 2,
            give_up_s=20.0,
            participation_floor_s=0.0,
        ),
        population=PopulationConfig(
            size=rng.choice((300, 3000)),
            examples_median=rng.choice((5, 20)),
            execution_per_example_s=0.2,
            latency_mean_s=rng.choice((0.5, 4.0)),
            dropout=rng.choice((0.0, 0.1, 0.3)),
            availability=1.0,
        ),
        kinds=_random_kinds(rng),
        supply=rng.choice((1.5, 4.0)),
        coordinators=rng.randint(1, 3),
        selectors=rng.randint(1, 3),
        aggregators=rng.randint(1, 4),
        network=NetworkConfig(
            delay_s=rng.choice((0.005, 0.05)),
            jitter=0.9,
            loss=rng.choice((0.0, 0.01)),
            duplication=rng.choice((0.0, 0.02)),
        ),
        storage=StorageConfig(
            transaction_s=rng.choice((0.002, 0.05)),
            blob_s=rng.choice((0.002, 0.1)),
            fold_s=rng.choice((0.0, 0.01, 0.3)),
            unknown=rng.choice((0.0, 0.01)),
        ),
        is_identified=rng.random() < 0.5,
        clones=rng.choice((0, 4)),
    )


def _with_overtaking_folds(config: ClusterConfig) -> ClusterConfig:
    """One task whose versions have one member each. Folds end in any order and transactions are
    often applied late, so that a client may move to another buffer than the one of a late record.
    """
    task = structs.replace(
        config.tasks[0],
        concurrency=8,
        regime=AsyncFL(1, max_staleness=50),
        secure_aggregation=None,
        clip=None,
        durability="commit",
        commit_interval_s=0.05,
    )
    storage = StorageConfig(
        transaction_s=0.05,
        blob_s=0.002,
        fold_s=0.3,
        folds_overtake=True,
        unknown=0.2,
        late_s=3.0,
    )
    return structs.replace(config, tasks=(task,), storage=storage)


def _with_privacy(config: ClusterConfig, rng: Random) -> ClusterConfig:
    """Some of the secure tasks have noise. Then the fleet is small, so that devices meet the same
    buffer again.
    """

    def private(task: TaskConfig) -> TaskConfig:
        is_possible = task.is_secure and task.aggregation_goal > 1 and task.model_length > 1
        if rng.random() >= 0.5 or not is_possible:
            return task
        weighting: PrivateWeighting = rng.choice(("equal", "capped"))
        privacy = Privacy(
            clip=_CLIP,
            max_participations=1_000_000,
            delta=1e-6,
            noise_multiplier=rng.choice((0.5, 1.0, 4.0)),
            weighting=weighting,
            expected_weight=1.0 if weighting == "equal" else 0.25,
        )
        return structs.replace(task, privacy=privacy)

    tasks = tuple(map(private, config.tasks))
    if tasks == config.tasks:
        return config
    population = structs.replace(config.population, size=_SMALL_FLEET)
    return structs.replace(config, tasks=tasks, population=population)


def _with_fewer_bits(config: ClusterConfig, *, are_masked: bool) -> ClusterConfig:
    """The secure tasks without noise have words of 16 bits, or the tasks in the clear upload 16 or
    8 bits, which one kind of devices lacks.
    """

    def narrow(task: TaskConfig) -> TaskConfig:
        if task.is_secure != are_masked or task.privacy is not None:
            return task
        bits: UploadBits = 16 if are_masked or task.model_length == 1 else 8
        needs = structs.replace(task.requirements, upload_bits=bits)
        return structs.replace(task, requirements=needs)

    def capable(kind: DeviceKind) -> DeviceKind:
        bits = 32 if kind.capabilities.labels == _LABELS[:1] else 8
        can = structs.replace(kind.capabilities, upload_bits=bits)
        return structs.replace(kind, capabilities=can)

    tasks, kinds = tuple(map(narrow, config.tasks)), tuple(map(capable, config.kinds))
    return config if tasks == config.tasks else structs.replace(config, tasks=tasks, kinds=kinds)


def _with_methods(config: ClusterConfig, rng: Random) -> ClusterConfig:
    """Some tasks have other weights and another damping; some in the clear keep single updates."""

    def changed(task: TaskConfig) -> TaskConfig:
        if rng.random() < 0.2:
            return task
        weighting = rng.choice((Weighting(), Weighting("equal"), Weighting("capped", _CAP)))
        rule, durability = Aggregation(), task.durability
        if not task.is_bound and rng.random() < 0.7:
            rule, durability = Aggregation(rng.choice(("median", "norm_bound"))), "commit"
            weighting = Weighting("equal") if rule.ignores_weights else weighting
        return structs.replace(
            task,
            staleness=rng.choice(STALENESS_FUNCTIONS),
            weighting=weighting if task.privacy is None else Weighting(),
            aggregation=rule,
            durability=durability,
        )

    return structs.replace(config, tasks=tuple(map(changed, config.tasks)))


def _with_room_for_evaluations(config: ClusterConfig) -> ClusterConfig:
    """One more upload, of an evaluation, fits into each aggregator."""
    chunk_bytes = config.server.chunk_bytes
    public = [task for task in config.tasks if task.privacy is None]
    needed = max(evaluation_upload_bytes(task, chunk_bytes) for task in public)
    return structs.replace(config, upload_bytes=config.upload_bytes + needed)


def _random_task(rng: Random, task: str) -> TaskConfig:
    concurrency = rng.choice((3, 8, 20))
    is_async = rng.random() < 0.6
    goal = rng.choice((1, 2, 5, concurrency + 3))
    labels = (rng.choice(_LABELS),) if rng.random() < 0.5 else ()
    secure = SecureAggregation(rng.choice((None, 1))) if rng.random() < 0.35 else None
    return TaskConfig(
        task=task,
        concurrency=concurrency,
        model_length=rng.choice((1, 6)),
        regime=AsyncFL(goal, max_staleness=rng.choice((0, 2, 50)))
        if is_async
        else SyncFL(over_selection=rng.choice((0.0, 0.3))),
        secure_aggregation=secure,
        clip=None if secure is None else _CLIP,
        optimizer=OptimizerConfig(kind=rng.choice(("fedavg", "fedadam", "fedyogi"))),
        requirements=Requirements(labels=labels),
        training_timeout_s=rng.choice((15.0, 30.0)),
        upload_timeout_s=rng.choice((8.0, 20.0)),
        participation_gap_s=rng.choice((0.0, 0.0, 5.0)),
        keep_versions=rng.choice((1, 3)),
        commit_interval_s=rng.choice((0.05, 0.25, 2.0)),
        durability=rng.choice(("commit", "commit", "commit", "step")),
    )


def _random_kinds(rng: Random) -> tuple[DeviceKind, ...]:
    everything = DeviceKind(0.4, Capabilities(labels=_LABELS))
    return (everything, *(DeviceKind(0.2, Capabilities(labels=(label,))) for label in _LABELS))


def _describe(config: ClusterConfig) -> str:
    tasks = ", ".join(
        f"{type(task.regime).__name__}(C={task.concurrency}, K={task.aggregation_goal}"
        f"{'' if task.threshold is None else f', t={task.threshold}'})"
        for task in config.tasks
    )
    return (
        f"{config.coordinators} coordinators, {config.selectors} selectors, "
        f"{config.aggregators} aggregators; {tasks}"
    )
