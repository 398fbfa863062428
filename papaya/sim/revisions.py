"""The owner of a simulated cluster changes the settings of its tasks while they run.

It writes the same transactions as `papaya task update` and a rollout. Nothing is signed here: a
digest is the hash of the task and the number of its revision. It is the content of the bundle, and
the key of the bundle ends with it, so that devices know it without a download.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from random import Random

from msgspec import structs

from papaya.config import AsyncFL, Staleness, SyncFL, TaskConfig
from papaya.messages import owner
from papaya.messages.base import TaskId
from papaya.messages.owner import TaskRows
from papaya.messages.storage import (
    TASKS,
    Candidate,
    Changed,
    Outcome,
    Row,
    TaskRow,
    Transaction,
    task_key,
)
from papaya.sim.cluster import Cluster
from papaya.sim.storage import OWNER

_MEAN_GAP_HEARTBEATS = 12.0
_FIRST_CANDIDATE = 1_000_000  # revisions of rollouts are numbered from here
STALENESS_FUNCTIONS = (
    Staleness(),
    Staleness("constant"),
    Staleness("polynomial", exponent=1.0),
    Staleness("hinge", slope=0.5, grace=1),
)


def signed(config: TaskConfig, revision: int, seq: int = 0) -> TaskConfig:
    """These settings as a revision that an owner has signed. Its bundle is stored under `seq`."""
    manifest = sha256(f"{config.task}/{revision}".encode()).hexdigest()
    bundle = f"{config.task}/{seq}/bundle-{revision}-{manifest}"
    needs = structs.replace(config.requirements, manifest=manifest, bundle=bundle)
    return structs.replace(config, requirements=needs)


class RevisionOwner:
    """Revises a random task now and then, until `until`."""

    def __init__(self, cluster: Cluster, rng: Random, until: float) -> None:
        self._cluster = cluster
        self._rng = rng
        self._until = until
        self._revision = 0
        self._next()

    def _next(self) -> None:
        mean_s = _MEAN_GAP_HEARTBEATS * self._cluster.config.server.heartbeat_s
        delay_s = self._rng.expovariate(1 / mean_s)
        if self._cluster.engine.now + delay_s < self._until:
            self._cluster.engine.after(delay_s, self._turn)

    def _turn(self) -> None:
        task = self._rng.choice(self._cluster.config.tasks).task
        prefixes = (TASKS, *owner.owner_prefixes(task))
        self._cluster.state.read(prefixes, partial(self._revise, task))
        self._next()

    def _revise(self, task: TaskId, rows: dict[str, Row]) -> None:
        found = TaskRows(task, rows)
        self._revision += 1
        settings = changed(found.row.config, self._rng)
        config = signed(settings, self._revision, found.fence.seq)
        self._cluster.put_bundle(config)
        change = owner.revise(found, config, running(task, rows), self._cluster.engine.now)
        self._cluster.state.transact(OWNER, change, partial(tell, self._cluster, self._rng))


class RolloutOwner:
    """Offers a candidate of a random task to a share of the devices, until `until`; later widens
    the share, gives it to all devices or takes it back. Not for tasks with bound buffers.
    """

    def __init__(self, cluster: Cluster, rng: Random, until: float) -> None:
        self._cluster = cluster
        self._rng = rng
        self._until = until
        self._revision = _FIRST_CANDIDATE
        self._next()

    def _next(self) -> None:
        mean_s = _MEAN_GAP_HEARTBEATS / 3 * self._cluster.config.server.heartbeat_s
        delay_s = self._rng.expovariate(1 / mean_s)
        if self._cluster.engine.now + delay_s < self._until:
            self._cluster.engine.after(delay_s, self._turn)

    def _turn(self) -> None:
        tasks = [each.task for each in self._cluster.config.tasks if not each.is_bound]
        if tasks:
            task = self._rng.choice(tasks)
            prefixes = (TASKS, *owner.owner_prefixes(task))
            self._cluster.state.read(prefixes, partial(self._go_on, task))
        self._next()

    def _go_on(self, task: TaskId, rows: dict[str, Row]) -> None:
        found, rng, now = TaskRows(task, rows), self._rng, self._cluster.engine.now
        row, own = found.row, running(task, rows)
        if row.candidate is None:
            same = {"regime": row.config.regime, "concurrency": row.config.concurrency}
            settings = structs.replace(changed(row.config, rng), **same)
            candidate = Candidate(self._signed(settings, found), rng.choice((0.3, 0.7)))
            change = owner.offer(found, candidate, own, now)
        elif (draw := rng.random()) < 0.3:
            wider = structs.replace(row, candidate=structs.replace(row.candidate, share=0.9))
            key = task_key(task)
            change = Transaction(require=((key, row),), put=((key, wider),))
        elif draw < 0.7:
            change = owner.revise(found, row.candidate.config, own, now)
        else:
            change = owner.revise(found, self._signed(row.config, found), own, now)
        self._cluster.state.transact(OWNER, change, partial(tell, self._cluster, rng))

    def _signed(self, settings: TaskConfig, found: TaskRows) -> TaskConfig:
        self._revision += 1
        config = signed(settings, self._revision, found.fence.seq)
        self._cluster.put_bundle(config)
        return config


def running(task: TaskId, rows: Mapping[str, Row]) -> list[TaskRow]:
    """The evaluations of this task that are not over."""
    return [
        row
        for row in rows.values()
        if isinstance(row, TaskRow)
        and not row.is_over
        and row.config.evaluates is not None
        and row.config.evaluates.task == task
    ]


def changed(config: TaskConfig, rng: Random) -> TaskConfig:
    """Other settings that an owner may sign for the same run."""
    regime: AsyncFL | SyncFL = SyncFL(rng.choice((0.0, 0.3)))
    if rng.random() < 0.6:
        goal, staleness = rng.choice((1, 2, 5)), rng.choice((0, 2, 50))
        regime = AsyncFL(goal if config.privacy is None else max(2, goal), staleness)
    concurrency = rng.choice((3, 8, 20))
    clip = rng.choice((32.0, 64.0)) if config.is_secure else rng.choice((None, 16.0))
    privacy = config.privacy
    if privacy is not None and clip is not None:
        privacy = structs.replace(privacy, clip=clip)
    return structs.replace(
        config,
        concurrency=concurrency,
        regime=regime,
        clip=clip,
        privacy=privacy,
        max_examples=rng.choice((5, 50, 1500)),
        staleness=config.staleness
        if config.staleness == Staleness()
        else rng.choice(STALENESS_FUNCTIONS),
        training_timeout_s=rng.choice((15.0, 30.0)),
        upload_timeout_s=rng.choice((8.0, 20.0)),
    )


def tell(cluster: Cluster, rng: Random, outcome: Outcome) -> None:
    """Usually tell the coordinators; otherwise they read the rows later."""
    if outcome == "committed" and rng.random() < 0.7:
        for node, host in cluster.hosts.items():
            if node.startswith("coordinator"):
                host.deliver(Changed())
