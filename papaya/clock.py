"""The machines' `now`: wall-clock seconds that never jump within a process.

Wall time at the start plus monotonic progress, so that no step of the system's clock ends a session
or a lease early, and so that timers of the event loop, which are monotonic too, agree with it. A
server that sleeps does not see the time pass; a device does (`device_clock`). It does not follow
NTP: deadlines that servers compare with each other leave room for clocks that disagree by a
heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """One per process: two of them may disagree by what the wall clock was set in between."""

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
    """A device sleeps for most of the day, and its examples grow old meanwhile."""
    return Clock(monotonic=_since_boot)


def _since_boot() -> float:
    # CLOCK_MONOTONIC stands still in suspend under Linux, and nowhere else.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
