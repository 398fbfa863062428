"""A server that lies about versions: what it says damps updates, and so it is a weight.

The victim is told that it is up to date, everybody else that they are as stale as can be. The sum
is still one of all of them; but the louder the victim is in it, the more the sum tells of it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from papaya.secagg.errors import OfferRefused
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import DEFAULT_MAXIMUM_STALENESS
from tests.unit.secagg.builders import Deployment, a_task, decoded

CLIENTS, VICTIM, LENGTH = 12, 7, 64
UPDATES = np.random.default_rng(1).normal(size=(CLIENTS, LENGTH)).astype(np.float32) / 16


def a_secure_task(max_staleness: int) -> PublicParameters:
    sizes = {"aggregation_goal": CLIENTS, "threshold": CLIENTS, "max_examples": 1}
    return a_task(length=LENGTH, max_staleness=max_staleness, **sizes)


def told_lies(max_staleness: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    deployment = Deployment(a_secure_task(max_staleness))
    sent = [
        deployment.accept(deployment.sealed(update, 1, 0, 0 if i == VICTIM else max_staleness))
        for i, update in enumerate(UPDATES)
    ]
    return decoded(deployment.unmasked(sent), CLIENTS, deployment.parameters).vector


@pytest.mark.parametrize("max_staleness", [0, 8, 50, DEFAULT_MAXIMUM_STALENESS])
def test_the_loudest_that_lies_make_one_client(max_staleness: int) -> None:
    """sqrt(1 + max_staleness), exactly: it is in the limitations, and this is how far it goes."""
    others = np.delete(UPDATES, VICTIM, axis=0).sum(axis=0)
    expected = UPDATES[VICTIM] + others / math.sqrt(1 + max_staleness)
    assert told_lies(max_staleness) == pytest.approx(expected, abs=1e-6)


def test_a_task_that_allows_any_lie_finds_no_device() -> None:
    """At 10,000 the rest of eleven clients is but a little noise on the victim's update."""
    sum_of_all = told_lies_unprotected(10_000)
    likeness = np.corrcoef(sum_of_all, UPDATES[VICTIM])[0, 1]
    assert likeness > 0.99
    with pytest.raises(OfferRefused) as caught:
        told_lies(10_000)
    assert caught.value.reason == "max_staleness"


def told_lies_unprotected(max_staleness: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights = np.full(CLIENTS, 1 / math.sqrt(1 + max_staleness))
    weights[VICTIM] = 1.0
    found: np.ndarray[tuple[int], np.dtype[np.float64]] = weights @ UPDATES
    return found
