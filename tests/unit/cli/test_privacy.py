"""What owners and devices are told about privacy: results with noise, norms, and budgets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from papaya.cli.admin_client import TOKEN_VARIABLE, ConnectionOptions, client_for
from papaya.cli.client import budget
from papaya.cli.main import CommandParser
from papaya.cli.task.norms import wait_for
from papaya.config import AsyncFL, EvaluationPlan, Privacy, PrivateEvaluation
from papaya.device.example_store import ExampleStore
from papaya.device.ledger import Charge, PrivacyLedger
from papaya.device.use_policy import PrivacyBudget, UsePolicy
from papaya.errors import OperatorError
from papaya.learning import parameters
from papaya.learning.parameters import FLOAT32
from papaya.learning.private_evaluation import BINS, norm_bin, upper_edge
from papaya.messages.storage import (
    EndingsRow,
    OptimizerRow,
    PointRow,
    Transaction,
    VersionRow,
    endings_key,
    optimizer_key,
    point_key,
    version_key,
)
from papaya.server.admin.views import Evaluate, Started
from tests.unit.cli.admin_server import TOKEN, AdminServer, admin_server, papaya
from tests.unit.server.admin.builders import BY, TASK

PRIVATE = structs.replace(
    TASK,
    regime=AsyncFL(aggregation_goal=50, max_staleness=50),
    evaluation=EvaluationPlan(clients=50, every_versions=1000),
    perplexity=True,
    privacy=Privacy(
        clip=1.0,
        max_participations=2,
        delta=1e-7,
        noise_multiplier=2.0,
        evaluation=PrivateEvaluation(noise_multiplier=3.0, max_participations=1),
    ),
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdminServer]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with admin_server(tmp_path) as found:
        found.call(found.system.submit(PRIVATE))
        yield found


def run(server: AdminServer, *arguments: str) -> int:
    return papaya(*arguments, "--admin", server.url)


def norms(middle: float, others: float = 1.0) -> tuple[float, ...]:
    counts = np.full(BINS, others)
    counts[norm_bin(middle) - 1 : norm_bin(middle) + 2] = 10.0, 30.0, 10.0
    return tuple(counts.tolist())


def with_point(server: AdminServer, **fields: object) -> None:
    row = PointRow(0, 1000.0, 0, 0, 0.0, **fields)  # type: ignore[arg-type]
    server.system.change(Transaction(put=((point_key("next-word", 0), row),)))


def test_a_private_task_is_shown_with_its_noise(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    deviations = {"loss": 0.25, "perplexity": 3.0}
    with_point(server, loss=2.5, perplexity=12.25, deviations=deviations, evaluated="{}")
    assert run(server, "task", "show", "next-word") == 0
    out = capsys.readouterr().out
    assert "loss 2.500 ± 0.25 at version 0, perplexity 12.2 ± 3" in out
    assert "2.5 ± 0.25" in out.split("created")[1], "in the table of versions too"
    terms = PRIVATE.privacy.terms  # type: ignore[union-attr]
    assert f"ε = {terms.epsilon:.3g} at δ = 1e-07 for 2 participations and 1 evaluation" in out
    assert "every update, in the clear; versions have noise" in out
    assert "on 50 clients: loss, with noise" in out
    assert run(server, "task", "show", "next-word", "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["detail"]["task"]["deviations"] == deviations


def test_norms_propose_a_clip_for_the_owner_to_sign(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OperatorError, match="has no histogram"):
        run(server, "task", "norms", "next-word", "--show")
    with_point(server, norms=norms(0.7), norms_deviation=3.0)
    assert run(server, "task", "norms", "next-word", "--show") == 0
    out, err = capsys.readouterr()
    clip = float(f"{upper_edge(norm_bin(0.7)):.3g}")
    assert out.splitlines()[-1] == f"clip = {clip:g} leaves about 50 % of the updates as they are"
    assert f"papaya task update next-word --set privacy.clip={clip:g}" in err
    assert "noise of ±3 devices per bin" in err
    assert len(out.splitlines()) == 2 + 3 + 1, "bins within the noise are left out"
    high = ("--quantile", "0.95", "--format", "json")
    assert run(server, "task", "norms", "next-word", "--show", *high) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["clip"] == float(f"{upper_edge(norm_bin(0.7) + 1):.3g}")
    assert len(found["counts"]) == BINS
    with_point(server, norms=norms(0.7), norms_deviation=30.0)
    with pytest.raises(OperatorError, match="hides the histogram"):
        run(server, "task", "norms", "next-word", "--show")
    with pytest.raises(OperatorError, match="not a share"):
        run(server, "task", "norms", "next-word", "--quantile", "1.5")


def test_norms_wait_for_devices_and_end_with_the_measurement(server: AdminServer) -> None:
    service = server.system.service
    client = client_for(ConnectionOptions(admin=server.url))

    def end_with(started: Started, counts: tuple[float, ...]) -> None:
        mean = (np.array(counts) / 50).astype(FLOAT32)
        key = f"{started.task}/1/version-1-{'0' * 32}"
        server.system.blobs.put(key, parameters.encode(mean, {}))
        rows = (
            (version_key(started.task, 1), VersionRow(1, key, 1, 0.0)),
            (optimizer_key(started.task), OptimizerRow(1, "o")),
        )
        server.system.change(Transaction(put=rows))
        server.call(server.system.turn())
        server.call(server.system.turn())

    server.call(server.system.submit(structs.replace(PRIVATE, task="emoji", evaluation=None)))
    server.call(server.system.turn())
    started = server.call(service.evaluate("emoji", Evaluate(norms=True), BY))
    waited: list[float] = []

    def made(seconds: float) -> None:
        waited.append(seconds)
        end_with(started, norms(0.7))

    point = wait_for(client, "emoji", started, made)
    assert point.norms == pytest.approx(norms(0.7), abs=1e-4)
    assert point.norms_deviation == 3.0
    assert len(waited) == 1
    started = server.call(service.evaluate("emoji", Evaluate(norms=True), BY))
    with pytest.raises(OperatorError, match=r"no histogram: .*cannot have made"):
        wait_for(client, "emoji", started, lambda _: end_with(started, (900.0,) * BINS))


@pytest.mark.parametrize(
    ("endings", "is_told"),
    [({}, True), ({"left_declined": 3, "counted": 1}, True), ({"left_diverged": 3}, False)],
)
def test_norms_hint_at_budgets_that_are_spent(
    server: AdminServer, endings: dict[str, int], is_told: bool
) -> None:
    system = server.system
    started = server.call(system.service.evaluate("next-word", Evaluate(norms=True), BY))
    row = EndingsRow(1, endings)
    system.change(Transaction(put=((endings_key(started.task), row),)))
    server.call(system.service.set_state(started.task, "cancelled", BY))
    with pytest.raises(OperatorError, match="no histogram") as caught:
        wait_for(client_for(ConnectionOptions(admin=server.url)), "next-word", started)
    assert ("papaya client budget" in caught.value.hint) == is_told
    assert "says how participations ended" in caught.value.hint


# -- on the device ------------------------------------------------------------------------------


def shown_budget(*arguments: str) -> int:
    parser = CommandParser(prog="papaya client")
    budget.add_to(parser.add_subparsers(required=True))
    options: argparse.Namespace = parser.parse_args(["budget", *arguments])
    return int(options.run(options))


def test_a_device_shows_what_it_has_spent_on_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "device.db"
    with pytest.raises(OperatorError, match="there is no device file"):
        shown_budget("--store", str(path))
    limit = PrivacyBudget(epsilon=8.0, delta=1e-7, window_s=90 * 86400.0)
    policies = {"keyboard": UsePolicy(tasks=("*",), budget=limit)}
    with ExampleStore(path, policies) as store, PrivacyLedger(path) as ledger:
        assert shown_budget("--store", str(path)) == 0
        line = "keyboard: spent epsilon = 0 at delta = 1e-07, of epsilon = 8 per 90 days"
        assert capsys.readouterr().out.splitlines() == [line]
        now = 4e9  # after every clock, so that it is within the window
        for kind, rho in (("train", 0.125), ("train", 0.125), ("evaluate", 0.03125)):
            ledger.spend(Charge("keyboard", "a" * 8, "next-word", kind, rho, 9), None, now)
        ledger.spend(Charge("keyboard", "", "old", "train", 1.0, 9), None, 1.0)  # long ago
        ledger.spend(Charge("photos", "", "faces", "train", 0.5, 9), None, now)
        store.declare({})
    assert shown_budget("--store", str(path)) == 0
    first, evaluated, trained, photos, faces = capsys.readouterr().out.splitlines()
    assert first.startswith("keyboard: spent epsilon = 3.")
    assert first.endswith("per 90 days"), "enough is left"
    assert evaluated == "  next-word of owner aaaaaaaa, evaluate: 1 participation, rho = 0.03125"
    assert trained == "  next-word of owner aaaaaaaa, train: 2 participations, rho = 0.25"
    assert photos.startswith("photos: no budget; spent epsilon = ")
    assert faces == "  faces, train: 1 participation, rho = 0.5"
    assert shown_budget("--store", str(path), "--format", "json") == 0
    found = {each["collection"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["keyboard"]["spent_rho"] == pytest.approx(0.28125)
    assert found["keyboard"]["budget"]["epsilon"] == 8.0
    assert found["photos"]["budget"] is None
    assert found["photos"]["device"] == "device"


def test_several_devices_are_in_a_folder_and_say_that_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OperatorError, match="no device file in"):
        shown_budget("--store", str(tmp_path))
    limit = PrivacyBudget(epsilon=8.0, delta=1e-7)
    policies = {"keyboard": UsePolicy(tasks=("*",), budget=limit)}
    for device, times in ((2, 3), (10, 1)):
        path = tmp_path / f"device-{device}.db"
        with ExampleStore(path, policies), PrivacyLedger(path) as ledger:
            for _ in range(times):
                ledger.spend(
                    Charge("keyboard", "", "next-word", "train", 0.3 * limit.rho, 9), None, 1.0
                )
    assert shown_budget("--store", str(tmp_path)) == 0
    second, spent, _, tenth, other, _ = capsys.readouterr().out.splitlines()
    assert (second, tenth) == ("device-2.db:", "device-10.db:")
    assert spent.endswith("of epsilon = 8; too little is left for another participation")
    assert other.endswith("of epsilon = 8")
    assert shown_budget("--store", str(tmp_path), "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["device"] for each in found] == ["device-2", "device-10"]
    assert found[0]["left_rho"] == pytest.approx(0.1 * limit.rho)
