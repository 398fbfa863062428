"""The noise has the law of the rounded Gaussian, and follows from its key and place alone.

Keys are fixed, so that no test fails by chance. A wrong sampler gives a p-value of practically 0.
"""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from papaya.secagg import noise
from papaya.secagg.errors import ParametersError
from papaya.secagg.fixed_point import SMALLEST_SIGMA
from papaya.secagg.noise import DISTANCE, LARGEST_SIGMA, NOISE_BLOCK, Noise
from papaya.secagg.words import SIGNED, WORD

SIGMAS = [Fraction(64), Fraction(1001, 10), Fraction(5000), Fraction(2**22 + 1), Fraction(2**28)]
ALMOST_NEVER = 1e-6


def drawn(sigma: Fraction, count: int, key: int = 0) -> npt.NDArray[np.float64]:
    words = np.zeros(count, WORD)
    Noise(key.to_bytes(16, "big"), sigma).add_to(words, 0, count)
    return words.view(SIGNED).astype(np.float64)


def chi_square(found: npt.NDArray[np.float64], sigma: float, edges: list[float]) -> float:
    """The p-value of the counts between these edges, which are halves of odd numbers."""
    counts = np.histogram(found, [-math.inf, *edges, math.inf])[0]
    below = np.array([0.0, *stats.norm.cdf(np.array(edges) / sigma), 1.0])
    above = np.array([1.0, *stats.norm.sf(np.array(edges) / sigma), 0.0])
    expected = np.where(below[:-1] < 0.5, np.diff(below), -np.diff(above)) * found.size
    assert expected.min() > 5
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("sigma", SIGMAS, ids=float)
def test_bins_have_their_exact_probabilities(sigma: Fraction) -> None:
    """1,000 bins of equal probability: a strip of the sampler has several of them."""
    found = drawn(sigma, 2_000_000)
    quantiles = stats.norm.ppf(np.arange(1, 1000) / 1000) * float(sigma)
    edges = sorted({math.floor(edge) + 0.5 for edge in quantiles})
    assert chi_square(found, float(sigma), edges) > ALMOST_NEVER


@pytest.mark.parametrize("sigma", SIGMAS, ids=float)
def test_the_tails_have_their_exact_probabilities(sigma: Fraction) -> None:
    found = drawn(sigma, 2_000_000, key=1)
    tail = [round(sigma * t) + 0.5 for t in (2, 2.5, 3, 3.25, 3.5, 3.75, 4, 4.25, 4.35)]
    edges = [-edge for edge in reversed(tail)] + tail
    assert chi_square(found, float(sigma), edges) > ALMOST_NEVER


def test_single_words_have_their_exact_probabilities() -> None:
    sigma = Fraction(64)
    found = drawn(sigma, 2_000_000, key=2)
    edges = [k + 0.5 for k in range(-150, 150)]
    assert chi_square(found, 64.0, edges) > ALMOST_NEVER


def test_words_places_and_keys_are_independent() -> None:
    found = drawn(SIGMAS[3], 40 * NOISE_BLOCK, key=3) / float(SIGMAS[3])
    other = drawn(SIGMAS[3], 40 * NOISE_BLOCK, key=4) / float(SIGMAS[3])
    pairs = [(found[:-lag], found[lag:]) for lag in (1, 2, 3, 16, NOISE_BLOCK)] + [(found, other)]
    for first, second in pairs:
        scale = math.sqrt(first.size)
        for power in (1, 2):  # of the words, and of their sizes
            a, b = first**power, second**power
            correlation = float(np.corrcoef(a, b)[0, 1]) * scale
            assert abs(correlation) < 5, (power, first.size)
    blocks = found.reshape(-1, NOISE_BLOCK)
    sums = blocks.sum(axis=1) / math.sqrt(NOISE_BLOCK)
    assert stats.kstest(sums, "norm").pvalue > ALMOST_NEVER


def test_a_word_depends_on_key_and_place_only() -> None:
    sigma, length = Fraction(1000), 3 * NOISE_BLOCK + 17
    whole, pieces = np.zeros(length, WORD), np.zeros(length, WORD)
    Noise(bytes(16), sigma).add_to(whole, 0, length)
    for start in (2 * NOISE_BLOCK, 0):
        Noise(bytes(16), sigma).add_to(pieces, start, min(length, start + 2 * NOISE_BLOCK))
    assert np.array_equal(whole, pieces)
    assert whole[0] != np.zeros(1, WORD)
    shorter = np.zeros(5, WORD)
    Noise(bytes(16), sigma).add_to(shorter, 0, 5)
    assert np.array_equal(shorter, whole[:5])


@pytest.mark.parametrize("sigma", [Fraction(64), Fraction(1001, 10), Fraction(2**28)], ids=float)
def test_decisions_in_float64_are_the_exact_ones(
    sigma: Fraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a huge margin every candidate is decided by exact arithmetic."""
    monkeypatch.setattr(noise, "NOISE_BLOCK", 2048)
    fast = Noise(b"k" * 16, sigma).block(7)
    asked = []
    exact = Noise._accepts

    def count(self: Noise, *candidate: object) -> bool:
        asked.append(candidate)
        return exact(self, *candidate)  # type: ignore[arg-type]

    monkeypatch.setattr(noise, "_UNSURE", 2.0**40)
    monkeypatch.setattr(Noise, "_accepts", count)
    assert np.array_equal(Noise(b"k" * 16, sigma).block(7), fast)
    assert len(asked) >= 2048


@pytest.mark.parametrize("sigma", [*SIGMAS, Fraction(127), Fraction(2047, 2)], ids=float)
def test_no_strip_has_fewer_slots_than_its_density_needs(sigma: Fraction) -> None:
    getcontext().prec = 50
    table = noise._table(sigma)
    assert table.slots.sum() <= 2**16
    assert Fraction(1, 64) < Fraction(2**table.shift) / sigma <= Fraction(1, 32)
    assert table.strips * 2**table.shift >= 12 * sigma
    for strip, slots in enumerate(table.slots.tolist()):
        exponent = table.exact * strip * strip
        density = (-Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp()
        assert table.scale * density <= slots
        assert np.count_nonzero(table.strip_of == strip) == slots


def test_the_proved_distance() -> None:
    """docs/privacy.md: the cut, and the middle of a position instead of the whole."""
    cut = math.erfc(12 / math.sqrt(2))
    position = 2.0**-5 * 2.0**-47  # in sigma
    middle = position**2 / 24 * (12.05**2 - 1)
    assert cut + middle + 2.0**-127 < DISTANCE
    # Of the largest model, for every delta that is allowed.
    assert 2**30 * DISTANCE < 1e-15 / 1000


@pytest.mark.parametrize("sigma", [Fraction(SMALLEST_SIGMA) - 1, Fraction(LARGEST_SIGMA) + 1])
def test_a_sigma_out_of_range(sigma: Fraction) -> None:
    with pytest.raises(ParametersError, match="noise of"):
        Noise(bytes(16), sigma)


def test_a_key_of_another_size() -> None:
    with pytest.raises(ParametersError, match="16 bytes"):
        Noise(bytes(15), Fraction(100))
