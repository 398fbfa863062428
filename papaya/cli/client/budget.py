"""`papaya client budget`: what this device has spent of its privacy budgets, and on what."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from papaya.cli.output import (
    Commands,
    FormatOptions,
    add_format,
    bind,
    plural,
    print_data,
    print_json,
)
from papaya.device.example_store import ExampleStore
from papaya.device.ledger import PrivacyLedger
from papaya.device.use_policy import PrivacyBudget, UsePolicy
from papaya.errors import OperatorError
from papaya.privacy.accountant import epsilon_of, mu_of

_DELTA = 1e-7  # for a collection without a budget


@dataclass(frozen=True, kw_only=True)
class ClientBudgetOptions(FormatOptions):
    store: Path = Path("device.db")


def add_to(actions: Commands) -> None:
    parser = actions.add_parser(
        "budget",
        help="show what this device has spent of its privacy budgets",
        description="Show, for each collection, the privacy budget, what was spent, and on which "
        "tasks. Only the device knows this; it is never sent.",
    )
    parser.add_argument(
        "--store", type=Path, metavar="FILE", help="file with the device's examples and ledger"
    )
    add_format(parser)
    bind(parser, ClientBudgetOptions, run)


def run(options: ClientBudgetOptions) -> int:
    if not options.store.is_file():
        raise OperatorError(
            f"there is no device file {options.store}",
            hint="papaya client budget --store FILE; several devices have device-1.db, device-2.db "
            "and so on in one folder",
        )
    with ExampleStore(options.store) as store, PrivacyLedger(options.store) as ledger:
        policies = dict(store.collections)
        for name in ledger.collections():
            policies.setdefault(name, UsePolicy())
        found = [_described(name, policies[name], ledger) for name in sorted(policies)]
    if options.is_json:
        print_json(found)
        return 0
    for each in found:
        print_data(_in_words(each))
        for spent in each.spent_on:
            owner = f" of owner {spent['owner']}" if spent["owner"] else ""
            times = plural(spent["participations"], "participation")
            print_data(
                f"  {spent['task']}{owner}, {spent['kind']}: {times}, rho = {spent['rho']:.4g}"
            )
    if not found:
        print_data("this device has no collections")
    return 0


class CollectionSpent(Struct, frozen=True):
    """One collection: its budget, what was spent in the current window, and on what."""

    collection: str
    budget: PrivacyBudget | None
    budget_rho: float | None
    spent_rho: float
    spent_epsilon: float
    delta: float
    spent_on: list[dict[str, Any]]


def _described(name: str, policy: UsePolicy, ledger: PrivacyLedger) -> CollectionSpent:
    budget = policy.budget
    since = -math.inf if budget is None else budget.begins(time.time())
    spent = ledger.spent(name, since)
    rho = math.fsum(each.rho for each in spent)
    delta = _DELTA if budget is None else budget.delta
    return CollectionSpent(
        collection=name,
        budget=budget,
        budget_rho=None if budget is None else budget.rho,
        spent_rho=rho,
        spent_epsilon=epsilon_of(mu_of(rho), delta),
        delta=delta,
        spent_on=[each._asdict() for each in spent],
    )


def _in_words(found: CollectionSpent) -> str:
    spent = f"spent epsilon = {found.spent_epsilon:.3g} at delta = {found.delta:g}"
    budget = found.budget
    if budget is None:
        return f"{found.collection}: no budget; {spent}"
    window = "" if budget.window_s is None else f" per {budget.window_s / 86400:g} days"
    return f"{found.collection}: {spent}, of epsilon = {budget.epsilon:g}{window}"
