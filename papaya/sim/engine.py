"""Virtual time: a queue of events. The same seed gives the same events in any process.

Events at the same instant run in the order in which they were scheduled. Events are never
removed: a handler checks whether its event still matters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias


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


_Event: TypeAlias = tuple[float, int, Callable[..., None], tuple[Any, ...]]
"""Time, ticket, handler, arguments. Tickets are unique, so handlers are never compared."""
_SLOTS_PER_S = 8  # a power of two, so that multiplying is exact


class Engine:
    """A clock, a heap of the events of the current slot, and lists of later ones by their slot.

    Most events are due within hundredths of a second, so the heap stays small however large the
    fleet is.
    """

    def __init__(self) -> None:
        self.now = 0.0
        # All events before `_heap_ends` are in the heap, all others in `_later`.
        self._heap: list[_Event] = []
        self._heap_ends = 0.0
        self._later: dict[int, list[_Event]] = {}
        self._later_count = 0
        # The keys of `_later`, as a heap.
        self._slots: list[int] = []
        # The ticket of the event that was scheduled last.
        self._ticket = 0

    @property
    def events(self) -> int:
        """How many have run, or begun to."""
        return self._ticket - len(self._heap) - self._later_count

    def at(self, time: float, handler: Callable[..., None], *arguments: Any) -> None:
        self.call_at(time, handler, arguments)

    def after(self, delay_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        self.call_at(self.now + delay_s, handler, arguments)

    def call_at(
        self, time: float, handler: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        """`at` for a caller that has the arguments as a tuple."""
        self._ticket += 1
        event = (time, self._ticket, handler, arguments)
        if time < self._heap_ends:
            heappush(self._heap, event)
        else:
            self._put_off(event)

    def skip(self) -> None:
        """Count an event that would do nothing as one that has run."""
        self._ticket += 1

    def _put_off(self, event: _Event) -> None:
        slot = int(event[0] * _SLOTS_PER_S)
        self._later_count += 1
        found = self._later.get(slot)
        if found is None:
            self._later[slot] = [event]
            heappush(self._slots, slot)
        else:
            found.append(event)

    def _has_next_slot(self, until: float) -> bool:
        """Fill the empty heap with the next slot that has events, if it begins by `until`."""
        if not self._slots or self._slots[0] > until * _SLOTS_PER_S:
            return False
        slot = heappop(self._slots)
        self._heap_ends = (slot + 1) / _SLOTS_PER_S
        self._heap += self._later.pop(slot)
        self._later_count -= len(self._heap)
        heapify(self._heap)
        return True

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> None:
        """Run every event up to `until`; `stop` is asked before each one."""
        heap = self._heap
        with rare_garbage_collection():
            while (heap or self._has_next_slot(until)) and heap[0][0] <= until:
                if stop is not None and stop():
                    return
                self.now, _, handler, arguments = heappop(heap)
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
