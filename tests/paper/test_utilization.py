"""The paper's sentences on client demand, client assignment and persistent aggregators."""

from __future__ import annotations

import pytest
from scipy.stats import chisquare

from papaya.messages.control import AggregatorOrders, SelectorOrders
from papaya.messages.participation import Aborted, Completed
from tests.unit.aggregator.builders import World, a_world, an_async_task
from tests.unit.aggregator.builders import a_task as a_config
from tests.unit.coordinator.builders import (
    PHONE,
    H,
    Office,
    a_served_office,
    a_task,
    an_office,
    assigned,
    needing,
    on,
    orders_in,
    sessions_in,
)

# -- client demand ----------------------------------------------------------------------------


@pytest.mark.parametrize("active", range(5))
def test_client_demand_is_target_concurrency_less_participating_users(active: int) -> None:
    """Client Independence: "we first define client demand for a task as the difference between the
    target concurrency and the number of users already participating in the training of the task."
    """
    world, node = a_world(an_async_task(goal=2, concurrency=4))
    world.joined(node, active)
    world.pass_s(H)
    assert node.last_report().demand == 4 - active


def test_each_aggregator_tracks_demand_for_its_own_tasks() -> None:
    """Tracking client demand: "each Aggregator tracks client demand for the tasks that are assigned
    to it."
    """
    world = World(a_config(task="words"), a_config(task="images"), a_config(task="sounds"))
    one, other = world.start("agg-1"), world.start("agg-2")
    world.place(one, "words")
    world.place(one, "images")
    world.place(other, "sounds")
    world.pass_s(H)
    world.joined(one, 1, "words")
    world.joined(one, 3, "images")
    world.pass_s(H)
    assert {r.task: r.demand for r in one.reports[-1].tasks} == {"words": 3, "images": 1}
    assert {r.task: r.demand for r in other.reports[-1].tasks} == {"sounds": 4}


def test_demand_rises_when_a_client_finishes() -> None:
    """Tracking client demand: "When a client finishes training [...], the Aggregator increases
    client demand for the associated task."
    """
    world, node = a_world(an_async_task(goal=2, concurrency=4))
    phones = world.joined(node, 4)
    world.pass_s(H)
    assert node.last_report().demand == 0
    assert phones[0].upload_for_good(1) == Completed()
    assert node.last_report().demand == 1


def test_demand_rises_when_a_client_fails() -> None:
    """The same sentence: "When a client [...] fails"."""
    world, node = a_world(an_async_task(goal=2, concurrency=4))
    phones = world.joined(node, 4)
    phones[0].leave()
    for phone in phones[1:3]:
        phone.heartbeat()
    world.pass_s(H)
    assert node.last_report().demand == 1
    for _ in range(2):
        for phone in phones[1:3]:
            phone.heartbeat()
        world.pass_s(H)
    assert node.last_report().demand == 2, "the last one was never heard again"
    assert phones[3].heartbeat() == Aborted("silent")


def test_as_soon_as_one_client_completes_or_fails_a_new_one_is_selected() -> None:
    """High Client Utilization: "in AsyncFL there is no cohort formation; as soon as one client
    completes training or fails, a new one is selected."
    """
    world, node = a_world(an_async_task(goal=3, concurrency=4))
    phones = world.joined(node, 4)
    for turn in range(12):
        leaver = phones.pop(0)
        if turn % 3:
            leaver.upload_for_good(1)
        else:
            leaver.leave()
        assert node.held().slots.client_demand == 1
        phones += world.joined(node, 1)
        assert len(node.held().sessions.active) == 4, "whether or not a version was made"
    assert world.version == 8 // 3


def test_the_coordinator_pools_the_demand_of_all_aggregators() -> None:
    """Tracking client demand: "the Coordinator pools together information from all Aggregators into
    a consolidated view of client demand for every task in the system."
    """
    office = an_office()
    office.aggregator("agg-1")
    office.aggregator("agg-2")
    for name in ("words", "images"):
        Office(a_task(name), store=office.store)
    office.pass_s(H)
    at = {office.fence(task).aggregator: task for task in ("words", "images")}
    assert set(at) == {"agg-1", "agg-2"}
    office.aggregator("agg-1", on(at["agg-1"], 1, demand=3))
    office.aggregator("agg-2", on(at["agg-2"], 1, demand=2))
    wanted = {task: office.machine.demand.of(task) for task in at.values()}
    assert wanted == {at["agg-1"]: 3, at["agg-2"]: 2}


def test_clients_assigned_but_not_confirmed_are_accounted_for() -> None:
    """Tracking client demand: "the Coordinator must explicitly account for clients that have been
    assigned to a task, but have not yet confirmed the assignment."
    """
    office = a_served_office(a_task(concurrency=10), demand=10)
    assert len(sessions_in(office.selector("sel-1", 7))) == 7
    assert len(sessions_in(office.selector("sel-2", 7))) == 3
    assert sessions_in(office.selector("sel-3", 7)) == []


# -- eligibility and assignment ---------------------------------------------------------------


def test_a_task_is_eligible_if_compatible_and_wanting() -> None:
    """Tracking task eligibility: "A task is eligible if the client is compatible with its
    requirements (e.g., can train the model of the task), and if the task has positive client
    demand."
    """
    office = an_office(
        needing("foreign", engine="executorch"), needing("full"), needing("right", engine="torch")
    )
    office.aggregator("agg-1")
    office.aggregator(
        "agg-1",
        on("foreign", 1, demand=4),
        on("full", 1, demand=0, active=4),
        on("right", 1, demand=4),
    )
    assert {a.task for a in assigned(office.selector("sel-1", 3))} == {"right"}


def test_a_client_is_assigned_to_a_random_eligible_task() -> None:
    """Task assignment: "Once an eligible task list is constructed for a client, the Coordinator
    randomly assigns the client to an eligible task."
    """
    tasks = [a_task(f"task-{i}", concurrency=5000) for i in range(5)]
    office = a_served_office(*tasks, demand=5000)
    counts = {a.task: len(a.sessions) for a in assigned(office.selector("sel-1", 5000))}
    assert sum(counts.values()) == 5000
    assert chisquare([counts[task.task] for task in tasks]).pvalue > 1e-4


def test_selectors_are_told_to_forward_the_client_to_the_responsible_aggregator() -> None:
    """Task assignment: "Concretely, the Coordinator instructs Selectors to forward the client to
    the Aggregator responsible for the task."
    """
    office = a_served_office(a_task(), demand=1)
    [orders] = orders_in(office.selector("sel-1", 1), SelectorOrders, "sel-1")
    [assignment] = orders.assignments
    [route] = orders.routes
    assert (route.task, route.aggregator, route.seq) == ("words", "agg-1", 1)
    assert (assignment.task, assignment.seq, assignment.device_class) == ("words", 1, PHONE)
    assert len(assignment.sessions) == 1


def test_many_tasks_share_a_fleet_that_fits_them_all() -> None:
    """High Client Utilization: "a multi-tenant FL system, where multiple FL tasks are running in
    parallel, and a single client may be compatible with many tasks." Each gets what it wants.
    """
    tasks = [a_task(f"task-{i:02}", concurrency=20) for i in range(50)]
    office = a_served_office(*tasks, demand=20)
    sends = office.selector("sel-1", 600) + office.selector("sel-2", 600)
    filled = {task.task: 0 for task in tasks}
    for assignment in assigned(sends):
        filled[assignment.task] += len(assignment.sessions)
    assert set(filled.values()) == {20}


# -- persistent aggregators -------------------------------------------------------------------


def live(office: Office, beats: int, *nodes: str, **loads: float) -> None:
    for _ in range(beats):
        office.pass_s(H)
        for node in nodes:
            office.aggregator(node, load=loads.get(node.replace("-", "_"), 0.0))


def placed(office: Office) -> dict[str, tuple[str, int]]:
    return {
        task: (office.fence(task).aggregator, office.fence(task).seq)
        for task in office.machine.rows.tasks
    }


def test_a_task_stays_with_its_aggregator() -> None:
    """Persistent Aggregator: "Aggregators are persistent and stateful [...]. Therefore, the
    Coordinator moves tasks between Aggregators only when it detects failed or overloaded
    Aggregators." A new and idle one gets nothing.
    """
    office = an_office(*(a_task(f"task-{i}") for i in range(6)))
    office.aggregator("agg-1")
    before = placed(office)
    live(office, 30, "agg-1", "agg-2", "agg-3")
    assert placed(office) == before


def test_an_aggregator_serves_many_versions_and_many_clients_without_being_made_anew() -> None:
    """Persistent Aggregator: "creating a new Aggregator for each task incurs a substantial
    overhead": one machine, one load, many versions.
    """
    world, node = a_world(an_async_task(goal=1))
    held = node.held()
    for _ in range(10):
        [phone] = world.joined(node, 1)
        phone.upload_for_good(1)
    assert world.version == 10
    assert node.held() is held


def test_tasks_of_a_failed_aggregator_are_moved() -> None:
    """The same sentence: "only when it detects failed [...] Aggregators"."""
    office = an_office(a_task())
    office.aggregator("agg-1")
    live(office, 4, "agg-2")
    assert placed(office) == {"words": ("agg-2", 2)}


def test_a_task_of_an_overloaded_aggregator_is_moved() -> None:
    """The same sentence: "or overloaded Aggregators"."""
    office = an_office(a_task("words"), a_task("images"))
    office.aggregator("agg-1")
    live(office, 4, "agg-2", "agg-1", agg_1=2.0)
    assert sorted(aggregator for aggregator, _ in placed(office).values()) == ["agg-1", "agg-2"]


def test_tasks_are_distributed_evenly() -> None:
    """Persistent Aggregator: "The Coordinator evenly distributes tasks among available Aggregators
    using the estimated workload of a task."
    """
    office = an_office()
    for node in ("agg-1", "agg-2", "agg-3"):
        office.aggregator(node)
    sizes = [900, 500, 400, 300, 300, 300]
    for i, concurrency in enumerate(sizes):
        Office(a_task(f"task-{i}", concurrency), store=office.store)
        live(office, 1, "agg-1", "agg-2", "agg-3")
    work = dict.fromkeys(("agg-1", "agg-2", "agg-3"), 0)
    for i, concurrency in enumerate(sizes):
        work[office.fence(f"task-{i}").aggregator] += concurrency
    assert sorted(work.values()) == [800, 900, 1000]


def test_the_workload_is_estimated_from_concurrency_and_model_size() -> None:
    """Persistent Aggregator: "The Coordinator estimates this workload using the task concurrency
    and model size." Either can make one task weigh more than two others.
    """
    for heavy in (a_task("heavy", 1000, model_length=10), a_task("heavy", 10, model_length=1000)):
        office = an_office(heavy)
        office.aggregator("agg-1")
        office.aggregator("agg-2")
        for name in ("light-1", "light-2"):
            Office(a_task(name, 20, model_length=20), store=office.store)
            live(office, 1, "agg-1", "agg-2")
        assert {task: aggregator for task, (aggregator, _) in placed(office).items()} == {
            "heavy": "agg-1",
            "light-1": "agg-2",
            "light-2": "agg-2",
        }


def test_orders_tell_each_aggregator_what_it_holds() -> None:
    """Coordinator: "First, it assigns FL tasks to Aggregators"."""
    office = an_office(a_task("words"), a_task("images"))
    [orders] = orders_in(office.aggregator("agg-1"), AggregatorOrders)[-1:]
    assert {placement.task for placement in orders.tasks} == {"words", "images"}
