"""Settings of differential privacy: what is refused, what is warned about, what follows."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from papaya.cli.task.privacy import NOT_ALL, privacy_in_words
from papaya.config import (
    AsyncFL,
    EvaluationPlan,
    Privacy,
    PrivateEvaluation,
    SecureAggregation,
    SyncFL,
    TaskConfig,
)
from papaya.config.privacy import rho_of_revisions
from papaya.errors import ConfigError, ProtocolError
from papaya.learning.private_evaluation import private_evaluation_length, summarize_private
from papaya.learning.settings import changed
from papaya.secagg.parameters import PRIVATE_SCHEME


def a_privacy(**changes: Any) -> Privacy:
    fields = {"clip": 1.0, "max_participations": 10, "delta": 1e-7, "epsilon": 8.0}
    return Privacy(**(fields | changes))


def a_config(**changes: Any) -> TaskConfig:
    fields: dict[str, Any] = {
        "task": "next-word",
        "concurrency": 1000,
        "model_length": 10_000,
        "regime": AsyncFL(aggregation_goal=500),
        "secure_aggregation": SecureAggregation(),
        "privacy": a_privacy(),
    }
    return TaskConfig(**(fields | changes))


def test_epsilon_gives_the_noise_and_the_noise_gives_epsilon() -> None:
    by_epsilon = a_privacy().terms
    assert 7.9 < by_epsilon.epsilon <= 8.0
    by_noise = a_privacy(epsilon=None, noise_multiplier=by_epsilon.noise_multiplier).terms
    assert by_noise == by_epsilon
    assert by_noise.epsilon_of_replacement > 2 * by_noise.epsilon


def test_the_public_parameters_have_all_of_it() -> None:
    config = a_config()
    found = config.public_parameters
    assert found is not None
    assert found.scheme == PRIVATE_SCHEME
    assert found.weighting == "equal"
    assert (found.clip, found.max_participations, found.delta) == (1.0, 10, 1e-7)
    assert found.noise_multiplier == a_privacy().terms.noise_multiplier
    assert config.update_bytes == 4 * found.vector_words == 4 * 10_001
    assert (config.clip, config.max_participations) == (1.0, 10)
    assert msgspec.json.decode(msgspec.json.encode(config), type=TaskConfig) == config


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"epsilon": 0.0}, "privacy.epsilon"),
        ({"epsilon": -1.0}, "privacy.epsilon"),
        ({"epsilon": math.inf}, "privacy.epsilon"),
        ({"epsilon": None}, "privacy.noise_multiplier and privacy.epsilon"),
        ({"noise_multiplier": 1.0}, "privacy.noise_multiplier and privacy.epsilon"),
        ({"epsilon": None, "noise_multiplier": 0.0}, "privacy.noise_multiplier"),
        ({"delta": 0.0}, "privacy.delta"),
        ({"delta": 0.5}, "privacy.delta"),
        ({"clip": 0.0}, "privacy.clip"),
        ({"clip": math.inf}, "privacy.clip"),
        ({"max_participations": 0}, "privacy.max_participations"),
        ({"max_participations": 2**40}, "privacy.max_participations"),
        ({"weighting": "examples"}, "privacy.weighting"),
        ({"expected_weight": 0.5}, "privacy.expected_weight"),
        ({"weighting": "capped", "expected_weight": 0.0}, "privacy.expected_weight"),
    ],
)
def test_privacy_that_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} = ") as caught:
        a_privacy(**changes)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"regime": AsyncFL(aggregation_goal=1)}, "aggregation_goal = 1"),
        ({"clip": 2.0}, "differs from privacy.clip"),
        ({"max_participations": 3}, "differs from privacy.max_participations"),
        ({"evaluation": EvaluationPlan()}, "evaluation"),
        ({"model_length": 2**30, "regime": AsyncFL(aggregation_goal=20_000)}, "levels"),
        ({"privacy": a_privacy(epsilon=None, noise_multiplier=1e9)}, "levels"),
    ],
)
def test_a_task_that_is_refused(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        a_config(**changes)
    assert caught.value.hint


@pytest.mark.parametrize("regime", [AsyncFL(aggregation_goal=500), SyncFL()])
def test_both_regimes(regime: AsyncFL | SyncFL) -> None:
    assert a_config(regime=regime).public_parameters is not None


def test_noise_above_the_signal_is_a_warning_with_the_ratio() -> None:
    z = a_privacy().terms.noise_multiplier
    [warning] = [
        w for w in a_config(regime=AsyncFL(aggregation_goal=100)).warnings() if "noise" in w
    ]
    assert f"about {z * 100 / 100:.3g} times" in warning
    capped = a_privacy(weighting="capped", expected_weight=0.1)
    [warning] = [w for w in a_config(privacy=capped).warnings() if "noise" in w]
    assert f"about {z * 100 / 50:.3g} times" in warning
    assert not [w for w in a_config().warnings() if "noise of a step" in w]


def test_an_evaluation_that_its_noise_hides_is_a_warning() -> None:
    """`summarize_private` refuses such a result, after devices have paid for it."""
    private = PrivateEvaluation(noise_multiplier=10.0)
    terms = private.terms(10.0, 1)
    needed = math.ceil(terms.smallest_weight(0))
    sums = np.zeros(private_evaluation_length(0))

    def hidden(clients: int) -> list[str]:
        config = a_config(
            regime=AsyncFL(aggregation_goal=20),
            privacy=a_privacy(evaluation=private),
            evaluation=EvaluationPlan(clients=clients),
        )
        return [w for w in config.warnings() if "hides the results of evaluations" in w]

    [warning] = hidden(needed - 1)
    assert f"by {needed - 1} clients" in warning
    assert f"{needed} clients are needed" in warning
    sums[0] = needed - 1
    with pytest.raises(ProtocolError, match="noise hides the result"):
        summarize_private(sums, needed - 1, terms, ())
    assert not hidden(needed)
    sums[0] = needed
    assert summarize_private(sums, needed, terms, ()).all.clients == needed


def test_other_warnings() -> None:
    large = a_config(privacy=a_privacy(delta=1e-3)).warnings()
    assert any("delta = 0.001 is large for a fleet" in warning for warning in large)
    clear = a_config(secure_aggregation=None).warnings()
    assert any("operator of the servers sees every update" in warning for warning in clear)
    small = a_config(model_length=6, regime=AsyncFL(aggregation_goal=10)).warnings()
    assert any("too small to detect" in warning for warning in small)


def test_the_owner_is_told_epsilon_and_what_it_does_not_say() -> None:
    first, second = privacy_in_words(a_config())
    terms = a_privacy().terms
    assert f"ε = {terms.epsilon:.4g} at δ = 1e-07" in first
    assert f"ε = {terms.epsilon_of_replacement:.4g} if they are replaced" in first
    assert second == NOT_ALL
    assert (
        second == "this ε is for this task only; only the device knows what it has spent in total"
    )
    assert privacy_in_words(a_config(privacy=None, clip=1.0)) == []


def test_an_owner_is_told_what_the_sampler_adds_and_how_often_evaluations_happen() -> None:
    evaluation = PrivateEvaluation(share=0.1, max_participations=3)
    first, _ = privacy_in_words(a_config(privacy=a_privacy(evaluation=evaluation)))
    assert "10 participations and 3 evaluations per device" in first
    terms = a_privacy(evaluation=evaluation).terms
    words = 10 * 10_000 + 3 * 64
    expected = (1 + math.exp(terms.epsilon_of_replacement)) * words * 2.0**-100
    assert f"the sampler adds at most {expected:.1g} to δ" in first


@pytest.mark.parametrize("share", [0.01, 0.1, 0.9])
def test_evaluations_have_their_share_of_epsilon(share: float) -> None:
    evaluation = PrivateEvaluation(share=share, max_participations=4)
    terms = a_privacy().terms
    for own in ({}, {"epsilon": None, "noise_multiplier": 3.0}):
        terms = a_privacy(evaluation=evaluation, **own).terms
        assert terms.evaluation is not None
        spent = 4 * terms.evaluation.rho
        assert spent / (spent + 10 * terms.rho) == pytest.approx(share, rel=2e-3)
        if not own:
            assert 7.9 < terms.epsilon <= 8.0
    assert terms.evaluation is not None
    by_noise = PrivateEvaluation(
        noise_multiplier=terms.evaluation.noise_multiplier, max_participations=4
    )
    again = a_privacy(evaluation=by_noise, epsilon=None, noise_multiplier=3.0).terms
    assert again == terms
    within = a_privacy(evaluation=PrivateEvaluation(noise_multiplier=50.0)).terms
    assert within.evaluation is not None
    assert within.evaluation.max_participations == 10, "as often as in training"
    assert 7.9 < within.epsilon <= 8.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "share and privacy.evaluation.noise_multiplier"),
        ({"share": 0.1, "noise_multiplier": 1.0}, "share and privacy.evaluation.noise_multiplier"),
        ({"share": 1.0}, "share"),
        ({"share": 0.0}, "share"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": 0.01}, "noise_multiplier"),
        ({"share": 0.1, "max_loss": 0.0}, "max_loss"),
        ({"share": 0.1, "max_loss": math.inf}, "max_loss"),
        ({"share": 0.1, "max_examples": 0}, "max_examples"),
        ({"share": 0.1, "max_participations": 0}, "max_participations"),
    ],
)
def test_evaluations_that_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^privacy\.evaluation\.{field} = ") as caught:
        a_privacy(evaluation=PrivateEvaluation(**changes))
    assert caught.value.hint


def test_what_a_device_can_have_spent_over_revisions() -> None:
    """The first ten participations can have cost the most, the next ten only what revision 2
    costs; whatever a device does, its ledger has no more.
    """
    one = a_privacy(epsilon=None, noise_multiplier=1.0, max_participations=10).terms
    two = a_privacy(epsilon=None, noise_multiplier=2.0, max_participations=20).terms
    three = a_privacy(epsilon=None, noise_multiplier=0.5, max_participations=4).terms
    assert rho_of_revisions([one]) == pytest.approx(10 * one.rho)
    assert rho_of_revisions([one, two]) == pytest.approx(10 * one.rho + 10 * two.rho)
    everything = 4 * three.rho + 6 * one.rho + 10 * two.rho
    assert rho_of_revisions([two, three, one]) == pytest.approx(everything)
    rng = Random(5)
    for _ in range(200):
        order, count, spent = [one, two, three], 0, 0.0
        rng.shuffle(order)
        for terms in order:
            for _ in range(rng.randrange(25)):
                if count < terms.max_participations:
                    count, spent = count + 1, spent + terms.rho
        assert spent <= everything * (1 + 1e-12)


def test_a_revision_is_told_with_what_earlier_ones_allowed() -> None:
    weak = a_privacy(epsilon=None, noise_multiplier=1.0).terms
    config = a_config(privacy=a_privacy(epsilon=None, noise_multiplier=4.0))
    own, all_of_them, _ = privacy_in_words(config, [weak, config.privacy.terms])  # type: ignore[union-attr]
    assert f"ε = {weak.epsilon:.4g}" in all_of_them
    assert f"ε = {weak.epsilon:.4g}" not in own
    assert len(privacy_in_words(config, [config.privacy.terms])) == 2  # type: ignore[union-attr]


def test_settings_can_be_changed_one_by_one() -> None:
    config = changed(a_config(), None, ["privacy.clip=0.5", "privacy.epsilon=4"])
    assert config.clip == 0.5
    assert config.privacy is not None
    assert 3.9 < config.privacy.terms.epsilon <= 4
    evaluated = changed(a_config(), None, ["privacy.evaluation.share=0.2", "evaluation={}"])
    assert evaluated.privacy is not None
    assert evaluated.privacy.evaluation == PrivateEvaluation(share=0.2)
    with pytest.raises(ConfigError, match=r"differs from privacy\.clip"):
        changed(a_config(), None, ["clip=0.5"])
