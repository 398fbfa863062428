"""Clients to tasks: pooled demand less unconfirmed leases, eligible tasks, a uniform choice."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from papaya.config import SecureAggregation
from papaya.coordinator.assignment import Leases, assign
from papaya.errors import InvariantError
from papaya.messages.base import TaskId
from papaya.messages.control import SelectorOrders
from papaya.messages.selection import Capabilities, DeviceClass
from papaya.messages.storage import EarlierRevision, TaskRow, task_key
from tests.unit.coordinator.builders import (
    A_MOMENT_S,
    PHONE,
    SERVER,
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

# -- demand and leases ------------------------------------------------------------------------


def test_as_many_clients_are_assigned_as_are_wanted() -> None:
    office = a_served_office(a_task(), demand=3)
    assert len(sessions_in(office.selector("sel-1", 10))) == 3


def test_no_more_clients_are_assigned_than_are_held() -> None:
    office = a_served_office(a_task(), demand=4)
    assert len(sessions_in(office.selector("sel-1", 2))) == 2
    assert office.machine.demand.of("words") == 2


def test_an_assignment_says_everything_a_selector_needs() -> None:
    office = a_served_office(a_task(), demand=2)
    [assignment] = assigned(office.selector("sel-1", 2))
    assert (assignment.task, assignment.seq, assignment.device_class) == ("words", 1, PHONE)
    assert assignment.confirm_by == office.now + SERVER.confirm_by_s
    assert len(set(assignment.sessions)) == 2


def test_an_assignment_names_the_newest_version_that_the_holder_reported() -> None:
    office = a_served_office(a_task())
    office.aggregator("agg-1", on("words", 1, demand=1, version=7))
    [assignment] = assigned(office.selector("sel-1", 1))
    assert (assignment.seq, assignment.version) == (1, 7)


def test_sessions_are_never_named_twice() -> None:
    office = a_served_office(a_task(concurrency=500), demand=500)
    first = sessions_in(office.selector("sel-1", 250))
    second = sessions_in(office.selector("sel-2", 250))
    assert len({*first, *second}) == 500


def test_a_client_that_has_not_confirmed_is_not_wanted_again() -> None:
    office = a_served_office(a_task(), demand=4)
    office.selector("sel-1", 3)
    assert len(sessions_in(office.selector("sel-2", 10))) == 1
    assert sessions_in(office.selector("sel-3", 10)) == []


def test_a_join_confirms_a_lease() -> None:
    """The report that shows the client as active also ends its lease: it counts once."""
    office = a_served_office(a_task(), demand=4)
    sessions = sessions_in(office.selector("sel-1", 3))
    office.aggregator("agg-1", on("words", 1, active=1, demand=3, joined=(sessions[0],)))
    assert office.machine.leases.count("words") == 2
    assert office.machine.demand.of("words") == 1


def test_a_join_that_is_reported_again_confirms_nothing_more() -> None:
    office = a_served_office(a_task(), demand=4)
    sessions = sessions_in(office.selector("sel-1", 3))
    for _ in range(3):
        office.aggregator("agg-1", on("words", 1, active=1, demand=3, joined=(sessions[0], "x")))
    assert office.machine.leases.count("words") == 2


def test_an_unfilled_session_is_wanted_again_at_once() -> None:
    office = a_served_office(a_task(), demand=2)
    sessions = sessions_in(office.selector("sel-1", 2))
    office.selector("sel-2", 0)
    assert sessions_in(office.selector("sel-1", 0, unfilled=(sessions[0],))) == []
    assert office.machine.demand.of("words") == 1
    assert len(sessions_in(office.selector("sel-2", 5))) == 1


def test_a_lease_expires_with_its_deadline() -> None:
    office = a_served_office(a_task(), demand=2)
    office.selector("sel-1", 2)
    office.pass_s(SERVER.confirm_by_s)
    office.aggregator("agg-1", on("words", 1, demand=2))
    assert office.machine.demand.of("words") == 0, "a join in this very instant is still in time"
    office.now += A_MOMENT_S
    office.aggregator("agg-1", on("words", 1, demand=2))
    assert office.machine.demand.of("words") == 2


def test_a_lease_does_not_expire_by_an_old_report_that_comes_late() -> None:
    """It was sent before the deadline: the join may be in the next one."""
    office = a_served_office(a_task(), demand=2)
    sent_at = office.now
    office.selector("sel-1", 2)
    office.pass_s(SERVER.confirm_by_s + H)
    office.aggregator("agg-1", on("words", 1, demand=2), at=sent_at)
    assert office.machine.demand.of("words") == 0


def test_a_lease_is_not_ended_by_an_aggregator_that_does_not_hold_the_task() -> None:
    office = a_served_office(a_task(), demand=2)
    office.selector("sel-1", 2)
    office.pass_s(SERVER.confirm_by_s + H)
    office.aggregator("agg-2", on("words", 1, demand=2))
    assert office.machine.leases.count("words") == 2


def test_leases_are_counted_per_task() -> None:
    leases = Leases()
    leases.grant("a", "words", 10.0)
    leases.grant("b", "words", 11.0)
    leases.grant("c", "images", 12.0)
    assert (leases.count("words"), leases.count("images"), leases.count("other")) == (2, 1, 0)
    leases.end("b")
    leases.end("b")
    assert (leases.count("words"), leases.count("images")) == (1, 1)


def test_active_and_leased_above_the_concurrency_break_the_invariant() -> None:
    office = a_served_office(a_task(concurrency=2), demand=2)
    office.selector("sel-1", 2)
    office.machine.check()
    with pytest.raises(InvariantError, match="above its concurrency of 2"):
        office.aggregator("agg-1", on("words", 1, active=1, demand=1))


def test_clients_of_an_earlier_revision_may_use_its_concurrency() -> None:
    """The revision lowered the concurrency to 2. When, is a time of another clock."""
    office = a_served_office(a_task(concurrency=2), demand=2)
    row = office.store.rows[task_key("words")]
    assert isinstance(row, TaskRow)
    before = EarlierRevision(a_task(concurrency=3), office.now - 3600)
    office.store.rows[task_key("words")] = msgspec.structs.replace(row, earlier=(before,))
    office.pass_s(H)
    office.aggregator("agg-1", on("words", 1, active=3, demand=0))
    with pytest.raises(InvariantError, match="above its concurrency of 3"):
        office.aggregator("agg-1", on("words", 1, active=4, demand=0))


# -- whose demand counts ----------------------------------------------------------------------


def test_demand_is_pooled_from_all_aggregators() -> None:
    office = an_office(a_task("words"), a_task("images"))
    office.aggregator("agg-1")
    office.store.rows["fence/images"] = msgspec.structs.replace(
        office.fence("images"), seq=2, aggregator="agg-2"
    )
    office.aggregator("agg-2")
    office.pass_s(H)
    office.aggregator("agg-1", on("words", 1, demand=3))
    office.aggregator("agg-2", on("images", 2, demand=2))
    assert (office.machine.demand.of("words"), office.machine.demand.of("images")) == (3, 2)
    assert len(sessions_in(office.selector("sel-1", 10))) == 5


@pytest.mark.parametrize("seq", [0, 2])
def test_a_report_under_another_sequence_number_is_not_demand(seq: int) -> None:
    office = an_office(a_task())
    office.aggregator("agg-1")
    office.aggregator("agg-1", on("words", seq, demand=4))
    assert office.machine.demand.of("words") == 0
    assert sessions_in(office.selector("sel-1", 10)) == []


def test_an_aggregator_that_does_not_hold_the_task_has_no_demand() -> None:
    office = a_served_office(a_task(), demand=0)
    office.aggregator("agg-2", on("words", 1, demand=4))
    assert sessions_in(office.selector("sel-1", 10)) == []


def test_a_report_without_the_task_takes_its_demand_away() -> None:
    office = a_served_office(a_task(), demand=4)
    office.aggregator("agg-1")
    assert sessions_in(office.selector("sel-1", 10)) == []


@pytest.mark.parametrize("state", ["paused", "cancelled"])
def test_a_task_that_does_not_run_gets_no_clients(state: str) -> None:
    office = a_served_office(a_task(), demand=4)
    row = office.store.rows[task_key("words")]
    assert isinstance(row, TaskRow)
    office.store.rows[task_key("words")] = msgspec.structs.replace(row, state=state)
    office.pass_s(H)
    office.aggregator("agg-1", on("words", 1, demand=4))
    sends = office.selector("sel-1", 10)
    assert sessions_in(sends) == []
    [orders] = orders_in(sends, SelectorOrders)
    assert orders.advertised == ()
    assert orders.wanting == ()
    routes = [route.task for route in orders.routes]
    assert routes == (["words"] if state == "paused" else []), "running clients finish"


# -- held clients -----------------------------------------------------------------------------


def test_a_client_spoken_for_is_not_assigned_twice() -> None:
    """The selector's next report crossed with the orders: it still counts the same clients."""
    office = a_served_office(a_task(), demand=2)
    [order] = orders_in(office.selector("sel-1", 3), SelectorOrders)
    assert len(order.assignments[0].sessions) == 2
    office.aggregator("agg-1", on("words", 1, demand=4))
    again = office.selector("sel-1", 3, acked=order.number - 1)
    assert len(sessions_in(again)) <= 1, "only the third was never spoken for"
    total = office.machine.leases.count("words")
    office.selector("sel-1", 3, acked=office.machine._order)
    assert office.machine.leases.count("words") == min(4, total + 3)


def test_a_rise_of_demand_goes_to_clients_already_held() -> None:
    office = a_served_office(a_task(), demand=0)
    office.selector("sel-1", 5)
    sends = office.aggregator("agg-1", on("words", 1, demand=2), heartbeat=False)
    assert len(sessions_in(sends)) == 2


def test_a_silent_selector_gets_no_assignments() -> None:
    office = a_served_office(a_task(), demand=0)
    office.selector("sel-1", 5)
    for _ in range(4):
        office.pass_s(H)
        office.aggregator("agg-1", on("words", 1, demand=0))
    assert sessions_in(office.aggregator("agg-1", on("words", 1, demand=2))) == []


# -- eligibility ------------------------------------------------------------------------------


def a_device(*excluded: TaskId, **capabilities: object) -> DeviceClass:
    return DeviceClass(Capabilities(**capabilities), excluded)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("needs", "fits", "fits_not"),
    [
        ({"engine": "torch"}, a_device(engine="torch"), a_device(engine="executorch")),
        ({"module": "m1"}, a_device(modules=("m0", "m1")), a_device(modules=("m2",))),
        ({"min_memory_mb": 512}, a_device(memory_mb=512), a_device(memory_mb=511)),
        ({"labels": ("eu", "de")}, a_device(labels=("de", "eu", "x")), a_device(labels=("eu",))),
        ({}, a_device(), a_device("words")),
    ],
    ids=["engine", "module", "memory", "labels", "excluded by its history"],
)
def test_a_task_is_eligible_if_the_device_fits(
    needs: dict[str, Any], fits: DeviceClass, fits_not: DeviceClass
) -> None:
    office = a_served_office(needing("words", **needs), demand=2)
    assert sessions_in(office.selector("sel-1", {fits_not: 5})) == []
    [assignment] = assigned(office.selector("sel-1", {fits_not: 5, fits: 5}))
    assert assignment.device_class == fits
    assert len(assignment.sessions) == 2


def test_a_secure_task_gets_no_device_without_a_trust_policy() -> None:
    secure = a_task(secure_aggregation=SecureAggregation(), clip=1.0)
    office = a_served_office(secure, demand=2)
    bare, trusting = a_device(trust_policy=False), a_device(trust_policy=True)
    assert sessions_in(office.selector("sel-1", {bare: 5})) == []
    [assignment] = assigned(office.selector("sel-1", {bare: 5, trusting: 5}))
    assert assignment.device_class == trusting
    [orders] = orders_in(office.selector("sel-1", {bare: 5}), SelectorOrders)
    assert [offer.is_secure for offer in orders.advertised] == [True]


def test_a_device_goes_to_the_one_task_that_it_fits() -> None:
    office = a_served_office(needing("words", engine="a"), needing("images", engine="b"))
    sends = office.selector("sel-1", {a_device(engine="b"): 3, a_device(engine="c"): 3})
    assert [(a.task, len(a.sessions)) for a in assigned(sends)] == [("images", 3)]


def test_a_task_without_demand_is_not_eligible() -> None:
    office = an_office(a_task("words"), a_task("images"))
    office.aggregator("agg-1")
    office.aggregator("agg-1", on("words", 1, demand=0), on("images", 1, demand=4))
    assert {a.task for a in assigned(office.selector("sel-1", 3))} == {"images"}


def test_requirements_that_change_are_seen_at_the_next_heartbeat() -> None:
    office = a_served_office(needing("words", engine="a"))
    assert sessions_in(office.selector("sel-1", {a_device(engine="b"): 1})) == []
    office.store.rows[task_key("words")] = TaskRow(needing("words", engine="b"))
    office.pass_s(H)
    assert len(sessions_in(office.aggregator("agg-1", on("words", 1, demand=4)))) == 1


# -- the choice -------------------------------------------------------------------------------


def split(office: Office, held: int) -> dict[TaskId, int]:
    return {a.task: len(a.sessions) for a in assigned(office.selector("sel-1", held))}


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_among_eligible_tasks_is_uniform(seed: int) -> None:
    tasks = [a_task(f"task-{i}", concurrency=4000) for i in range(4)]
    office = a_served_office(*tasks, demand=4000, seed=seed)
    counts = split(office, 4000)
    assert sum(counts.values()) == 4000
    assert chisquare([counts[task.task] for task in tasks]).pvalue > 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_does_not_depend_on_how_much_a_task_wants(seed: int) -> None:
    office = an_office(*(a_task(name, 9000) for name in ("a", "b", "c")), seed=seed)
    office.aggregator("agg-1")
    demands = {"a": 700, "b": 3000, "c": 9000}
    office.aggregator("agg-1", *(on(t, 1, demand=d) for t, d in demands.items()))
    counts = split(office, 1500)
    assert chisquare([counts[task] for task in demands]).pvalue > 1e-4


def test_the_choice_is_made_client_by_client() -> None:
    """One at a time it comes out the same: no task is served before another."""
    office = a_served_office(a_task("a", 2000), a_task("b", 2000), demand=2000)
    first = [assigned(office.selector(f"sel-{i}", 1))[0].task for i in range(400)]
    assert chisquare([first.count("a"), first.count("b")]).pvalue > 1e-4
    changes = sum(one != other for one, other in pairwise(first))
    assert 130 < changes < 270, "no pattern either"


def test_what_one_task_cannot_take_goes_to_the_others() -> None:
    tasks = [a_task(f"task-{i:03}", concurrency=10) for i in range(200)]
    office = a_served_office(*tasks, demand=10)
    counts = split(office, 1990)
    assert sum(counts.values()) == 1990
    assert max(counts.values()) == 10


NAMES = ("a", "b", "c")
CLASSES = [DeviceClass(Capabilities(labels=labels)) for labels in ((), ("x",), ("x", "y"))]


@given(
    held=st.lists(
        st.tuples(st.sampled_from(["s1", "s2"]), st.sampled_from(CLASSES), st.integers(-2, 12)),
        max_size=6,
    ),
    wanted=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 10)),
    fits=st.dictionaries(st.sampled_from(CLASSES), st.sets(st.sampled_from(NAMES))),
    seed=st.integers(0, 2**16),
)
def test_nobody_waits_beside_a_task_that_fits_and_wants(
    held: list[tuple[str, DeviceClass, int]],
    wanted: dict[TaskId, int],
    fits: dict[DeviceClass, set[TaskId]],
    seed: int,
) -> None:
    """And no task gets more than it wants, no selector gives more than it holds."""
    left = dict(wanted)
    chosen = assign(held, left, lambda kind: tuple(sorted(fits.get(kind, ()))), Random(seed))
    for task in wanted:
        given_ = sum(count for (_, _, t), count in chosen.items() if t == task)
        assert left[task] == wanted[task] - given_ >= 0
    for selector, kind in {(s, k) for s, k, _ in held}:
        available = sum(max(0, n) for s, k, n in held if (s, k) == (selector, kind))
        taken = sum(n for (s, k, _), n in chosen.items() if (s, k) == (selector, kind))
        assert taken <= available
        assert taken == available or not any(left.get(task, 0) for task in fits.get(kind, ()))
    assert all(task in fits.get(kind, ()) for _, kind, task in chosen)
