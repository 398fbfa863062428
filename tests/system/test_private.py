"""A private task with real processes: a server, its TSA, devices with ledgers and budgets."""

from __future__ import annotations

import asyncio
import json
import subprocess
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import structs

from papaya.config import EvaluationPlan, Privacy, PrivateEvaluation
from papaya.device.example_store import ExampleStore
from papaya.device.ledger import PrivacyLedger
from papaya.device.use_policy import PrivacyBudget, UsePolicy
from papaya.learning import parameters
from papaya.learning.definition import TaskTerms
from papaya.learning.evaluation import evaluation_vector
from papaya.messages.base import TaskId
from papaya.messages.storage import FORMAT_KEY, PRIVATE_FORMAT, FormatRow
from papaya.privacy.accountant import epsilon_of, mu_of
from papaya.store.state import SqliteState
from tests.system.admin import Admin
from tests.system.fleet import briefly, fleet
from tests.system.oracle import Books
from tests.system.processes import CALM, PAPAYA, Installation, ServerProcess, environment
from tests.system.test_secure import CONFIG, GOAL, STEP_S, admin_of, trust, until, url

# Enough clients that their weight exceeds the limit by 7 standard deviations of the noise. Enough
# devices to evaluate, even if slow ones have used their privacy budget without being counted.
DEVICES, RHO, DELTA, CLIENTS = 32, 0.5, 1e-6, 12
PRIVATE = structs.replace(
    CONFIG,
    clip=None,
    privacy=Privacy(
        clip=1.0,
        max_participations=2,
        delta=DELTA,
        noise_multiplier=1.0,
        evaluation=PrivateEvaluation(
            noise_multiplier=1.0, max_participations=1, max_loss=8.0, max_examples=1
        ),
    ),
    evaluation=EvaluationPlan(every_versions=1000, clients=CLIENTS),
)
TERMS = structs.replace(TaskTerms.of(PRIVATE), collection="keyboard")


def terms_of(task: TaskId) -> TaskTerms | None:
    return TERMS


def budget_of(device: int) -> float:
    """The even ones afford everything that the task asks for, the odd ones two participations."""
    return (3 if device % 2 == 0 else 2) * RHO


def path_of(folder: Path, device: int) -> Path:
    return folder / f"device-{device}.db"


def give_budgets(folder: Path) -> None:
    folder.mkdir()
    for device in range(DEVICES):
        epsilon = epsilon_of(mu_of(1.001 * budget_of(device)), DELTA)
        budget = PrivacyBudget(epsilon=epsilon, delta=DELTA)
        policies = {"keyboard": UsePolicy(tasks=("*",), budget=budget)}
        ExampleStore(path_of(folder, device), policies).close()


def test_devices_pay_for_noise_and_decline_beyond_their_budgets(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add(server=CALM).start()
        admin = admin_of(installation, server)
        admin.submit(PRIVATE)
        folder = installation.folder / "devices"
        give_budgets(folder)
        asyncio.run(take_part(installation, server, admin, folder))
        assert server.stop() == 0
        check_ledgers(folder)
        check_noise(Books(installation.data, PRIVATE.task))
        with closing(SqliteState(installation.data / "state.db")) as state:
            # A server of 0.4.0, which would add no noise in the clear, does not start any more.
            assert state.read((FORMAT_KEY,)) == {FORMAT_KEY: FormatRow(PRIVATE_FORMAT)}


async def take_part(
    installation: Installation, server: ServerProcess, admin: Admin, folder: Path
) -> None:
    believed = await asyncio.to_thread(trust, installation, server)
    token = installation.secret("device.token")
    async with fleet(
        folder,
        [url(server)],
        token,
        DEVICES,
        briefly,
        evaluation=lambda _: evaluation_vector(0, 2.0, 1).tobytes(),
        trust=believed,
        terms=terms_of,
    ) as flying:
        # Even devices may train twice and evaluate once; odd ones can afford two of these.
        line = await asyncio.to_thread(
            admin.until_task,
            PRIVATE.task,
            lambda line: line["version"] >= 3 and line["loss"] is not None,
            STEP_S,
        )
        sigma = 1.0 * np.sqrt(1.25)
        assert 0 < line["deviations"]["loss"] < 8 * sigma / (4 * sigma) * np.sqrt(1.25)
        assert 0 <= line["loss"] <= 8
        await flying.book.until(
            lambda: list(flying.book.ended.values()).count("left") >= DEVICES,
            STEP_S,
            "devices that have spent their budget leave",
        )
        await asyncio.to_thread(
            until,
            lambda: all(_has_spent(folder, device) for device in range(DEVICES)),
            "every device has taken part",
        )
        await flying.go_home(STEP_S)


def _has_spent(folder: Path, device: int) -> bool:
    with PrivacyLedger(path_of(folder, device)) as ledger:
        return bool(ledger.spent("keyboard"))


def check_ledgers(folder: Path) -> None:
    evaluated = 0
    for device in range(DEVICES):
        with PrivacyLedger(path_of(folder, device)) as ledger:
            spent = {each.kind: each for each in ledger.spent("keyboard")}
        total = sum(each.rho for each in spent.values())
        assert 0 < total <= budget_of(device)
        assert total == RHO * sum(each.participations for each in spent.values())
        # A device may have evaluated only before the test ended.
        times = {kind: each.participations for kind, each in spent.items()}
        assert times.get("train", 0) <= 2
        evaluated += times.get("evaluate", 0)
    assert evaluated >= CLIENTS
    shown = subprocess.run(
        [*PAPAYA, "client", "budget", "--store", path_of(folder, 0), "--format", "json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=STEP_S,
        check=True,
    )
    [keyboard] = json.loads(shown.stdout)
    assert 0 < keyboard["spent_rho"] <= keyboard["budget_rho"]


def check_noise(books: Books) -> None:
    """Without noise no step is longer than the clip, because it is a mean of clipped updates. With
    it, 48 coordinates have a standard deviation of a quarter each: a norm of 1.7.
    """
    found = [
        parameters.decode(books.blobs.get(row.parameters), PRIVATE.model_length)
        for _, row in sorted(books.versions.items())
    ]
    steps = [float(np.linalg.norm(after - before)) for before, after in pairwise(found)]
    assert len(steps) >= 3
    assert all(len(books.consumed[v].members) == GOAL for v in books.consumed)
    assert min(steps) > 1.0
