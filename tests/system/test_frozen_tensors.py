"""Two devices with the same task file and different base models: only one of them is counted."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from papaya.cli.demo.show import reading
from papaya.device.device import Device
from papaya.device.training import sandboxed
from papaya.device.use_policy import UsePolicy
from papaya.learning.task import load_task
from tests.system.admin import Admin
from tests.system.fleet import Book, WatchedProcess
from tests.system.processes import Installation, ServerProcess
from tests.unit.learning.torch.test_frozen import lora_in

STEP_S = 240.0
_COMES_AGAIN = ("", "rejected", "aborted", "gave_up")


def test_a_device_with_another_base_model_is_not_counted_and_says_why(tmp_path: Path) -> None:
    owner = lora_in(tmp_path / "owner", 1.0)
    same = lora_in(tmp_path / "same", 1.0)
    other = lora_in(tmp_path / "other", 2.0)
    with Installation(tmp_path) as installation:
        server = installation.add().start()
        admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        admin.submit(load_task(owner).config())
        ending, reason = asyncio.run(_visited(installation, server, other))
        assert ending == "rejected"
        assert reason == "lora: the model of this device holds other frozen tensors"
        _, metrics = admin.ask("GET", "/metrics")
        assert reading(metrics.decode(), "papaya_task_joined_total", "lora") == 0
        ending, _ = asyncio.run(_visited(installation, server, same))
        assert ending == "counted"
        assert server.stop() == 0


async def _visited(
    installation: Installation, server: ServerProcess, file: Path
) -> tuple[str, str]:
    """Visits until the task wants clients; how the last one ended."""
    ending = reason = ""
    book = Book()
    async with (
        WatchedProcess(book, None, None) as process,
        sandboxed([file], time.time) as trainer,
    ):
        with Device(
            process,
            selectors=[f"http://{server.addresses['devices']}"],
            store=file.with_name("device.db"),
            trainer=trainer,
            token=installation.secret("device.token"),
            memory_mb=1024,
        ) as device:
            device.store.declare({"points": UsePolicy(tasks=("lora",))})
            device.store.add_new("points", [b"1 2", b"3 4"], time.time())
            async with asyncio.timeout(STEP_S):
                # One that was silent for too long on a busy machine comes again.
                while not reason.startswith("lora") and ending in _COMES_AGAIN:
                    finish = await device.visit()
                    ending, reason = finish.ending, finish.detail
                    await asyncio.sleep(0.05)
    return ending, reason
