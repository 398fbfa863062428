"""The twin of the TSA: the real object, that crashes and keeps nothing."""

from __future__ import annotations

from random import Random

import pytest

from papaya.sim.tsa_twin import TsaTwin
from papaya.tsa.errors import RefusalReason, TsaRefused, Unavailable
from tests.unit.secagg.builders import a_task

PARAMETERS = a_task()


class Clock:
    now = 10.0


def test_a_crash_is_a_new_identity_that_knows_nothing() -> None:
    twin = TsaTwin(Clock(), Random(1))
    before = twin.identity_public_key
    digest = twin.register(PARAMETERS)
    assert len(twin.offers(digest, 2)) == 2
    twin.crash()
    assert twin.identity_public_key != before
    with pytest.raises(TsaRefused) as caught:
        twin.offers(digest, 1)
    assert caught.value.reason is RefusalReason.UNKNOWN_PARAMETERS


def test_while_it_is_away_it_does_not_answer() -> None:
    clock = Clock()
    twin = TsaTwin(clock, Random(1))
    twin.crash(away_s=5.0)
    with pytest.raises(Unavailable):
        twin.register(PARAMETERS)
    clock.now = 15.0
    digest = twin.register(PARAMETERS)
    twin.crash(away_s=5.0)
    twin.come_back()
    assert twin.register(PARAMETERS) == digest


def test_the_same_seed_draws_the_same_keys() -> None:
    keys = [TsaTwin(Clock(), Random(seed)).identity_public_key for seed in (1, 1, 2)]
    assert keys[0] == keys[1] != keys[2]
