"""The machines' `now`: wall-clock seconds that never jump within a process.

Wall time at the start plus monotonic progress, so that no step of the system's clock ends a session
or a lease early, and so that timers of the event loop, which are monotonic too, agree with it. A
machine that sleeps does not see the time pass. It does not follow NTP: deadlines that servers
compare with each other leave room for clocks that disagree by a heartbeat.
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
