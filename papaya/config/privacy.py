"""Differential privacy of a task: how much noise, and for how many participations.

docs/privacy.md states what follows from it. The owner gives the noise or the epsilon; the other one
is computed. `PrivacyTerms` is what is signed: all numbers that a device needs to know what a
participation costs. Evaluations and histograms of norms have noise and limits of their own, and are
part of the task's epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct

from papaya.config.checks import Settings, require, require_choice, require_count, require_numbers
from papaya.privacy import accountant
from papaya.secagg.parameters import MAX_DELTA, MIN_DELTA, PRIVATE_SCHEME

PrivateWeighting = Literal["equal", "capped"]
NORMS_CLIP = 1.0  # one device is in one bin of a histogram of norms
_FEWEST_DEVIATIONS = 4
_mu_for = lru_cache(maxsize=256)(accountant.mu_for)


def evaluation_clip(metrics: int) -> float:
    """The largest norm of what a device uploads in an evaluation: its weight, and its weight times
    the loss and each metric, which are scaled to ±1/2. The weight is at most 1.
    """
    return math.sqrt(1 + (1 + metrics) / 4)


class EvaluationTerms(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What owner, device and TSA agree on for evaluations and histograms of norms.

    `noise_multiplier`: the standard deviation of the noise, in clips. `max_participations`: of one
    device, over all runs and revisions. Losses above `max_loss` count as `max_loss`. A device with
    `max_examples` held-out examples or more has the weight 1.
    """

    noise_multiplier: float
    max_participations: int
    max_loss: float
    max_examples: int

    def __post_init__(self) -> None:
        _check_noise("privacy.evaluation.noise_multiplier", self.noise_multiplier)
        _check_bounds(self)
        require_count("privacy.evaluation.max_participations", self.max_participations)

    @property
    def rho(self) -> float:
        """What one participation costs a device."""
        return accountant.rho_of(self.noise_multiplier)

    def deviation(self, metrics: int) -> float:
        """The standard deviation of the noise in each sum of an evaluation."""
        return self.noise_multiplier * evaluation_clip(metrics)

    def smallest_weight(self, metrics: int) -> float:
        """The noise hides the result if all devices of an evaluation together weigh less."""
        return _FEWEST_DEVIATIONS * self.deviation(metrics)


class PrivacyTerms(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What owner, device and TSA agree on.

    `noise_multiplier`: the standard deviation of the noise, in clips. `max_participations`: of one
    device, over all runs and revisions. `expected_weight`: the sum is divided by the number of
    members times this. `evaluation`: None if there are no evaluations.
    """

    noise_multiplier: float
    delta: float
    max_participations: int
    weighting: PrivateWeighting
    expected_weight: float
    evaluation: EvaluationTerms | None = None

    def __post_init__(self) -> None:
        _check_noise("privacy.noise_multiplier", self.noise_multiplier)
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
    def costs(self) -> tuple[ParticipationCost, ...]:
        """What a device can spend on this task."""
        own = ParticipationCost("train", self.max_participations, self.rho)
        if self.evaluation is None:
            return (own,)
        most, rho = self.evaluation.max_participations, self.evaluation.rho
        return (own, ParticipationCost("evaluate", most, rho))

    @property
    def mu(self) -> float:
        """Of all participations of one device together."""
        return accountant.mu_of(math.fsum(cost.most * cost.rho for cost in self.costs))

    @property
    def epsilon(self) -> float:
        """Of all participations of one device in this task."""
        return accountant.epsilon_of(self.mu, self.delta)

    @property
    def epsilon_of_replacement(self) -> float:
        """The same, if neighbours differ in the device's numbers instead of having zeros."""
        return accountant.epsilon_of(accountant.replacement(self.mu), self.delta)


def public_terms(terms: PrivacyTerms) -> dict[str, Any]:
    """The part of the public parameters that states the noise."""
    return {
        "scheme": PRIVATE_SCHEME,
        "noise_multiplier": terms.noise_multiplier,
        "delta": terms.delta,
        "max_participations": terms.max_participations,
        "weighting": terms.weighting,
        "expected_weight": terms.expected_weight,
    }


class ParticipationCost(NamedTuple):
    """What one participation of a kind costs, and how many one device may have."""

    kind: Literal["train", "evaluate"]
    most: int
    rho: float


def rho_of_revisions(revisions: Sequence[PrivacyTerms]) -> float:
    """The most that one device can have spent on a task that had all these terms.

    Participations of one kind count together. The i-th one can only have happened under terms that
    allow i of them, so it has cost at most the largest rho among those.
    """
    total = []
    for kind in ("train", "evaluate"):
        costs = [cost for terms in revisions for cost in terms.costs if cost.kind == kind]
        before = 0
        for most in sorted({cost.most for cost in costs}):
            largest = max(cost.rho for cost in costs if cost.most >= most)
            total.append((most - before) * largest)
            before = most
    return math.fsum(total)


class PrivateEvaluation(Settings, frozen=True, kw_only=True):
    """Give either `share`, of all that a device can spend on the task, or `noise_multiplier`.

    `max_participations`: None means as often as in training.
    """

    share: float | None = None
    noise_multiplier: float | None = None
    max_participations: int | None = None
    max_loss: float = 10.0
    max_examples: int = 10

    def __post_init__(self) -> None:
        require_numbers(self, "privacy.evaluation.")
        require(
            (self.share is None) != (self.noise_multiplier is None),
            "privacy.evaluation.share and privacy.evaluation.noise_multiplier",
            (self.share, self.noise_multiplier),
            "determine each other: exactly one must be given",
            "give share, for example 0.1",
        )
        require(
            self.share is None or 0 < self.share < 1,
            "privacy.evaluation.share",
            self.share,
            "must be above 0 and below 1",
            "0.1 leaves 90 % of the budget to training",
        )
        if self.noise_multiplier is not None:
            _check_noise("privacy.evaluation.noise_multiplier", self.noise_multiplier)
        if self.max_participations is not None:
            require_count("privacy.evaluation.max_participations", self.max_participations)
        _check_bounds(self)

    def terms(self, noise_multiplier: float, max_participations: int) -> EvaluationTerms:
        return EvaluationTerms(
            noise_multiplier=float(noise_multiplier),
            max_participations=max_participations,
            max_loss=float(self.max_loss),
            max_examples=self.max_examples,
        )


class Privacy(Settings, frozen=True, kw_only=True):
    """Give either `noise_multiplier` or `epsilon`; `epsilon` is that of all participations of a
    device, in training and evaluations.

    `weighting`: "equal" gives all updates the same weight, "capped" weighs them by their examples.
    `evaluation`: None if the task is not evaluated on devices.
    """

    clip: float
    max_participations: int
    delta: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    weighting: PrivateWeighting = "equal"
    expected_weight: float = 1.0
    evaluation: PrivateEvaluation | None = None

    def __post_init__(self) -> None:
        require_numbers(self, "privacy.")
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
        z, evaluation = self._noise_multipliers()
        return PrivacyTerms(
            noise_multiplier=float(z),
            delta=float(self.delta),
            max_participations=self.max_participations,
            weighting=self.weighting,
            expected_weight=float(self.expected_weight),
            evaluation=evaluation,
        )

    def _noise_multipliers(self) -> tuple[float, EvaluationTerms | None]:
        """That of training, and the terms of evaluations."""
        found, z, most = self.evaluation, self.noise_multiplier, self.max_participations
        times = most if found is None else found.max_participations or most
        share = 0.0 if found is None or found.share is None else found.share
        if self.epsilon is not None:
            mu = _mu_for(self.epsilon, self.delta)
            if found is not None and found.noise_multiplier is not None:
                share = times * (1 / found.noise_multiplier / mu) ** 2
                require(
                    share < 1,
                    "privacy.evaluation.noise_multiplier",
                    found.noise_multiplier,
                    f"costs more than epsilon = {self.epsilon:g} in {times} evaluations",
                    "give privacy.evaluation.share instead, for example 0.1",
                )
            z = accountant.noise_multiplier_for(mu, most, 1 - share)
        assert z is not None
        if found is None:
            return z, None
        other = found.noise_multiplier
        if other is None:
            mu = math.sqrt(most / (1 - share)) / z
            other = accountant.noise_multiplier_for(mu, times, share)
        return z, found.terms(other, times)


def _check_noise(field: str, noise_multiplier: float) -> None:
    require(
        math.isfinite(noise_multiplier) and noise_multiplier > 0,
        field,
        noise_multiplier,
        "must be finite and above zero",
        "give privacy.epsilon instead, and the noise is computed",
    )


def _check_bounds(found: EvaluationTerms | PrivateEvaluation) -> None:
    require(
        math.isfinite(found.max_loss) and found.max_loss > 0,
        "privacy.evaluation.max_loss",
        found.max_loss,
        "must be finite and above zero",
        "use about the loss of an untrained model: the noise grows with it",
    )
    require_count("privacy.evaluation.max_examples", found.max_examples)


def _check_delta(delta: float) -> None:
    require(
        MIN_DELTA <= delta <= MAX_DELTA,
        "privacy.delta",
        delta,
        f"must be from {MIN_DELTA:g} to {MAX_DELTA:g}",
        "use less than one divided by the number of devices, for example 1e-7",
    )
