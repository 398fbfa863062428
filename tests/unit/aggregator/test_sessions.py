"""Virtual sessions at an aggregator: each request twice, room for C, silence and timeouts."""

from __future__ import annotations

import pytest

from papaya.aggregator.sessions import Session, Sessions
from papaya.errors import InvariantError, ProtocolError
from papaya.messages.participation import (
    Aborted,
    Alive,
    Completed,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Left,
    Refused,
    Report,
    Retry,
    UploadGranted,
)
from papaya.messages.selection import Capabilities, CheckIn
from papaya.messages.tickets import AssignmentTicket, SessionTicket
from tests.unit.aggregator.builders import (
    KEYRING,
    SERVER,
    TASK,
    World,
    a_task,
    a_world,
    an_async_task,
    make_version,
)

H = SERVER.heartbeat_s
A_MOMENT_S = 2.0**-10


# -- the same request twice -----------------------------------------------------------------


def test_joined_says_all_that_a_client_needs() -> None:
    world, node = a_world(a_task(training_timeout_s=60.0, max_participations=7))
    phone = world.phone(node, "s-1")
    joined = phone.join()
    assert isinstance(joined, Joined)
    assert (joined.task, joined.session, joined.version) == (TASK, "s-1", 0)
    assert joined.parameters in world.blobs
    assert joined.model_length == 4
    assert (joined.heartbeat_s, joined.training_timeout_s) == (H, 60.0)
    assert (joined.participation_gap_s, joined.max_participations) == (3600.0, 7)


def test_a_join_twice_is_one_client() -> None:
    world, node = a_world()
    phone = world.phone(node)
    first = phone.join()
    world.pass_s(5.0)
    assert phone.join() == first
    assert len(node.held().sessions.active) == 1


def test_a_repeated_join_names_the_version_of_the_first() -> None:
    world, node = a_world()
    phone = world.phone(node)
    first = phone.join()
    make_version(world, node)
    again = phone.join()
    assert world.version == 1
    assert again == first
    assert isinstance(again, Joined)
    assert again.version == 0


def test_a_join_may_be_repeated_after_its_confirm_by() -> None:
    """Only the first join has to come in time: a repetition asks for a lost answer."""
    world, node = a_world()
    phone = world.phone(node)
    first = phone.join()
    for _ in range(5):
        world.pass_s(H)
        phone.heartbeat()
    assert phone.join() == first


def test_a_heartbeat_twice_is_answered_twice() -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    assert phone.heartbeat() == phone.heartbeat() == Alive()
    assert len(node.held().sessions.active) == 1


def test_a_report_twice_is_granted_the_same_upload() -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    before = phone.ticket
    first = phone.ask(Report(before, 3))
    world.pass_s(5.0)
    assert isinstance(first, UploadGranted)
    assert phone.ask(Report(before, 3)) == first


def test_a_repeated_report_cannot_change_the_examples() -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    before = phone.ticket
    phone.report(examples=2)
    assert isinstance(phone.ask(Report(before, 500)), UploadGranted)
    phone.send(8)
    phone.complete()
    [version] = [row for row in world.store.rows.values() if hasattr(row, "members")]
    assert [member.examples for member in version.members] == [2]


def test_a_leave_twice_is_answered_the_same() -> None:
    """Messages: "Any request may be repeated: the same answer comes back." """
    world, node = a_world()
    [phone] = world.joined(node, 1)
    assert phone.leave() == Left()
    assert phone.leave() == Left()


@pytest.mark.parametrize(
    ("reason", "counted"),
    [("diverged", "left_diverged"), ("ValueError: my secret", "left_other"), ("", "left_other")],
)
def test_why_a_client_left_is_counted_by_code_and_reported(reason: str, counted: str) -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    for _ in range(2):
        assert phone.ask(Leave(phone.ticket, reason)) == Left()
    assert dict(node.held().report(world.now, 9).endings) == {counted: 1}


def test_a_client_that_left_is_no_longer_active_and_is_told_so() -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    phone.leave()
    assert node.held().sessions.active == {}
    assert phone.heartbeat() == Aborted("left")
    assert phone.report() == Aborted("left")


def test_a_leave_during_the_upload_frees_slot_and_bytes() -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    phone.report()
    phone.chunk(0, b"12345678")
    assert phone.leave() == Left()
    assert node.memory_used == 0
    assert node.shards._uploads == {}


def test_a_leave_after_the_whole_update_is_told_how_it_ended() -> None:
    """The update cannot be taken back: the answer is that it was counted."""
    world, node = a_world(an_async_task(3))
    first, second = world.joined(node, 2)
    first.upload(1)
    second.upload(2)  # within the commit interval of the first
    left = world.ask(node, Leave(second.ticket, "late"))
    assert left not in world.answers
    world.pass_s(1.0)
    assert world.answers[left] == Completed()
    assert world.recorded() == [first.session, second.session]


# -- concurrency ----------------------------------------------------------------------------


def test_no_more_than_c_clients_are_active() -> None:
    world, node = a_world(a_task(concurrency=3))
    world.joined(node, 3)
    assert world.phone(node).join() == Aborted("full")
    assert len(node.held().sessions.active) == 3


def test_an_ended_session_makes_room_at_once() -> None:
    world, node = a_world(a_task(concurrency=1))
    [phone] = world.joined(node, 1)
    assert world.phone(node).join() == Aborted("full")
    phone.leave()
    assert isinstance(world.phone(node).join(), Joined)


def test_an_assignment_is_taken_until_its_confirm_by() -> None:
    world, node = a_world()
    in_time, late = world.phone(node), world.phone(node)
    world.pass_s(SERVER.confirm_by_s)
    assert isinstance(in_time.join(), Joined)
    world.pass_s(A_MOMENT_S)
    assert isinstance(late.join(), Refused)
    assert list(node.held().sessions.active) == [in_time.session]


# -- silence and time -----------------------------------------------------------------------


def test_a_client_is_dead_after_three_silent_heartbeats() -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    world.pass_s(3 * H - A_MOMENT_S)
    assert len(node.held().sessions.active) == 1
    world.pass_s(A_MOMENT_S)
    assert node.held().sessions.active == {}
    assert phone.heartbeat() == Aborted("silent")
    assert node.held().counters["aborted_silent"] == 1


@pytest.mark.parametrize("request_kind", ["heartbeat", "report", "chunk"])
def test_every_request_is_a_sign_of_life(request_kind: str) -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    world.pass_s(2 * H)
    if request_kind == "heartbeat":
        phone.heartbeat()
    else:
        phone.report()
    if request_kind == "chunk":
        world.pass_s(H / 2)
        phone.chunk(0, b"12345678")
    world.pass_s(3 * H - A_MOMENT_S)
    assert len(node.held().sessions.active) == 1
    world.pass_s(A_MOMENT_S)
    assert node.held().sessions.active == {}


def test_training_has_a_timeout_however_lively_the_client_is() -> None:
    """The client is given the timeout and one heartbeat to say that it is done."""
    world, node = a_world(a_task(training_timeout_s=60.0))
    [phone] = world.joined(node, 1)
    for _ in range(6):
        world.pass_s(H)
        assert phone.heartbeat() == Alive()
    world.pass_s(H - A_MOMENT_S)
    assert phone.heartbeat() == Alive()
    world.pass_s(A_MOMENT_S)
    assert phone.heartbeat() == Aborted("timed_out")
    assert node.held().counters["aborted_timed_out"] == 1


def test_how_a_session_ended_is_remembered_until_its_tickets_expire() -> None:
    config = a_task(training_timeout_s=60.0, upload_timeout_s=30.0)
    world, node = a_world(config)
    [phone] = world.joined(node, 1)
    ticket = KEYRING.open(phone.ticket, SessionTicket)
    phone.leave()
    world.pass_s(ticket.expires + config.upload_timeout_s - world.now - A_MOMENT_S)
    assert node.held().sessions.ended[phone.session][0] == Aborted("left")
    world.pass_s(2 * H)
    assert node.held().sessions.ended == {}
    assert isinstance(phone.heartbeat(), Refused)


def test_a_task_that_is_not_held_here_is_for_another_to_answer() -> None:
    world, node = a_world()
    foreign = KEYRING.seal(AssignmentTicket("other", "s", 1, world.now + 30))
    answer = world.answers[world.ask(node, Join(foreign))]
    assert isinstance(answer, Retry)
    assert answer.after_s > 0


def test_nothing_is_answered_from_before_the_load() -> None:
    world = World(a_task())
    node = world.start()
    world.place(node)
    phone = world.phone(node)
    from_future = KEYRING.seal(SessionTicket(TASK, "s", 9, 0, "blob", expires=world.now + 60))
    answer = world.answers[world.ask(node, Heartbeat(from_future))]
    assert isinstance(answer, Retry), "a later holder's ticket: the task has moved"
    assert answer.elsewhere
    assert isinstance(phone.join(), Joined)


def test_a_machine_refuses_what_is_not_its_business() -> None:
    _, node = a_world()
    with pytest.raises(ProtocolError, match="CheckIn"):
        node.machine.receive(10.0, CheckIn(1, Capabilities()))


# -- the container --------------------------------------------------------------------------


def a_session(name: str, now: float = 0.0, expires: float = 1000.0) -> Session:
    ticket = SessionTicket(TASK, name, 1, 0, "blob", expires)
    return Session(ticket, KEYRING.seal(ticket), now)


def test_too_many_active_sessions_break_the_invariant() -> None:
    sessions = Sessions(dead_after_s=30.0)
    sessions.admit(a_session("a"))
    sessions.admit(a_session("b"))
    sessions.check(2)
    with pytest.raises(InvariantError, match="2 clients are active"):
        sessions.check(1)


def test_the_machine_checks_its_tasks() -> None:
    world, node = a_world(a_task(concurrency=1))
    world.joined(node, 1)
    node.machine.check()
    node.held().sessions.admit(a_session("one too many"))
    with pytest.raises(InvariantError, match="above concurrency 1"):
        node.machine.check()


def test_active_and_ended_at_once_breaks_the_invariant() -> None:
    sessions = Sessions(dead_after_s=30.0)
    sessions.admit(a_session("a"))
    sessions.remember("a", Completed(), 100.0)
    with pytest.raises(InvariantError, match="active and ended"):
        sessions.check(2)


def test_a_deadline_that_moved_is_filed_again() -> None:
    sessions = Sessions(dead_after_s=30.0)
    one, other = a_session("one"), a_session("other")
    sessions.admit(one)
    sessions.admit(other)
    one.seen_at = 20.0
    assert sessions.expired(29.9) == []
    assert sessions.expired(30.0) == [other]
    sessions.end(other, Aborted("silent"), 100.0)
    assert sessions.next_deadline() == 50.0
    assert sessions.expired(50.0) == [one]


def test_sessions_still_training_are_found_by_their_initial_version() -> None:
    sessions = Sessions(dead_after_s=30.0)
    old = a_session("old")
    ticket = SessionTicket(TASK, "new", 1, 5, "blob", 1000.0)
    new = Session(ticket, b"", 0.0)
    sessions.admit(old)
    sessions.admit(new)
    assert list(sessions.training_from(range(5))) == [old]
    assert list(sessions.training_from(range(6))) == [old, new]
    sessions.end(old, Aborted("stale"), 100.0)
    assert list(sessions.training_from(range(6))) == [new]


def test_an_end_to_be_kept_for_long_does_not_keep_those_behind_it() -> None:
    sessions = Sessions(dead_after_s=30.0)
    sessions.remember("of a clock that was ahead", Completed(), 1e9)
    for number in range(10):
        sessions.remember(f"s{number}", Completed(), 10.0 - number)
    sessions.remember("s9", Completed(), 20.0)  # told again, by another holder
    sessions.forget(5.0)
    assert sorted(sessions.ended) == [
        "of a clock that was ahead",
        "s0",
        "s1",
        "s2",
        "s3",
        "s4",
        "s9",
    ]
    sessions.forget(20.0)
    assert list(sessions.ended) == ["of a clock that was ahead"]
