"""Pace steering: devices that a selector rejects come back at a rate that the leader wants."""

from __future__ import annotations

from papaya.config import ServerConfig

# A selector never paces check-ins below this rate: it costs nothing, and keeps a small fleet close
# by for the next task.
_MIN_PACE_PER_S = 1.0


class Pacing:
    """Chooses when a rejected device should check in again.

    The selector only sees arrivals. By Little's law, the number of devices that it steers is about
    arrivals per second x the window that it gives them. So the window that brings the wanted rate
    is the current window x measured rate ÷ wanted rate. It changes by at most a factor of two per
    heartbeat, because devices follow a new window only when the old one is over.
    """

    def __init__(self, now: float, config: ServerConfig) -> None:
        self._config = config
        self._since = now
        self._arrivals = 0
        # Check-ins per second in the last heartbeat.
        self.measured_per_s = 0.0
        self.mean_s = config.min_retry_s

    def arrived(self) -> None:
        self._arrivals += 1

    def adjust(self, now: float, wanted_per_s: float) -> None:
        """Call it once per heartbeat."""
        if now <= self._since:
            return
        self.measured_per_s = self._arrivals / (now - self._since)
        self._since, self._arrivals = now, 0
        ratio = self.measured_per_s / max(wanted_per_s, _MIN_PACE_PER_S)
        mean_s = self.mean_s * min(2.0, max(0.5, ratio))
        self.mean_s = min(self._config.max_retry_s, max(self._config.min_retry_s, mean_s))

    def window(self) -> tuple[float, float]:
        """A range of seconds, so that devices rejected together do not return together."""
        return 0.5 * self.mean_s, 1.5 * self.mean_s
