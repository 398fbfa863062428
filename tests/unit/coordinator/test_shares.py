"""Weights and priorities of tasks; with equal ones, the paper's uniform choice."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from papaya.config import AsyncFL, TaskConfig
from papaya.coordinator.assignment import assign
from papaya.messages.base import NodeId, TaskId
from papaya.messages.selection import DeviceClass
from papaya.messages.storage import Changed, ShareRow, Transaction, share_key
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.report import RunWatch
from papaya.sim.simulate import protocol_tasks
from papaya.sim.storage import OWNER
from tests.unit.coordinator.builders import PHONE, a_served_office, a_task, assigned, on

TASKS = ("a", "b", "c")


def uniform(
    held: list[tuple[NodeId, DeviceClass, int]], wanted: dict[TaskId, int], rng: Random
) -> Counter[TaskId]:
    """The paper's rule, word for word."""
    found: Counter[TaskId] = Counter()
    for _, _, count in held:
        for _ in range(count):
            eligible = [task for task, number in wanted.items() if number > 0]
            if eligible:
                task = eligible[int(rng.random() * len(eligible))]
                wanted[task] -= 1
                found[task] += 1
    return found


def drawn(
    clients: int, wanted: dict[TaskId, int], shares: dict[TaskId, ShareRow], seed: int = 1
) -> Counter[TaskId]:
    chosen = assign([("sel", PHONE, clients)], wanted, lambda _: TASKS, Random(seed), shares)
    found: Counter[TaskId] = Counter()
    for (_, _, task), count in chosen.items():
        found[task] += count
    return found


@given(
    seed=st.integers(0, 2**32),
    wanted=st.dictionaries(st.sampled_from(TASKS), st.integers(0, 20)),
    clients=st.integers(0, 50),
    weight=st.sampled_from([0.001, 1.0, 7.0]),
    priority=st.integers(-2, 2),
)
def test_equal_shares_are_the_uniform_choice_with_the_same_random_numbers(
    seed: int, wanted: dict[TaskId, int], clients: int, weight: float, priority: int
) -> None:
    shares = {task: ShareRow(weight, priority) for task in TASKS}
    expected = uniform([("sel", PHONE, clients)], dict(wanted), Random(seed))
    assert drawn(clients, dict(wanted), shares, seed) == expected
    assert drawn(clients, dict(wanted), {}, seed) == expected


@pytest.mark.parametrize("seed", range(5))
def test_devices_are_divided_by_weight(seed: int) -> None:
    shares = {"a": ShareRow(3.0), "c": ShareRow(0.5)}
    found = drawn(9000, dict.fromkeys(TASKS, 10_000), shares, seed)
    expected = [9000 * weight / 4.5 for weight in (3.0, 1.0, 0.5)]
    assert chisquare([found[task] for task in TASKS], expected).pvalue > 0.001
    assert chisquare([found[task] for task in TASKS]).pvalue < 1e-6, "the weights have an effect"


def test_a_higher_priority_is_served_first_and_the_rest_goes_on() -> None:
    shares = {"a": ShareRow(1.0, 2), "b": ShareRow(5.0, 1)}
    assert drawn(10, {"a": 4, "b": 3, "c": 100}, shares) == {"a": 4, "b": 3, "c": 3}
    assert drawn(4, {"a": 4, "b": 3, "c": 100}, shares) == {"a": 4}


def test_the_leader_uses_the_rows() -> None:
    office = a_served_office(a_task("a", 400), a_task("b", 400))
    office.store.apply(Transaction(put=((share_key("b"), ShareRow(priority=1)),)))
    office.receive(Changed())
    office.aggregator("agg-1", on("a", 1, demand=400), on("b", 1, demand=400))
    found = assigned(office.selector("sel-1", 100))
    assert {assignment.task for assignment in found} == {"b"}
    office.store.apply(Transaction(put=((share_key("b"), ShareRow(weight=1e-9)),)))
    office.receive(Changed())
    office.aggregator("agg-1", on("a", 1, demand=400), on("b", 1, demand=300))
    found = assigned(office.selector("sel-2", 100))
    assert {assignment.task for assignment in found} == {"a"}


def test_scarce_devices_are_divided_in_a_whole_system() -> None:
    """Two equal tasks that want far more devices than there are; one has three times the weight."""
    tasks: tuple[TaskConfig, ...] = protocol_tasks(
        2, regime=AsyncFL(aggregation_goal=10), concurrency=400
    )
    watch = RunWatch(warm_up_s=200.0, sample_s=10.0)
    cluster = Cluster(ClusterConfig(tasks=tasks, supply=0.05), seed=3, observers=[watch])
    share = Transaction(put=((share_key("task-2"), ShareRow(weight=3.0)),))
    cluster.state.transact(OWNER, share, lambda outcome: None)
    cluster.run(1000.0)
    versions = {task.task: task.versions for task in watch.report().tasks}
    ratio = versions["task-2"] / versions["task-1"]
    assert 2.4 < ratio < 3.6, versions
