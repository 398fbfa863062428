"""Clients that train before the version that counts them is due.

An update depends on its client and on the version that the client downloaded, so it can be trained
as soon as that version is made. In AsyncFL most members of a version start from an earlier one than
the newest. While the server's step is made here, worker processes train members of the next
versions:

    version made ──▶ members of the next versions that start from it ──▶ workers
    version due  ◀── the updates of its members, in their order

As many clients are trained ahead as the task's concurrency, or fewer if their updates would not fit
into 256 MB. The next version is trained in any case. Each piece of work is of one version, so a
client that fails ends learning at the version that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import Ints
from papaya.study.trace import Trace
from papaya.study.workloads.base import BeginsTraining, BegunTraining, Matrix

_MOST_BYTES: Final = 256 << 20


class TrainingAhead:
    """The members of the next versions, in training."""

    def __init__(
        self, workload: BeginsTraining, sgd: ClientSGD, last: int, concurrency: int
    ) -> None:
        self._workload = workload
        self._sgd = sgd
        self._last = last
        self._most = min(concurrency, _MOST_BYTES // (FLOAT32.itemsize * workload.length))
        # Of each version: members that cannot train yet, and those in training.
        self._waiting: dict[int, Ints] = {}
        self._begun: dict[int, list[tuple[Ints, BegunTraining]]] = {}

    def begin(self, trace: Trace, models: Mapping[int, Vector], newest: int) -> None:
        """Train the members of the next versions that start from `newest` or an older version."""
        ready = self._ready(trace, newest)
        together = sum(map(len, ready.values()))
        for version, members in ready.items():
            starts, index = np.unique(trace.start[members], return_inverse=True)
            begun = self._workload.begin(
                [models[start] for start in starts.tolist()],
                index,
                trace.clients.take(members),
                self._sgd,
                together,
            )
            rows = members - trace.members(version).start
            self._begun.setdefault(version, []).append((rows, begun))

    def _ready(self, trace: Trace, newest: int) -> dict[int, Ints]:
        """The members that can train now, of the next version first."""
        ready: dict[int, Ints] = {}
        for version in range(newest + 1, min(self._last, trace.versions) + 1):
            span = trace.members(version)
            ahead = span.stop - trace.members(newest + 1).start
            if version > newest + 1 and ahead > self._most:
                break
            waiting = self._waiting.get(version)
            if waiting is None:
                waiting = np.arange(span.start, span.stop)
            can_train = trace.start[waiting] <= newest
            if can_train.any():
                ready[version] = waiting[can_train]
            self._waiting[version] = waiting[~can_train]
        return ready

    def updates(self, trace: Trace, version: int) -> Matrix:
        """A row for each member of the version after the newest. Waits for them."""
        span = trace.members(version)
        updates = np.empty((span.stop - span.start, self._workload.length), FLOAT32)
        for rows, begun in self._begun.get(version, []):
            updates[rows] = begun.updates()
        self._begun.pop(version, None)
        del self._waiting[version]
        return updates

    def cancel(self) -> None:
        """Nobody needs what has been begun."""
        for begun in self._begun.values():
            for _, training in begun:
                training.cancel()
