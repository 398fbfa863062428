"""The device's account of what its participations have cost (docs/privacy.md).

Charges are kept per collection, over all owners, tasks, runs and revisions, in the device's file.
A charge is durable before the first byte of an update leaves the device, and is never refunded:
an update that a server discards has left the device too. The check of the budget and the charge
are one transaction, so that two processes cannot spend the same budget twice.

The file also has the tags that the device seals with its seeds: one for each hash of public
parameters, drawn once. The TSA takes a tag into a group once.

If the file is deleted, the device starts with a full budget; nobody can check this. Time is the
device's clock. A charge dated in the future counts, so setting the clock back frees nothing.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple, Self

from papaya.device.device_file import DeviceFile, StrPath
from papaya.device.example_store import ExampleStore
from papaya.device.executor import GivenUp
from papaya.device.use_policy import PrivacyBudget
from papaya.learning.definition import TaskTerms
from papaya.messages.base import TaskId
from papaya.secagg.channel import DEVICE_TAG_BYTES
from papaya.secagg.words import Entropy

_SLACK = 1 + 1e-12  # sums of floats
_SCHEMA = """
CREATE TABLE IF NOT EXISTS privacy_charge (
    id INTEGER PRIMARY KEY,
    collection TEXT NOT NULL,
    owner TEXT NOT NULL,
    task TEXT NOT NULL,
    kind TEXT NOT NULL,
    rho REAL NOT NULL,
    at REAL NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS charge_by_collection ON privacy_charge (collection, at);
CREATE TABLE IF NOT EXISTS privacy_tag (
    parameters BLOB PRIMARY KEY,
    tag BLOB NOT NULL
) STRICT, WITHOUT ROWID;
"""


class Charge(NamedTuple):
    """The cost of one participation. `owner` is empty for a task file of this device. `most`: how
    often the device takes part in the task, over all its runs, revisions and collections.
    """

    collection: str
    owner: str
    task: str
    kind: str
    rho: float
    most: int


class SpentOn(NamedTuple):
    """What all participations of one kind in one task have cost."""

    collection: str
    owner: str
    task: str
    kind: str
    participations: int
    rho: float
    last_at: float


class Allowance(NamedTuple):
    """What may be spent on a collection, and the share of it for the owner of the task."""

    budget: PrivacyBudget
    share: float = 1.0


class PrivacyLedger:
    """One device's ledger, in the same file as its examples. Thread-safe."""

    def __init__(self, path: StrPath) -> None:
        self._file = DeviceFile(path, _SCHEMA)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def why_not(self, charge: Charge, allowance: Allowance | None, now: float) -> str:
        """Why the device cannot afford this; empty if it can."""
        with self._file.transaction():
            return self._why_not(charge, allowance, now)

    def spend(self, charge: Charge, allowance: Allowance | None, now: float) -> None:
        """Charge durably, or raise GivenUp and charge nothing."""
        with self._file.transaction():
            if reason := self._why_not(charge, allowance, now):
                raise GivenUp("declined", reason)
            self._file.change(
                "INSERT INTO privacy_charge (collection, owner, task, kind, rho, at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                *charge[:-1],
                now,
            )

    def spent(self, collection: str, since: float = -math.inf) -> tuple[SpentOn, ...]:
        """What was spent on a collection since a time, by owner, task and kind."""
        with self._file.transaction():
            return self._spent(collection, since)

    def collections(self) -> tuple[str, ...]:
        with self._file.transaction():
            rows = self._file.rows("SELECT DISTINCT collection FROM privacy_charge ORDER BY 1")
        return tuple(name for [name] in rows)

    def tag(self, parameters_hash: bytes, entropy: Entropy) -> bytes:
        """The tag for these public parameters, durably; drawn at the first call."""
        with self._file.transaction():
            self._file.change(
                "INSERT OR IGNORE INTO privacy_tag (parameters, tag) VALUES (?, ?)",
                parameters_hash,
                entropy(DEVICE_TAG_BYTES),
            )
            [[tag]] = self._file.rows(
                "SELECT tag FROM privacy_tag WHERE parameters = ?", parameters_hash
            )
        return bytes(tag)

    def _why_not(self, charge: Charge, allowance: Allowance | None, now: float) -> str:
        [[times]] = self._file.rows(
            "SELECT count(*) FROM privacy_charge WHERE owner = ? AND task = ? AND kind = ?",
            charge.owner,
            charge.task,
            charge.kind,
        )
        if times >= charge.most:
            return (
                f"the privacy budget for task {charge.task} is spent: this device has taken part "
                f"{times} times ({charge.kind})"
            )
        if allowance is None:
            return ""
        budget, share = allowance
        found = self._spent(charge.collection, budget.begins(now))
        total = math.fsum(each.rho for each in found) + charge.rho
        own = math.fsum(each.rho for each in found if each.owner == charge.owner) + charge.rho
        for spent, limit, whose in (
            (total, budget.rho, "the budget"),
            (own, budget.rho * share, f"the share of owner {charge.owner}"),
        ):
            if spent > limit * _SLACK:
                return (
                    f"too little is left of the privacy budget: after task {charge.task}, "
                    f"collection {charge.collection!r} would have spent rho = {spent:.4g}, "
                    f"{whose} is {limit:.4g}"
                )
        return ""

    def _spent(self, collection: str, since: float) -> tuple[SpentOn, ...]:
        rows = self._file.rows(
            "SELECT collection, owner, task, kind, count(*), sum(rho), max(at) "
            "FROM privacy_charge WHERE collection = ? AND at > ? "
            "GROUP BY owner, task, kind ORDER BY owner, task, kind",
            collection,
            since,
        )
        return tuple(SpentOn(*row) for row in rows)


class PlannedUse(NamedTuple):
    """A participation that a server asks for: of which task, of whose, under which terms."""

    terms: TaskTerms | None
    owner: str
    task: str
    share: float
    evaluates: bool

    @classmethod
    def of_file(cls, terms: TaskTerms | None, program: TaskId, *, evaluates: bool) -> Self:
        """Of a task file of this device, which counts under its own name, not under an alias."""
        name = program if terms is None else terms.task or program
        return cls(terms, "", name, 1.0, evaluates)


class PrivacyAccount:
    """Applies the budgets of a device's policies to its ledger.

    A collection with a budget takes part in no task or evaluation without noise. If it is unknown
    what a task uses (a trainer of the app's own without terms), all collections count.
    """

    def __init__(self, ledger: PrivacyLedger, store: ExampleStore) -> None:
        self._ledger = ledger
        self._store = store
        # Owners and names of tasks that are known to keep personal tensors.
        self._keeping: set[tuple[str, str]] = set()

    def why_not(self, use: PlannedUse, now: float) -> str:
        """Why the device declines; empty if it does not. For its own log only."""
        self._store.refresh()  # the app may have declared a budget meanwhile
        if (charge := _charge_of(use)) is not None:
            return self._ledger.why_not(charge, self._allowance(use, charge), now)
        policies, terms = self._store.collections, use.terms
        if terms is not None and terms.privacy:
            return f"evaluations of task {use.task} have no noise"
        limited = sorted(name for name, policy in policies.items() if policy.budget is not None)
        used = limited if terms is None else [terms.collection or ""]
        for collection in used:
            if collection in limited:
                what = "evaluations of task {} have" if use.evaluates else "task {} has"
                noise = f"{what.format(use.task)} no noise"
                return f"collection {collection!r} has a privacy budget, and {noise}"
        return ""

    def check_state(self, use: PlannedUse, state: bytes) -> None:
        """GivenUp if this state of a private task could pass on what its collection has deleted to
        an update in another window of the budget.
        """
        if state:
            self._keeping.add((use.owner, use.task))
            self.check_window(use)

    def check_window(self, use: PlannedUse) -> None:
        """The same, before training, for tasks whose file says that they keep tensors, and for
        those that have left a state on this device before.
        """
        terms = use.terms
        if terms is None or not terms.privacy:
            return
        if not terms.keeps_tensors and (use.owner, use.task) not in self._keeping:
            return
        collection = terms.collection or ""
        policy = self._store.collections.get(collection)
        window_s = None if policy is None or policy.budget is None else policy.budget.window_s
        if policy is not None and window_s is not None and window_s < 2 * policy.max_age_s:
            raise GivenUp(
                "declined",
                f"task {use.task} keeps personal tensors on this device: the budget of collection "
                f"{collection!r} has window_s = {window_s:.0f}, which must be at least 2 x "
                f"max_age_s = {2 * policy.max_age_s:.0f}",
                hint="in the policy file, make budget.window_s longer, leave it out, or keep "
                "examples for a shorter time",
            )

    def spend(self, use: PlannedUse, now: float) -> None:
        """Charge durably. GivenUp if it is more than the budget, or if there is a budget now and
        no noise.
        """
        if (charge := _charge_of(use)) is None:
            if reason := self.why_not(use, now):
                raise GivenUp("declined", reason)
            return
        self._store.refresh()
        self._ledger.spend(charge, self._allowance(use, charge), now)

    def tag(self, parameters_hash: bytes) -> bytes:
        return self._ledger.tag(parameters_hash, os.urandom)

    def _allowance(self, use: PlannedUse, charge: Charge) -> Allowance | None:
        policy = self._store.collections.get(charge.collection)
        if policy is None or policy.budget is None:
            return None
        return Allowance(policy.budget, use.share)


def _charge_of(use: PlannedUse) -> Charge | None:
    terms, wanted = use.terms, "evaluate" if use.evaluates else "train"
    if terms is None or not terms.privacy:
        return None
    for kind, most, rho in terms.privacy.costs:
        if kind == wanted:
            return Charge(terms.collection or "", use.owner, use.task, kind, rho, most)
    return None
