"""Runs many devices in one process; the failure of one does not affect the others.

On SIGTERM or SIGINT every device leaves its session. Running uploads have `drain_s` to finish, the
other devices leave at once, and after another `leave_s` the process ends in any case.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from papaya.device.device import Device
from papaya.device.process import DeviceProcess

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DeviceRuntime:
    def __init__(self, process: DeviceProcess, devices: Sequence[Device]) -> None:
        self._pacing = process.pacing
        self._devices = tuple(devices)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, visits: int | None = None) -> None:
        """Run until every device made its `visits`, or until `stop()`."""
        running = [asyncio.create_task(device.run_forever(visits)) for device in self._devices]
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await self._until_over(running, stopped)
        finally:
            for task in (*running, stopped):
                task.cancel()
            await asyncio.gather(*running, stopped, return_exceptions=True)

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _until_over(
        self, running: list[asyncio.Task[None]], stopped: asyncio.Task[bool]
    ) -> None:
        pending = {*running, stopped}
        while not stopped.done() and pending != {stopped}:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a bug or a broken disk: report it
        for even_sending, seconds in ((False, self._pacing.drain_s), (True, self._pacing.leave_s)):
            if left := [task for task in running if not task.done()]:
                for device in self._devices:
                    device.stop(even_sending)
                await asyncio.wait(left, timeout=seconds)
