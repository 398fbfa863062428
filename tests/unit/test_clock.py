"""The clock: wall time at the start, and from then on only forwards."""

from __future__ import annotations

import time

import pytest

from papaya.clock import Clock
from papaya.config import ServerConfig
from papaya.coordinator.recovery import Leadership
from papaya.device.example_store import ExampleStore
from papaya.device.use_policy import UsePolicy


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


class Suspended:
    """Suspended, CLOCK_MONOTONIC stands still and CLOCK_BOOTTIME goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.since_boot = 1000.0
        monkeypatch.setattr(time, "clock_gettime", self._clock_gettime)
        monkeypatch.setattr(time, "monotonic", lambda: 1000.0)

    def _clock_gettime(self, clock: int) -> float:
        return self.since_boot if clock == time.CLOCK_BOOTTIME else 1000.0


def test_a_leader_that_was_suspended_knows_that_its_lease_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = Suspended(monkeypatch)
    clock, config = Clock(), ServerConfig(heartbeat_s=10.0)
    leadership = Leadership("c-1", 1, config)
    leadership.observe(clock.now(), None)
    assert leadership.next_attempt(clock.now()) is not None
    assert leadership.confirm(clock.now())
    assert leadership.leads(clock.now())
    times.since_boot += config.leader_lease_s
    assert not leadership.leads(clock.now())


def test_a_device_grows_older_in_its_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its examples must expire."""
    times = Suspended(monkeypatch)
    clock = Clock()
    policy = UsePolicy(tasks=("words",), max_age_s=86400.0, validation=0.0, test=0.0)
    with ExampleStore(":memory:", {"typed": policy}) as store:
        store.add("typed", [b"secret"], clock.now())
        times.since_boot += 3 * 86400.0
        assert store.query("typed", "words", "train", 10, True, clock.now()) == []
