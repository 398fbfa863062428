"""The `now` of the machines: wall-clock seconds that never jump within a process.

It is the wall time at the start plus the time that has passed since, also while the machine was
suspended. So setting the system's clock does not end a session or a lease early, and a server that
was suspended knows that its lease has ended. It does not follow NTP: a process that started with a
wrong clock keeps it until it restarts. Leaders compare clocks by reports, and refuse servers whose
clock is too far off. No update is counted twice, even if clocks are wrong (docs/adr/0034).
"""

from __future__ import annotations

import time
from collections.abc import Callable


def _since_boot() -> float:
    # Under Linux CLOCK_MONOTONIC stops while the machine is suspended.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Clock:
    """Use one per process: two may differ if the wall clock was set in between."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = _since_boot,
    ) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def now(self) -> float:
        return self._offset + self._monotonic()
