"""What the machine does at this moment, for targets that would be absolute otherwise.

A number of updates per second says as much about the machine and its other users as about this
code. So such a target is a ratio to a small fixed piece of work, timed in the same process, in
turns with what is measured.
"""

from __future__ import annotations

import time
from heapq import heappop, heappush

from papaya.messages import wire
from papaya.messages.participation import Report

_EVENTS = 20_000
_MESSAGE = Report(b"t" * 200, examples=20)


def bare_event_s(waiting: int = 1_000) -> float:
    """CPU seconds to push and pop one event of a heap, and to encode and decode one message.

    `waiting`: events in the heap at any time.

    Whoever simulates the protocol or runs its servers has to do both for every message, whatever
    the machines do in between. Both are limited by the interpreter and by memory, as the machines
    are, so a slow machine slows both alike.
    """
    heap: list[tuple[float, int]] = [(float(i), i) for i in range(waiting)]
    start_s = time.process_time()
    for number in range(waiting, waiting + _EVENTS):
        due, _ = heappop(heap)
        wire.from_device.parse(wire.encode(_MESSAGE))
        heappush(heap, (due + waiting * (1 + number % 7), number))
    return (time.process_time() - start_s) / _EVENTS
