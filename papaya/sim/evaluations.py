"""The owner of a simulated cluster evaluates the newest versions of its tasks.

It does what `papaya/server/admin/supervisor.py` does, with the same transactions: starts an
evaluation, ends it when it has a result or its time is over, and deletes it when its tickets have
expired. It reads and writes the state store as every process does, and keeps nothing in memory, so
an answer that is lost or a transaction that is applied late is found in the rows of a later turn.
"""

from __future__ import annotations

from functools import partial
from random import Random

import numpy as np

from papaya.aggregator.sessions import pinned_until, ticket_life_s
from papaya.aggregator.shards import initial_blobs
from papaya.aggregator.upload import needed_bytes
from papaya.config import EvaluationPlan, TaskConfig
from papaya.learning.evaluation import verdict
from papaya.learning.parameters import FLOAT32
from papaya.messages import owner
from papaya.messages.base import TaskId
from papaya.messages.storage import (
    TASKS,
    Changed,
    Outcome,
    Row,
    TaskRow,
    Transaction,
    VersionRow,
    holder_prefixes,
    version_key,
)
from papaya.messages.tickets import PSEUDONYM_KEY_BYTES
from papaya.sim.cluster import Cluster
from papaya.sim.protocol_updates import SHORT_EVALUATION_LENGTH
from papaya.sim.storage import OWNER

_ALL_SEQS = 2**62
_PLANS = tuple(
    EvaluationPlan(clients=clients, timeout_s=timeout_s)
    for clients in (2, 6, 15)
    for timeout_s in (20.0, 90.0, 600.0)
)


def evaluation_upload_bytes(task: TaskConfig, chunk_bytes: int) -> int:
    """The memory that an aggregator needs for an upload of an evaluation of this task."""
    version = VersionRow(0, "", 0, 0.0)
    config = owner.evaluation_config(task, version, _PLANS[0], SHORT_EVALUATION_LENGTH)
    return needed_bytes(config, chunk_bytes)


class EvaluationOwner:
    """Takes a turn about every two heartbeats, from now on."""

    def __init__(self, cluster: Cluster, rng: Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._next()

    def _next(self) -> None:
        delay_s = self._rng.expovariate(0.5 / self._cluster.config.server.heartbeat_s)
        self._cluster.engine.after(delay_s, self._cluster.state.read, (TASKS,), self._turn)

    def _turn(self, rows: dict[str, Row]) -> None:
        tasks = [row for row in rows.values() if isinstance(row, TaskRow)]
        evaluated = []
        for row in tasks:
            if row.config.evaluates is not None:
                self._look_after(row)
                if not row.is_over:
                    evaluated.append(row.config.evaluates.task)
        public = [r for r in tasks if r.config.evaluates is None and r.config.privacy is None]
        free = [r for r in public if r.config.task not in evaluated]
        if free and self._rng.random() < 0.3:
            self._start(self._rng.choice(free))
        self._next()

    def _start(self, row: TaskRow) -> None:
        prefix = f"version/{row.config.task}/"
        self._cluster.state.read((prefix,), partial(self._start_with, row))

    def _start_with(self, row: TaskRow, rows: dict[str, Row]) -> None:
        versions = {row.version: row for row in rows.values() if isinstance(row, VersionRow)}
        newest, plan = versions[max(versions)], self._rng.choice(_PLANS)
        evaluation = owner.evaluation_config(row.config, newest, plan, SHORT_EVALUATION_LENGTH)
        blobs = initial_blobs(evaluation, np.zeros(SHORT_EVALUATION_LENGTH, FLOAT32))
        for key, data in blobs:
            self._cluster.blobs.put(key, data)
        now = self._cluster.engine.now
        kept_until = pinned_until(evaluation, now, self._cluster.config.server)
        pseudonym_key = self._rng.randbytes(PSEUDONYM_KEY_BYTES)
        keys = (blobs[0][0], blobs[1][0])
        self._write(owner.evaluate(row, evaluation, newest, *keys, now, kept_until, pseudonym_key))

    def _look_after(self, row: TaskRow) -> None:
        task, now = row.config.task, self._cluster.engine.now
        if not row.is_over:
            self._cluster.state.read((version_key(task, 1),), partial(self._settle, row))
        elif now >= row.ended + ticket_life_s(row.config, self._cluster.config.server):
            self._cluster.state.read(holder_prefixes(task), partial(self._forget, row))

    def _settle(self, row: TaskRow, found: dict[str, Row]) -> None:
        now = self._cluster.engine.now
        if found:
            self._write(owner.end_evaluation(row, "completed", now, "it has a result"))
        elif (why := verdict(row.config.stop, row.submitted, now, ())) is not None:
            self._write(owner.end_evaluation(row, "cancelled", now, why))

    def _forget(self, row: TaskRow, rows: dict[str, Row]) -> None:
        self._write(owner.forget(row, rows), forgotten=row.config.task)

    def _write(self, change: Transaction, forgotten: TaskId = "") -> None:
        self._cluster.state.transact(OWNER, change, partial(self._written, forgotten))

    def _written(self, forgotten: TaskId, outcome: Outcome) -> None:
        """Usually tell the coordinators; otherwise they read the rows later."""
        if outcome != "committed":
            return
        if forgotten:
            self._cluster.blobs.sweep(forgotten, _ALL_SEQS, frozenset())
        elif self._rng.random() < 0.7:
            for node, host in self._cluster.hosts.items():
                if node.startswith("coordinator"):
                    host.deliver(Changed())
