"""An audit of the whole mechanism by a canary, at z = 1.

One device sends either zeros or an update of the clip's length in one coordinate; everything else
is known. The auditor does what a hostile server can do, gives each sum a score, and estimates mu
from two samples of scores. Scores of the mechanism are normal with means that differ by mu standard
deviations, so mu times a constant is a t statistic, and its alarm has an exact level and power.

The draws are fixed, so that no test fails by chance.
"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import pytest
from scipy import stats

from papaya.secagg.words import SIGNED
from papaya.sim.bugs import planted
from papaya.tsa.errors import TsaRefused
from tests.unit.secagg.builders import Deployment, a_private_task, entropy

SUMS = 180  # in each of the two worlds
FREEDOM = 2 * SUMS - 2
REPEATS = 4  # of a release
PARAMETERS = a_private_task(
    length=2, noise_multiplier=1.0, weighting="capped", aggregation_goal=4, threshold=2
)
ALARM = float(stats.nct.isf(1e-6, FREEDOM, math.sqrt(SUMS / 2)))
"""For mu = 1/z = 1."""


def score(world: int, number: int) -> float:
    """How much a hostile server thinks that the device has sent the canary."""
    deployment = Deployment(PARAMETERS)
    deployment.tsa._entropy = entropy(f"TSA {world} {number}")
    canary = np.array([PARAMETERS.clip if world else 0.0, 0.0], np.float32)
    examples, tag = 100 if world else 1, b"the device's tag"
    # The device takes part as often as it is asked to; the server uses one group for all of it.
    members = [deployment.any_sealed(0.0)]
    deployment.accept(members[0])
    for _ in range(2):
        update = deployment.sealed(canary, examples, tag=tag)
        with suppress(TsaRefused):
            members.append(deployment.accept(update))
    total = np.mean(
        [deployment.unmasked(members).view(SIGNED).astype(float) for _ in range(REPEATS)], axis=0
    )
    surplus = total[-1] - len(members)
    return float(total[0] / float(PARAMETERS.sigma) + 1000 * surplus)


def statistic() -> float:
    """mu as estimated, times the square root of half the number of sums."""
    without, with_canary = ([score(w, i) for i in range(SUMS)] for w in (0, 1))
    deviation = math.sqrt((np.var(without, ddof=1) + np.var(with_canary, ddof=1)) / 2)
    mu = float(np.mean(with_canary) - np.mean(without)) / max(deviation, 1e-9)
    return mu * math.sqrt(SUMS / 2)


def test_the_alarm_is_rare_without_a_reason_and_certain_with_one() -> None:
    assert stats.nct.sf(ALARM, FREEDOM, 1.0 * math.sqrt(SUMS / 2)) <= 1e-6 * (1 + 1e-6)
    # Half the noise, two updates, or the mean of four draws; the other bugs show more.
    assert stats.nct.sf(ALARM, FREEDOM, 2.0 * math.sqrt(SUMS / 2)) > 0.999


def test_mu_is_as_promised() -> None:
    found = statistic()
    assert found < ALARM
    # The confidence interval for mu at a level of 1e-6 has 1 in it.
    nearly = [float(stats.nct.ppf(p, FREEDOM, math.sqrt(SUMS / 2))) for p in (5e-7, 1 - 5e-7)]
    assert nearly[0] < found < nearly[1]


@pytest.mark.parametrize(
    "bug",
    ["noise-halved", "noise-skipped", "noise-drawn-again", "tag-ignored", "weight-released"],
)
def test_planted_bugs_are_found(bug: str) -> None:
    with planted(bug):
        assert statistic() > ALARM
