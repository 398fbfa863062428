"""Pace steering: when a rejected device should come back.

A selector sees only arrivals. The number of devices that it steers is about arrivals per second x
the window it hands out (Little's law), so the window that would bring the wanted rate is the old
one x measured ÷ wanted. It moves by at most a factor of two a heartbeat: devices follow late.
"""

from __future__ import annotations

from papaya.config import ServerConfig

# So many check-ins cost a selector nothing; a small fleet stays within reach of the next task.
_ALWAYS_WELCOME_PER_S = 1.0


class Pacing:
    """Measures check-ins and gives out retry windows."""

    def __init__(self, now: float, config: ServerConfig) -> None:
        self._config = config
        self._since = now
        self._arrivals = 0
        self.mean_s = config.min_retry_s

    def arrived(self) -> None:
        self._arrivals += 1

    def adjust(self, now: float, wanted_per_s: float) -> None:
        """Once a heartbeat."""
        if now <= self._since:
            return
        measured = self._arrivals / (now - self._since)
        self._since, self._arrivals = now, 0
        ratio = measured / max(wanted_per_s, _ALWAYS_WELCOME_PER_S)
        mean_s = self.mean_s * min(2.0, max(0.5, ratio))
        self.mean_s = min(self._config.max_retry_s, max(self._config.min_retry_s, mean_s))

    def window(self) -> tuple[float, float]:
        """Spread out, so that devices rejected together do not return together."""
        return 0.5 * self.mean_s, 1.5 * self.mean_s
