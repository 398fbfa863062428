"""Count the files and functions of Papaya that one unencrypted update passes through.

Starts a server with all roles and one device in this process, on loopback, lets one update warm
everything up, and profiles every call on every thread while the next one goes from check-in to a
published version. Prints a summary, or with `--list` the files with their numbers of functions:

    python -m tools.update_walk
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import aiohttp
import msgspec
import numpy as np

import papaya
from papaya.config import AsyncFL, Deployment, DeviceConfig, ServerConfig, TaskConfig
from papaya.credentials.token_files import read
from papaya.device.device import Device
from papaya.device.eligibility import Eligibility
from papaya.device.limits import CheckInPacing
from papaya.device.process import DeviceProcess
from papaya.device.training import ProtocolTrainer
from papaya.learning import parameters
from papaya.server.server import Server
from papaya.sim.protocol_updates import protocol_update

_PACKAGE = os.path.dirname(papaya.__file__) + os.sep
_TASK = TaskConfig(
    task="walk", concurrency=1, model_length=1000, regime=AsyncFL(1), participation_gap_s=0.0
)
_PUBLISH_S = 0.5  # after the acknowledgement: the version is made and published


class Walk:
    """Which functions of Papaya were called, on any thread, while it is on."""

    def __init__(self) -> None:
        self.called: dict[CodeType, None] = {}
        self.is_on = False
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            self.called[frame.f_code] = None

    def functions_by_file(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for code in self.called:
            found[code.co_filename.removeprefix(_PACKAGE)] += 1
        return found


async def walk(folder: Path) -> Walk:
    profile = Walk()
    deployment = Deployment(
        data=str(folder / "data"),
        devices="127.0.0.1:0",
        admin="127.0.0.1:0",
        server=ServerConfig(heartbeat_s=0.5, min_retry_s=0.05, max_retry_s=0.2),
    )
    server = Server(deployment)
    await server.start()
    try:
        await _submit(server.addresses["admin"], folder / "data" / "admin.token")
        token = read(folder / "data" / "device.token").reveal()
        await _visit_until_counted(folder, server.addresses["devices"], token, profile)
    finally:
        await server.stop()
        sys.setprofile(None)
    return profile


async def _submit(address: str, token: Path) -> None:
    headers = {"Authorization": f"Bearer {read(token).reveal()}"}
    data = parameters.encode(np.zeros(_TASK.model_length, parameters.FLOAT32), {"task": "walk"})
    where = f"http://{address}/admin/tasks"
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as session:
        path = f"{where}/walk/parameters?model_length={_TASK.model_length}"
        async with session.put(path, data=data) as stored:
            key = (await stored.json())["parameters"]
        body = msgspec.json.encode({"config": _TASK, "parameters": key})
        async with session.post(where, data=body):
            pass


async def _visit_until_counted(folder: Path, address: str, token: str, profile: Walk) -> None:
    """Two counted visits; the second one is profiled, until its version is published."""
    process = DeviceProcess(
        now=time.time, pacing=CheckInPacing(pause_s=0), eligibility=Eligibility((), ())
    )
    trainer = ProtocolTrainer(protocol_update, seconds=lambda: 0.0)
    async with process:
        device = Device(
            process,
            selectors=[f"http://{address}"],
            store=folder / "device.db",
            trainer=trainer,
            token=token,
            config=DeviceConfig(participation_floor_s=0.0),
        )
        counted = 0
        while counted < 2:
            profile.called.clear()
            profile.is_on = counted == 1
            finish = await device.visit()
            await asyncio.sleep(_PUBLISH_S)
            profile.is_on = False
            counted += finish.ending == "counted"


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(walk(Path(folder))).functions_by_file()
    if "--list" in arguments:
        for file, functions in found.most_common():
            print(f"{functions:5} {file}")
    print(f"one update passes through {len(found)} files and {found.total()} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
