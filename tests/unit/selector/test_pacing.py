"""Pace steering: a fleet that obeys its windows comes, over time, at about the wanted rate."""

from __future__ import annotations

import heapq
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.config import ServerConfig
from papaya.machine import Reply
from papaya.messages.selection import Rejected
from papaya.selector.pacing import Pacing
from tests.unit.selector.builders import BOOT, a_selector, an_open_selector, check_in, orders

H = 10.0


def pacing(**config: Any) -> Pacing:
    return Pacing(0.0, ServerConfig(**{"min_retry_s": 4.0, "max_retry_s": 64.0, **config}))


def beat(paced: Pacing, number: int, arrivals: int, wanted_per_s: float) -> float:
    for _ in range(arrivals):
        paced.arrived()
    paced.adjust(number * H, wanted_per_s)
    return paced.mean_s


# --- One step


def test_the_window_begins_short() -> None:
    assert pacing().window() == (2.0, 6.0)


@pytest.mark.parametrize(
    ("arrivals", "mean_s"), [(100, 16), (150, 24), (75, 12), (200, 32), (1000, 32), (50, 8), (0, 8)]
)
def test_the_window_follows_measured_over_wanted_by_at_most_a_factor_of_two(
    arrivals: int, mean_s: float
) -> None:
    paced = pacing()
    beat(paced, 1, 10_000, wanted_per_s=10.0)
    assert beat(paced, 2, 10_000, wanted_per_s=10.0) == 16
    assert beat(paced, 3, arrivals, wanted_per_s=10.0) == mean_s


def test_arrivals_are_counted_afresh_each_heartbeat() -> None:
    paced = pacing()
    beat(paced, 1, 10_000, wanted_per_s=10.0)
    first = beat(paced, 2, 100, wanted_per_s=10.0)
    assert beat(paced, 3, 100, wanted_per_s=10.0) == first


def test_the_rate_is_over_the_time_that_really_passed() -> None:
    paced = pacing()
    beat(paced, 1, 10_000, wanted_per_s=10.0)
    assert beat(paced, 4, 300, wanted_per_s=10.0) == 8


def test_no_time_passed_is_no_measurement() -> None:
    paced = pacing()
    beat(paced, 1, 10_000, wanted_per_s=10.0)
    assert beat(paced, 1, 10_000, wanted_per_s=10.0) == 8


def test_a_crowd_that_nobody_wants_is_sent_ever_farther_away() -> None:
    paced = pacing()
    means = [beat(paced, number, 1000, wanted_per_s=0.0) for number in range(1, 7)]
    assert means == [8, 16, 32, 64, 64, 64]


def test_a_few_devices_stay_within_reach_though_nobody_wants_them_now() -> None:
    """One check-in a second costs nothing, and the next task will want them."""
    paced = pacing()
    for number in range(1, 5):
        beat(paced, number, 1000, wanted_per_s=0.0)
    means = [beat(paced, number, 5, wanted_per_s=0.0) for number in range(5, 10)]
    assert means == [32, 16, 8, 4, 4]
    assert beat(paced, 10, 15, wanted_per_s=0.1) == 6
    assert beat(paced, 11, 10, wanted_per_s=0.1) == 6


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1e6)), max_size=20))
def test_the_mean_stays_within_its_limits(beats: list[tuple[int, float]]) -> None:
    paced = pacing()
    for number, (arrivals, wanted_per_s) in enumerate(beats, start=1):
        before = paced.mean_s
        after = beat(paced, number, arrivals, wanted_per_s)
        assert 4 <= after <= 64
        assert before / 2 <= after <= before * 2


def test_a_window_is_as_wide_as_its_mean() -> None:
    """Devices rejected together must not return together."""
    paced = pacing()
    for number in range(1, 6):
        beat(paced, number, 100, wanted_per_s=0.0)
        start, end = paced.window()
        assert start > 0
        assert (start + end) / 2 == paced.mean_s == end - start


# --- A fleet


def arrivals_per_beat(fleet: int, wanted_per_s: float, beats: int, stampede: bool) -> list[int]:
    """Every device is rejected and comes back within the window that it was given."""
    paced = Pacing(0.0, ServerConfig(heartbeat_s=H))
    rng = Random(7)
    waiting = [(0.0 if stampede else rng.random() * 60, device) for device in range(fleet)]
    heapq.heapify(waiting)
    counts = []
    for number in range(1, beats + 1):
        count = 0
        while waiting[0][0] < number * H:
            now, device = heapq.heappop(waiting)
            start, end = paced.window()
            paced.arrived()
            heapq.heappush(waiting, (now + start + (end - start) * rng.random(), device))
            count += 1
        paced.adjust(number * H, wanted_per_s)
        counts.append(count)
    return counts


@pytest.mark.parametrize("stampede", [True, False])
@pytest.mark.parametrize(
    ("fleet", "wanted_per_s"), [(200, 2.0), (1000, 2.0), (2000, 10.0), (2000, 100.0)]
)
def test_a_fleet_comes_at_about_the_wanted_rate(
    fleet: int, wanted_per_s: float, stampede: bool
) -> None:
    """From everybody at once to the pace that the Coordinator asked for."""
    counts = arrivals_per_beat(fleet, wanted_per_s, beats=600, stampede=stampede)
    settled = counts[300:]
    assert sum(settled) / len(settled) / H == pytest.approx(wanted_per_s, rel=0.25)
    assert max(settled) <= 5 * wanted_per_s * H


def test_a_fleet_too_small_for_the_wanted_rate_comes_as_often_as_it_may() -> None:
    counts = arrivals_per_beat(10, 100.0, beats=100, stampede=True)
    assert sum(counts[50:]) / 50 / H == pytest.approx(10 / ServerConfig().min_retry_s, rel=0.1)


def test_devices_rejected_together_return_spread_over_their_window() -> None:
    paced = Pacing(0.0, ServerConfig(min_retry_s=100.0))
    start, end = paced.window()
    rng = Random(3)
    returns = [start + (end - start) * rng.random() for _ in range(1000)]
    busiest = max(sum(at <= back < at + 1 for back in returns) for at in range(50, 150))
    assert busiest < 30


# --- In the selector


def test_a_selector_paces_by_its_share_of_the_orders() -> None:
    """1 check-in per second is wanted and 40 come in 10 s: the window doubles, once a heartbeat."""
    selector = an_open_selector(heartbeat_s=H, min_retry_s=5.0, max_retry_s=1000.0)
    selector.receive(BOOT, orders(1, wanting=(), check_ins_per_s=1.0))

    def window() -> tuple[float, float]:
        [effect] = selector.receive(now, check_in(), "d")
        assert isinstance(effect, Reply)
        assert isinstance(effect.message, Rejected)
        return effect.message.retry_from_s, effect.message.retry_until_s

    now = BOOT + 1
    assert [window() for _ in range(40)] == 40 * [(2.5, 7.5)]
    selector.wake(BOOT + 9)
    assert window() == (2.5, 7.5)
    now = BOOT + 10
    selector.wake(now)
    assert [window() for _ in range(10)] == 10 * [(5.0, 15.0)]
    now = BOOT + 20
    selector.wake(now)
    assert window() == (5.0, 15.0)


def test_a_selector_that_has_heard_from_no_leader_sends_nobody_away_for_days() -> None:
    """It booted while the Coordinator was down: it does not know that nobody is wanted."""
    selector = a_selector(heartbeat_s=H)
    for number in range(60):
        selector.wake(BOOT + number * H)
    [effect] = selector.receive(BOOT + 600, check_in(), "d")[:1]
    assert isinstance(effect, Reply)
    assert isinstance(effect.message, Rejected)
    assert effect.message.retry_until_s <= 3600
