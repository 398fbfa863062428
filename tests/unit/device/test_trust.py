"""What a device agrees to: never less than its own task file, nor than its owner."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec import structs

from papaya.attestation.policy import DevicePolicy
from papaya.config import (
    AsyncFL,
    EvaluationPlan,
    Privacy,
    PrivateEvaluation,
    Requirements,
    SecureAggregation,
    Staleness,
    TaskConfig,
    Weighting,
)
from papaya.device.trust import agreed_policy
from papaya.errors import ProtocolError
from papaya.learning.definition import TaskTerms
from papaya.learning.evaluation import EVALUATION_LENGTH
from papaya.learning.private_evaluation import BINS, private_evaluation_length
from papaya.messages.owner import evaluation_config
from papaya.messages.storage import VersionRow
from papaya.secagg.errors import OfferRefused
from papaya.secagg.parameters import PublicParameters
from tests.unit.verifiable_log.builders import KEY

GOAL = 100
A_VERSION = VersionRow(3, "next-word/1/version-3", 1, 0.0)


def an_owner(**changes: Any) -> DevicePolicy:
    return DevicePolicy(**{"log_key": str(KEY.verifier)} | changes)


def a_config(**changes: Any) -> TaskConfig:
    settings: dict[str, Any] = {
        "task": "next-word",
        "concurrency": 1000,
        "model_length": 5,
        "regime": AsyncFL(aggregation_goal=GOAL, max_staleness=50),
        "clip": 1.0,
        "secure_aggregation": SecureAggregation(),
    }
    return TaskConfig(**(settings | changes))


def offered(config: TaskConfig) -> PublicParameters:
    found = config.public_parameters
    assert found is not None
    return found


def an_evaluation_of(config: TaskConfig) -> TaskConfig:
    return evaluation_config(config, A_VERSION, EvaluationPlan(clients=10), EVALUATION_LENGTH)


def refusal(owner: DevicePolicy, file: TaskConfig, server: TaskConfig) -> str:
    """Of what a server offers for a task that the device has a file of."""
    is_evaluation = server.evaluates is not None
    policy = agreed_policy(owner, server.task, TaskTerms.of(file), evaluates=is_evaluation)
    with pytest.raises(OfferRefused) as caught:
        policy.check(offered(server))
    return caught.value.reason


@pytest.mark.parametrize("config", [a_config(), an_evaluation_of(a_config())])
def test_a_device_agrees_to_what_its_file_says(config: TaskConfig) -> None:
    is_evaluation = config.evaluates is not None
    policy = agreed_policy(
        an_owner(), config.task, TaskTerms.of(a_config()), evaluates=is_evaluation
    )
    policy.check(offered(config))


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        ({"weighting": Weighting("equal")}, "weighting"),
        ({"weighting": Weighting("capped", 20)}, "max_examples"),
        ({"staleness": Staleness("constant")}, "damping"),
        ({"staleness": Staleness("hinge", slope=0.5, grace=10)}, "damping"),
    ],
)
def test_a_device_agrees_to_the_weights_and_the_damping_of_its_file(
    methods: dict[str, Any], reason: str
) -> None:
    config = a_config(**methods)
    policy = agreed_policy(an_owner(), config.task, TaskTerms.of(config), evaluates=False)
    policy.check(offered(config))
    assert refusal(an_owner(), a_config(), config) == reason


def test_a_device_limits_the_damping_of_any_function() -> None:
    steep = a_config(staleness=Staleness("polynomial", exponent=2.0))
    assert refusal(an_owner(), steep, steep) == "damping"
    assert refusal(an_owner(maximum_staleness=10_000), steep, a_config()) == "damping"


@pytest.mark.parametrize("weaker", [SecureAggregation(10), SecureAggregation(GOAL - 1)])
def test_a_server_lowers_the_threshold_of_the_file(weaker: SecureAggregation) -> None:
    """A file that says nothing means its goal, K: what its owner believes in."""
    lowered = a_config(secure_aggregation=weaker)
    assert refusal(an_owner(), a_config(), lowered) == "threshold"
    assert refusal(an_owner(), a_config(), an_evaluation_of(lowered)) == "threshold"


def test_a_server_lowers_the_goal_and_with_it_the_threshold() -> None:
    small = a_config(regime=AsyncFL(aggregation_goal=10, max_staleness=50))
    assert refusal(an_owner(), a_config(), small) == "threshold"


def test_a_higher_threshold_than_the_files_is_no_harm() -> None:
    file = a_config(secure_aggregation=SecureAggregation(20))
    policy = agreed_policy(an_owner(), file.task, TaskTerms.of(file), evaluates=False)
    policy.check(offered(a_config()))


def test_an_owner_may_want_more_clients_than_the_file() -> None:
    assert refusal(an_owner(minimum_threshold=GOAL + 1), a_config(), a_config()) == "threshold"


def test_a_file_that_allows_more_staleness_than_its_owner_is_refused() -> None:
    """The task's author and its server may be one and the same."""
    stale = a_config(regime=AsyncFL(aggregation_goal=GOAL, max_staleness=1001))
    assert refusal(an_owner(), stale, stale) == "max_staleness"
    policy = agreed_policy(
        an_owner(maximum_staleness=1001), stale.task, TaskTerms.of(stale), evaluates=False
    )
    policy.check(offered(stale))


def test_evaluations_are_not_damped_so_no_staleness_is_too_much() -> None:
    config = an_evaluation_of(a_config())
    policy = agreed_policy(
        an_owner(maximum_staleness=0), config.task, TaskTerms.of(a_config()), evaluates=True
    )
    policy.check(offered(config))


SIGNED = structs.replace(
    TaskTerms.of(a_config()),
    manifest="ab" * 32,
    aggregation_goal=a_config().aggregation_goal,
)


def signed_offer(**changes: Any) -> PublicParameters:
    config = a_config(requirements=Requirements(manifest=SIGNED.manifest))
    return dataclasses.replace(offered(config), **changes)


def test_a_device_agrees_to_the_manifest_that_it_has_verified() -> None:
    agreed_policy(an_owner(), "next-word", SIGNED, evaluates=False).check(signed_offer())


@pytest.mark.parametrize(
    "changes",
    [
        {"manifest": "cd" * 32},
        {"manifest": "", "kind": ""},
        {"aggregation_goal": a_config().aggregation_goal + 1},
        {"aggregation_goal": a_config().aggregation_goal + 1, "threshold": 11},
        {"clip": 9.0},
        {"max_examples": 7},
    ],
    ids=str,
)
def test_a_server_that_shows_another_task_than_was_signed_is_refused(
    changes: dict[str, Any],
) -> None:
    policy = agreed_policy(an_owner(), "next-word", SIGNED, evaluates=False)
    with pytest.raises(OfferRefused):
        policy.check(signed_offer(**changes))


def test_a_task_file_agrees_to_no_signed_task() -> None:
    policy = agreed_policy(an_owner(), "next-word", TaskTerms.of(a_config()), evaluates=False)
    with pytest.raises(OfferRefused, match="manifest"):
        policy.check(signed_offer())


@pytest.mark.parametrize(("manifest", "agrees"), [("ab" * 32, True), ("cd" * 32, False)])
def test_an_evaluation_has_the_manifest_of_its_task(manifest: str, agrees: bool) -> None:
    task = a_config(requirements=Requirements(manifest=manifest))
    evaluation = an_evaluation_of(task)
    found = offered(evaluation)
    assert (found.kind, found.manifest) == ("evaluate", manifest)
    policy = agreed_policy(an_owner(), evaluation.task, SIGNED, evaluates=True)
    with nullcontext() if agrees else pytest.raises(OfferRefused, match="manifest"):
        policy.check(found)


PRIVATE = Privacy(
    clip=1.0,
    max_participations=5,
    delta=1e-7,
    epsilon=8.0,
    evaluation=PrivateEvaluation(share=0.2),
)


def a_private_config(**changes: Any) -> TaskConfig:
    return a_config(**({"clip": None, "privacy": PRIVATE} | changes))


def measured(config: TaskConfig, *, norms: bool) -> PublicParameters:
    length = BINS if norms else private_evaluation_length(0)
    plan = EvaluationPlan(clients=10)
    return offered(evaluation_config(config, A_VERSION, plan, length, norms=norms))


@pytest.mark.parametrize("manifest", ["", "ab" * 32])
@pytest.mark.parametrize("norms", [False, True])
def test_a_device_agrees_to_private_evaluations_as_its_terms_say(
    norms: bool, manifest: str
) -> None:
    config = a_private_config(requirements=Requirements(manifest=manifest or None))
    terms = structs.replace(TaskTerms.of(config), manifest=manifest)
    found = measured(config, norms=norms)
    policy = agreed_policy(an_owner(), found.task, terms, evaluates=True, norms=norms)
    policy.check(found)
    changes: dict[str, Any] = {"noise_multiplier": 0.1, "max_participations": 9, "clip": 5.0}
    for field, value in changes.items():
        with pytest.raises(OfferRefused, match=field):
            policy.check(dataclasses.replace(found, **{field: value}))
    other = measured(config, norms=not norms)
    with pytest.raises(OfferRefused, match=r"length|clip"):
        policy.check(dataclasses.replace(other, task=found.task))


def test_parameters_of_an_evaluation_are_none_of_training() -> None:
    """Both have the same scheme, so the kind must be compared. A device would charge the cost of
    training and seal for a group with the noise of evaluations, or the other way round.
    """
    config = a_private_config(requirements=Requirements(manifest="ab" * 32))
    terms = structs.replace(
        TaskTerms.of(config), manifest="ab" * 32, aggregation_goal=config.aggregation_goal
    )
    policy = agreed_policy(an_owner(), "next-word", terms, evaluates=False)
    policy.check(offered(config))
    with pytest.raises(OfferRefused, match="kind"):
        policy.check(dataclasses.replace(offered(config), kind="evaluate", number=3))


def test_evaluations_without_noise_are_not_sealed() -> None:
    terms = TaskTerms.of(a_private_config(privacy=structs.replace(PRIVATE, evaluation=None)))
    with pytest.raises(ProtocolError, match="no noise for evaluations"):
        agreed_policy(an_owner(), "next-word", terms, evaluates=True)


def test_a_file_in_the_clear_has_no_threshold() -> None:
    terms = TaskTerms.of(a_config(secure_aggregation=None))
    assert (terms.secure, terms.threshold) == (False, None)


def test_without_a_clip_nothing_is_masked() -> None:
    terms = structs.replace(TaskTerms.of(a_config()), clip=None)
    with pytest.raises(ProtocolError, match="no clip"):
        agreed_policy(an_owner(), "next-word", terms, evaluates=False)
