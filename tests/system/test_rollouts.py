"""An owner rolls settings out to real devices: bad ones are taken back, good ones reach all.

The same run shows the metric of the task in `/metrics`, and what a webhook is told.
"""

from __future__ import annotations

import hmac
import json
import re
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.confined import needs_confinement
from tests.system.processes import CALM, Installation, Toml
from tests.system.test_signed_tasks import STEP_S, SignedWorld
from tests.unit.server.test_webhooks import Receiver

pytestmark = needs_confinement

KEY = "a-key-that-only-the-receiver-has-too"
# With a rate of 100 every step multiplies the error: training goes on, and the model is useless.
TASK = """
import torch
from helper import to_tensors
from papaya.learning.task import AsyncFL, ClientSGD, EvaluationPlan, Examples, OptimizerConfig, Task

task = Task(
    name="opened", model=lambda: torch.nn.Linear(1, 1), batch=to_tensors,
    loss=lambda module, x, y: ((module(x) - y) / 100).square().mean(),
    examples=Examples("numbers"),
    metrics={"near": lambda module, x, y: ((module(x) - y).abs() < 1000).float()[:, 0]},
    client=ClientSGD(rate=0.01), regime=AsyncFL(aggregation_goal=2), concurrency=4,
    optimizer=OptimizerConfig(kind="fedavg"), participation_gap_s=0.0,
    evaluation=EvaluationPlan(every_versions=1, clients=2),
)
"""


def is_signed(headers: dict[str, str], body: bytes) -> bool:
    fields = dict(part.split("=") for part in headers["Papaya-Signature"].split(","))
    signed = f"{fields['t']}.".encode() + body
    return fields["v1"] == hmac.new(KEY.encode(), signed, "sha256").hexdigest()


def until_rollout(world: SignedWorld, state: str) -> Any:
    def is_so(found: Any) -> bool:
        return bool(found["rollout"]["state"] == state)

    return world.admin.until("/admin/tasks/opened", is_so, STEP_S)


def metrics(address: str) -> dict[str, float]:
    """The samples of `/metrics`, by name with labels."""
    connection = HTTPConnection(address, timeout=120)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_bad_settings_are_taken_back_and_good_ones_reach_all_devices(tmp_path: Path) -> None:
    receiver = Receiver()
    key = tmp_path / "webhook.key"
    key.write_text(KEY)
    key.chmod(0o600)
    with closing(receiver), Installation(tmp_path) as installation:
        deployment: dict[str, Toml] = {
            "device_tokens": "signed",
            "webhooks": [receiver.url],
            "webhook_key": str(key),
        }
        server = installation.add(deployment=deployment, server=CALM)
        world = SignedWorld(tmp_path, server.start(), installation, text=TASK)
        run = world.task("submit", str(world.program))["task"]
        with world.devices(count=5, identified=True):
            world.admin.until_task(run, lambda found: found["evaluated"] is not None, STEP_S)

            judged = ("--tolerance", "10", "--evaluations", "1", "--updates", "2")
            begun = world.task(
                *("rollout", "opened", "--set", "client.rate=100", "--share", "90%"), *judged
            )
            assert (begun["state"], begun["share"], begun["revision"]) == ("running", 0.9, 2)
            back = until_rollout(world, "rolled_back")
            assert re.match(r"loss |\d+ % of its participations fail", back["rollout"]["why"])
            assert back["task"]["revision"] == 3
            restored = back["task"]["version"]
            world.admin.until_task(run, lambda found: found["evaluated"] >= restored, STEP_S)

            # On a slow machine, clients may count as silent whatever the settings are.
            world.task(
                *("rollout", "opened", "--set", "client.rate=0.02", "--share", "90%"),
                *(*judged, "--failures", "1"),
            )
            done = until_rollout(world, "finished")
            assert (done["task"]["revision"], done["task"]["signed"]) == (4, 5)
            world.until_version(run, done["task"]["version"] + 1)

            found = metrics(server.addresses["admin"])
            assert found[f'papaya_task_metric{{metric="near",task="{run}"}}'] == 1.0
        shown = world.admin.get(f"/admin/tasks/{run}")["points"]
        assert any(point["metrics"] == {"near": 1.0} for point in shown)
        assert server.stop() == 0
    assert all(is_signed(*request) for request in receiver.requests)
    # A delivery may come again, if the receiver was slow to answer.
    deliveries = {headers["Papaya-Delivery"]: body for headers, body in receiver.requests}
    told = [json.loads(body)["event"] for body in deliveries.values()]
    assert told.count("rollout_rolled_back") == 1
    assert "version_published" in told
