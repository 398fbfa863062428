"""The accountant: what participations cost, and the epsilon that follows from it.

One participation with noise multiplier z is mu-GDP with mu = 1/z (Gaussian differential privacy,
Dong, Roth and Su 2022). Its cost is rho = mu^2 / 2. Costs add up, also if each is chosen after the
results of the earlier ones are known (Smith and Thakurta 2022), and mu = sqrt(2 rho). Epsilon at
delta follows from mu exactly:

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon * Phi(-mu/2 - epsilon/mu)

Neighbours: the device's numbers are replaced by zeros. If they are replaced by any others, the
sensitivity is twice as large: mu is doubled. Everything is a function of numbers; nothing is stored
here. Refused (ValueError): values for which no epsilon exists.
"""

from __future__ import annotations

import math
from typing import Final

_STEPS: Final = 200  # of a bisection; a float64 has no more digits
_FAR: Final = -30.0  # below it, erfc is close to the smallest float
_LARGEST: Final = 1e12  # of epsilon and of mu
_MOST_FINITE: Final = 700.0  # exp of more is not a float64


def rho_of(noise_multiplier: float) -> float:
    """The cost of one participation."""
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier = {noise_multiplier}: must be finite and above zero")
    return 1 / (2 * noise_multiplier * noise_multiplier)


def mu_of(rho: float) -> float:
    return math.sqrt(2 * rho)


def delta_of_sampler(epsilon: float, words: float) -> float:
    """What so many words of noise add to delta, if each is within 2^-100 of the exact mechanism in
    total variation (docs/privacy.md).
    """
    distance = words * 2.0**-100
    return 1.0 if epsilon > _MOST_FINITE else min(1.0, (1 + math.exp(epsilon)) * distance)


def replacement(mu: float) -> float:
    """The same mechanism if the device's numbers are replaced by others instead of zeros."""
    return 2 * mu


def delta_of(mu: float, epsilon: float) -> float:
    """The smallest delta for which mu-GDP is (epsilon, delta)-DP."""
    if mu == 0:
        return 0.0
    first = _log_phi(mu / 2 - epsilon / mu)
    second = epsilon + _log_phi(-mu / 2 - epsilon / mu)
    # The first is larger. The difference of logarithms keeps digits where both are tiny.
    return max(0.0, math.exp(first) * -math.expm1(min(0.0, second - first)))


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest epsilon for which mu-GDP is (epsilon, delta)-DP, rounded up."""
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: must be above 0 and below 1")
    if not 0 <= mu <= _LARGEST:
        raise ValueError(f"mu = {mu}: must be from 0 to {_LARGEST:g}")
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    # delta falls with epsilon; Phi(mu/2 - epsilon/mu) is below every delta from 40 mu on.
    low, high = 0.0, mu * mu / 2 + 40 * mu
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if delta_of(mu, middle) <= delta:
            high = middle
        else:
            low = middle
    return high


def mu_for(epsilon: float, delta: float) -> float:
    """The largest mu that is (epsilon, delta)-DP, rounded down."""
    if not 0 < epsilon <= _LARGEST:
        raise ValueError(f"epsilon = {epsilon}: must be above 0 and at most {_LARGEST:g}")
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: must be above 0 and below 1")
    low, high = 0.0, 1.0
    while delta_of(high, epsilon) <= delta:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if delta_of(middle, epsilon) <= delta:
            low = middle
        else:
            high = middle
    return low


def noise_multiplier_for(mu: float, participations: int, share: float = 1.0) -> float:
    """The smallest noise multiplier, to four digits, with which so many participations together
    cost at most this share of mu.
    """
    exact = math.sqrt(participations / share) / mu
    unit = 10.0 ** (math.floor(math.log10(exact)) - 3)
    found = float(f"{math.ceil(exact / unit) * unit:.4g}")
    return found if found >= exact else float(f"{found + unit:.4g}")


def _log_phi(x: float) -> float:
    """The logarithm of the normal distribution function."""
    if x > _FAR:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    # The asymptotic series; its error is below its last term, 105 / x^8.
    inverse = 1 / (x * x)
    series = 1 - inverse * (1 - 3 * inverse * (1 - 5 * inverse))
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log(series)
