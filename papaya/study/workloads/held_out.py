"""The quality of a model from its losses on held-out clients.

Paper, "Sampling bias and fairness": percentile p of data volume means the clients at or above it.
Clients are taken in the order of their volumes; those of equal volume at an edge all belong to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from papaya.errors import InvariantError
from papaya.sim.draws import Floats, Ints
from papaya.study.workloads.base import Quality


def quality(losses: Floats, volumes: Ints) -> Quality:
    """Client i has the mean loss `losses[i]` and `volumes[i]` training examples."""
    if len(losses) == 0 or len(losses) != len(volumes) or volumes.min() < 1:
        raise InvariantError(f"{len(losses)} losses for {len(volumes)} clients with examples")

    def mean(level: float) -> float:
        chosen = at_or_above(volumes, level)
        return float(np.average(losses[chosen], weights=volumes[chosen]))

    return Quality(mean(0), mean(0.75), mean(0.99), float(losses.mean()))


def at_or_above(volumes: Ints, level: float) -> npt.NDArray[np.bool_]:
    """Which clients are at or above this percentile, from 0 to below 1."""
    chosen: npt.NDArray[np.bool_] = volumes >= np.sort(volumes)[int(level * len(volumes))]
    return chosen
