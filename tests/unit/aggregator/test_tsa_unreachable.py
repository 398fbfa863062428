"""A TSA that does not answer is not lost: sessions and their updates wait for it.

`cut_off`: calls do not reach it. `freeze`: seeds reach it, but its answers come too late.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from papaya.aggregator.work import GetOffers, Offered, Step
from papaya.machine import Transact
from papaya.messages.base import Message
from papaya.messages.participation import (
    MAX_EXTRA_S,
    Aborted,
    ChunkReceived,
    Completed,
    Incomplete,
    Left,
    Refused,
    Retry,
    UploadGranted,
)
from papaya.messages.storage import RecordRow
from papaya.messages.tickets import UploadTicket
from tests.unit.aggregator.builders import KEYRING, SERVER, TASK
from tests.unit.aggregator.secure_builders import (
    SecureNode,
    SecurePhone,
    SecureWorld,
    a_secure_task,
    a_secure_world,
    make_secure_version,
    successor,
)

H = SERVER.heartbeat_s
COUNTED = Completed()
HOUR_S = 3600.0
UPLOAD_S = 120.0


def kept(answer: Message | None) -> Retry:
    """The answer to a client that has to wait: it may stay."""
    assert isinstance(answer, Retry), answer
    assert answer.keep_s > 0
    assert answer.after_s < H
    return answer


def unanswered(world: SecureWorld, phone: SecurePhone, *values: float) -> None:
    """Its upload is complete, but the TSA does not answer."""
    kept(world.answers[phone.upload(*values)])


def completed_again(world: SecureWorld, phone: SecurePhone) -> Message:
    return world.answers[phone.complete()]


def stay(world: SecureWorld, phone: SecurePhone, seconds: float, *, renews: bool = True) -> None:
    """Ask again and again, as a client does that was answered Retry.

    `renews`: it uses the tickets that these answers carry, as clients of earlier versions do not.
    """
    ends_at = world.now + seconds
    while world.now < ends_at:
        answer = kept(completed_again(world, phone))
        phone.ticket = answer.ticket if renews else phone.ticket
        world.pass_s(min(H, ends_at - world.now))


def test_an_update_whose_seed_gets_no_answer_is_sent_again_and_counted() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    world.tsa.cut_off(3 * H)
    unanswered(world, phone, 3.0)
    stay(world, phone, 3 * H)
    world.pass_s(1.0)
    assert isinstance(completed_again(world, phone), Incomplete)
    assert phone.send_for_good() == COUNTED
    assert (world.version, node.dropped()) == (1, {})
    assert world.parameters(1)[0] == pytest.approx(3.0, abs=1e-5)


@pytest.mark.parametrize("renews", [True, False])
def test_a_client_may_wait_past_its_deadline_with_any_of_its_tickets(renews: bool) -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    world.tsa.cut_off(UPLOAD_S + 2 * H)
    unanswered(world, phone, 3.0)
    first = phone.ticket
    stay(world, phone, UPLOAD_S + 2 * H, renews=renews)
    world.pass_s(1.0)
    assert isinstance(completed_again(world, phone), Incomplete)
    phone.ticket = first
    assert phone.send_for_good() == COUNTED


def test_a_successor_keeps_a_client_that_waits_past_its_deadline() -> None:
    """The answers of the first holder carried tickets that say so."""
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    world.tsa.cut_off(UPLOAD_S + 2 * H)
    unanswered(world, phone, 3.0)
    first = phone.ticket
    stay(world, phone, UPLOAD_S + 2 * H)
    phone.node = successor(world, node)
    renewed, phone.ticket = phone.ticket, first
    assert isinstance(completed_again(world, phone), Refused), "nothing in it says so"
    phone.ticket = renewed
    assert isinstance(completed_again(world, phone), Incomplete)
    assert phone.send_for_good() == COUNTED
    assert world.version == 1


def test_a_successor_keeps_a_client_that_waits_for_an_offer_past_its_deadline() -> None:
    world, node = a_secure_world(a_secure_task(goal=1, training_timeout_s=60.0))
    [first, phone] = world.secure_phones(node, 2)
    world.tsa.cut_off(12 * H)
    unanswered(world, first, 3.0)
    for _ in range(12):
        phone.ticket = kept(phone.report()).ticket
        world.pass_s(H)
    phone.node = successor(world, node)
    world.pass_s(1.0)
    assert phone.upload_for_good(3.0) == COUNTED


def test_no_ticket_keeps_a_session_longer_than_the_limit() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    world.tsa.cut_off(HOUR_S)
    unanswered(world, phone, 3.0)
    opened = KEYRING.open(phone.ticket, UploadTicket)
    while isinstance(answer := completed_again(world, phone), Retry):
        phone.ticket = answer.ticket
        renewed = KEYRING.open(phone.ticket, UploadTicket)
        assert renewed.kept_until <= opened.upload_by + MAX_EXTRA_S
        assert replace(renewed, kept_until=0.0) == opened
        world.pass_s(H)
    assert world.now >= opened.upload_by + MAX_EXTRA_S - H


def test_a_seed_that_the_tsa_may_have_keeps_its_place_in_the_buffer() -> None:
    """Otherwise others fill the buffer, and no other group takes this seed."""
    world, node = a_secure_world(a_secure_task(goal=2))
    slow, first, second = world.secure_phones(node, 3)
    world.tsa.freeze(H)
    unanswered(world, slow, 1.0)
    stay(world, slow, H)
    world.pass_s(1.0)
    assert first.upload_for_good(3.0) == COUNTED
    assert second.upload_for_good(5.0) == COUNTED
    assert world.version == 0
    assert slow.send_for_good() == COUNTED
    assert world.version == 1
    assert world.parameters(1)[0] == pytest.approx(2.0, abs=1e-5)


def test_the_place_is_kept_when_the_task_is_loaded_again() -> None:
    world, node = a_secure_world(a_secure_task(goal=2))
    slow, first, second = world.secure_phones(node, 3)
    world.tsa.freeze(H)
    unanswered(world, slow, 1.0)
    stay(world, slow, H)
    world.pass_s(1.0)
    node.hold(Transact)
    first.upload(3.0)
    world.pass_s(1.0)
    node.settle("lost")
    node.release()
    world.pass_s(1.0)
    for phone in (first, second):
        if phone is second:
            phone.granted_and_sealed(5.0)
        assert phone.send_for_good() == COUNTED
    assert slow.send_for_good() == COUNTED
    assert world.version == 1


@pytest.mark.parametrize("way", ["leaves", "is silent"])
def test_a_client_that_does_not_come_back_frees_its_place(way: str) -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    gone, other = world.secure_phones(node, 2)
    world.tsa.freeze(1.0)
    unanswered(world, gone, 1.0)
    if way == "leaves":
        assert gone.leave() == Left()
    else:
        for _ in range(4):
            other.heartbeat()
            world.pass_s(H)
        assert gone.heartbeat() == Aborted("silent")
    world.pass_s(2.0)
    assert other.upload_for_good(3.0) == COUNTED
    assert world.version == 1


def test_an_update_that_a_predecessor_put_elsewhere_finds_its_group() -> None:
    """It is placed in one buffer, unanswered there, and then the TSA names another group."""
    world, node = a_secure_world(a_secure_task(goal=2))
    moved, other = world.secure_phones(node, 2)
    moved.granted_and_sealed(1.0)
    other.granted_and_sealed(3.0)
    ticket = node.held().sessions.active[moved.session].upload_ticket
    assert ticket is not None
    world.tsa.accept(ticket.offer, 2, moved.sealed.sealed)  # as a predecessor did
    world.tsa.cut_off(1.0)
    moved.send_masked()
    kept(completed_again(world, moved))
    world.pass_s(2.0)
    moved.send_masked()
    assert isinstance(completed_again(world, moved), Incomplete)
    assert moved.send_for_good() == COUNTED
    assert [record.target for record in world.store.all(RecordRow)] == [2]


def test_sessions_outlive_their_deadlines_while_the_tsa_is_away() -> None:
    world, node = a_secure_world(a_secure_task(goal=1, upload_timeout_s=UPLOAD_S))
    [phone] = world.secure_phones(node, 1)
    world.tsa.cut_off(4 * UPLOAD_S)
    unanswered(world, phone, 3.0)
    stay(world, phone, 4 * UPLOAD_S)
    world.pass_s(1.0)
    assert phone.send_for_good() == COUNTED
    assert completed_again(world, phone) == COUNTED  # the answer is kept as long


def test_a_client_that_has_trained_waits_with_its_report() -> None:
    """It has not sealed: even if the TSA is lost, its update is not."""
    config = a_secure_task(goal=1, training_timeout_s=60.0)
    world, node = a_secure_world(config)
    [first, phone] = world.secure_phones(node, 2)
    world.tsa.cut_off(20 * H)
    unanswered(world, first, 3.0)
    while world.now < 20 * H:
        kept(phone.report())
        world.pass_s(H)
    world.tsa.crash()
    world.pass_s(1.0)
    assert phone.upload_for_good(3.0) == COUNTED


def test_the_first_version_after_a_long_wait_aborts_nobody_who_waits() -> None:
    """By then a ticket life has passed, so `settled` may rise, but not above those who wait."""
    config = a_secure_task(goal=1, training_timeout_s=60.0, upload_timeout_s=UPLOAD_S)
    world, node = a_secure_world(config)
    make_secure_version(world, node)
    [waiting] = world.secure_phones(node, 1)
    make_secure_version(world, node)
    make_secure_version(world, node)
    [first] = world.secure_phones(node, 1)
    world.tsa.cut_off(300.0)
    unanswered(world, first, 3.0)
    for _ in range(30):
        kept(waiting.report())
        stay(world, first, H)
    world.pass_s(1.0)
    assert first.send_for_good() == COUNTED
    assert world.version == 4
    assert waiting.upload_for_good(5.0) == COUNTED


def test_no_session_waits_for_ever() -> None:
    world, node = a_secure_world(a_secure_task(goal=1, upload_timeout_s=UPLOAD_S))
    [phone] = world.secure_phones(node, 1)
    world.tsa.cut_off(HOUR_S)
    unanswered(world, phone, 3.0)
    stay(world, phone, UPLOAD_S + MAX_EXTRA_S - H)
    world.pass_s(H + 1.0)
    assert completed_again(world, phone) == Aborted("timed_out")


def test_offers_last_for_the_upload_and_the_wait() -> None:
    """A seed of an offer that has ended is refused, so old offers are not given out."""
    world, node = a_secure_world(a_secure_task(goal=1, upload_timeout_s=UPLOAD_S))
    world.pass_s(HOUR_S - UPLOAD_S - MAX_EXTRA_S)
    [phone] = world.secure_phones(node, 1)
    phone.report()
    world.pass_s(1.0)
    assert isinstance(phone.report(), UploadGranted)
    phone.seal(3.0)
    phone.send_masked()
    world.tsa.cut_off(MAX_EXTRA_S)
    kept(completed_again(world, phone))
    stay(world, phone, MAX_EXTRA_S)
    world.pass_s(1.0)
    assert phone.send_for_good() == COUNTED


def test_while_the_tsa_is_away_no_upload_starts_and_no_clients_are_wanted() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    first, second = world.secure_phones(node, 2)
    second.granted_and_sealed(5.0)
    world.tsa.cut_off(2 * H)
    unanswered(world, first, 3.0)
    kept(second.send_masked()[0])
    assert not any(s.upload for s in node.held().sessions.active.values())
    assert node.held().demand(world.now) == 0
    world.pass_s(H)
    assert node.last_report().halted == "the TSA does not answer; updates wait for it"
    kept(second.send_masked()[0])
    world.pass_s(2 * H)
    assert node.held().demand(world.now) == 3
    assert node.last_report().halted == ""
    assert isinstance(second.send_masked()[0], ChunkReceived)


def test_no_clients_are_wanted_while_the_tsa_refuses_to_make_offers() -> None:
    """They would train, and then wait with their reports."""
    world = SecureWorld(a_secure_task(goal=1))
    node = world.start()
    node.hold(GetOffers)
    world.place(node)
    node.receive(Offered(TASK, 1, problem="the TSA knows too many tasks"))
    world.pass_s(H)
    assert node.last_report().demand == 0
    assert node.last_report().halted == "the TSA knows too many tasks"
    node.release()
    world.pass_s(1.0)
    assert node.last_report().demand == 4
    assert node.last_report().halted == ""


def test_an_upload_that_has_started_may_go_on_and_is_not_sent_again() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    first, second = world.secure_phones(node, 2)
    second.granted_and_sealed(5.0)
    size = SERVER.chunk_bytes
    assert isinstance(second.chunk(0, second.sealed.update[:size]), ChunkReceived)
    world.tsa.cut_off(H / 2)
    unanswered(world, first, 3.0)
    second.send_masked()
    kept(completed_again(world, second))
    world.pass_s(H / 2 + 1.0)
    handle = second.complete()
    world.pass_s(1.0)
    assert world.answers[handle] == COUNTED


def test_complete_uploads_hold_no_memory_while_a_release_waits() -> None:
    """Otherwise a secure task whose buffers are full would take the memory of all tasks."""
    world, node = a_secure_world(a_secure_task(goal=1))
    first, second, third = world.secure_phones(node, 3)
    node.hold(Step)
    assert first.upload_for_good(3.0) == COUNTED
    second.upload(5.0)
    handle = third.upload(7.0)
    assert handle not in world.answers
    world.tsa.cut_off(4 * H)
    node.release()
    world.pass_s(2 * H + 1.0)
    kept(world.answers[handle])
    assert not any(s.upload for s in node.held().sessions.active.values())
    stay(world, third, 2 * H)
    world.pass_s(2.0)
    assert third.send_for_good() == COUNTED
    assert world.version == 3


def test_a_tsa_that_does_not_answer_is_asked_every_second() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    world.tsa.cut_off(5.0)
    unanswered(world, phone, 3.0)
    before = len(node.did(GetOffers))
    world.pass_s(4.5)
    assert len(node.did(GetOffers)) - before == 4


def test_a_tsa_that_is_lost_while_it_is_away_is_lost() -> None:
    world, node = a_secure_world(a_secure_task(goal=3))
    counted, phone = world.secure_phones(node, 2)
    assert counted.upload_for_good(1.0) == COUNTED
    world.tsa.cut_off(H)
    unanswered(world, phone, 3.0)
    world.tsa.crash(H)
    stay(world, phone, H)
    world.pass_s(1.0)
    assert phone.send_for_good() in (Completed("trusted_party_lost"), Completed("seed_refused"))
    assert (world.version, node.dropped()) == (1, {"trusted_party_lost": 1})


def test_a_successor_counts_an_update_whose_seed_got_no_answer() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    world.tsa.freeze(H)
    unanswered(world, phone, 3.0)
    heir: SecureNode = successor(world, node)
    phone.node = heir
    world.pass_s(2.0)
    kept(completed_again(world, phone))
    stay(world, phone, H)
    world.pass_s(1.0)
    assert phone.send_for_good() == COUNTED
    assert heir.held(TASK).ledger.version == 1
