"""Virtual time: order, timers, the network's faults, processes that stop and come back."""

from __future__ import annotations

from functools import partial
from random import Random

from papaya.sim.engine import Engine, TimerWheel
from papaya.sim.network import Network, NetworkConfig


def test_events_run_in_time_and_then_in_the_order_of_scheduling() -> None:
    engine, seen = Engine(), list[str]()
    engine.at(2.0, seen.append, "late")
    engine.at(1.0, seen.append, "first")
    engine.at(1.0, seen.append, "second")
    engine.run(1.5)
    assert (seen, engine.now) == (["first", "second"], 1.5)
    engine.run(3.0)
    assert (seen, engine.events) == (["first", "second", "late"], 3)


def test_events_that_schedule_events_run_in_order_within_and_across_seconds() -> None:
    engine, rng = Engine(), Random(2)
    seen: list[tuple[float, int]] = []
    scheduled = 0

    def schedule() -> None:
        nonlocal scheduled
        scheduled += 1
        delay_s = rng.choice([0.0, 0.01, rng.random(), 3.0, 40 * rng.random()])
        engine.after(delay_s, handle, engine.now + delay_s, scheduled)

    def handle(due: float, number: int) -> None:
        assert engine.now == due
        seen.append((due, number))
        if scheduled < 2000:
            schedule()
            schedule()

    schedule()
    for until in range(0, 2000, 7):
        engine.run(until)
    assert seen == sorted(seen)
    assert len(seen) == scheduled == engine.events > 2000


def test_a_run_stops_when_told_and_goes_on_from_there() -> None:
    engine, seen = Engine(), list[int]()
    for number in range(5):
        engine.at(float(number), seen.append, number)
    engine.run(10.0, stop=lambda: len(seen) == 2)
    assert (seen, engine.now) == ([0, 1], 1.0)
    engine.run(10.0)
    assert seen == [0, 1, 2, 3, 4]


def test_a_wheel_wakes_never_early_and_at_most_a_tick_late() -> None:
    engine, woken = Engine(), list[tuple[float, float]]()
    wheel = TimerWheel(engine, tick_s=0.5)
    rng = Random(3)

    def wake(due: float, now: float) -> None:
        woken.append((due, now))

    for due in (rng.uniform(0, 20) for _ in range(200)):
        wheel.at(due, partial(wake, due))
    engine.run(30.0)
    assert len(woken) == 200
    assert all(due <= now <= due + 0.5 for due, now in woken)


def carried(config: NetworkConfig, messages: int = 2000) -> list[int]:
    engine, seen = Engine(), list[int]()
    network = Network(engine, Random(5), config)
    for number in range(messages):
        engine.at(number * 0.001, network.carry, "a", "b", 1, seen.append, number)
    engine.run(1000.0)
    return seen


def test_a_clean_network_delivers_all_once_but_not_in_order() -> None:
    seen = carried(NetworkConfig())
    assert sorted(seen) == list(range(2000))
    assert seen != sorted(seen)


def test_loss_and_duplication_are_as_often_as_configured() -> None:
    lossy = carried(NetworkConfig(loss=0.2))
    assert 0.76 < len(lossy) / 2000 < 0.84
    doubled = carried(NetworkConfig(duplication=0.3))
    assert sorted(set(doubled)) == list(range(2000))
    assert 1.26 < len(doubled) / 2000 < 1.34


def test_a_partition_cuts_both_ways_and_only_across() -> None:
    engine, seen = Engine(), list[str]()
    network = Network(engine, Random(5), NetworkConfig())
    network.partition(frozenset({"a"}), frozenset({"b", "c"}))
    for source, target in (("a", "b"), ("c", "a"), ("b", "c")):
        network.carry(source, target, 1, seen.append, source + target)
    network.heal()
    network.carry("a", "b", 1, seen.append, "healed")
    engine.run(10.0)
    assert sorted(seen) == ["bc", "healed"]
