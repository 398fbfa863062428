"""A TSA that crashes or cannot be reached: buffers that are lost, and those that wait."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from papaya.aggregator.work import Fold, GetOffers, Snapshot, Step
from papaya.config import SyncFL
from papaya.machine import Transact
from papaya.messages.participation import Aborted, Completed
from papaya.messages.storage import OptimizerRow, RecordRow, VersionRow
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.unmask import TakeBlock
from papaya.tsa.errors import RefusalReason, TsaRefused
from tests.unit.aggregator.builders import SERVER
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


def test_an_open_buffer_becomes_its_predecessor_and_is_counted() -> None:
    """As soon as offers come from another TSA: nobody else works for a lost buffer."""
    world, node = a_secure_world(a_secure_task(goal=3))
    make_secure_version(world, node, 1.0)
    before = world.parameters(1)
    old, new = world.secure_phones(node, 2)
    assert old.upload_for_good(9.0) == COUNTED
    world.tsa.crash()
    assert new.upload_for_good(9.0) == Completed("trusted_party_lost")  # an offer of the old stock
    assert (world.version, world.parameters(2)) == (2, before)
    assert node.dropped() == {"trusted_party_lost": 1}
    assert old.session in {m.session for m in world.consumed_members()}
    assert world.store.all(RecordRow) == []
    make_secure_version(world, node, 2.0)
    assert (world.version, node.dropped()) == (3, {"trusted_party_lost": 1})
    assert world.parameters(3)[0] == pytest.approx(before[0] + 2.0, abs=1e-5)


def test_a_successor_finds_that_the_seeds_of_its_record_are_lost() -> None:
    """It knows no identity of before; but this party numbers its offers from below those seeds."""
    world, node = a_secure_world(a_secure_task(goal=3))
    make_secure_version(world, node, 1.0)
    [old] = world.secure_phones(node, 1)
    assert old.upload_for_good(9.0) == COUNTED
    world.tsa.crash()
    heir = successor(world, node)
    assert (world.version, heir.dropped()) == (2, {"trusted_party_lost": 1})
    assert old.ask_again(heir) == COUNTED
    world.pass_s(H)
    make_secure_version(world, heir, 2.0)
    assert (world.version, heir.dropped()) == (3, {"trusted_party_lost": 1})


def test_a_buffer_that_was_emptied_before_the_tsa_crashed_has_lost_nothing() -> None:
    """Its only member was not durable when the rows were read again. It is filled with seeds of the
    new TSA, and they are there.
    """
    world, node = a_secure_world(a_secure_task(goal=3, concurrency=8))
    phones = world.secure_phones(node, 4)
    node.hold(Transact)
    phones[0].upload(1.0)
    for phone in phones[1:]:
        phone.granted_and_sealed(1.0)  # the stock is low: offers are requested with a seed taken
    world.pass_s(1.0)
    node.settle("lost")
    node.release()
    world.tsa.crash()
    assert phones[1].send_for_good() == Completed("trusted_party_lost")
    first, *others = world.secure_phones(node, 3)
    assert first.upload_for_good(3.0) == COUNTED
    assert phones[2].send_for_good() == Completed("seed_refused")  # offers are requested again
    assert [phone.upload_for_good(3.0) for phone in others] == [COUNTED] * 2
    assert (world.version, node.dropped()) == (1, {})
    assert world.parameters(1)[0] == pytest.approx(3.0, abs=1e-5)


def test_a_successor_goes_on_with_a_record_whose_seeds_are_there() -> None:
    world, node = a_secure_world(a_secure_task(goal=3))
    [old] = world.secure_phones(node, 1)
    assert old.upload_for_good(9.0) == COUNTED
    heir = successor(world, node)
    world.pass_s(H)
    for phone in world.secure_phones(heir, 2):
        assert phone.upload_for_good(0.0) == COUNTED
    assert (world.version, heir.dropped()) == (1, {})
    assert world.parameters(1)[0] == pytest.approx(3.0, abs=1e-5)


def test_updates_on_their_way_into_a_lost_buffer_are_settled_before_it_goes() -> None:
    """One is folded and not durable, one is being folded: both have an answer in the end."""
    world, node = a_secure_world(a_secure_task(goal=4))
    [old, folded, folding, doubter] = world.secure_phones(node, 4)
    assert old.upload_for_good(9.0) == COUNTED
    node.hold(Snapshot)
    handle = folded.upload(9.0)
    node.hold(Fold)
    late = folding.upload(9.0)
    doubter.granted_and_sealed(1.0)
    world.tsa.crash()
    node.release()
    world.pass_s(1.0)
    assert world.answers[handle] == COUNTED
    assert world.answers[late] == Completed("trusted_party_lost")
    assert (world.version, node.dropped()) == (1, {"trusted_party_lost": 1})
    assert sorted(world.consumed()) == sorted([old.session, folded.session])


def test_a_lost_buffer_stays_lost_when_the_rows_are_read_again() -> None:
    world, node = a_secure_world(a_secure_task(goal=3))
    [old, new] = world.secure_phones(node, 2)
    assert old.upload_for_good(9.0) == COUNTED
    world.tsa.crash()
    node.hold(Transact)
    assert new.upload_for_good(9.0) == Completed("trusted_party_lost")
    node.settle("lost")  # nobody knows whether the buffer was given up
    node.release()
    world.pass_s(1.0)
    assert (world.version, node.dropped()["trusted_party_lost"]) == (1, 2)


def test_a_lost_round_of_syncfl_is_over_at_once() -> None:
    world, node = a_secure_world(a_secure_task(goal=3, regime=SyncFL(0.0), concurrency=3))
    old, new, training = world.secure_phones(node, 3)
    assert old.upload_for_good(9.0) == COUNTED
    world.tsa.crash()
    assert new.upload_for_good(9.0) == Completed("trusted_party_lost")
    assert (world.version, node.dropped()) == (1, {"trusted_party_lost": 1})
    assert isinstance(training.report(), Aborted)
    make_secure_version(world, node, 2.0)
    assert world.parameters(2)[0] == pytest.approx(2.0, abs=1e-5)


def test_a_lost_round_of_syncfl_waits_for_an_update_that_is_being_folded() -> None:
    world, node = a_secure_world(a_secure_task(goal=4, regime=SyncFL(0.0), concurrency=4))
    old, dirty, folding, new = world.secure_phones(node, 4)
    assert old.upload_for_good(9.0) == COUNTED
    node.hold(Snapshot, Fold)
    for phone in (dirty, folding, new):
        phone.granted_and_sealed(9.0)
        phone.send_masked()
    dirty.complete()
    node.release_one()
    world.pass_s(1.0)
    handle = folding.complete()
    new.complete()
    world.tsa.crash()
    node.held_back.rotate(1)  # the last fold tells that the TSA is another one
    node.release_one()
    world.pass_s(1.0)
    node.release_one()  # then the cut is made: the round takes no more, and ends
    assert world.version == 0
    node.release()
    world.pass_s(1.0)
    assert world.answers[handle] == Completed("seed_refused")  # the new one has such an index, too
    assert (world.version, node.dropped()) == (1, {"trusted_party_lost": 1})
    make_secure_version(world, node, 2.0)
    assert world.version == 2


def test_a_tsa_that_cannot_be_reached_for_a_while_costs_nothing() -> None:
    world, node = a_secure_world(a_secure_task(goal=2))
    phones = world.secure_phones(node, 2)
    node.hold(Step)
    for phone in phones:
        phone.upload(3.0)
    world.pass_s(1.0)
    world.tsa.cut_off(3.5)
    node.release()
    world.pass_s(3.0)
    assert (world.version, node.dropped()) == (0, {})
    assert node.held().counters["steps_postponed"] >= 2
    world.pass_s(2.0)
    assert (world.version, node.dropped()) == (1, {})
    assert world.parameters(1)[0] == pytest.approx(3.0, abs=1e-5)
    assert [phone.ask_again(node) for phone in phones] == [COUNTED] * 2


class Failing:
    """The TSA's release, which fails so many times first."""

    def __init__(self, world: SecureWorld, times: int) -> None:
        self._release = world.tsa.release
        self.times = times

    def __call__(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        self.times -= 1
        if self.times >= 0:
            raise TsaRefused(RefusalReason.INTERNAL, "internal error of the TSA")
        self._release(parameters, group, members, take)


def test_a_tsa_that_fails_for_a_moment_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, node = a_secure_world(a_secure_task(goal=2))
    monkeypatch.setattr(world.tsa, "release", Failing(world, 3))
    for phone in world.secure_phones(node, 2):
        assert phone.upload_for_good(3.0) == COUNTED
    world.pass_s(20.0)
    assert (world.version, node.dropped()) == (1, {})
    assert node.held().counters["steps_postponed"] == 3
    assert world.parameters(1)[0] == pytest.approx(3.0, abs=1e-5)


def test_a_tsa_that_always_fails_is_given_up_by_its_operator_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The acknowledged updates stay, and the owner is told; a restarted TSA has lost them."""
    world, node = a_secure_world(a_secure_task(goal=1))
    failing = Failing(world, 1000)
    monkeypatch.setattr(world.tsa, "release", failing)
    [phone] = world.secure_phones(node, 1)
    assert phone.upload_for_good(3.0) == COUNTED
    world.pass_s(3600.0)
    assert (world.version, node.dropped()) == (0, {})
    assert failing.times > 1000 - 3600 / 32
    assert "restart" in node.last_report().halted
    assert node.held().demand(world.now) == 0
    failing.times = 0
    world.tsa.crash()
    world.pass_s(65.0)
    assert (world.version, node.dropped()) == (1, {"trusted_party_lost": 1})
    [phone] = world.secure_phones(node, 1)
    phone.report()  # the offers of before have ended
    world.pass_s(1.0)
    assert phone.upload_for_good(2.0) == COUNTED
    assert world.version == 2


def test_the_other_buffer_is_committed_while_a_step_waits_for_the_tsa() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    first, second = world.secure_phones(node, 2)
    node.hold(Step)
    first.upload(3.0)
    world.pass_s(1.0)
    second.upload(5.0)
    world.pass_s(1.0)
    world.tsa.cut_off(3.0)
    node.release()
    world.pass_s(2.5)
    assert (world.version, len(world.members())) == (0, 2)
    world.pass_s(3.0)
    assert (world.version, node.dropped()) == (2, {})
    assert world.parameters(2)[0] == pytest.approx(8.0, abs=1e-5)


def drop_a_buffer(world: SecureWorld, node: SecureNode) -> SecurePhone:
    """Goal 1: one client is in a durable record when the TSA crashes."""
    node.hold(Step)
    [phone] = world.secure_phones(node, 1)
    assert phone.upload_for_good(9.0) == COUNTED
    world.tsa.crash()
    node.release()
    return phone


def test_a_dropped_buffer_changes_nothing_but_the_version() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    make_secure_version(world, node, 1.0)
    [head] = world.store.all(OptimizerRow)
    drop_a_buffer(world, node)
    [after] = world.store.all(OptimizerRow)
    assert after == OptimizerRow(2, head.state)
    rows = {row.version: row for row in world.store.all(VersionRow)}
    assert rows[2].parameters == rows[1].parameters


def test_after_a_restart_training_goes_on_with_new_offers_soon() -> None:
    """One lost upload is enough to distrust the whole stock, not one for each offer in it."""
    world, node = a_secure_world(a_secure_task(goal=1, concurrency=40))
    make_secure_version(world, node)
    world.tsa.crash()
    phones = world.secure_phones(node, 5)
    answers = [phone.upload_for_good(1.0) for phone in phones]
    assert answers == [Completed("trusted_party_lost"), *[COUNTED] * 4]
    assert (world.version, node.dropped()) == (5, {})


def test_a_member_whose_buffer_was_dropped_cannot_be_counted_again() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    phone = drop_a_buffer(world, node)
    assert (world.version, node.dropped()) == (1, {"trusted_party_lost": 1})
    assert phone.send_for_good() == COUNTED  # what it was told before stays true
    heir = successor(world, node)
    assert phone.ask_again(heir) == COUNTED
    assert world.version == 1


def test_bytes_that_two_versions_share_live_as_long_as_the_younger_one() -> None:
    config = a_secure_task(goal=1, keep_versions=1, max_staleness=2, concurrency=30)
    world, node = a_secure_world(config)
    make_secure_version(world, node, 4.0)
    drop_a_buffer(world, node)
    shared = {row.version: row.parameters for row in world.store.all(VersionRow)}[2]
    was_alone = False
    for _ in range(6):
        world.pass_s(200.0)
        make_secure_version(world, node, 4.0)
        named = {row.version: row.parameters for row in world.store.all(VersionRow)}
        assert all(blob in world.blobs for blob in named.values())
        was_alone |= 1 not in named and named.get(2) == shared
    assert was_alone
    assert shared not in world.blobs


def test_a_refused_seed_makes_it_ask_for_an_offer_at_once() -> None:
    """Not when it next wakes: a wake that places an update would ask to be woken again at once."""
    world, node = a_secure_world(a_secure_task(goal=2))
    [phone] = world.secure_phones(node, 1)
    phone.granted_and_sealed(1.0)
    phone.send_masked()
    world.tsa.crash()
    asked = len(node.did(GetOffers))
    phone.complete()
    assert len(node.did(GetOffers)) == asked + 1
    assert node.machine.next_wake() > world.now
