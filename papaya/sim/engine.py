"""Virtual time: an event heap. The same seed gives the same events in any process.

Events at the same instant run in the order in which they were scheduled. Events are never
removed: a handler checks whether its event still matters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any


class TimerWheel:
    """Cheap timers: all that are due within the same tick fire at its end.

    Most timers of devices no longer matter when they are due. Here such a timer costs a list entry
    instead of an event; the others fire at most a tick late.
    """

    def __init__(self, engine: Engine, tick_s: float) -> None:
        self._engine = engine
        self._tick_s = tick_s
        self._slots: dict[int, list[Callable[[float], None]]] = {}

    def at(self, time: float, wake: Callable[[float], None]) -> None:
        slot = int(time / self._tick_s) + 1
        waiting = self._slots.get(slot)
        if waiting is None:
            self._slots[slot] = [wake]
            self._engine.at(slot * self._tick_s, self._turn, slot)
        else:
            waiting.append(wake)

    def _turn(self, slot: int) -> None:
        now = self._engine.now
        for wake in self._slots.pop(slot):
            wake(now)


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
        with rare_garbage_collection():
            while heap and heap[0][0] <= until:
                if stop is not None and stop():
                    return
                self.now, _, handler, arguments = heappop(heap)
                self.events += 1
                handler(*arguments)
        self.now = max(self.now, until)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """What a simulation drops is freed by reference counts; looking for cycles costs a tenth."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
