"""The `now` of the machines: wall-clock seconds that never jump within a process.

It is the wall time at the start plus monotonic progress. So setting the system's clock does not end
a session or a lease early, and `now` agrees with the timers of the event loop, which are monotonic
too. The clock of a server stops while the machine is suspended; that of a device does not
(`device_clock`). It does not follow NTP: deadlines that several servers check allow for clocks that
differ by a heartbeat.
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
    """A clock that includes suspended time: devices sleep, and their examples still age."""
    return Clock(monotonic=_since_boot)


def _since_boot() -> float:
    # Under Linux CLOCK_MONOTONIC stops while the machine is suspended.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
