"""A TSA with noise: the sum plus the noise of the group's key, one update per device, and what the
aggregator makes of it (docs/privacy.md).
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from papaya.secagg.errors import Implausible, ParametersError, UpdateError
from papaya.secagg.fixed_point import private_levels
from papaya.secagg.noise import NOISE_BLOCK, Noise
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import UnsealedUpdate, squared_length
from papaya.secagg.unmask import chance_of_random_words
from papaya.secagg.words import SIGNED, WORD, Words
from papaya.tsa import wire
from papaya.tsa.errors import RefusalReason, TsaRefused
from tests.unit.secagg.builders import (
    NOW,
    Deployment,
    a_private_task,
    a_task,
    decoded,
    encoded,
    entropy,
)

LONG = 3 * NOISE_BLOCK + 5


def noise_of(deployment: Deployment, words: Words, updates: list[np.ndarray]) -> np.ndarray:
    """What is in the words besides the updates, which are within the clip."""
    parameters = deployment.parameters
    total = sum(encoded(u, parameters.scale, parameters.levels) for u in updates)
    return (words[:-1] - total).view(SIGNED)


def test_the_sum_has_the_noise_of_the_groups_key() -> None:
    """And the noise has the promised size, on every word but the constant."""
    deployment = Deployment(a_private_task(length=LONG))
    values = np.full(LONG, 0.5 / math.sqrt(LONG), np.float32)
    updates = [deployment.accept(deployment.sealed(values)) for _ in range(4)]
    words = deployment.unmasked(updates)
    assert words[-1] == 4
    found = noise_of(deployment, words, 4 * [values]) / float(deployment.parameters.sigma)
    assert abs(float(found.std()) - 1) < 0.02
    assert abs(float(found.mean())) < 5 / math.sqrt(LONG)
    first, second = (found[:NOISE_BLOCK], found[NOISE_BLOCK : 2 * NOISE_BLOCK])
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 5 / math.sqrt(NOISE_BLOCK)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 10])
def test_noise_made_ahead_is_the_same_noise(ahead: int) -> None:
    """However much was made ahead, and whatever seeds came between."""
    parameters = a_private_task(length=3 * 4 * NOISE_BLOCK + 7, aggregation_goal=5)
    released = []
    for made in (0, ahead):
        deployment = Deployment(parameters)
        updates = deployment.accepted(3)
        for _ in range(made):
            deployment.tsa.sum_waiting()
        updates += deployment.accepted(2)
        released.append(deployment.unmasked(updates))
    assert np.array_equal(released[0], released[1])


def test_a_repeated_release_repeats_the_noise() -> None:
    deployment = Deployment(a_private_task())
    updates = deployment.accepted(4)
    first = deployment.unmasked(updates)
    assert np.array_equal(deployment.unmasked(updates), first)


def test_the_noise_does_not_depend_on_the_members() -> None:
    """Members that are left out take their masks with them, and the noise stays."""
    parameters = a_private_task(aggregation_goal=20)
    released = []
    for left_out in (0, 1, 12):
        deployment = Deployment(parameters)
        updates = deployment.accepted(18, value=0.0)
        deployment.tsa.sum_waiting()
        words = deployment.unmasked(updates[left_out:])
        released.append(words[:-1].tolist())
    assert released[0] == released[1] == released[2]


def test_groups_and_tsas_have_different_noise() -> None:
    one, other = Deployment(a_private_task()), Deployment(a_private_task())
    other.tsa._entropy = entropy("another TSA")
    found = []
    for deployment, group in ((one, 0), (one, 1), (other, 0)):
        updates = [
            deployment.accept(deployment.sealed(np.zeros(5, np.float32)), group) for _ in range(4)
        ]
        found.append(deployment.unmasked(updates, group).tolist())
    assert found[0] != found[1]
    assert found[0] != found[2]


# --- One update per device and group ---------------------------------------------------------


def test_a_server_that_keeps_a_group_open_gets_one_update_of_a_device() -> None:
    """All participations of a device in one group would cost P^2 instead of P."""
    deployment = Deployment(a_private_task(max_participations=5))
    tag, zeros = b"the device's tag", np.zeros(5, np.float32)
    deployment.accept(deployment.sealed(zeros, tag=tag), group=7)
    later = [deployment.sealed(zeros, tag=tag) for _ in range(4)]
    for again in later:
        with pytest.raises(TsaRefused) as caught:
            deployment.accept(again, group=7)
        assert caught.value.reason is RefusalReason.SAME_DEVICE
        deployment.tsa.check()
    assert deployment.tsa.status(deployment.hash).groups == ((7, 1),)
    deployment.accept(later[0], group=8)  # its offer is not used up
    others = [deployment.accept(deployment.any_sealed(), 7) for _ in range(3)]
    assert len(others) == 3


def test_a_tag_cannot_be_changed_on_the_way() -> None:
    deployment = Deployment(a_private_task())
    update = deployment.any_sealed()
    assert len(update.sealed) == 80
    for position in range(48, 64):  # where the tag is
        changed = bytearray(update.sealed)
        changed[position] ^= 1
        with pytest.raises(TsaRefused) as caught:
            deployment.tsa.accept(update.index, 0, bytes(changed), NOW)
        assert caught.value.reason is RefusalReason.SEAL


def test_a_seed_without_a_tag_is_refused_by_both_sides() -> None:
    private, plain = Deployment(a_private_task()), Deployment()
    with pytest.raises(UpdateError, match="tag of 0 bytes"):
        private.sealed(np.zeros(5, np.float32), tag=b"")
    with pytest.raises(UpdateError, match="tag of 16 bytes"):
        plain.sealed(np.zeros(5, np.float32), tag=bytes(16))
    short = private.any_sealed().sealed[:64]
    with pytest.raises(TsaRefused, match="80 bytes"):
        private.tsa.accept(private.offer().index, 0, short, NOW)


def test_both_sizes_of_a_sealed_seed_go_over_the_wire() -> None:
    for size in (64, 80):
        frame = wire.accept_request(1, 2, bytes(range(size)))
        assert wire.read_accept(frame[5:]) == (1, 2, bytes(range(size)))
    for size in (0, 63, 65, 79, 81):
        with pytest.raises(TsaRefused):
            wire.accept_request(1, 2, bytes(size))
        with pytest.raises(TsaRefused):
            wire.read_accept(bytes(16 + size))


# --- Sensitivity -----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 1.0001, 7.0, 1e30])
@pytest.mark.parametrize("length", [1, 5, 1000])
def test_no_update_is_longer_than_the_noise_allows_for(scale: float, length: int) -> None:
    deployment = Deployment(a_private_task(length=length))
    rng = np.random.default_rng(length)
    delta = rng.normal(size=length).astype(np.float32)
    delta *= np.float32(scale / np.linalg.norm(delta))
    update = deployment.sealed(delta)
    deployment.accept(update)
    masks = deployment.tsa._tasks[deployment.hash].groups[0]
    masks._to_noise, masks._noise = 0, None
    words = update.masked - masks.masks_of([update.index])
    levels = deployment.parameters.levels
    assert squared_length(words[:-1]) <= levels * levels
    if scale <= 1:
        assert np.allclose(
            words[:-1].view(SIGNED) * deployment.parameters.step, delta, atol=2e-6 * scale
        )
    else:
        assert squared_length(words[:-1]) >= 0.99 * levels * levels


@pytest.mark.parametrize("values", [[2**31 - 1] * 9, [-(2**31)] * 9, [1, -1, 65536, -65537]])
def test_squared_lengths_are_exact(values: list[int]) -> None:
    words = np.array(values, SIGNED).view(WORD)
    assert squared_length(words) == sum(value * value for value in values)
    many = np.full(300_000, 2**31 - 1, SIGNED).view(WORD)
    assert squared_length(many) == 300_000 * (2**31 - 1) ** 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_do_not_leave_the_device(bad: float) -> None:
    deployment = Deployment(a_private_task())
    delta = np.array([0, 0, bad, 0, 0], np.float32)
    with pytest.raises(UpdateError, match="NaN"):
        deployment.sealed(delta)


def test_a_server_that_lies_about_staleness_only_shrinks_the_update() -> None:
    deployment = Deployment(a_private_task())
    unit = np.array([1, 0, 0, 0, 0], np.float32)
    for current in range(9):
        update = deployment.sealed(unit, current=current)
        deployment.accept(update, current)
        group = deployment.tsa._tasks[deployment.hash].groups.pop(current)
        group._to_noise, group._noise = 0, None
        words = (update.masked - group.masks_of([update.index])).view(SIGNED)
        expected = deployment.parameters.levels / math.sqrt(1 + current)
        assert words[0] == pytest.approx(expected, abs=1)
        del deployment.tsa._accepted[update.index]


# --- The public numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("goal", [2, 10, 1000, 100_000])
@pytest.mark.parametrize("z", [0.1, 0.3, 1.0, 2.5, 100.0])
def test_levels_are_the_most_that_leave_room_for_noise(goal: int, z: float) -> None:
    levels = private_levels(goal, z)
    assert goal * levels + 9 * Fraction(z) * levels <= 2**31 - 1
    assert goal * (levels + 1) + 9 * Fraction(z) * (levels + 1) > 2**31 - 1


@pytest.mark.parametrize("goal", [2, 10, 1000, 100_000])
@pytest.mark.parametrize("z", [0.1, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("length", [16, 64, 5_000_000])
def test_random_words_are_implausible_for_every_goal_and_noise(
    goal: int, z: float, length: int
) -> None:
    """ADR 0074: as without noise, but for models of a few coordinates."""
    levels = private_levels(goal, z)
    if levels < math.ceil(4 * math.sqrt(length)) or z * levels < 64:
        return  # refused for want of precision
    parameters = a_private_task(
        length=length, aggregation_goal=goal, threshold=goal, noise_multiplier=z
    )
    assert chance_of_random_words(goal, parameters) < {16: 2.0**-8, 64: 2.0**-67}.get(
        length, 1e-300
    )


def test_a_sum_is_divided_by_the_public_divisor() -> None:
    parameters = a_private_task(weighting="capped", expected_weight=0.25)
    deployment = Deployment(parameters)
    values = np.full(5, 0.4, np.float32)
    updates = [deployment.accept(deployment.sealed(values, examples=50)) for _ in range(4)]
    words = deployment.unmasked(updates)
    found = decoded(words, 4, parameters)
    assert found.weight == 4 * 0.25
    noise = found.vector - 4 * 0.5 * values
    assert np.allclose(found.mean() - noise / found.weight, 0.4 * 0.5 / 0.25, atol=1e-5)


@pytest.mark.parametrize("seed", range(50))
def test_honest_sums_with_noise_are_plausible(seed: int) -> None:
    parameters = a_private_task(length=40, aggregation_goal=4)
    rng = np.random.default_rng(seed)
    unit = rng.normal(size=40)
    total = 4 * np.rint(unit / np.linalg.norm(unit) * (parameters.levels - 10)).astype(np.int64)
    words = np.append(total, 4).astype(WORD)
    Noise(seed.to_bytes(16, "big"), parameters.sigma).add_to(words, 0, 40)
    decoded(words, 4, parameters)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([0, 0, 0, 0, 0, 3], "constant"),
        ([2**30 + 2**29] * 5 + [4], "norm"),
        ([2**31 - 1, 0, 0, 0, 0, 4], "coordinate"),
        ([0, 0, 0, 0, 4], "length"),
    ],
)
def test_implausible_sums(words: list[int], reason: str) -> None:
    parameters = a_private_task(threshold=3, noise_multiplier=0.5)
    with pytest.raises(Implausible) as caught:
        decoded(np.array(words, WORD), 4 if reason != "coordinate" else 3, parameters)
    assert caught.value.reason == reason or reason == "coordinate"


# --- Bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": 2}, "noise_multiplier"),
        ({"noise_multiplier": 1e-12}, "noise_multiplier"),
        ({"noise_multiplier": 1e9}, "noise_multiplier"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 0.5}, "delta"),
        ({"delta": 1e-16}, "delta"),
        ({"max_participations": 0}, "max_participations"),
        ({"max_participations": None}, "max_participations"),
        ({"expected_weight": 0.5}, "expected_weight"),
        ({"weighting": "capped", "expected_weight": 0.0}, "expected_weight"),
        ({"weighting": "capped", "expected_weight": 1.5}, "expected_weight"),
        ({"weighting": "examples"}, "weighting"),
        ({"weighting": "none"}, "weighting"),
        ({"clip": 0.0}, "clip"),
        ({"clip": math.inf}, "clip"),
        ({"aggregation_goal": 1, "threshold": 1}, "aggregation_goal"),
        ({"length": 2**30 + 1}, "length"),
        ({"length": 2**30, "aggregation_goal": 20_000}, "noise_multiplier"),
        ({"scheme": "papaya-secagg-3"}, "noise_multiplier"),
        ({"scheme": "papaya-secagg-4"}, "scheme"),
    ],
)
def test_parameters_that_are_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ParametersError) as caught:
        a_private_task(**changes)
    assert caught.value.reason == field


def test_the_largest_model_is_possible() -> None:
    assert a_private_task(length=2**30, aggregation_goal=1000).levels > 4 * 2**15


def test_the_plain_scheme_has_no_noise_and_its_encoding_is_as_before() -> None:
    with pytest.raises(ParametersError):
        a_task(noise_multiplier=1.0)
    with pytest.raises(ParametersError):
        a_task(weighting="capped")
    assert b"noise_multiplier" not in a_task().encode()
    for parameters in (a_task(), a_private_task(), a_private_task(manifest=64 * "a", kind="train")):
        assert PublicParameters.decode(parameters.encode()) == parameters


def test_an_update_is_sealed_once() -> None:
    deployment = Deployment(a_private_task())
    update = UnsealedUpdate(np.zeros(5, np.float32), 1, 0)
    update.seal(deployment.terms(), deployment.offer(), 0, NOW, deployment.draw, bytes(16))
    with pytest.raises(UpdateError, match="already sealed"):
        update.seal(deployment.terms(), deployment.offer(), 0, NOW, deployment.draw, bytes(16))
