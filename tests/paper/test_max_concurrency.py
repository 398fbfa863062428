"""The paper's sentences on the upper bound of concurrently participating clients."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.config import TaskConfig
from papaya.messages.participation import Aborted, Completed, Joined
from tests.unit.aggregator.builders import (
    SERVER,
    Phone,
    a_sync_task,
    a_task,
    a_world,
    an_async_task,
    make_version,
)
from tests.unit.coordinator.builders import a_served_office, on, sessions_in
from tests.unit.coordinator.builders import a_task as a_wanting_task

H = SERVER.heartbeat_s


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_an_upper_bound_is_enforced_for_every_task(concurrency: int, kind: str) -> None:
    """Enforcing Max Concurrency: "the system enforces an upper bound of concurrently participating
    clients (C) for every task based on task configuration."
    """
    config = (
        a_sync_task(concurrency, 0.0)
        if kind == "sync"
        else an_async_task(concurrency, concurrency=concurrency)
    )
    world, node = a_world(config)
    world.joined(node, concurrency)
    for _ in range(3):
        assert world.phone(node).join() == Aborted("full")
    assert len(node.held().sessions.active) == concurrency


def test_a_client_is_selected_only_below_the_threshold() -> None:
    """Enforcing Max Concurrency: "A client can be selected for a task only if number of active
    clients is below the configured threshold."
    """
    office = a_served_office(a_wanting_task(concurrency=4), demand=0)
    office.selector("sel-1", 10)
    assert sessions_in(office.aggregator("agg-1", on("words", 1, active=4, demand=0))) == []
    assert len(sessions_in(office.aggregator("agg-1", on("words", 1, active=3, demand=1)))) == 1


def test_a_client_that_completed_is_inactive() -> None:
    """Enforcing Max Concurrency: "An active client may become inactive for various reasons. The
    client may have completed execution".
    """
    world, node = a_world(a_task(concurrency=1))
    [phone] = world.joined(node, 1)
    assert phone.upload_for_good(1) == Completed()
    assert isinstance(world.phone(node).join(), Joined)


def test_a_client_that_misses_heartbeats_is_considered_dead() -> None:
    """Enforcing Max Concurrency: "or it may be considered dead due to missed heartbeats"."""
    world, node = a_world(a_task(concurrency=1))
    world.joined(node, 1)
    world.pass_s(2 * H)
    assert world.phone(node).join() == Aborted("full")
    world.pass_s(2 * H)
    assert isinstance(world.phone(node).join(), Joined)


@pytest.mark.parametrize("error", ["it says so", "it takes too long", "its update is broken"])
def test_a_client_with_an_execution_error_is_inactive(error: str) -> None:
    """Enforcing Max Concurrency: "or execution error"."""
    world, node = a_world(a_task(concurrency=1, training_timeout_s=20.0))
    [phone] = world.joined(node, 1)
    if error == "it says so":
        phone.leave()
    elif error == "its update is broken":
        phone.upload(math.nan)
    else:
        for _ in range(3):
            world.pass_s(H)
            phone.heartbeat()
    assert isinstance(world.phone(node).join(), Joined)


def test_a_client_aborted_for_staleness_is_inactive() -> None:
    """Enforcing Max Concurrency: "clients may also be aborted by the server if staleness (measured
    as the difference between current and initial model versions) is higher than a configurable
    value."
    """
    world, node = a_world(an_async_task(1, concurrency=2, max_staleness=0))
    world.joined(node, 1)
    make_version(world, node)
    assert isinstance(world.phone(node).join(), Joined)
    assert isinstance(world.phone(node).join(), Joined)
    assert world.phone(node).join() == Aborted("full")


ACTIONS = st.sampled_from(["join", "leave", "upload", "bad upload", "silence", "time", "take over"])


@pytest.mark.parametrize(
    "config",
    [an_async_task(2, concurrency=3, max_staleness=1), a_sync_task(3, 0.5)],
    ids=["async", "sync"],
)
@given(actions=st.lists(st.tuples(ACTIONS, st.integers(0, 9)), max_size=40))
@settings(max_examples=50)
def test_whatever_happens_no_more_than_c_are_active(
    config: TaskConfig, actions: list[tuple[str, int]]
) -> None:
    """The same sentence, under everything at once. The bound is also reached: it is no accident."""
    world, node = a_world(config)
    phones: list[Phone] = []
    for action, which in actions:
        phone = phones[which % len(phones)] if phones else None
        if action == "join" or phone is None:
            phones.append(world.phone(node))
            phones[-1].join()
        elif action == "leave":
            phone.leave()
        elif action in ("upload", "bad upload"):
            phone.report()
            phone.send(math.nan if action == "bad upload" else 1)
            phone.complete()
        elif action == "silence":
            world.pass_s(which * H / 2)
        elif action == "take over":
            world.crash(node)
            node = world.start(f"agg-{world.now}-{which}")
            world.place(node)
            for known in phones:
                known.node = node
                known.heartbeat()
        else:
            world.pass_s(1.0)
        assert len(node.held().sessions.active) <= config.concurrency
    world.pass_s(H)
    while isinstance(world.phone(node).join(), Joined):
        pass
    assert node.held().slots.client_demand == 0
