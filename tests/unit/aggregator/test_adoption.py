"""A successor adopts running clients by their tickets and keeps room for those that may come."""

from __future__ import annotations

import math

import pytest

from papaya.config import TaskConfig
from papaya.messages.base import Message
from papaya.messages.owner import TaskRows, rollback
from papaya.messages.participation import (
    Aborted,
    Alive,
    ChunkReceived,
    Completed,
    Heartbeat,
    Incomplete,
    Join,
    Joined,
    Left,
    Refused,
    Report,
    UploadGranted,
)
from papaya.messages.storage import ConsumedRow
from papaya.messages.tickets import AssignmentTicket, Keyring, SessionTicket, UploadTicket
from tests.unit.aggregator.builders import (
    KEYRING,
    SERVER,
    TASK,
    Node,
    Phone,
    World,
    a_sync_task,
    a_task,
    a_world,
    an_async_task,
    make_version,
)

H = SERVER.heartbeat_s
A_MOMENT_S = 2.0**-10


def take_over(
    world: World, phones: list[Phone], leases: tuple[str, ...] = (), active: int | None = None
) -> Node:
    """The holder dies; another aggregator takes its task; the phones are routed there.

    `active`: how many clients the holder had by its last report.
    """
    world.crash(world.nodes[-1])
    successor = world.start(f"agg-{world.now}")
    world.place(successor, leases=leases, active=active)
    for phone in phones:
        phone.node = successor
    return successor


def training(count: int, config: TaskConfig | None = None) -> tuple[World, list[Phone]]:
    world, node = a_world(config)
    return world, world.joined(node, count)


def members(world: World) -> dict[str, int]:
    """Staleness of every counted client."""
    rows = world.store.all(ConsumedRow)
    return {member.session: member.staleness for row in rows for member in row.members}


# -- the window -------------------------------------------------------------------------------


def test_a_successor_offers_at_once_what_the_clients_of_its_predecessor_leave_free() -> None:
    world, phones = training(3)
    successor = take_over(world, phones, active=3)
    world.pass_s(1.0)
    assert successor.last_report().demand == 4 - 3
    assert [phone.heartbeat() for phone in phones] == 3 * [Alive()]
    assert successor.last_report().demand == 4 - 3


def test_for_three_heartbeats_room_is_kept_for_every_client_that_may_come() -> None:
    world, [early, late, gone] = training(3)
    successor = take_over(world, [early, late, gone], active=3)
    world.pass_s(1.0)
    world.joined(successor, 1)
    world.pass_s(3 * H - 1.0 - A_MOMENT_S)
    assert early.heartbeat() == late.heartbeat() == Alive()
    offered = [report.tasks[0].demand for report in successor.reports if report.tasks]
    assert max(offered) == 1
    world.pass_s(A_MOMENT_S)
    assert successor.last_report().demand == 1, "the place of the client that did not come"
    assert gone.heartbeat() == Aborted("full")


def test_after_a_rollback_no_room_is_kept_for_clients_whose_work_is_void() -> None:
    world, phones = training(3)
    rows = TaskRows(TASK, world.store.rows)
    change = rollback(rows, 0, rows.optimizer.state, world.now)
    assert world.store.apply(change) == "committed"
    successor = take_over(world, phones, leases=("assigned",), active=3)
    world.pass_s(1.0)
    assert successor.last_report().demand == 4 - 1, "who has not joined yet may still come"
    assert [phone.heartbeat() for phone in phones] == 3 * [Aborted("stale")]
    joined = world.joined(successor, 2)
    heir = take_over(world, joined, active=2)
    world.pass_s(1.0)
    assert heir.last_report().demand == 4 - 2, "these train from the version of the rollback"
    assert [phone.heartbeat() for phone in joined] == 2 * [Alive()]


def test_a_report_names_the_clients_that_are_still_awaited() -> None:
    """So that the next holder keeps room for them too, if this one fails."""
    world, phones = training(3)
    successor = take_over(world, phones, active=3)
    phones[0].heartbeat()
    world.pass_s(H)
    assert (successor.last_report().active, successor.last_report().awaited) == (1, 2)
    world.pass_s(2 * H)
    assert successor.last_report().awaited == 0


def test_without_a_report_of_the_predecessor_all_room_is_kept() -> None:
    world, phones = training(3)
    successor = take_over(world, phones)
    assert [phone.heartbeat() for phone in phones] == 3 * [Alive()]
    world.pass_s(2 * H)
    assert [phone.heartbeat() for phone in phones] == 3 * [Alive()]
    window = [report.tasks[0].demand for report in successor.reports if report.tasks]
    assert set(window) == {0}
    world.pass_s(H)
    assert successor.last_report().demand == 4 - 3, "and it is reported at once"
    assert successor.last_report().active == 3


def test_a_place_that_an_adopted_client_leaves_is_offered_again() -> None:
    world, phones = training(4)
    successor = take_over(world, phones)
    assert [phone.heartbeat() for phone in phones[:2]] == 2 * [Alive()]
    phones[0].leave()
    world.pass_s(H)
    assert successor.last_report().demand == 1
    assert [phone.heartbeat() for phone in phones[2:]] == 2 * [Alive()]


def test_a_client_whose_join_was_not_reported_is_adopted_with_its_lease() -> None:
    """The Coordinator lists it among the leases, not among the active clients."""
    world, phones = training(4)
    successor = take_over(world, phones, leases=(phones[3].session,), active=3)
    world.pass_s(1.0)
    assert [report.tasks[0].demand for report in successor.reports if report.tasks] == [0]
    assert [phone.heartbeat() for phone in phones] == 4 * [Alive()]


def test_the_training_of_adopted_clients_is_not_lost() -> None:
    world, phones = training(2)
    take_over(world, phones)
    for phone in phones:
        assert phone.heartbeat() == Alive()
        assert phone.upload_for_good(6) == Completed()
    assert world.version == 1
    assert world.consumed() == [phone.session for phone in phones]


def test_with_every_client_adopted_nothing_is_wanted_and_nobody_is_woken_for_ever() -> None:
    world, phones = training(4)
    successor = take_over(world, phones)
    for phone in phones:
        phone.heartbeat()
    world.pass_s(2 * H)
    assert successor.last_report().demand == 0
    assert successor.machine.next_wake() > world.now


def test_a_report_adopts_and_freezes_staleness_by_the_clients_own_version() -> None:
    world, [phone] = training(1, an_async_task(1))
    make_version(world, phone.node)
    make_version(world, phone.node)
    take_over(world, [phone])
    granted = phone.report()
    assert isinstance(granted, UploadGranted)
    assert granted.version == 2
    phone.send(1)
    phone.complete()
    assert members(world)[phone.session] == 2


def test_a_chunk_adopts_with_the_staleness_frozen_by_the_predecessor() -> None:
    world, [phone] = training(1, an_async_task(1))
    make_version(world, phone.node)
    phone.report()
    make_version(world, phone.node)
    successor = take_over(world, [phone])
    assert world.answers[phone.complete()] == Incomplete((0, 1))
    assert list(successor.held().sessions.active) == [phone.session]
    phone.send(1)
    phone.complete()
    assert members(world)[phone.session] == 1


def test_a_client_that_only_leaves_is_thanked_and_takes_no_place() -> None:
    world, [phone] = training(1)
    successor = take_over(world, [phone])
    assert phone.leave() == Left()
    assert successor.held().sessions.active == {}


def test_a_restarted_aggregator_adopts_its_own_clients() -> None:
    world, [phone] = training(1)
    world.crash(phone.node)
    phone.node = world.start("agg-1")
    world.place(phone.node)
    assert phone.heartbeat() == Alive()


def test_an_adopted_client_obeys_the_rules_of_time_again() -> None:
    world, [phone] = training(1)
    successor = take_over(world, [phone])
    phone.heartbeat()
    world.pass_s(3 * H)
    assert successor.held().sessions.active == {}
    assert phone.heartbeat() == Aborted("silent")


def test_a_client_counted_by_the_predecessor_is_told_so_and_not_adopted() -> None:
    world, [phone] = training(1)
    before = phone.ticket
    assert phone.upload_for_good(1) == Completed()
    successor = take_over(world, [phone])
    assert world.answers[phone.complete()] == Completed()
    assert phone.ask(Report(before, 1)) == Completed()
    assert phone.ask(Join(phone.assignment)) == Completed()
    assert successor.held().sessions.active == {}
    assert world.recorded() == [phone.session]


def test_a_client_too_stale_is_not_adopted() -> None:
    world, [phone] = training(1, an_async_task(1, max_staleness=1))
    make_version(world, phone.node)
    interim = take_over(world, [])
    world.pass_s(H)
    make_version(world, interim)
    successor = take_over(world, [phone])
    assert phone.heartbeat() == Aborted("stale")
    assert successor.held().sessions.active == {}


# -- room -------------------------------------------------------------------------------------


def test_there_is_room_for_clients_that_were_assigned_under_the_predecessor() -> None:
    world, phones = training(3)
    assigned = world.phone(phones[0].node)
    successor = take_over(world, [*phones, assigned], leases=(assigned.session,), active=3)
    assert [phone.heartbeat() for phone in phones] == 3 * [Alive()]
    assert isinstance(assigned.join(), Joined)
    assert len(successor.held().sessions.active) == 4
    assert successor.held().slots.promises.count == 0


def test_no_more_than_c_are_adopted() -> None:
    world, phones = training(4, a_task(concurrency=4))
    extra = KEYRING.seal(SessionTicket(TASK, "extra", 1, 0, "blob", expires=world.now + 60))
    successor = take_over(world, phones)
    for phone in phones:
        phone.heartbeat()
    assert world.answers[world.ask(successor, Heartbeat(extra))] == Aborted("full")


def test_after_the_window_a_client_is_adopted_only_while_there_is_room() -> None:
    world, [early, late] = training(2)
    successor = take_over(world, [early, late])
    world.pass_s(3 * H - A_MOMENT_S)
    early.heartbeat()
    world.pass_s(A_MOMENT_S)
    assert successor.last_report().demand == 3
    assert late.heartbeat() == Aborted("full"), "all three free places are promised"
    world.joined(successor, 2)
    assert late.heartbeat() == Aborted("full"), "one of them still is"
    world.joined(successor, 1)
    early.leave()
    late.ticket = KEYRING.seal(SessionTicket(TASK, "later", 1, 0, "blob", expires=world.now + 60))
    assert late.heartbeat() == Alive(), "a place that nobody was told of yet"
    assert len(successor.held().sessions.active) == 4


def test_a_window_is_opened_once_not_by_every_reading_of_the_rows() -> None:
    world, phones = training(2)
    successor = take_over(world, phones)
    opened = successor.held().slots.adopts_until
    world.pass_s(H / 2)
    held = successor.held()
    successor._perform(held.load())
    assert held.slots.adopts_until == opened


# -- which ticket decides ---------------------------------------------------------------------


def test_a_doubled_join_cannot_make_a_client_younger_than_it_is() -> None:
    """Its first join was answered by the predecessor at version 0, where it trains. A copy of that
    join, late in the network, reaches the successor at version 2. The delta's base is version 0.
    """
    world, [phone] = training(1, an_async_task(1))
    make_version(world, phone.node)
    make_version(world, phone.node)
    take_over(world, [phone])
    copy = phone.ask(Join(phone.assignment))
    assert isinstance(copy, Joined)
    assert copy.version == 2
    phone.upload_for_good(1)
    assert members(world)[phone.session] == 2


def test_a_client_that_a_doubled_join_has_admitted_needs_no_second_place() -> None:
    world, phones = training(4)
    successor = take_over(world, phones)
    assert all(isinstance(phone.ask(Join(phone.assignment)), Joined) for phone in phones)
    assert [phone.heartbeat() for phone in phones] == 4 * [Alive()]
    assert len(successor.held().sessions.active) == 4


def test_nor_does_one_that_uploads_already() -> None:
    world, phones = training(4)
    for phone in phones:
        phone.report()
    take_over(world, phones)
    assert all(isinstance(phone.ask(Join(phone.assignment)), Joined) for phone in phones)
    answers = [phone.chunk(0, b"\0" * 8) for phone in phones]
    assert answers == 4 * [ChunkReceived("u1", 0)]


def test_a_join_repeated_after_an_upload_began_names_the_same_version() -> None:
    world, [phone] = training(1, an_async_task(2))
    phone.report()
    take_over(world, [phone])
    phone.chunk(0, b"\0" * 8)
    again = phone.ask(Join(phone.assignment))
    assert isinstance(again, Joined)
    assert again.version == 0
    assert KEYRING.open(again.ticket, SessionTicket).session == phone.session


# -- who is never adopted ---------------------------------------------------------------------


def a_session_ticket(world: World, **changes: object) -> SessionTicket:
    fields = {
        "task": TASK,
        "session": "ghost",
        "seq": 1,
        "version": 0,
        "parameters": "blob",
        "expires": world.now + 60,
    }
    return SessionTicket(**{**fields, **changes})  # type: ignore[arg-type]


def asked(world: World, node: Node, sealed: bytes) -> list[Message]:
    requests = [Heartbeat(sealed), Report(sealed, 1), Join(sealed)]
    return [world.answers[world.ask(node, request)] for request in requests]


def test_a_valid_ticket_of_this_kind_would_be_adopted() -> None:
    """Or the refusals below would prove nothing."""
    world, _ = training(0)
    successor = take_over(world, [])
    sealed = KEYRING.seal(a_session_ticket(world))
    assert world.answers[world.ask(successor, Heartbeat(sealed))] == Alive()


@pytest.mark.parametrize("forgery", ["other key", "unknown key id", "mended", "cut", "empty"])
def test_a_forged_ticket_is_never_adopted(forgery: str) -> None:
    world, _ = training(0)
    successor = take_over(world, [])
    sealed = KEYRING.seal(a_session_ticket(world))
    forged = {
        "other key": Keyring({1: b"x" * 32}).seal(a_session_ticket(world)),
        "unknown key id": Keyring({2: b"k" * 32}).seal(a_session_ticket(world)),
        "mended": sealed[:-1] + bytes([sealed[-1] ^ 1]),
        "cut": sealed[:-1],
        "empty": b"",
    }[forgery]
    assert all(isinstance(answer, Refused) for answer in asked(world, successor, forged))
    assert successor.held().sessions.active == {}


def test_an_expired_ticket_is_never_adopted() -> None:
    world, _ = training(0)
    successor = take_over(world, [])
    sealed = KEYRING.seal(a_session_ticket(world, expires=world.now - A_MOMENT_S))
    assert all(isinstance(answer, Refused) for answer in asked(world, successor, sealed))
    assert successor.held().sessions.active == {}


def test_a_ticket_of_another_kind_is_never_adopted() -> None:
    world, _ = training(0)
    successor = take_over(world, [])
    assignment = KEYRING.seal(AssignmentTicket(TASK, "ghost", 1, world.now + 60))
    for request in (Heartbeat(assignment), Report(assignment, 1)):
        assert isinstance(world.answers[world.ask(successor, request)], Refused)
    assert successor.held().sessions.active == {}


def test_a_ticket_of_another_task_is_never_adopted() -> None:
    world = World(a_task(), a_task(task="images"))
    node = world.start()
    world.place(node)
    world.place(node, "images")
    sealed = KEYRING.seal(a_session_ticket(world, task="images"))
    assert world.answers[world.ask(node, Heartbeat(sealed))] == Alive()
    assert node.held(TASK).sessions.active == {}
    assert list(node.held("images").sessions.active) == ["ghost"]


def test_an_upload_of_a_sync_round_that_is_over_is_not_adopted() -> None:
    world, [phone, other] = training(2, a_sync_task(2, 1.0))
    phone.report()
    other.upload_for_good(1)
    assert world.version == 1
    successor = take_over(world, [phone])
    ticket = KEYRING.open(phone.ticket, UploadTicket)
    assert ticket.version == 0
    assert phone.chunk(0, b"\0" * 8) == Aborted("round_over")
    assert successor.held().sessions.active == {}


def test_nan_is_refused_for_an_adopted_client_too() -> None:
    world, [phone] = training(1, an_async_task(1))
    phone.report()
    take_over(world, [phone])
    phone.send(math.nan)
    assert world.answers[phone.complete()] == Completed("not_finite")
