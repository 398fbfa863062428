"""The ledger: what is spent stays spent, and nothing is spent beyond the budget."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET, UnsetType

from papaya.config import EvaluationTerms, PrivacyTerms
from papaya.device.example_store import ExampleStore
from papaya.device.executor import GivenUp
from papaya.device.ledger import Allowance, Charge, PlannedUse, PrivacyAccount, PrivacyLedger
from papaya.device.use_policy import PrivacyBudget, UsePolicy, parse_policies
from papaya.errors import ConfigError
from papaya.learning.definition import TaskTerms
from papaya.privacy.accountant import epsilon_of, mu_of

NOW, DAY_S = 1_700_000_000.0, 86_400.0
BUDGET = PrivacyBudget(epsilon=8.0, delta=1e-7)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[PrivacyLedger]:
    with PrivacyLedger(tmp_path / "device.db") as opened:
        yield opened


def a_charge(rho: float = BUDGET.rho / 4, **changes: Any) -> Charge:
    charge = Charge("keyboard", "owner-1", "next-word", "train", rho, most=1000)
    return charge._replace(**changes)


def evaluation_terms(z: float) -> EvaluationTerms:
    return EvaluationTerms(noise_multiplier=z, max_participations=3, max_loss=10.0, max_examples=10)


def a_use(
    z: float | None = 2.0,
    *,
    evaluates: bool = False,
    most: int = 10,
    evaluation: float | None = None,
) -> PlannedUse:
    privacy: PrivacyTerms | UnsetType = UNSET
    if z is not None:
        privacy = PrivacyTerms(
            noise_multiplier=z,
            delta=1e-7,
            max_participations=most,
            weighting="equal",
            expected_weight=1.0,
            evaluation=None if evaluation is None else evaluation_terms(evaluation),
        )
    terms = TaskTerms(True, 5, 100, 8, 1.0, 10, privacy=privacy, collection="keyboard")
    return PlannedUse(terms, "", "next-word", 1.0, evaluates)


def test_the_budget_is_a_limit_over_all_owners_and_tasks(ledger: PrivacyLedger) -> None:
    for owner, task in (("a", "x"), ("b", "x"), ("", "y"), ("a", "z")):
        ledger.spend(a_charge(owner=owner, task=task), Allowance(BUDGET), NOW)
    with pytest.raises(GivenUp, match="would have spent") as caught:
        ledger.spend(a_charge(rho=1e-3), Allowance(BUDGET), NOW)
    assert caught.value.code == "declined"
    spent = ledger.spent("keyboard")
    assert [each.participations for each in spent] == [1, 1, 1, 1]
    total = math.fsum(each.rho for each in spent)
    assert epsilon_of(mu_of(total), BUDGET.delta) == pytest.approx(BUDGET.epsilon)
    ledger.spend(a_charge(collection="photos"), Allowance(BUDGET), NOW)


def test_a_share_limits_one_owner(ledger: PrivacyLedger) -> None:
    for _ in range(2):
        ledger.spend(a_charge(), Allowance(BUDGET, 0.5), NOW)
    with pytest.raises(GivenUp, match="share of owner owner-1"):
        ledger.spend(a_charge(), Allowance(BUDGET, 0.5), NOW)
    ledger.spend(a_charge(owner="owner-2"), Allowance(BUDGET, 0.5), NOW)


def test_a_device_takes_part_as_often_as_signed_over_all_runs(ledger: PrivacyLedger) -> None:
    for _ in range(3):
        ledger.spend(a_charge(rho=1e-6, most=3), None, NOW)
    with pytest.raises(GivenUp, match="taken part 3 times"):
        ledger.spend(a_charge(rho=1e-6, most=3), None, NOW + 1000 * DAY_S)
    with pytest.raises(GivenUp, match="taken part 3 times"):
        ledger.spend(a_charge(rho=1e-6, most=3, collection="photos"), None, NOW)
    ledger.spend(a_charge(rho=1e-6, most=3, kind="evaluate"), None, NOW)  # has its own limit
    ledger.spend(a_charge(rho=1e-6, most=4), None, NOW)  # the owner has signed more


def test_a_window_renews_and_a_clock_that_was_set_back_frees_nothing(
    ledger: PrivacyLedger,
) -> None:
    window = Allowance(PrivacyBudget(epsilon=8.0, delta=1e-7, window_s=30 * DAY_S))
    for day in range(4):
        ledger.spend(a_charge(), window, NOW + day * DAY_S)
    for now in (NOW + 4 * DAY_S, NOW - 1000 * DAY_S):
        with pytest.raises(GivenUp, match="the budget"):
            ledger.spend(a_charge(), window, now)
    ledger.spend(a_charge(), window, NOW + 30.5 * DAY_S)
    with pytest.raises(GivenUp, match="the budget"):
        ledger.spend(a_charge(), window, NOW + 30.5 * DAY_S)


def test_a_tag_is_drawn_once_for_each_hash_and_survives(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with PrivacyLedger(path) as ledger:
        first, other = ledger.tag(b"a" * 32, os.urandom), ledger.tag(b"b" * 32, os.urandom)
        assert len(first) == 16
        assert first != other
    with PrivacyLedger(path) as ledger:
        assert ledger.tag(b"a" * 32, os.urandom) == first


def test_a_collection_with_a_budget_takes_part_in_nothing_without_noise(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    policies = {"keyboard": UsePolicy(tasks=("*",), budget=BUDGET), "photos": UsePolicy()}
    with ExampleStore(path, policies) as store, PrivacyLedger(path) as ledger:
        account = PrivacyAccount(ledger, store)
        assert account.why_not(a_use(), NOW) == ""
        assert "task next-word has no noise" in account.why_not(a_use(None), NOW)
        assert "evaluations" in account.why_not(a_use(None, evaluates=True), NOW)
        unknown = PlannedUse(None, "", "any", 1.0, evaluates=False)
        assert "keyboard" in account.why_not(unknown, NOW)
        with pytest.raises(GivenUp, match="has no noise"):
            account.spend(a_use(None), NOW)  # the last check before an upload
        assert ledger.collections() == ()
        assert "would have spent" in account.why_not(a_use(0.1), NOW)


def test_a_budget_of_another_process_applies_at_once(tmp_path: Path) -> None:
    """The app that adds examples declares it while the device runs in a process of its own."""
    path = tmp_path / "device.db"
    policy = UsePolicy(tasks=("next-word",))
    tight = PrivacyBudget(epsilon=0.1, delta=1e-7)
    with ExampleStore(path, {"keyboard": policy}) as store, PrivacyLedger(path) as ledger:
        account = PrivacyAccount(ledger, store)
        private, plain = a_use(), a_use(z=None)
        assert account.why_not(private, NOW) == account.why_not(plain, NOW) == ""
        with ExampleStore(path) as app:
            app.declare({"keyboard": UsePolicy(tasks=policy.tasks, budget=tight)})
        for use, problem in ((private, "too little is left"), (plain, "has no noise")):
            with pytest.raises(GivenUp, match=problem):
                account.spend(use, NOW)
            assert problem in account.why_not(use, NOW)
        assert ledger.spent("keyboard") == ()


def test_an_evaluation_costs_what_its_own_noise_says(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    policies = {"keyboard": UsePolicy(tasks=("*",), budget=BUDGET)}
    with ExampleStore(path, policies) as store, PrivacyLedger(path) as ledger:
        account = PrivacyAccount(ledger, store)
        assert "no noise" in account.why_not(a_use(evaluates=True), NOW)
        use = a_use(evaluates=True, evaluation=4.0)
        for _ in range(3):
            account.spend(use, NOW)
        assert "taken part 3 times (evaluate)" in account.why_not(use, NOW)
        account.spend(a_use(2.0, evaluation=4.0), NOW)
        spent = ledger.spent("keyboard")
        assert [(each.kind, each.participations) for each in spent] == [
            ("evaluate", 3),
            ("train", 1),
        ]
        assert [each.rho for each in spent] == pytest.approx([3 / 32, 1 / 8])


def test_without_a_budget_participations_are_recorded_and_not_limited(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with (
        ExampleStore(path, {"keyboard": UsePolicy()}) as store,
        PrivacyLedger(path) as ledger,
    ):
        account = PrivacyAccount(ledger, store)
        assert account.why_not(a_use(None), NOW) == ""
        account.spend(a_use(0.01), NOW)
        [spent] = ledger.spent("keyboard")
        assert spent.rho == pytest.approx(5000)


def test_a_window_shorter_than_the_retention_is_refused() -> None:
    policy = b"""
    [collections.keyboard]
    tasks = ["*"]
    max_age_s = 864000
    [collections.keyboard.budget]
    epsilon = 8.0
    delta = 1e-7
    window_s = 863999
    """
    with pytest.raises(ConfigError, match="shorter than max_age_s"):
        parse_policies(policy, "policies.toml")
    found = parse_policies(policy.replace(b"863999", b"864000"), "policies.toml")
    assert found["keyboard"].budget is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [("epsilon", 0.0), ("epsilon", math.inf), ("delta", 0.0), ("delta", 0.9), ("window_s", 0.0)],
)
def test_a_budget_that_cannot_be(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"budget.{field}"):
        PrivacyBudget(**{"epsilon": 1.0, "delta": 1e-7} | {field: value})
