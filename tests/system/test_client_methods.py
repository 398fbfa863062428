"""A training loop, state on the device, 8-bit uploads and an optimizer of the operator, together.

The server is a process, training happens in the device's sandbox. The task counts its trainings on
the device and uploads the count, so the model tells which state a training began with.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from papaya.client.work import Finish
from papaya.config import DeviceConfig
from papaya.device.device import Device
from papaya.device.load import Ask
from papaya.device.training import ExecutorTrainer, sandboxed
from papaya.device.use_policy import UsePolicy
from papaya.learning.parameters import Vector, decode
from papaya.learning.task import load_task
from papaya.messages.base import Message
from papaya.messages.participation import Chunk, Complete
from tests.system.admin import Admin
from tests.system.fleet import Book, WatchedProcess
from tests.system.processes import Installation, ServerProcess
from tests.unit.learning.test_extensions import install

STEP_S = 240.0
HALF = 150
CHUNK_BYTES = 128
CHUNKS = 3  # 300 numbers of a byte each and two scales; 10 chunks in float32
CONFIG = DeviceConfig(participation_floor_s=0.0, backoff_s=0.02, max_backoff_s=0.2)

TASK = f"""
import torch
from torch import nn

from papaya.learning.task import AsyncFL, ClientSGD, Examples, OptimizerConfig, Task


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros({HALF}))
        self.control = nn.Parameter(torch.zeros({HALF}))
        self.own = nn.Parameter(torch.zeros(1))


def train(local):
    with torch.no_grad():
        local.module.own += 1
        local.module.weight += local.module.own
        local.module.control += local.module.own


task = Task(name="counting", model=Counting, train=train, personal=["own"], upload_bits=8,
    loss=lambda module, ones: (module.weight * ones.mean()).mean(),
    batch=lambda found: (torch.ones(len(found)),), examples=Examples("numbers"),
    client=ClientSGD(rate=1.0), concurrency=3, regime=AsyncFL(aggregation_goal=1),
    optimizer=OptimizerConfig(kind="halves", rate=1.0, parameters=(("share", 0.5),)),
    participation_gap_s=0.0)
"""

OPTIMIZER = """
import numpy as np

from papaya.learning.server_optimizer import ServerOptimizer


class Halves(ServerOptimizer):
    initial_moments = ()

    def change(self, steps, parameters, step, moments):
        rates = np.full(parameters.size, self.rate, np.float32)
        rates[parameters.size // 2 :] = self.parameters["share"]
        return parameters + rates * step, ()
"""


class LosingPower(Book):
    """When `is_cut`, a device whose update is uploaded asks for no acknowledgement any more."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False
        self.cut = asyncio.Event()
        self.indices: set[int] = set()  # of all chunks that were sent

    async def exchange(self, selector: str, message: Message, ask: Ask) -> Message | None:
        if isinstance(message, Chunk):
            self.indices.add(message.index)
        if self.is_cut and isinstance(message, Complete):
            self.cut.set()
            await asyncio.Event().wait()
        return await super().exchange(selector, message, ask)


def test_state_is_kept_with_the_acknowledgement_and_survives_restarts(tmp_path: Path) -> None:
    file, packages = tmp_path / "counting.py", tmp_path / "packages"
    file.write_text(TASK)
    packages.mkdir()
    group = "[papaya.server_optimizers]"
    install(packages, "papaya_halves", OPTIMIZER, group, "halves = papaya_halves:Halves")
    with Installation(tmp_path, PYTHONPATH=str(packages)) as installation:
        server = installation.add(
            deployment={"extensions": ["server_optimizers:halves"]},
            server={"chunk_bytes": CHUNK_BYTES},
        ).start()
        admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        admin.submit(load_task(file).config())
        book = asyncio.run(_lives(installation, server, file))
        admin.until_task("counting", lambda task: task["version"] == 3, STEP_S)
        # Trainings that were counted began with 0, 1 and 2; one more, of 2, was not.
        assert [_halves(admin, version) for version in (1, 2, 3)] == [(1, 0.5), (3, 1.5), (6, 3)]
        assert book.indices == set(range(CHUNKS))
        assert server.stop() == 0


def _halves(admin: Admin, version: int) -> tuple[float, float]:
    _, data = admin.ask("GET", f"/admin/tasks/counting/versions/{version}/parameters")
    model: Vector = decode(data, 2 * HALF)
    halves = model[:HALF], model[HALF:]
    assert max(np.ptp(half) for half in halves) < 0.1, "all are equal but for rounding"
    weight, control = (round(float(half.mean()), 2) for half in halves)
    return weight, control


async def _lives(installation: Installation, server: ServerProcess, file: Path) -> LosingPower:
    """Four lives of a device. In the third it loses its power before the acknowledgement."""
    book = LosingPower()
    async with (
        WatchedProcess(book, None, None) as process,
        sandboxed([file], time.time) as trainer,
        asyncio.timeout(STEP_S),
    ):
        for life in range(4):
            book.is_cut = life == 2
            with _device(process, installation, server, trainer) as device:
                if life == 0:
                    device.store.declare({"numbers": UsePolicy(tasks=("counting",))})
                    device.store.add_new("numbers", [b"1"], time.time())
                visits = asyncio.create_task(_counted(device))
                if book.is_cut:
                    await book.cut.wait()
                    visits.cancel()
                with suppress(asyncio.CancelledError):
                    await visits
    return book


def _device(
    process: WatchedProcess,
    installation: Installation,
    server: ServerProcess,
    trainer: ExecutorTrainer,
) -> Device:
    return Device(
        process,
        selectors=[f"http://{server.addresses['devices']}"],
        store=installation.folder / "device.db",
        trainer=trainer,
        token=installation.secret("device.token"),
        config=CONFIG,
        memory_mb=1024,
    )


async def _counted(device: Device) -> Finish:
    while (finish := await device.visit()).ending != "counted":
        # A device that was silent for too long on a busy machine comes again.
        assert finish.ending in ("rejected", "aborted", "gave_up"), finish
        await asyncio.sleep(0.05)
    return finish
