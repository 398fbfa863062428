"""The accountant agrees with `dp-accounting` on a grid, and is monotone and consistent off it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.privacy.accountant import (
    delta_of,
    epsilon_of,
    mu_for,
    mu_of,
    noise_multiplier_for,
    replacement,
    rho_of,
)

GRID = json.loads(Path(__file__).with_name("accounting.json").read_text())


def test_the_grid_of_dp_accounting() -> None:
    assert len(GRID) == 96
    for row in GRID:
        mu = mu_of(row["participations"] * rho_of(row["noise_multiplier"]))
        found = epsilon_of(mu, row["delta"])
        assert found == pytest.approx(row["exact"], rel=1e-12), row
        if row["composed"] is not None:  # an upper bound by another method
            assert row["composed"] - 2e-5 < found <= row["composed"], row


@given(st.floats(1e-3, 300), st.floats(1e-12, 0.1))
def test_epsilon_and_delta_are_inverse(mu: float, delta: float) -> None:
    epsilon = epsilon_of(mu, delta)
    assert delta_of(mu, epsilon) <= delta
    if epsilon > 0:
        assert delta_of(mu, epsilon * (1 - 1e-6)) > delta * (1 - 1e-12)


@given(st.floats(1e-3, 100), st.floats(1e-12, 0.1), st.integers(1, 10_000))
def test_a_noise_multiplier_keeps_its_epsilon(epsilon: float, delta: float, count: int) -> None:
    z = noise_multiplier_for(mu_for(epsilon, delta), count)
    assert epsilon_of(mu_of(count * rho_of(z)), delta) <= epsilon * (1 + 1e-12)
    smaller = z * (1 - 2e-3)
    assert epsilon_of(mu_of(count * rho_of(smaller)), delta) > epsilon * (1 - 1e-3)


@given(st.floats(1e-3, 50), st.floats(1e-9, 0.1))
def test_the_largest_mu(epsilon: float, delta: float) -> None:
    mu = mu_for(epsilon, delta)
    assert epsilon_of(mu, delta) == pytest.approx(epsilon, rel=1e-6)


def test_replacement_is_twice_the_sensitivity() -> None:
    assert replacement(mu_of(rho_of(2.0))) == pytest.approx(mu_of(rho_of(1.0)))


def test_small_and_large_mu_are_finite() -> None:
    assert epsilon_of(0.0, 1e-6) == 0.0
    assert epsilon_of(1e-9, 1e-6) == 0.0
    # mu^2 / 2 plus a few standard deviations.
    assert 5e9 < epsilon_of(1e5, 1e-9) < 5.001e9


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-6, math.nan])
def test_a_delta_that_is_no_probability(delta: float) -> None:
    for function in (epsilon_of, mu_for):
        with pytest.raises(ValueError, match="delta"):
            function(1.0, delta)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_values_without_a_cost(value: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        rho_of(value)
    with pytest.raises(ValueError, match="epsilon"):
        mu_for(value, 1e-6)
