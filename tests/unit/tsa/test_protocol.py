"""Any clients, any order, any drop-out: the sum is exact, and what the server sees is noise."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from papaya.secagg import fixed_point
from papaya.secagg.participant import SealedUpdate, weight_and_damping
from papaya.secagg.words import WORD, Words
from papaya.tsa import wire
from papaya.tsa.errors import RefusalReason, TsaRefused
from tests.unit.secagg import reference
from tests.unit.secagg.builders import NOW, Deployment, a_task, decoded, encoded, entropy

LENGTH = 3

clients = st.lists(
    st.tuples(
        st.lists(st.floats(-0.5, 0.5, width=32), min_size=LENGTH, max_size=LENGTH),
        st.integers(1, 200),
        st.integers(0, 8),
        st.integers(0, 2),  # its group
        st.sampled_from(["counted", "never sent", "not folded", "sent twice"]),
    ),
    min_size=1,
    max_size=24,
)


@settings(max_examples=60)
@given(clients, st.randoms(use_true_random=False), st.booleans())
def test_the_sum_is_exact_for_any_clients_in_any_order(
    drawn: list[Any], random: Any, idle: bool
) -> None:
    parameters = a_task(length=LENGTH, threshold=1, aggregation_goal=24)
    deployment = Deployment(parameters)
    started = [
        (deployment.sealed(np.array(values, np.float32), n, 0, s), values, n, s, group, fate)
        for values, n, s, group, fate in drawn
    ]
    random.shuffle(started)
    counted: dict[int, list[Any]] = {}
    for update, values, n, s, group, fate in started:
        if fate == "never sent":
            continue
        deployment.accept(update, group)
        if idle:
            deployment.tsa.sum_waiting()
        if fate == "sent twice":
            with pytest.raises(TsaRefused) as caught:
                deployment.accept(update, group)
            assert caught.value.reason is RefusalReason.REPLAYED
        if fate != "not folded":
            counted.setdefault(group, []).append((update, values, n, s))
    for group in sorted(counted):
        members = counted[group]
        words = deployment.unmasked([update for update, *_ in members], group)
        assert words.tolist() == fixed_point_sum(deployment, members)
        assert_close(deployment, words, members)
    deployment.tsa.check()


def fixed_point_sum(deployment: Deployment, members: list[Any]) -> list[int]:
    parameters = deployment.parameters
    total = [0] * parameters.vector_words
    for _, values, n, s in members:
        weight, damping = min(n, 100) / 100, 1 / math.sqrt(1 + s)
        factor = weight * damping * (parameters.levels / parameters.clip)
        words = [reference.encoded(value, factor, parameters.levels) for value in values]
        for at, word in enumerate([*words, round(weight * parameters.levels), 1]):
            total[at] = (total[at] + word) % 2**32
    return total


def assert_close(deployment: Deployment, words: Words, members: list[Any]) -> None:
    parameters = deployment.parameters
    found = decoded(words, len(members), parameters)
    sums = [Fraction(0)] * (LENGTH + 1)
    for _, values, n, s in members:
        weight, damping = weight_and_damping(parameters, n, s)
        for at, value in enumerate(values):
            sums[at] += Fraction(value) * Fraction(weight) * Fraction(damping)
        sums[-1] += Fraction(weight)
    bound = Fraction(fixed_point.error_bound(len(members), 24, parameters.clip))
    for value, exact in zip([*found.vector.tolist(), found.weight], sums, strict=True):
        assert abs(Fraction(value) - exact) <= bound + abs(exact) / 2**23


# --- What the server sees -----------------------------------------------------------------------
# The proof's simulator sends the server uniform vectors in place of an honest client's masked one,
# and fits only the released sum to the ideal functionality's answer.

WORDS = 40_000
SUSPICIOUS = 1e-4  # drawn bytes repeat from run to run, so neither does a verdict change


def uniformity(words: Words) -> float:
    """The smallest of four p-values: each byte of the words against the uniform distribution."""
    table = words.view(np.uint8).reshape(-1, 4)
    counts = [np.bincount(table[:, byte], minlength=256) for byte in range(4)]
    return min(float(stats.chisquare(count).pvalue) for count in counts)


def same_source(first: Words, second: Words) -> float:
    """Chi-square test of homogeneity on each byte of the words of two vectors."""
    tables = [words.view(np.uint8).reshape(-1, 4) for words in (first, second)]
    values = [
        stats.chi2_contingency([np.bincount(t[:, byte], minlength=256) for t in tables]).pvalue
        for byte in range(4)
    ]
    return float(min(values))


def two_inputs() -> tuple[Deployment, SealedUpdate, SealedUpdate]:
    deployment = Deployment(a_task(length=WORDS - 2, threshold=2))
    one = np.full(WORDS - 2, 1.0, np.float32)
    other = np.sin(np.arange(WORDS - 2)).astype(np.float32) / 200
    return deployment, deployment.sealed(one), deployment.sealed(other)


def test_masked_vectors_of_different_inputs_look_alike() -> None:
    _, first, second = two_inputs()
    assert uniformity(first.masked) > SUSPICIOUS
    assert uniformity(second.masked) > SUSPICIOUS
    assert same_source(first.masked, second.masked) > SUSPICIOUS


def test_masked_vectors_of_two_clients_say_nothing_together() -> None:
    """Not even their difference or their word-wise exclusive or."""
    _, first, second = two_inputs()
    assert uniformity(first.masked - second.masked) > SUSPICIOUS
    assert uniformity(first.masked ^ second.masked) > SUSPICIOUS
    assert uniformity(first.masked[1:] - first.masked[:-1]) > SUSPICIOUS


def test_the_servers_view_is_the_simulators_view() -> None:
    """The simulator knows the sum alone; its masked vectors and unmask are as good as real ones."""
    deployment, first, second = two_inputs()
    for update in (first, second):
        deployment.accept(update)
    masks = deployment.tsa.release(deployment.hash, 0, [first.index, second.index])
    known_sum = first.masked + second.masked - masks
    draw = entropy("simulator")
    simulated = [np.frombuffer(draw(4 * WORDS), WORD) for _ in range(2)]
    simulated_masks = simulated[0] + simulated[1] - known_sum
    for real, ideal in ((first.masked, simulated[0]), (masks, simulated_masks)):
        assert same_source(real, ideal) > SUSPICIOUS
        assert uniformity(real) > SUSPICIOUS
    assert uniformity(masks - first.masked) > SUSPICIOUS


def test_the_statistics_would_notice() -> None:
    """No mask, a mask that leaves out a part of the group, and a mask used twice."""
    deployment, first, _ = two_inputs()
    parameters = deployment.parameters
    plain = encoded(
        np.sin(np.arange(WORDS)).astype(np.float32), float(parameters.levels), parameters.levels
    )
    assert uniformity(plain) < 1e-12
    reduced: Words = np.frombuffer(entropy("weak")(4 * WORDS), WORD) % np.uint32(2**31 - 1)
    assert uniformity(reduced) < 1e-12
    assert same_source(reduced, first.masked) < 1e-12
    twice = first.masked - (first.masked + plain)
    assert uniformity(twice) < 1e-12


def test_the_tsa_gets_as_many_bytes_whatever_the_model() -> None:
    sizes = []
    for length in (1, 1000, 300_000):
        deployment = Deployment(a_task(length=length, threshold=1))
        update = deployment.any_sealed()
        sizes.append(len(wire.accept_request(update.index, 0, update.sealed)))
        deployment.tsa.accept(update.index, 0, update.sealed, NOW)
    assert sizes == [85, 85, 85]
