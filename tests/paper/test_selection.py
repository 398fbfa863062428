"""The paper's sentences on selection: the Selector, its map, and finding a task for a client."""

from __future__ import annotations

import pytest

from papaya.machine import Forward
from papaya.messages.control import Held, Route
from papaya.messages.participation import (
    Chunk,
    Complete,
    Heartbeat,
    Join,
    Leave,
    Report,
    Request,
    Retry,
)
from papaya.messages.selection import Accepted, Capabilities, DeviceClass, Rejected
from papaya.messages.tickets import SessionTicket
from tests.unit.selector.builders import (
    BOOT,
    COORDINATORS,
    EPOCH,
    KEYRING,
    OTHERS,
    PHONE,
    SEQ,
    TABLET,
    TASK,
    a_selector,
    accepted,
    advertised,
    an_open_selector,
    answers,
    assign,
    check_in,
    orders,
    rejected,
    report,
)

TICKET = KEYRING.seal(SessionTicket(TASK, "s1", SEQ, 4, "blob", expires=1e9))
REQUESTS: list[Request] = [
    Join(TICKET),
    Heartbeat(TICKET),
    Report(TICKET, 10),
    Chunk(TICKET, "u", 0, 0, b""),
    Complete(TICKET, "u"),
    Leave(TICKET, ""),
]


def test_the_selector_forwards_what_others_must_answer_and_keeps_what_it_can_answer() -> None:
    """System Components: "The Selector is the only component that directly communicates with
    clients. When necessary, it forwards client requests to other components."
    """
    selector = an_open_selector()
    for request in REQUESTS:
        assert selector.receive(BOOT, request, "d") == [Forward("d", "aggregator-1", request)]
    effects = selector.receive(BOOT, check_in(), "d") + selector.wake(BOOT + 100)
    assert not any(isinstance(effect, Forward) for effect in effects)
    assert rejected(effects) == ["d"]


def test_the_selector_advertises_tasks_and_summarizes_availability() -> None:
    """System Components: "For client selection, it advertises available tasks to clients, and
    summarizes current client availability for the Coordinator".
    """
    selector = an_open_selector(hold_s=60.0, heartbeat_s=10.0)
    tasks = (advertised(min_memory_mb=512), *OTHERS)
    selector.receive(BOOT, orders(1, advertised=tasks))
    too_small = DeviceClass(Capabilities(memory_mb=511))
    for handle, device in enumerate((PHONE, too_small, TABLET, PHONE)):
        selector.receive(BOOT + 1, check_in(device), handle)
    summary = report(selector.wake(BOOT + 10))
    assert summary is not None
    assert summary.held == (Held(PHONE, 2), Held(TABLET, 1))


def test_the_selector_routes_requests_to_the_corresponding_aggregator() -> None:
    """System Components: "For client participation, the Selector routes client requests to the
    corresponding Aggregator".
    """
    selector = an_open_selector()
    routes = (Route("emoji", "aggregator-2", 8), Route(TASK, "aggregator-1", SEQ))
    selector.receive(BOOT, orders(1, routes=routes))
    emoji = Heartbeat(KEYRING.seal(SessionTicket("emoji", "s2", 8, 1, "blob", 1e9)))
    assert selector.receive(BOOT, emoji, "d") == [Forward("d", "aggregator-2", emoji)]
    assert selector.receive(BOOT, Heartbeat(TICKET), "e") == [
        Forward("e", "aggregator-1", Heartbeat(TICKET))
    ]


@pytest.mark.parametrize("is_wanted", [True, False])
def test_selection_ends_with_acceptance_or_rejection(is_wanted: bool) -> None:
    """Client Independence: "a client can complete the selection phase with either acceptance
    (client is accepted for participation) or rejection (client will try to participate at another
    time)."
    """
    selector = an_open_selector(hold_s=20.0)
    selector.receive(BOOT, check_in(), "d")
    assignments = (assign("s1"),) if is_wanted else ()
    effects = selector.receive(BOOT + 1, orders(1, assignments=assignments))
    effects += selector.wake(BOOT + 20)
    [(device, answer)] = answers(effects).items()
    assert device == "d"
    if is_wanted:
        assert isinstance(answer, Accepted)
        assert (answer.task, answer.session) == (TASK, "s1")
    else:
        assert isinstance(answer, Rejected)
        assert 0 < answer.retry_from_s < answer.retry_until_s


@pytest.mark.parametrize(
    ("memory_mb", "wanting", "is_eligible"),
    [(512, (TASK,), True), (511, (TASK,), False), (512, (), False), (511, (), False)],
)
def test_a_task_is_eligible_when_it_fits_and_wants_clients(
    memory_mb: int, wanting: tuple[str, ...], is_eligible: bool
) -> None:
    """High Client Utilization: "A task is eligible if the client is compatible with its
    requirements (e.g., can train the model of the task), and if the task has positive client
    demand."
    """
    selector = an_open_selector()
    only = (advertised(min_memory_mb=512),)
    selector.receive(BOOT, orders(1, advertised=only, wanting=wanting))
    device = DeviceClass(Capabilities(memory_mb=memory_mb))
    effects = selector.receive(BOOT + 1, check_in(device), "d")
    assert (rejected(effects) == []) is is_eligible


def test_an_assigned_client_is_forwarded_to_the_aggregator_of_its_task() -> None:
    """High Client Utilization: "the Coordinator instructs Selectors to forward the client to the
    Aggregator responsible for the task."
    """
    selector = an_open_selector()
    selector.receive(BOOT, check_in(), "d")
    effects = selector.receive(BOOT + 1, orders(1, assignments=(assign("s1"),)))
    answer = answers(effects)["d"]
    assert isinstance(answer, Accepted)
    join = Join(answer.ticket)
    assert selector.receive(BOOT + 2, join, "d") == [Forward("d", "aggregator-1", join)]


def test_no_client_waits_for_another_to_be_selected() -> None:
    """System Design Challenges: "in [GFL] a client cannot begin training until the entire cohort of
    clients has been selected. To support AsyncFL, we design a client selection mechanism that
    avoids any inter-client dependencies".
    """
    selector = an_open_selector()
    for number in range(5):
        selector.receive(BOOT, check_in(), number)
        effects = selector.receive(BOOT, orders(number + 1, assignments=(assign(f"s{number}"),)))
        assert accepted(effects) == {number: f"s{number}"}


def test_the_map_is_refreshed_from_the_coordinator_on_every_report() -> None:
    """Failure Recovery: "Client requests are routed by selectors using assignment maps (model
    training task to corresponding aggregator identity) refreshed from coordinator on every report."
    """
    selector = an_open_selector(heartbeat_s=10.0)
    for number in range(1, 6):
        assert report(selector.wake(BOOT + 10 * number)) is not None
        aggregator = f"aggregator-{number % 3}"
        selector.receive(BOOT, orders(number, routes=(Route(TASK, aggregator, SEQ + number),)))
        assert selector.receive(BOOT, REQUESTS[0], "d") == [Forward("d", aggregator, REQUESTS[0])]


def test_a_stale_selector_tells_its_clients_to_retry() -> None:
    """Failure Recovery: "Upon selector failure or selector having stale assignment map clients
    retry through a different selector." The client's side is in test_client.py.
    """
    fresh, stale = an_open_selector(), an_open_selector()
    fresh.receive(BOOT, orders(1, routes=(Route(TASK, "aggregator-2", SEQ + 1),)))
    moved = Heartbeat(KEYRING.seal(SessionTicket(TASK, "s1", SEQ + 1, 4, "blob", 1e9)))
    assert isinstance(answers(stale.receive(BOOT, moved, "d"))["d"], Retry)
    assert fresh.receive(BOOT, moved, "d") == [Forward("d", "aggregator-2", moved)]


def test_a_selector_that_failed_has_its_map_back_after_its_next_report() -> None:
    """Failure Recovery: "Failed or stale selector refreshes assignment map on next report to
    coordinator."
    """
    rebooted = a_selector()
    assert isinstance(answers(rebooted.receive(BOOT, Join(TICKET), "d"))["d"], Retry)
    assert report(rebooted.wake(BOOT)) is not None
    rebooted.receive(BOOT + 0.1, orders(1))
    effects = rebooted.receive(BOOT + 0.2, Join(TICKET), "d")
    assert effects == [Forward("d", "aggregator-1", Join(TICKET))]


def test_without_a_coordinator_participants_go_on_and_nobody_new_is_assigned() -> None:
    """Failure Recovery: "Upon coordinator failure participating clients are not affected, only for
    the duration of the recovery no new clients are assigned."
    """
    selector = an_open_selector(heartbeat_s=10.0, hold_s=20.0)
    for beat in range(1, 30):
        now = BOOT + 10 * beat
        assert accepted(selector.wake(now)) == {}
        assert accepted(selector.receive(now, check_in(), beat)) == {}
        for request in REQUESTS:
            assert selector.receive(now, request, "d") == [Forward("d", "aggregator-1", request)]


def test_a_selector_works_by_the_last_orders_until_a_new_leader_gives_others() -> None:
    """Failure Recovery: "Selectors and aggregators wait until a new leader coordinator is elected
    meanwhile continuing to operate based on last known assignments."
    """
    selector = an_open_selector(heartbeat_s=10.0)
    for beat in range(1, 10):
        # Every candidate hears the reports: whichever is elected knows the selectors.
        assert report(selector.wake(BOOT + 10 * beat)) is not None
    assert rejected(selector.receive(BOOT + 100, check_in(), "waits")) == []
    new = {"epoch": EPOCH + 1, "leader": COORDINATORS[1]}
    routes = (Route(TASK, "aggregator-2", SEQ + 1),)
    effects = selector.receive(
        BOOT + 101, orders(1, **new, routes=routes, assignments=(assign("s1"),))
    )
    assert accepted(effects) == {"waits": "s1"}
    effects = selector.receive(BOOT + 102, Join(TICKET), "d")
    assert effects == [Forward("d", "aggregator-2", Join(TICKET))]
