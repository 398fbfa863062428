"""Why a training failed stays on the device: the server learns a code and nothing else.

A marked example goes into every kind of failure. Nothing of it may be in the server's rows, logs,
metrics or answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from papaya.client.work import Finish, Trained
from papaya.config import DeviceConfig
from papaya.device.device import Device
from papaya.device.events import Event, VisitEnded
from papaya.device.example_store import ExampleStore, UseRefused
from papaya.device.executor import GivenUp
from papaya.device.limits import CheckInPacing
from papaya.device.process import DeviceProcess
from papaya.device.training import ProtocolTrainer, TrainingRequest, sandboxed
from papaya.device.use_policy import UsePolicy
from papaya.errors import OperatorError
from papaya.messages.participation import LeaveReason
from papaya.messages.reasons import in_words
from papaya.server.admin.views import TaskDetail
from tests.hostile.running_server import MODEL_LENGTH, RunningServer

MARK = "marked-example-4711"
STEP_S = 240.0


class FailingTrainer(ProtocolTrainer):
    """Fails with each of these errors in turn."""

    def __init__(self, errors: list[Exception | Trained]) -> None:
        super().__init__(lambda session, length: bytes(4 * length), lambda: 0.0)
        self._errors = iter(errors)

    async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
        error = next(self._errors)
        if isinstance(error, Exception):
            raise error
        return error


def a_process() -> DeviceProcess:
    """A process that leaves only after the server has received its reason."""
    pacing = CheckInPacing(pause_s=0.0, leave_s=STEP_S)
    return DeviceProcess(now=time.time, assume=("idle", "charging", "unmetered"), pacing=pacing)


async def ended(device: Device) -> Finish:
    """The next visit that was not rejected."""
    async with asyncio.timeout(STEP_S):
        while (finish := await device.visit()).ending == "rejected":
            await asyncio.sleep(0.05)
    return finish


def everything(server: RunningServer, log: str) -> str:
    """All that the server has of its devices, as one text."""
    state = b"".join(path.read_bytes() for path in server.data.rglob("*.db*"))
    paths = ("/admin/tasks", "/admin/tasks/t", "/admin/status", "/metrics")
    answers = b"".join(server.admin("GET", path).body for path in paths)
    return (state + answers).decode(errors="replace") + log


def counts(server: RunningServer) -> dict[str, int]:
    """Endings per task, once the supervisor has written all reports."""
    return msgspec.json.decode(server.admin("GET", "/admin/tasks/t").body, type=TaskDetail).endings


async def counted(server: RunningServer, expected: dict[str, int]) -> None:
    async with asyncio.timeout(STEP_S):
        while counts(server) != expected:
            await asyncio.sleep(0.05)


def test_no_failure_of_a_trainer_tells_the_server_more_than_its_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes: tuple[LeaveReason, ...] = get_args(LeaveReason)
    errors: list[Exception | Trained] = [
        *(GivenUp(code, f"{MARK} {code}", hint=MARK, traceback=MARK) for code in codes),
        UseRefused(f"no {MARK}", hint=MARK),
        OperatorError(MARK),
        ValueError(MARK),
        Trained(MARK.encode(), 1),  # of a wrong length
    ]
    expected = dict.fromkeys((f"left_{code}" for code in codes), 1)
    expected["left_declined"] += 1
    expected["left_training_failed"] += 3
    events: list[Event] = []

    async def scenario(server: RunningServer) -> str:
        host, port = server.address("devices")
        async with a_process() as process:
            with Device(
                process,
                selectors=[f"http://{host}:{port}"],
                store=tmp_path / f"{MARK}.db",
                trainer=FailingTrainer(errors),
                token=server.token("device"),
                config=DeviceConfig(participation_floor_s=0.0),
                notify=events.append,
            ) as device:
                for _ in errors:
                    assert (await ended(device)).ending == "failed"
        await counted(server, expected)
        return everything(server, caplog.text)

    with caplog.at_level(logging.DEBUG), RunningServer(tmp_path) as server:
        server.submit("t", concurrency=4, participation_gap_s=0.0)
        found = asyncio.run(scenario(server))
    assert MARK not in found
    assert "left_diverged" in found
    for event in events:
        if isinstance(event, VisitEnded) and event.ending == "failed":
            assert MARK in event.detail or "bytes" in event.detail, "the owner sees all of it"


TASK = f"""
import os
import torch
from papaya.learning.task import AsyncFL, ClientSGD, Examples, Task

def batch(examples):
    mode = examples[0].split()[1]
    print(examples)
    if mode == b"raise":
        raise ValueError(examples)
    if mode == b"exit":
        os._exit(3)
    if mode == b"hoard":
        hoard = [bytearray(1 << 26) for _ in range(1 << 10)]
    return (torch.full((1, {MODEL_LENGTH}), float("nan") if mode == b"nan" else 1.0),)

task = Task(
    name="t", model=lambda: torch.nn.Linear({MODEL_LENGTH}, 1, bias=False), batch=batch,
    loss=lambda module, x: module(x).mean(), examples=Examples("texts"),
    client=ClientSGD(rate=0.1), regime=AsyncFL(aggregation_goal=2), concurrency=4,
)
"""
MODES: dict[str, LeaveReason] = {
    "raise": "training_failed",
    "nan": "diverged",
    "exit": "crashed",
    "hoard": "out_of_memory",
}


def test_no_failure_of_task_code_tells_the_server_more_than_its_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "task.py"
    file.write_text(TASK)
    policy = UsePolicy(tasks=("t",), validation=0.0, test=0.0)
    events: list[Event] = []

    async def scenario(server: RunningServer) -> str:
        host, port = server.address("devices")
        async with a_process() as process, sandboxed([file], time.time) as trainer:
            with Device(
                process,
                selectors=[f"http://{host}:{port}"],
                store=tmp_path / "device.db",
                trainer=trainer,
                token=server.token("device"),
                config=DeviceConfig(participation_floor_s=0.0),
                notify=events.append,
            ) as device:
                for mode, code in MODES.items():
                    device.store.declare({"texts": policy})
                    device.store.add("texts", [f"{MARK} {mode}".encode()], time.time())
                    finish = await ended(device)
                    assert (finish.ending, finish.reason) == ("failed", code), mode
                    device.store.drop("texts")
                finish = await ended(device)
                assert finish.reason == "no_examples"
        await counted(server, {f"left_{code}": 1 for code in (*MODES.values(), "no_examples")})
        return everything(server, caplog.text)

    with caplog.at_level(logging.DEBUG), RunningServer(tmp_path) as server:
        server.submit("t", concurrency=4, participation_gap_s=0.0)
        found = asyncio.run(scenario(server))
    assert MARK not in found
    failed = [e for e in events if isinstance(e, VisitEnded) and e.ending == "failed"]
    assert MARK in failed[0].detail
    assert "Traceback" in failed[0].explanation
    assert MARK in failed[0].explanation


def test_text_of_an_older_device_is_counted_and_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), RunningServer(tmp_path) as server:
        server.submit("t", concurrency=4, participation_gap_s=0.0)
        leave = {"type": "Leave", "ticket": server.join()["ticket"], "reason": MARK}
        assert server.post("leave", leave).kind == "Left"
        asyncio.run(counted(server, {"left_other": 1}))
        assert MARK not in everything(server, caplog.text)


def test_every_code_has_words() -> None:
    for code in get_args(LeaveReason):
        assert in_words(f"left_{code}") != f"left_{code}"
