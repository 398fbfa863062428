"""Differential privacy of a task: how much noise, and for how many participations.

docs/privacy.md states what follows from it. The owner gives the noise or the epsilon; the other one
is computed. `PrivacyTerms` is what is signed: all numbers that a device needs to know what a
participation costs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, get_args

from msgspec import Struct

from papaya.config.checks import require, require_choice, require_count
from papaya.privacy import accountant
from papaya.secagg.parameters import MAX_DELTA, MIN_DELTA

PrivateWeighting = Literal["equal", "capped"]
_noise_multiplier_for = lru_cache(maxsize=256)(accountant.noise_multiplier_for)


class PrivacyTerms(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What owner, device and TSA agree on.

    `noise_multiplier`: the standard deviation of the noise, in clips. `max_participations`: of one
    device, over all runs and revisions. `expected_weight`: the sum is divided by the number of
    members times this.
    """

    noise_multiplier: float
    delta: float
    max_participations: int
    weighting: PrivateWeighting
    expected_weight: float

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0,
            "privacy.noise_multiplier",
            self.noise_multiplier,
            "must be finite and above zero",
            "give privacy.epsilon instead, and the noise is computed",
        )
        _check_delta(self.delta)
        require_count("privacy.max_participations", self.max_participations)
        require_choice("privacy.weighting", self.weighting, get_args(PrivateWeighting))
        largest = "1 with equal weights" if self.weighting == "equal" else "above 0 and at most 1"
        require(
            self.expected_weight == 1
            or (self.weighting == "capped" and 0 < self.expected_weight <= 1),
            "privacy.expected_weight",
            self.expected_weight,
            f"must be {largest}",
            "it is the mean of min(examples, max_examples) / max_examples over devices",
        )

    @property
    def rho(self) -> float:
        """What one participation costs a device."""
        return accountant.rho_of(self.noise_multiplier)

    @property
    def mu(self) -> float:
        """Of all participations of one device together."""
        return accountant.mu_of(self.max_participations * self.rho)

    @property
    def epsilon(self) -> float:
        """Of all participations of one device in this task."""
        return accountant.epsilon_of(self.mu, self.delta)

    @property
    def epsilon_of_replacement(self) -> float:
        """The same, if neighbours differ in the device's numbers instead of having zeros."""
        return accountant.epsilon_of(accountant.replacement(self.mu), self.delta)


class Privacy(Struct, frozen=True, kw_only=True):
    """Give `noise_multiplier` or `epsilon`; `epsilon` is that of all participations of a device.

    `weighting`: "equal" gives all updates the same weight, "capped" weighs them by their examples.
    """

    clip: float
    max_participations: int
    delta: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    weighting: PrivateWeighting = "equal"
    expected_weight: float = 1.0

    def __post_init__(self) -> None:
        require(
            (self.noise_multiplier is None) != (self.epsilon is None),
            "privacy.noise_multiplier and privacy.epsilon",
            (self.noise_multiplier, self.epsilon),
            "determine each other: exactly one must be given",
            "give epsilon, for example 8.0",
        )
        require(
            self.epsilon is None or (math.isfinite(self.epsilon) and self.epsilon > 0),
            "privacy.epsilon",
            self.epsilon,
            "must be finite and above zero",
            "common values are from 1 to 10; smaller is more private",
        )
        require(
            math.isfinite(self.clip) and self.clip > 0,
            "privacy.clip",
            self.clip,
            "must be finite and above zero",
            "use about the median of the norms of updates",
        )
        _check_delta(self.delta)
        require_count("privacy.max_participations", self.max_participations)
        assert self.terms.mu > 0  # checks the rest

    @property
    def terms(self) -> PrivacyTerms:
        z = self.noise_multiplier
        if self.epsilon is not None:
            z = _noise_multiplier_for(self.epsilon, self.delta, self.max_participations)
        assert z is not None
        return PrivacyTerms(
            noise_multiplier=float(z),
            delta=float(self.delta),
            max_participations=self.max_participations,
            weighting=self.weighting,
            expected_weight=float(self.expected_weight),
        )


def _check_delta(delta: float) -> None:
    require(
        MIN_DELTA <= delta <= MAX_DELTA,
        "privacy.delta",
        delta,
        f"must be from {MIN_DELTA:g} to {MAX_DELTA:g}",
        "use less than one divided by the number of devices, for example 1e-7",
    )
