"""The clock: wall time at the start, and from then on only forwards."""

from __future__ import annotations

import time

from papaya.net.clock import Clock


class Times:
    """A wall clock that can be set and a monotonic one that cannot."""

    def __init__(self) -> None:
        self.wall = 1_000_000.0
        self.monotonic = 50.0

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.monotonic)


def test_it_starts_at_the_wall_clock_and_moves_with_the_monotonic_one() -> None:
    times = Times()
    clock = times.clock()
    assert clock.now() == 1_000_000.0
    times.monotonic += 2.5
    assert clock.now() == 1_000_002.5


def test_setting_the_wall_clock_does_not_move_it() -> None:
    times = Times()
    clock = times.clock()
    times.wall -= 3600
    assert clock.now() == 1_000_000.0


def test_by_default_it_is_the_time_of_this_machine() -> None:
    before = time.time()
    clock = Clock()
    first, second = clock.now(), clock.now()
    # The two system clocks are read one after the other, and differ by what lies between.
    assert abs(first - before) < 60
    assert first <= second
