"""Real devices that train nothing, and a log of how their sessions end.

They are the device runtime over real sockets; training is a wait. A session counts from the answer
to its join. None of these devices drops out, so every session that does not end as `counted` lost
its work to the servers.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from papaya.client.client import Stage
from papaya.config import DeviceConfig
from papaya.device.device import Device
from papaya.device.eligibility import Eligibility
from papaya.device.events import Event, StageReached, VisitEnded
from papaya.device.limits import CheckInPacing
from papaya.device.load import LoadFleet
from papaya.device.process import DeviceProcess
from papaya.device.training import ProtocolTrainer
from papaya.sim.protocol_updates import protocol_update


class Log:
    """How sessions ended. `turned_away`: assigned, but refused at the join, before any work.

    `in_progress_at_faults`: sessions that had joined and not ended, summed over all faults.
    """

    def __init__(self) -> None:
        self.joins = 0
        # When clients joined each task, in order.
        self.joined_at: defaultdict[str | None, list[float]] = defaultdict(list)
        self.endings: Counter[str] = Counter()
        self.turned_away: Counter[str] = Counter()
        self.in_progress_at_faults = 0
        self._joined: set[str] = set()

    def __call__(self, event: Event) -> None:
        match event:
            case StageReached(stage=Stage.DOWNLOADING.value):
                self.joins += 1
                self._joined.add(event.device)
                self.joined_at[event.task].append(time.monotonic())
            case VisitEnded() if event.device in self._joined:
                self._joined.remove(event.device)
                self.endings[_ending(event)] += 1
            case VisitEnded() if event.task is not None:
                self.turned_away[_ending(event)] += 1

    def note_fault(self) -> None:
        self.in_progress_at_faults += len(self._joined)

    @property
    def lost(self) -> int:
        return self.endings.total() - self.endings["counted"]


def _ending(event: VisitEnded) -> str:
    if event.ending in ("counted", "aborted"):
        return event.reason or event.ending
    return f"{event.ending}: {event.reason}"


class Devices(LoadFleet):
    """Each makes one visit after the other until `go_home`."""

    async def go_home(self, timeout_s: float) -> None:
        """Start no more visits, and wait for those that have begun."""
        self.stop_visits()
        await self.wait(timeout_s)
        await self.vanish()


@asynccontextmanager
async def visiting(
    folder: Path,
    selectors: Sequence[str],
    token: str,
    count: int,
    config: DeviceConfig,
    mean_training_s: float,
    log: Log,
    seed: int,
) -> AsyncIterator[Devices]:
    folder.mkdir()
    rng = Random(seed)
    trainer = ProtocolTrainer(protocol_update, lambda: rng.expovariate(1 / mean_training_s))
    process = DeviceProcess(
        now=time.time,
        pacing=CheckInPacing(pause_s=0),
        eligibility=Eligibility((), ()),
        max_parallel=count,
    )
    async with process:
        devices = [
            Device(
                process,
                selectors=selectors,
                store=folder / f"{number}.db",
                trainer=trainer,
                token=token,
                name=f"device-{number}",
                config=config,
                notify=log,
                rng=Random(rng.getrandbits(64)),
            )
            for number in range(count)
        ]
        try:
            yield Devices(devices, rng)
        finally:
            for device in devices:
                device.close()
