"""The device's side: its policy, its weight, and one seal per update."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.secagg.errors import OfferRefused, SecureAggregationError, UpdateError
from papaya.secagg.parameters import MAX_GOAL
from papaya.secagg.participant import (
    ParticipantPolicy,
    Terms,
    UnsealedUpdate,
    weight_and_damping,
)
from papaya.secagg.words import BLOCK
from tests.unit.secagg.builders import (
    NOW,
    Deployment,
    a_policy,
    a_task,
    decoded,
)

DELTA = np.array([0.5, -0.5, 0.25, 0.0, 1.0], np.float32)


def refusal(deployment: Deployment, update: UnsealedUpdate, **policy: Any) -> str:
    with pytest.raises(SecureAggregationError) as caught:
        update.seal(deployment.terms(**policy), deployment.offer(), 0, NOW, deployment.draw)
    return caught.value.reason


def test_a_device_wants_ten_clients_unless_told_otherwise() -> None:
    policy = ParticipantPolicy(task="t", length=1, clip=1.0, max_examples=1, max_staleness=0)
    assert policy.minimum_threshold == 10


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"minimum_threshold": 3}, "threshold"),
        ({"task": "other"}, "task"),
        ({"length": 6}, "length"),
        ({"clip": 1.5}, "clip"),
        ({"max_examples": 99}, "max_examples"),
        ({"max_staleness": 9}, "max_staleness"),
        ({"maximum_staleness": 7}, "max_staleness"),
        ({"weighting": "none"}, "weighting"),
    ],
)
def test_terms_outside_the_policy_cannot_exist(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(OfferRefused) as caught:
        Deployment().terms(**changes)
    assert caught.value.reason == reason


@given(st.integers(1, 10**6), st.integers(0, 8))
def test_the_weight_is_the_devices_own(examples: int, staleness: int) -> None:
    weight, damping = weight_and_damping(a_task(), examples, staleness)
    assert weight == min(examples, 100) / 100
    assert damping == 1 / math.sqrt(1 + staleness)


def test_a_vector_that_is_not_weighted() -> None:
    assert weight_and_damping(a_task(weighting="none"), 3, 4) == (1.0, 1.0)


@pytest.mark.parametrize("value", [0.5, 8.0, -8.0, 1e30, np.inf, -np.inf, np.nan])
def test_what_is_no_count_is_refused_and_never_rounded_or_clamped(value: float) -> None:
    deployment = Deployment(a_task(weighting="none", clip=7.0, max_examples=1))
    counts = np.array([0, 7, -7, 1, value], np.float32)
    assert refusal(deployment, UnsealedUpdate(counts, 1, 0)) == "not_a_count"


@pytest.mark.parametrize("goal", [4, 1000, MAX_GOAL])
def test_counts_are_exact(goal: int) -> None:
    deployment = Deployment(
        a_task(weighting="none", clip=7.0, max_examples=1, aggregation_goal=goal)
    )
    counts = np.array([0, 7, -7, 1, 3], np.float32)
    sent = [deployment.accept(deployment.sealed(counts, 1)) for _ in range(3)]
    found = decoded(deployment.unmasked(sent), 3, deployment.parameters)
    assert found.vector.tolist() == (3 * counts).tolist()
    assert found.mean().tolist() == counts.tolist()


@pytest.mark.parametrize("staleness", [-1, -(2**40), 9, 2**40])
def test_a_staleness_that_cannot_be_is_refused(staleness: int) -> None:
    with pytest.raises(OfferRefused) as caught:
        weight_and_damping(a_task(), 1, staleness)
    assert caught.value.reason == "staleness"


@pytest.mark.parametrize("examples", [0, -5])
def test_an_update_of_no_examples_is_refused(examples: int) -> None:
    with pytest.raises(UpdateError):
        weight_and_damping(a_task(), examples, 0)


def test_sealing_takes_no_weight_from_anyone() -> None:
    accepted = set(inspect.signature(UnsealedUpdate.seal).parameters)
    assert accepted == {"self", "terms", "offer", "current_version", "now", "entropy", "tag"}


def test_an_update_is_sealed_once() -> None:
    deployment = Deployment()
    update = UnsealedUpdate(DELTA, 10, 0)
    update.seal(deployment.terms(), deployment.offer(), 0, NOW, deployment.draw)
    assert refusal(deployment, update) == "already_sealed"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_unsealed_update_cannot_be_copied(copied: Any) -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        copied(UnsealedUpdate(DELTA, 10, 0))


def test_a_refused_seal_leaves_the_update_for_another_offer() -> None:
    deployment = Deployment()
    update = UnsealedUpdate(DELTA, 10, 0)
    offer = deployment.offer()
    for now, current in ((NOW + 1e6, 0), (NOW, -1), (NOW, 9)):
        with pytest.raises(OfferRefused):
            update.seal(deployment.terms(), offer, current, now, deployment.draw)
    assert update.seal(deployment.terms(), offer, 8, NOW, deployment.draw).index == offer.index


@pytest.mark.parametrize("shape", [(4,), (6,), (1, 5), (5, 1), ()])
def test_an_update_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    update = UnsealedUpdate(np.zeros(shape, np.float32), 10, 0)
    assert refusal(Deployment(), update) == "length"


def test_what_is_not_finite_never_leaves() -> None:
    delta = DELTA.copy()
    delta[3] = math.nan
    assert refusal(Deployment(), UnsealedUpdate(delta, 10, 0)) == "not_finite"


def test_a_sealed_update_is_fixed() -> None:
    sealed = Deployment().sealed(DELTA)
    assert not sealed.masked.flags.writeable
    assert sealed.masked.size == DELTA.size + 2


def test_two_updates_never_share_a_seed() -> None:
    deployment = Deployment()
    first, second = deployment.sealed(DELTA), deployment.sealed(DELTA)
    assert first.sealed != second.sealed
    assert not np.array_equal(first.masked, second.masked)


@pytest.mark.parametrize("length", [BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1])
def test_the_last_two_words_may_lie_in_another_block(length: int) -> None:
    deployment = Deployment(a_task(length=length, threshold=1))
    update = deployment.accept(deployment.sealed(np.full(length, 0.5, np.float32), 50))
    words = deployment.unmasked([update]).view("<i4")
    levels = deployment.parameters.levels
    assert words[-2:].tolist() == [round(levels / 2), 1]
    assert set(words[:-2].tolist()) == {round(levels / 4)}


def test_the_policy_is_asked_before_the_offer() -> None:
    parameters = a_task()
    with pytest.raises(OfferRefused):
        Terms(bytes(32), parameters, a_policy(parameters, minimum_threshold=10))
