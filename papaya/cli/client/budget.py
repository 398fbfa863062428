"""`papaya client budget`: what this device has spent of its privacy budgets, and on what."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
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
        description="Show, for each collection, the privacy budget, what was spent, on which "
        "tasks, and where too little is left for another participation. Only the device knows "
        "this; it is never sent.",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="PATH",
        help="file with the device's examples and ledger, or a folder with the files of several "
        "devices",
    )
    add_format(parser)
    bind(parser, ClientBudgetOptions, run)


def run(options: ClientBudgetOptions) -> int:
    files = _files(options.store)
    found = {path: _collections(path) for path in files}
    if options.is_json:
        print_json([each for path in files for each in found[path]])
        return 0
    for path, collections in found.items():
        if len(files) > 1:
            print_data(f"{path.name}:")
        print_data("\n".join(_lines(collections)) or "this device has no collections")
    return 0


def _files(store: Path) -> list[Path]:
    """The file itself, or those in a folder, as `papaya client --devices N` makes them."""
    found = sorted(store.glob("*.db"), key=_number) if store.is_dir() else [store]
    if not found or not found[0].is_file():
        what = "no device file in" if store.is_dir() else "no device file"
        raise OperatorError(
            f"there is {what} {store}",
            hint="give the path of `papaya client --store`: papaya client budget --store PATH",
        )
    return found


def _number(path: Path) -> tuple[int, str]:
    """Sorts device-2.db before device-10.db."""
    return len(path.name), path.name


class CollectionSpent(Struct, frozen=True):
    """One collection: its budget, what was spent in the current window, and on what.

    `left_rho`: None without a budget. Another participation in a task costs about as much as those
    before it did on average.
    """

    device: str
    collection: str
    budget: PrivacyBudget | None
    budget_rho: float | None
    spent_rho: float
    left_rho: float | None
    spent_epsilon: float
    delta: float
    spent_on: list[dict[str, Any]]

    @property
    def is_spent(self) -> bool:
        """Is too little left for any task that has used it?"""
        costs = [each["rho"] / each["participations"] for each in self.spent_on]
        return self.left_rho is not None and bool(costs) and self.left_rho < min(costs)


def _collections(path: Path) -> list[CollectionSpent]:
    with ExampleStore(path) as store, PrivacyLedger(path) as ledger:
        policies = dict(store.collections)
        for name in ledger.collections():
            policies.setdefault(name, UsePolicy())
        return [_described(path, name, policies[name], ledger) for name in sorted(policies)]


def _described(path: Path, name: str, policy: UsePolicy, ledger: PrivacyLedger) -> CollectionSpent:
    budget = policy.budget
    since = -math.inf if budget is None else budget.begins(time.time())
    spent = ledger.spent(name, since)
    rho = math.fsum(each.rho for each in spent)
    delta = _DELTA if budget is None else budget.delta
    return CollectionSpent(
        device=path.stem,
        collection=name,
        budget=budget,
        budget_rho=None if budget is None else budget.rho,
        spent_rho=rho,
        left_rho=None if budget is None else max(0.0, budget.rho - rho),
        spent_epsilon=epsilon_of(mu_of(rho), delta),
        delta=delta,
        spent_on=[each._asdict() for each in spent],
    )


def _lines(collections: list[CollectionSpent]) -> Iterator[str]:
    for found in collections:
        yield _in_words(found)
        for spent in found.spent_on:
            owner = f" of owner {spent['owner']}" if spent["owner"] else ""
            times = plural(spent["participations"], "participation")
            yield f"  {spent['task']}{owner}, {spent['kind']}: {times}, rho = {spent['rho']:.4g}"


def _in_words(found: CollectionSpent) -> str:
    spent = f"spent epsilon = {found.spent_epsilon:.3g} at delta = {found.delta:g}"
    budget = found.budget
    if budget is None:
        return f"{found.collection}: no budget; {spent}"
    window = "" if budget.window_s is None else f" per {budget.window_s / 86400:g} days"
    end = "; too little is left for another participation" if found.is_spent else ""
    return f"{found.collection}: {spent}, of epsilon = {budget.epsilon:g}{window}{end}"
