"""Tasks to aggregators: least loaded by concurrency x model size, moved on failure or overload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.config import TaskConfig
from papaya.coordinator.placement import least_loaded, relieve
from papaya.messages.control import AggregatorOrders
from papaya.messages.storage import Changed, FenceRow
from tests.unit.coordinator.builders import (
    A_MOMENT_S,
    SERVER,
    H,
    Office,
    a_task,
    an_office,
    on,
    orders_in,
)


def beat(office: Office, *nodes: str, **loads: float) -> None:
    """One heartbeat of every aggregator named."""
    office.pass_s(H)
    for node in nodes:
        held = [
            on(task, office.fence(task).seq, demand=0)
            for task in office.machine.rows.tasks
            if office.fence(task).aggregator == node
        ]
        office.aggregator(node, *held, load=loads.get(node.replace("-", "_"), 0.0))


def holders(office: Office) -> dict[str, str]:
    return {task: office.fence(task).aggregator for task in office.machine.rows.tasks}


def several(count: int, concurrency: int = 4) -> list[TaskConfig]:
    return [a_task(f"task-{i}", concurrency) for i in range(count)]


# -- where a new task goes --------------------------------------------------------------------


def test_on_a_cold_start_a_second_task_waits_until_everyone_had_a_turn_to_report() -> None:
    """ "evenly distributes tasks among available Aggregators": not all to the first who speaks."""
    office = Office(*several(4))
    office.wake()
    office.aggregator("agg-1")
    office.now += H / 2
    office.aggregator("agg-2")
    assert list(holders(office).values()) == ["agg-1", "agg-2", "", ""], "one each, without waiting"
    beat(office, "agg-1", "agg-2")
    assert sorted(holders(office).values()) == ["agg-1", "agg-1", "agg-2", "agg-2"]


def test_a_first_task_does_not_wait_for_a_heartbeat() -> None:
    """The aggregator reported before there was a leader. It is told who leads and reports again."""
    office = Office(a_task())
    assert office.aggregator("agg-1", epoch=0) == []
    [orders] = orders_in(office.wake(), AggregatorOrders, "agg-1")
    assert (orders.epoch, orders.tasks) == (1, ())
    assert office.fence().aggregator == "", "its old report is no sign of life"
    office.aggregator("agg-1", heartbeat=False)
    assert (office.fence().aggregator, office.now) == ("agg-1", 0.0)


def test_a_restarted_holder_has_its_tasks_again_before_others_report() -> None:
    """The whole machine was restarted: nothing is gained by waiting."""
    office = an_office(*several(3))
    office.aggregator("agg-1")
    again = Office(store=office.store, boot=1, now=office.now)
    again.wake()
    again.aggregator("agg-1", boot=1, heartbeat=False)
    assert {again.fence(task) for task in holders(again)} == {FenceRow(2, "agg-1", 1)}


def test_while_others_may_report_a_silent_holder_keeps_its_task() -> None:
    office = an_office(a_task())
    office.aggregator("agg-1")
    again = Office(store=office.store, boot=1, now=office.now)
    again.wake()
    again.aggregator("agg-2")
    again.pass_s(SERVER.recovery_s - A_MOMENT_S)
    again.aggregator("agg-2")
    assert again.fence().aggregator == "agg-1"
    again.pass_s(A_MOMENT_S)
    again.aggregator("agg-2")
    assert again.fence().aggregator == "agg-2"


def test_a_new_leader_places_a_task_that_nobody_holds_without_a_recovery_period() -> None:
    office = an_office(a_task())
    office.aggregator("agg-1")
    again = Office(store=office.store, boot=1, now=office.now)
    again.wake()
    again.aggregator("agg-1", on("words", 1, demand=4))
    submit(again, a_task("new"))
    again.receive(Changed())
    assert again.fence("new").aggregator == "", "others may have less work"
    again.pass_s(H)
    assert again.fence("new").aggregator == "agg-1"


def test_the_workload_of_a_task_is_concurrency_times_model_size() -> None:
    assert a_task(concurrency=100, model_length=50).workload == 100 * 50 * 4


def test_the_least_loaded_is_chosen_and_the_first_by_name_among_equals() -> None:
    assert least_loaded({"b": 1.0, "a": 2.0, "c": 0.5}) == "c"
    assert least_loaded({"b": 1.0, "a": 1.0}) == "a"
    assert least_loaded({}) is None


def test_a_new_task_goes_to_the_aggregator_with_the_least_work() -> None:
    """By workload, not by number of tasks: two small ones weigh less than a big one."""
    office = an_office(a_task("big", 1000))
    office.aggregator("agg-1")
    office.aggregator("agg-2")
    assert office.fence("big").aggregator == "agg-1"
    for name in ("small-1", "small-2", "small-3"):
        submit(office, a_task(name, 10))
        beat(office, "agg-1", "agg-2")
        assert office.fence(name).aggregator == "agg-2"


def submit(office: Office, config: TaskConfig) -> None:
    Office(config, store=office.store)


def test_model_size_counts_as_much_as_concurrency() -> None:
    office = an_office(a_task("wide", 10, model_length=10_000))
    office.aggregator("agg-1")
    office.aggregator("agg-2")
    submit(office, a_task("busy", 1000, model_length=10))
    beat(office, "agg-1", "agg-2")
    submit(office, a_task("third", 1))
    beat(office, "agg-1", "agg-2")
    assert holders(office) == {"busy": "agg-2", "third": "agg-2", "wide": "agg-1"}


def test_many_new_tasks_are_spread_before_any_of_them_is_committed() -> None:
    office = an_office()
    for node in ("agg-1", "agg-2", "agg-3"):
        office.aggregator(node)
    for config in several(9):
        submit(office, config)
    beat(office, "agg-1", "agg-2", "agg-3")
    found = list(holders(office).values())
    assert [found.count(node) for node in ("agg-1", "agg-2", "agg-3")] == [3, 3, 3]


def test_without_an_aggregator_a_task_waits() -> None:
    office = an_office(a_task())
    office.pass_s(5 * H)
    assert office.fence().seq == 0
    office.aggregator("agg-1")
    assert office.fence().aggregator == "agg-1"


# -- never for balance alone ------------------------------------------------------------------


def test_a_new_empty_aggregator_gets_nothing() -> None:
    """ "moves tasks between Aggregators only when it detects failed or overloaded Aggregators"."""
    office = an_office(*several(5))
    office.aggregator("agg-1")
    before = {task: office.fence(task) for task in holders(office)}
    for _ in range(20):
        beat(office, "agg-1", "agg-2")
    assert {task: office.fence(task) for task in holders(office)} == before


def test_an_aggregator_that_is_merely_busy_keeps_its_tasks() -> None:
    office = an_office(*several(4))
    office.aggregator("agg-1")
    for _ in range(10):
        beat(office, "agg-1", "agg-2", agg_1=1.0)
    assert set(holders(office).values()) == {"agg-1"}


# -- failure ----------------------------------------------------------------------------------


def test_all_tasks_of_a_silent_aggregator_move_after_three_heartbeats() -> None:
    office = an_office(*several(4))
    office.aggregator("agg-1")
    office.aggregator("agg-2")
    for _ in range(2):
        beat(office, "agg-2")
    assert set(holders(office).values()) == {"agg-1"}
    beat(office, "agg-2")
    assert set(holders(office).values()) == {"agg-2"}
    assert {office.fence(task).seq for task in holders(office)} == {2}


def test_silence_is_counted_from_the_last_report_of_any_kind() -> None:
    office = an_office(a_task())
    office.aggregator("agg-1")
    office.aggregator("agg-2")
    for _ in range(10):
        office.pass_s(SERVER.dead_after_s / 2)
        office.aggregator("agg-1", on("words", 1, demand=0), heartbeat=False)
        office.aggregator("agg-2")
    assert office.fence().aggregator == "agg-1"


def test_the_tasks_of_a_failed_aggregator_are_spread_over_the_others() -> None:
    office = an_office(*several(6))
    office.aggregator("agg-1")
    for _ in range(3):
        beat(office, "agg-2", "agg-3")
    found = list(holders(office).values())
    assert sorted(found) == 3 * ["agg-2"] + 3 * ["agg-3"]


def test_a_task_without_any_live_aggregator_stays_where_it_is() -> None:
    office = an_office(a_task())
    office.aggregator("agg-1")
    office.pass_s(10 * H)
    assert office.fence().seq == 1
    office.aggregator("agg-1", on("words", 1, demand=0))
    assert office.fence().seq == 1, "it is back, and nobody took its task"


def test_a_restarted_aggregator_holds_its_task_under_a_new_number() -> None:
    """The boot that held it is gone: what it had in memory must not be believed."""
    office = an_office(a_task())
    office.aggregator("agg-1", boot=1, number=7)
    assert (office.fence().seq, office.fence().boot) == (1, 1.0)
    office.pass_s(A_MOMENT_S)
    office.aggregator("agg-1", boot=2, number=1)
    assert (office.fence().seq, office.fence().aggregator, office.fence().boot) == (2, "agg-1", 2.0)


def test_a_restarted_aggregators_task_may_go_to_one_with_less_work() -> None:
    office = an_office(*several(2))
    office.aggregator("agg-1", boot=1)
    office.aggregator("agg-2", boot=1)
    office.aggregator("agg-1", boot=2, number=1)
    assert sorted(holders(office).values()) == ["agg-1", "agg-2"]
    assert {office.fence(task).seq for task in holders(office)} == {2}


# -- overload ---------------------------------------------------------------------------------


def test_an_overloaded_aggregator_gives_one_task_away() -> None:
    office = an_office(*several(4))
    office.aggregator("agg-1")
    for _ in range(2):
        beat(office, "agg-2", "agg-1", agg_1=1.5)
        assert set(holders(office).values()) == {"agg-1"}, "overload has to last"
    beat(office, "agg-2", "agg-1", agg_1=1.5)
    assert sorted(holders(office).values()) == ["agg-1", "agg-1", "agg-1", "agg-2"]
    beat(office, "agg-2", "agg-1", agg_1=1.5)
    assert sorted(holders(office).values()).count("agg-2") == 1, "and waits what that brings"


def test_overload_has_to_last_without_a_break() -> None:
    office = an_office(*several(4))
    office.aggregator("agg-1")
    for load in (2.0, 2.0, 0.5, 2.0, 2.0, 1.0, 2.0, 2.0):
        beat(office, "agg-2", "agg-1", agg_1=load)
    assert set(holders(office).values()) == {"agg-1"}


def test_lasting_overload_moves_tasks_until_no_move_helps() -> None:
    office = an_office(*several(4))
    office.aggregator("agg-1")
    for _ in range(30):
        beat(office, "agg-2", "agg-1", agg_1=1.5)
    assert sorted(holders(office).values()) == ["agg-1", "agg-1", "agg-2", "agg-2"]


def test_one_task_that_is_too_much_for_anybody_does_not_wander() -> None:
    office = an_office(a_task(concurrency=1000))
    office.aggregator("agg-1")
    for _ in range(12):
        beat(office, "agg-2", "agg-1", agg_1=5.0)
    assert office.fence().seq == 1


def test_overload_without_anybody_else_moves_nothing() -> None:
    office = an_office(*several(3))
    office.aggregator("agg-1")
    for _ in range(6):
        beat(office, "agg-1", agg_1=5.0)
    assert {office.fence(task).seq for task in holders(office)} == {1}


def test_the_best_move_evens_out() -> None:
    tasks = {"a": 10.0, "b": 45.0, "c": 80.0}
    assert relieve("x", tasks, {"x": 135.0, "y": 40.0, "z": 90.0}) == ("b", "y")


@pytest.mark.parametrize(
    ("tasks", "workloads"),
    [
        ({"a": 10.0}, {"x": 10.0}),
        ({"a": 10.0}, {"x": 10.0, "y": 0.0}),
        ({"a": 10.0, "b": 10.0}, {"x": 20.0, "y": 15.0}),
        ({}, {"x": 0.0, "y": 0.0}),
    ],
    ids=["nobody else", "it would only change places", "the receiver would be worse", "nothing"],
)
def test_no_move_is_better_than_one_that_does_not_help(
    tasks: dict[str, float], workloads: dict[str, float]
) -> None:
    assert relieve("x", tasks, workloads) is None


WORK = st.integers(0, 300).map(float)


@given(
    own=st.dictionaries(st.sampled_from("abcde"), WORK, min_size=1),
    others=st.dictionaries(st.sampled_from("yz"), WORK, min_size=1),
)
def test_a_move_lowers_the_greater_of_the_two_workloads(
    own: dict[str, float], others: dict[str, float]
) -> None:
    before = sum(own.values())
    move = relieve("x", own, {"x": before, **others})
    if move is not None:
        task, to = move
        assert others[to] == min(others.values())
        assert max(before - own[task], others[to] + own[task]) < before
    else:
        target = min(others.values())
        assert all(work == 0 or target + work >= before for work in own.values())
