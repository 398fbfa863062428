"""The machines' `now`: wall-clock seconds that never jump within a process.

It is the wall time at the start plus monotonic progress, so that a step of the system's clock does
not end a session or a lease early, and the monotonic timers of the event loop agree with it. It
does not advance while a server is suspended; a device's does (`device_clock`). It does not follow
NTP: deadlines that servers compare allow for clocks that differ by a heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Use one per process: two may differ if the wall clock was set in between."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def now(self) -> float:
        return self._offset + self._monotonic()


def device_clock() -> Clock:
    """A clock that advances during suspend: a device is suspended for most of the day."""
    return Clock(monotonic=_since_boot)


def _since_boot() -> float:
    # Linux's CLOCK_MONOTONIC does not advance during suspend; on other systems it does.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
