"""The quality of a model from its losses on held-out clients.

Paper, "Sampling bias and fairness": percentile p of data volume means the clients at or above it.
Clients are taken in the order of their volumes; those of equal volume at an edge all belong to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from papaya.errors import InvariantError
from papaya.sim.workloads.base import Ints, Quality

Floats = npt.NDArray[np.float64]


def quality(losses: Floats, volumes: Ints) -> Quality:
    """Client i has the mean loss `losses[i]` and `volumes[i]` training examples."""
    if len(losses) == 0 or len(losses) != len(volumes) or volumes.min() < 1:
        raise InvariantError(f"{len(losses)} losses for {len(volumes)} clients with examples")
    ordered = np.sort(volumes)

    def at_or_above(level: float) -> float:
        chosen = volumes >= ordered[int(level * len(ordered))]
        return float(np.average(losses[chosen], weights=volumes[chosen]))

    return Quality(at_or_above(0), at_or_above(0.75), at_or_above(0.99), float(losses.mean()))
