"""A secure task at its holder: offers, crashes of either side, buffers that are of no use."""

from __future__ import annotations

from itertools import permutations

import pytest

from papaya.aggregator.work import Fold, GetOffers, Snapshot, Step
from papaya.config import SyncFL
from papaya.machine import Effect, Transact
from papaya.messages.owner import TaskRows, rollback
from papaya.messages.participation import (
    Complete,
    Completed,
    Incomplete,
    Joined,
    Refused,
    Report,
    Retry,
    UploadGranted,
)
from papaya.messages.tickets import UploadTicket
from papaya.secagg.offer import Offer
from tests.unit.aggregator.builders import KEYRING, SERVER, TASK
from tests.unit.aggregator.secure_builders import (
    SecureWorld,
    a_secure_task,
    a_secure_world,
    make_secure_version,
    successor,
)

H = SERVER.heartbeat_s
COUNTED = Completed()


# -- what is asked of whom ----------------------------------------------------------------------


def test_offers_are_there_before_the_first_client_reports() -> None:
    _, node = a_secure_world()
    assert len(node.did(GetOffers)) == 1


def test_a_report_is_answered_with_an_offer_and_its_ticket_names_it() -> None:
    world, node = a_secure_world()
    phones = world.secure_phones(node, 3)
    given = []
    for phone in phones:
        granted = phone.report()
        assert isinstance(granted, UploadGranted)
        assert granted.secure is not None
        ticket = KEYRING.open(granted.ticket, UploadTicket)
        assert ticket.offer == Offer.decode(granted.secure.offer).index
        assert phone.report() == granted  # a lost answer is given again, with the same offer
        given.append(ticket.offer)
    assert len(set(given)) == 3


def test_nobody_is_told_a_weight_nor_says_how_many_examples_it_has() -> None:
    world, node = a_secure_world()
    [phone] = world.secure_phones(node, 1)
    phone.upload_for_good(1.0, examples=70)
    [member] = world.members()
    assert member.examples == 1


def test_a_count_of_examples_in_the_clear_is_refused() -> None:
    """A client that tells its weight would be weighed by the server's word, not by its own."""
    world, node = a_secure_world()
    [phone] = world.secure_phones(node, 1)
    answer = phone.report(examples=70)
    assert answer == Refused("examples = 70 in a secure task", "report examples = 1")
    assert isinstance(phone.report(), UploadGranted)  # the session is as it was


def test_without_offers_a_client_waits_and_keeps_its_session() -> None:
    world = SecureWorld()
    world.tsa.crash(away_s=3 * H)
    node = world.start()
    world.place(node)
    world.pass_s(H)
    [phone] = world.secure_phones(node, 1)
    for _ in range(2):
        assert isinstance(phone.report(), Retry)
        world.pass_s(0.9 * H)
    world.pass_s(H)
    assert isinstance(phone.report(), UploadGranted)
    phone.seal(1.0)
    assert phone.send_for_good() == COUNTED


def test_each_version_is_the_mean_of_its_members() -> None:
    world, node = a_secure_world(a_secure_task(goal=3, threshold=2))
    phones = world.secure_phones(node, 3)
    for phone, value, examples in zip(phones, (3.0, -6.0, 12.0), (100, 50, 25), strict=True):
        phone.upload(value, examples=examples)
    world.pass_s(1.0)
    assert world.version == 1
    mean = (3.0 * 1 - 6.0 * 0.5 + 12.0 * 0.25) / 1.75
    assert world.parameters(1) == pytest.approx([mean, 0, 0, 0], abs=1e-5)
    assert node.dropped() == {}


def test_staleness_damps_under_the_mask() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    slow = world.secure_phones(node, 1)[0]
    for _ in range(3):
        make_secure_version(world, node, 0.0)
    slow.upload_for_good(8.0)
    assert world.version == 4
    assert world.parameters(4)[0] == pytest.approx(8.0 / 2.0, abs=1e-5)


def test_a_round_of_syncfl_is_aggregated_alike() -> None:
    world, node = a_secure_world(a_secure_task(goal=2, regime=SyncFL(0.0), concurrency=2))
    for turn in (1, 2):
        make_secure_version(world, node, 2.0)
        assert world.version == turn
    assert world.parameters(2)[0] == pytest.approx(4.0, abs=1e-5)


# -- an aggregator crashes, the TSA lives -----------------------------------------------


@pytest.mark.parametrize("kind", [Fold, Snapshot, Transact, Step])
def test_a_crash_of_the_holder_at_any_point_loses_nothing(kind: type) -> None:
    """It dies with one piece of work undone; its clients go on at the successor."""
    world, node = a_secure_world(a_secure_task(goal=2))
    first, second = world.secure_phones(node, 2)
    assert first.upload_for_good(2.0) == COUNTED
    node.hold(kind)
    second.upload(6.0)
    world.pass_s(1.0)
    heir = successor(world, node)
    second.node = heir
    assert second.send_for_good() == COUNTED
    assert world.version == 1
    assert sorted(world.consumed()) == sorted([first.session, second.session])
    assert world.parameters(1)[0] == pytest.approx(4.0, abs=1e-5)
    assert heir.dropped() == {}


@pytest.mark.parametrize("kind", [Fold, Snapshot, Transact])
@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_crash_with_seeds_in_two_groups_loses_nothing(
    kind: type[Effect], order: tuple[int, ...]
) -> None:
    """Two are in group 1 and two in group 2, none of them durable; they come back in any order,
    so that each may be placed in the buffer that has not its seed.
    """
    world, node = a_secure_world(a_secure_task(goal=2))
    phones = world.secure_phones(node, 4)
    node.hold(kind)
    for phone, value in zip(phones, (2.0, 6.0, 10.0, 20.0), strict=True):
        phone.upload(value)
    world.pass_s(1.0)
    heir = successor(world, node)
    for number in order:
        phones[number].node = heir
        answer = phones[number].send_for_good()
        if isinstance(answer, Incomplete):
            answer = phones[number].send_for_good()
        assert answer == COUNTED
    assert (world.version, heir.dropped()) == (2, {})
    assert sorted(world.consumed()) == sorted(phone.session for phone in phones)
    assert world.parameters(2)[0] == pytest.approx(19.0, abs=1e-5)
    assert not any(name.startswith("discarded") for name in heir.held().counters)


@pytest.mark.parametrize("turn", range(4))
def test_all_come_back_at_once_and_none_is_lost(turn: int) -> None:
    """A misplaced one has its wrong place for a moment: who belongs there waits for it."""
    world, node = a_secure_world(a_secure_task(goal=2))
    phones = world.secure_phones(node, 4)
    node.hold(Snapshot)
    for phone in phones:
        phone.upload(4.0)
    world.pass_s(1.0)
    heir = successor(world, node)
    heir.hold(Fold)
    back = phones[turn:] + phones[:turn]
    for phone in back:
        phone.node = heir
        phone.send_masked()
    handles = [phone.complete() for phone in back]
    while heir.held_back:
        heir.release_one()
    again = []
    for phone, handle in zip(back, handles, strict=True):
        if isinstance(world.answers.get(handle), Incomplete):
            phone.send_masked()
            again.append(phone.complete())
        else:
            again.append(handle)
    heir.release()
    world.pass_s(1.0)
    assert [world.answers[handle] for handle in again] == [COUNTED] * 4
    assert (world.version, heir.dropped()) == (2, {})


def test_a_misplaced_client_is_asked_for_its_bytes_once_and_then_told_that_it_is_too_late() -> None:
    """While it sends them, others fill the buffer that has its seed."""
    world, node = a_secure_world(a_secure_task(goal=1))
    phones = world.secure_phones(node, 4)
    node.hold(Snapshot)
    phones[0].upload(1.0)
    phones[1].upload(1.0)
    for phone in phones[2:]:
        phone.granted_and_sealed(1.0)
    world.pass_s(1.0)
    heir = successor(world, node)
    for phone in phones:
        phone.node = heir
    late = phones[1]
    assert isinstance(late.send_for_good(), Incomplete)
    assert [phone.send_for_good() for phone in phones[2:]] == [COUNTED] * 2
    folds = len(heir.did(Fold))
    assert late.send_for_good() == Completed("seed_refused")
    assert heir.held().counters["discarded_seed_refused"] == 1
    assert len(heir.did(Fold)) == folds  # for a version that is there nobody is asked


def test_a_crash_between_release_and_commit_repeats_the_same_step() -> None:
    world, node = a_secure_world(a_secure_task(goal=2))
    phones = world.secure_phones(node, 2)
    node.hold(Step)
    for phone in phones:
        phone.upload(3.0)
    world.pass_s(1.0)
    node.hold(Transact)
    node.release_one()  # the masks are out, the version is written, its row is not
    assert world.version == 0
    heir = successor(world, node)
    assert world.version == 1
    assert world.parameters(1)[0] == pytest.approx(3.0, abs=1e-5)
    assert heir.dropped() == {}
    assert [phone.ask_again(heir) for phone in phones] == [COUNTED] * 2


def test_the_seed_s_place_taken_meanwhile_costs_the_client_its_update() -> None:
    """Its seed is in group 1, which others filled: it can be in no other sum, and it is told."""
    world, node = a_secure_world(a_secure_task(goal=1))
    slow, quick = world.secure_phones(node, 2)
    node.hold(Snapshot)
    slow.upload(2.0)
    quick.granted_and_sealed(5.0)
    world.pass_s(1.0)
    heir = successor(world, node)
    quick.node = slow.node = heir
    assert quick.send_for_good() == COUNTED
    assert slow.send_for_good() == Completed("seed_refused")
    assert heir.held().counters["discarded_seed_refused"] == 1
    make_secure_version(world, heir, 5.0)
    assert (world.version, heir.dropped()) == (2, {})


def test_a_report_doubled_to_a_successor_does_not_cost_the_seed_its_offer() -> None:
    """The doubled one is granted another offer, and nobody hears of it. The client has sealed for
    the first, and shows the ticket that names it.
    """
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    doubled = Report(phone.ticket, 1)
    phone.granted_and_sealed(3.0)
    shown = KEYRING.open(phone.ticket, UploadTicket)
    heir = successor(world, node)
    phone.node = heir
    second = phone.ask(doubled)
    assert isinstance(second, UploadGranted)
    assert KEYRING.open(second.ticket, UploadTicket).offer != shown.offer
    assert phone.send_for_good() == COUNTED
    assert [member.offer for member in world.consumed_members()] == [shown.offer]
    assert world.parameters(1)[0] == pytest.approx(3.0, abs=1e-5)


def test_a_ticket_shown_after_the_last_byte_changes_nothing() -> None:
    """What is being folded has its seed and its offer already."""
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    doubled = Report(phone.ticket, 1)
    phone.granted_and_sealed(3.0)
    heir = successor(world, node)
    phone.node = heir
    second = phone.ask(doubled)
    assert isinstance(second, UploadGranted)
    heir.hold(Fold)
    phone.send_masked()
    handle = phone.complete()
    late = world.ask(heir, Complete(second.ticket, "u1", phone.sealed.sealed))
    heir.release()
    world.pass_s(1.0)
    assert [world.answers[asked] for asked in (handle, late)] == [COUNTED] * 2
    assert (world.version, heir.dropped()) == (1, {})


def test_an_unknown_outcome_asks_for_the_same_bytes_again() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    node.hold(Transact)
    handle = phone.upload(2.0)
    world.pass_s(1.0)
    node.settle("lost")
    node.release()
    assert isinstance(world.answers[handle], Incomplete)
    assert phone.send_for_good() == COUNTED
    assert world.parameters(1)[0] == pytest.approx(2.0, abs=1e-5)


def test_a_task_in_the_clear_never_asks_for_offers() -> None:
    world, node = a_secure_world(a_secure_task(secure_aggregation=None))
    [phone] = world.secure_phones(node, 1)
    granted = phone.report()
    assert isinstance(granted, UploadGranted)
    assert granted.secure is None
    assert node.did(GetOffers) == []
    assert node.held(TASK).offers is None


def test_joining_says_that_the_update_will_be_masked() -> None:
    world, node = a_secure_world()
    answer = world.phone(node).join()
    assert isinstance(answer, Joined)
    assert answer.secure


def test_a_roll_back_gives_up_masked_buffers_and_their_groups() -> None:
    """Seeds of the branch that was given up stay in the TSA's group, unreleased."""
    world, node = a_secure_world(a_secure_task(goal=2))
    make_secure_version(world, node, 4.0)
    [given_up] = world.secure_phones(node, 1)
    assert given_up.upload_for_good(60.0) == COUNTED
    rows = TaskRows(TASK, world.store.rows)
    change = rollback(rows, 0, rows.optimizer.state, world.now)
    assert world.store.apply(change) == "committed"
    heir = successor(world, node)
    world.pass_s(H)
    assert (world.version, world.recorded()) == (2, [])
    make_secure_version(world, heir, 1.0)
    assert (world.version, heir.dropped()) == (3, {})
    assert world.parameters(3)[0] == pytest.approx(1.0, abs=1e-5)
