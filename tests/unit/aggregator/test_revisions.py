"""A task whose owner changes its settings while clients train (docs/adr/0045)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from msgspec import structs

from papaya.aggregator.sessions import ticket_life_s
from papaya.aggregator.shards import Shards
from papaya.aggregator.tsa import TsaAdapter
from papaya.aggregator.work import Forget, StockedOffer
from papaya.config import AsyncFL, SyncFL, TaskConfig
from papaya.machine import Transact
from papaya.messages.owner import TaskRows, revise
from papaya.messages.participation import (
    Aborted,
    Alive,
    Completed,
    Joined,
    Leave,
    Left,
    Refused,
    Retry,
    SecureOffer,
    UploadGranted,
)
from papaya.messages.storage import ConsumedRow, RecordRow, TaskRow, task_key
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.unmask import TakeBlock
from papaya.sim.revisions import signed
from papaya.sim.tsa_twin import TsaTwin
from tests.unit.aggregator.builders import SERVER, TASK, Node, World, a_task, a_world, make_version
from tests.unit.aggregator.secure_builders import (
    SecureNode,
    SecurePhone,
    SecureWorld,
    a_secure_task,
    a_secure_world,
    make_secure_version,
)

H = SERVER.heartbeat_s
COUNTED, REVISED = Completed(), Aborted("revised")


def change(world: World, node: Node, active: int | None = None, **changes: Any) -> TaskConfig:
    """Revise the task, and let the same aggregator hold it again."""
    rows = TaskRows(TASK, world.store.rows)
    revision = len(rows.row.earlier) + 1
    config = signed(structs.replace(rows.row.config, **changes), revision)
    world.store.apply(revise(rows, config, (), world.now))
    node.order([])
    world.place(node, active=active)
    return config


def a_signed_world(**changes: Any) -> tuple[World, Node]:
    return a_world(signed(a_task(**changes), 0))


def a_signed_secure_world(**changes: Any) -> tuple[SecureWorld, SecureNode]:
    return a_secure_world(signed(a_secure_task(**changes), 0))


def finish(phone: SecurePhone, *values: float) -> object:
    """Report until there is an offer, then send the masked update."""
    answer = phone.report()
    for _ in range(10):
        if not isinstance(answer, Retry):
            break
        phone.world.pass_s(0.5)
        answer = phone.report()
    assert isinstance(answer, UploadGranted), answer
    phone.seal(*values)
    return phone.send_for_good()


# -- in the clear ---------------------------------------------------------------------------------


def test_an_update_is_weighed_and_clipped_by_the_manifest_of_its_client() -> None:
    world, node = a_signed_world(regime=AsyncFL(4), max_examples=10)
    [before] = world.joined(node, 1)
    change(world, node, active=1, clip=1.0, max_examples=3)
    assert before.upload_for_good(5.0, examples=8) == COUNTED
    [after, within] = world.joined(node, 2)
    assert after.upload_for_good(5.0, examples=8) == Completed("over_norm")
    assert within.upload_for_good(0.5, examples=8) == COUNTED
    [record] = world.store.all(RecordRow)
    assert [member.examples for member in record.members] == [8, 3]


def test_a_client_with_the_bundle_of_another_revision_cannot_join() -> None:
    """It would train under one manifest and be weighed by another."""
    world, node = a_signed_world()
    late = world.phone(node)
    change(world, node, active=0)
    assert late.join() == REVISED
    assert late.join() == REVISED, "the same answer twice"
    assert isinstance(world.phone(node).join(), Joined)


def test_a_client_that_fetches_the_bundle_first_gives_its_assignment_back() -> None:
    """The report that follows ends its lease: no slot waits for a client that will not join."""
    world, node = a_signed_world(concurrency=1)
    fetching = world.phone(node)
    leave = Leave(fetching.assignment, "no_program")
    assert fetching.ask(leave) == Left()
    assert fetching.ask(leave) == Left(), "the same answer twice"
    assert fetching.join() == Aborted("left")
    report = node.held().report(world.now, 99)
    assert fetching.session in report.joined
    assert (report.active, report.demand) == (0, 1)
    assert not report.endings, "it was no participation"
    assert isinstance(world.phone(node).join(), Joined)


def test_an_assignment_that_was_used_or_has_expired_is_not_given_back() -> None:
    world, node = a_signed_world()
    [phone] = world.joined(node, 1)
    assert phone.ask(Leave(phone.assignment, "no_program")) == Left(), "it leaves its session"
    assert phone.heartbeat() == Aborted("left")
    late = world.phone(node)
    world.pass_s(4 * H)
    assert isinstance(late.ask(Leave(late.assignment, "no_program")), Refused)


def test_after_a_switch_to_syncfl_clients_of_earlier_versions_end() -> None:
    world, node = a_signed_world(regime=AsyncFL(1, max_staleness=50), concurrency=6)
    [old, uploading] = world.joined(node, 2)
    assert isinstance(uploading.report(), UploadGranted)
    make_version(world, node)
    [current] = world.joined(node, 1)
    change(world, node, active=3, regime=SyncFL(0.0))
    assert old.heartbeat() == REVISED
    assert uploading.heartbeat() == REVISED
    assert current.heartbeat() == Alive()
    assert current.upload_for_good(1.0) == COUNTED


def test_a_goal_below_what_the_open_buffer_has_makes_a_version_at_once() -> None:
    world, node = a_signed_world(regime=AsyncFL(4))
    for phone in world.joined(node, 3):
        assert phone.upload_for_good(1.0) == COUNTED
    change(world, node, active=0, regime=AsyncFL(2))
    node.held().check()
    world.pass_s(H)
    assert world.version == 1
    [consumed] = world.store.all(ConsumedRow)
    assert len(consumed.members) == 3


def test_a_task_whose_every_client_diverges_is_repaired_by_one_revision() -> None:
    world, node = a_signed_world(regime=AsyncFL(2), clip=0.5)
    for phone in world.joined(node, 3):
        assert phone.upload_for_good(float("nan")) == Completed("not_finite")
    for phone in world.joined(node, 3):
        assert phone.upload_for_good(3.0) == Completed("over_norm")
    change(world, node, active=0, clip=5.0)
    for phone in world.joined(node, 2):
        assert phone.upload_for_good(3.0) == COUNTED
    assert world.version == 1


def test_a_manifest_that_is_no_longer_stored_cannot_be_weighed_by() -> None:
    world, node = a_signed_world()
    [phone] = world.joined(node, 1)
    for _ in range(9):
        change(world, node, active=1)
    row = world.store.rows[task_key(TASK)]
    assert isinstance(row, TaskRow)
    assert len(row.earlier) == 8
    assert phone.heartbeat() == REVISED


# -- secure aggregation ---------------------------------------------------------------------------


def test_a_buffer_belongs_to_the_manifest_of_its_first_member() -> None:
    """Updates of the new manifest use the next buffer, and versions come in their order."""
    world, node = a_signed_secure_world(goal=2)
    first, second = world.secure_phones(node, 2)
    assert first.upload_for_good(1.0) == COUNTED
    before = node.held().pipeline.manifest
    config = change(world, node, active=1, regime=AsyncFL(1), clip=32.0)
    assert second.heartbeat() == Alive()
    [third] = world.secure_phones(node, 1)
    assert third.upload_for_good(1.0) == COUNTED
    found = {row.target: row.manifest for row in world.store.all(RecordRow)}
    assert found == {1: before, 2: config.manifest}
    assert finish(second, 3.0) == COUNTED
    assert world.version == 2
    assert node.dropped() == {}


def test_a_buffer_with_too_few_clients_in_flight_is_given_up() -> None:
    world, node = a_signed_secure_world(goal=3)
    phones = world.secure_phones(node, 2)
    assert phones[0].upload_for_good(1.0) == COUNTED
    change(world, node, active=1)
    assert phones[1].heartbeat() == Alive()
    world.pass_s(H)
    assert node.dropped() == {"revised": 1}, "two can be there, three are needed"
    assert world.version == 1
    assert world.parameters(1) == world.parameters(0)
    assert phones[1].report() == REVISED
    make_secure_version(world, node)
    assert world.version == 2


def test_nothing_is_given_up_while_clients_of_the_last_holder_may_come() -> None:
    world, node = a_signed_secure_world(goal=2)
    phones = world.secure_phones(node, 2)
    assert phones[0].upload_for_good(1.0) == COUNTED
    change(world, node, active=1)
    world.pass_s(2 * H)
    assert node.dropped() == {}
    assert finish(phones[1], 1.0) == COUNTED
    assert world.version == 1
    assert node.dropped() == {}


def test_a_buffer_is_given_up_when_the_last_ticket_of_its_manifest_has_expired() -> None:
    world, node = a_signed_secure_world(goal=2)
    phones = world.secure_phones(node, 2)
    assert phones[0].upload_for_good(1.0) == COUNTED
    life_s = ticket_life_s(world.config, SERVER)
    change(world, node, active=1)
    until = world.now + life_s + H
    while world.now < until and node.dropped() == {}:
        phones[1].heartbeat()
        world.pass_s(H)
    assert node.dropped() == {"revised": 1}
    world.pass_s(until - world.now)
    make_secure_version(world, node)
    assert len(node.did(Forget)) == 1, "the TSA can drop the earlier parameters"


def test_enough_clients_of_an_earlier_manifest_may_fill_another_buffer() -> None:
    world, node = a_signed_secure_world(goal=2, concurrency=6)
    phones = world.secure_phones(node, 3)
    change(world, node, active=3)
    for phone in phones:
        assert phone.heartbeat() == Alive()
    assert finish(phones[0], 1.0) == COUNTED
    assert finish(phones[1], 1.0) == COUNTED
    assert world.version == 1
    world.pass_s(H)
    assert phones[2].heartbeat() == REVISED, "alone it cannot fill a buffer"


def test_a_syncfl_round_of_an_earlier_manifest_ends_before_the_next_begins() -> None:
    config = signed(a_secure_task(regime=SyncFL(0.0), concurrency=2), 0)
    world, node = a_secure_world(config)
    phones = world.secure_phones(node, 2)
    assert phones[0].upload_for_good(1.0) == COUNTED
    change(world, node, active=1)
    assert isinstance(world.phone(node).join(), Retry)
    assert finish(phones[1], 1.0) == COUNTED
    assert world.version == 1
    assert node.dropped() == {}
    assert isinstance(world.phone(node).join(), Joined)


class TsaPerManifest(TsaAdapter):
    """The TSA of the world serves the parameters with this digest; another one all others."""

    def __init__(self, world: SecureWorld, digest: bytes) -> None:
        self._first, self._digest = world.tsa, digest
        self.other = TsaTwin(world, Random(3))

    def _of(self, parameters: PublicParameters) -> TsaAdapter:
        return (self._first if parameters.digest() == self._digest else self.other).adapter

    def offers(
        self, parameters: PublicParameters, count: int
    ) -> tuple[tuple[StockedOffer, ...], SecureOffer]:
        return self._of(parameters).offers(parameters, count)

    def accept(self, parameters: PublicParameters, index: int, group: int, sealed: bytes) -> None:
        self._of(parameters).accept(parameters, index, group, sealed)

    def reach(self, parameters: PublicParameters) -> None:
        self._of(parameters).reach(parameters)

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        self._of(parameters).release(parameters, group, members, take)


def with_two_tsas(world: SecureWorld, node: SecureNode) -> TsaPerManifest:
    parameters = world.config.public_parameters
    assert parameters is not None
    tsas = TsaPerManifest(world, parameters.digest())
    node.shards = Shards(tsa=tsas)
    return tsas


def test_offers_of_another_manifests_tsa_do_not_lose_a_buffer() -> None:
    """It counts from zero: its indices say nothing about seeds at the TSA of the buffer."""
    world, node = a_signed_secure_world(goal=2)
    first, second = world.secure_phones(node, 2)
    assert first.upload_for_good(1.0) == COUNTED
    with_two_tsas(world, node)
    change(world, node, active=1)
    world.pass_s(H)
    assert finish(second, 3.0) == COUNTED
    assert node.dropped() == {}
    assert world.version == 1
    assert world.parameters(1)[0] == pytest.approx(2.0, abs=1e-5)


def test_a_restart_of_another_manifests_tsa_does_not_lose_a_buffer() -> None:
    world, node = a_signed_secure_world(goal=2)
    first, second = world.secure_phones(node, 2)
    assert first.upload_for_good(1.0) == COUNTED
    tsas = with_two_tsas(world, node)
    change(world, node, active=1, regime=AsyncFL(3))
    world.pass_s(H)
    [late] = world.secure_phones(node, 1)
    late.granted_and_sealed(1.0)
    tsas.other.crash()
    assert late.send_for_good() == Completed("trusted_party_lost")
    assert finish(second, 3.0) == COUNTED
    assert node.dropped() == {}
    assert world.version == 1


def test_a_lost_buffer_of_an_earlier_manifest_stays_lost_when_rows_are_read_again() -> None:
    world, node = a_signed_secure_world(goal=3)
    first, second, third = world.secure_phones(node, 3)
    assert first.upload_for_good(1.0) == COUNTED
    change(world, node, active=2)
    assert [second.heartbeat(), third.heartbeat()] == [Alive(), Alive()]
    world.tsa.crash()
    node.hold(Transact)
    second.report()  # offers of the new TSA show that the seeds are lost
    node.settle("lost")
    node.release()
    world.pass_s(1.0)
    assert set(node.dropped()) == {"trusted_party_lost"}
    assert world.version == 1


@pytest.mark.parametrize("way", ["moves", "is placed here again", "finds another fence"])
def test_the_tsa_forgets_a_manifest_that_is_no_longer_stored(way: str) -> None:
    """The next holder does not know it: a row names only the last few."""
    world, node = a_signed_secure_world(goal=2)
    [first] = world.secure_phones(node, 1)
    assert first.upload_for_good(1.0) == COUNTED
    [second] = world.secure_phones(node, 1)
    for _ in range(9):
        rows = TaskRows(TASK, world.store.rows)
        revision = rows.row.revision + 1
        config = signed(rows.row.config, revision)
        world.store.apply(revise(rows, config, (), world.now, revision=revision))
    if way == "moves":
        node.order([])
    elif way == "is placed here again":
        world.place(node)
    else:
        second.upload_for_good(1.0)  # its record is refused
    assert [effect.config for effect in node.did(Forget)] == [world.config]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_client_is_never_offered_other_terms_than_it_joined_under(restarts: bool) -> None:
    world, node = a_signed_secure_world(goal=1)
    [phone] = world.secure_phones(node, 1)
    change(world, node, active=1, clip=32.0, max_examples=7)
    if restarts:
        world.tsa.crash()
        world.pass_s(H)
    assert finish(phone, 1.0) == COUNTED, "it refuses every other manifest"
    assert world.version == 1


def test_a_device_refuses_an_offer_for_another_manifest() -> None:
    world, node = a_signed_secure_world(goal=1)
    [phone] = world.secure_phones(node, 1)
    assert isinstance(phone, SecurePhone)
    phone.manifest = bytes(32)
    phone.report()
    with pytest.raises(Exception, match="manifest = "):
        phone.seal(1.0)
