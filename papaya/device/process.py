"""Shared by the devices of one process: connections, downloads, training slots, eligibility.

`memory_mb` is what a device declares: a power of two, so that similar devices form one class.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from papaya.device.allowed_hosts import AllowedHosts
from papaya.device.download import Downloads
from papaya.device.eligibility import (
    ChargingProbe,
    Eligibility,
    IdleProbe,
    Ineligible,
    UnmeteredProbe,
)
from papaya.device.events import (
    Notify,
    SelectorReachable,
    SelectorUnreachable,
    UploadRerouted,
    nobody,
)
from papaya.device.limits import CheckInPacing, DeviceLimits
from papaya.device.selectors import Selectors, check_url, open_session
from papaya.device.trust import Trust

_PROCESS = "process"
_LOAD_PERIOD_S = 60.0


class OwnLoad:
    """The part of the one-minute load average that our own training causes.

    It decays by e every minute, like the kernel's average. Without it, a device would find its
    machine busy because of its own training, and leave.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._running = 0
        self._load, self._at = 0.0, now()

    def __call__(self) -> float:
        kept = math.exp((self._at - self._now()) / _LOAD_PERIOD_S)
        return self._load * kept + self._running * (1 - kept)

    def change(self, by: int) -> None:
        self._load, self._at = self(), self._now()
        self._running += by


class DeviceProcess:
    """Open it with `async with`, inside the loop that its devices run in.

    `assume` names eligibility conditions that the owner declares to hold; `eligibility` replaces
    the probes. `blobs_hosts` and `upload_hosts`: to which hosts selectors may send the devices.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        limits: DeviceLimits | None = None,
        pacing: CheckInPacing | None = None,
        assume: Collection[str] = (),
        eligibility: Eligibility | None = None,
        max_parallel: int | None = None,
        blobs_url: str | None = None,
        blobs_hosts: Collection[str] = (),
        upload_hosts: Collection[str] = (),
        certificates: Path | None = None,
        proxy: str | None = None,
        trust: Trust | None = None,
        notify: Notify = nobody,
    ) -> None:
        self.now = now
        self.trust = trust
        self.limits = limits or DeviceLimits()
        self.pacing = pacing or CheckInPacing()
        self._own_load = OwnLoad(now)
        self._eligibility = eligibility or Eligibility(
            (IdleProbe(own_load=self._own_load), ChargingProbe(), UnmeteredProbe()), assume
        )
        self._max_parallel = max_parallel or os.cpu_count() or 1
        self._blobs_url = None if blobs_url is None else check_url(blobs_url)
        self._blobs_hosts = AllowedHosts(blobs_hosts, any_port=True)
        self.upload_hosts = AllowedHosts(upload_hosts)
        self._certificates = certificates
        self._proxy = proxy
        self._notify = notify
        self._reasons: list[Ineligible] = []
        self._checked_at = float("-inf")

    async def __aenter__(self) -> Self:
        self._session = open_session(self._certificates, self._proxy)
        self.selectors = Selectors(self._session, self.limits, self._on_reachable)
        self.downloads = Downloads(
            self._session, self.limits.max_training_s, self._blobs_url, hosts=self._blobs_hosts
        )
        self._slots = asyncio.Semaphore(self._max_parallel)
        self._checking = asyncio.Lock()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.downloads.aclose()
        await self._session.close()

    @asynccontextmanager
    async def training_slot(self) -> AsyncIterator[None]:
        """At most `max_parallel` trainings at a time. Waiting does not pause the session."""
        async with self._slots:
            self._own_load.change(+1)
            try:
                yield
            finally:
                self._own_load.change(-1)

    async def reasons_against(self) -> list[Ineligible]:
        """Reasons against taking part now, at most `eligibility_poll_s` old."""
        async with self._checking:
            if self.now() >= self._checked_at + self.pacing.eligibility_poll_s:
                self._reasons = await asyncio.to_thread(self._eligibility.check)
                self._checked_at = self.now()
            return self._reasons

    def upload_rerouted(self, server: str, reason: str, problem: str, hint: str = "") -> None:
        self._notify(UploadRerouted(_PROCESS, self.now(), server, reason, problem, hint))

    def _on_reachable(self, server: str, problem: str | None, hint: str) -> None:
        if problem is None:
            self._notify(SelectorReachable(_PROCESS, self.now(), server))
        else:
            self._notify(SelectorUnreachable(_PROCESS, self.now(), server, problem, hint))


def memory_mb(root: Path = Path("/")) -> int:
    """Megabytes, rounded down to a power of two; 0 if unknown."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                megabytes = int(line.split()[1]) // 1024
                return 1 << (megabytes.bit_length() - 1) if megabytes else 0
    except (OSError, ValueError, IndexError):
        pass
    return 0
