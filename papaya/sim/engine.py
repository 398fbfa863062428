"""Virtual time: an event heap. The same seed gives the same events in any process.

Events at the same instant run in the order in which they were scheduled. No event is ever removed:
whoever schedules one that may become pointless checks that when it fires.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Engine:
    """A clock and a heap of (time, ticket, handler, arguments)."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ticket = 0

    def at(self, time: float, handler: Callable[..., None], *arguments: Any) -> None:
        self._ticket += 1
        heappush(self._heap, (time, self._ticket, handler, arguments))

    def after(self, delay_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        self._ticket += 1
        heappush(self._heap, (self.now + delay_s, self._ticket, handler, arguments))

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> None:
        """Run every event up to `until`; `stop` is asked before each one."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            if stop is not None and stop():
                return
            self.now, _, handler, arguments = heappop(heap)
            self.events += 1
            handler(*arguments)
        self.now = max(self.now, until)
