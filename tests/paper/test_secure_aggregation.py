"""The paper's sentences on secure aggregation that are rules, against the machines."""

from __future__ import annotations

import numpy as np
import pytest

from papaya.aggregator.masked_sum import MaskedSum, TsaError
from papaya.aggregator.work import Keep, Snapshot, Step
from papaya.config import SyncFL
from papaya.learning.parameters import FLOAT32
from papaya.messages.participation import Completed, Joined, UploadGranted
from papaya.messages.storage import RecordRow, VersionRow
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.words import WORD
from tests.unit.aggregator.builders import MODEL_LENGTH, SERVER
from tests.unit.aggregator.secure_builders import (
    SecureNode,
    SecureWorld,
    a_secure_task,
    a_secure_world,
    make_secure_version,
)

H = SERVER.heartbeat_s
COUNTED = Completed()
Released = list[tuple[int, tuple[int, ...]]]


def releases_of(world: SecureWorld) -> Released:
    """Every unmasking vector that the TSA gives away from here on."""
    found: Released = []
    world.tsa.on_released = lambda digest, group, members, masks: found.append((group, members))
    return found


def masked_sum(world: SecureWorld) -> tuple[list[int], RecordRow]:
    [record] = world.store.all(RecordRow)
    total = MaskedSum.decode(world.blobs[record.sum], MODEL_LENGTH + 2)
    return total.vector.tolist(), record


# -- Secure Aggregation: the five steps ----------------------------------------------------------


def test_the_aggregator_gets_the_masked_update_and_nothing_else() -> None:
    """(2) "The client shares the masked model update with a corresponding Aggregator and the random
    seed used to generate the mask with the TSA".
    """
    world, node = a_secure_world()
    [phone] = world.secure_phones(node, 1)
    update = np.array([1.5, -2.5, 3.5, -4.5], FLOAT32)
    assert phone.upload_for_good(*update.tolist()) == COUNTED
    got = b"".join(bytes(effect.data) for effect in node.did(Keep))
    assert got == phone.sealed.update
    plain = update.tobytes()
    seen = [got, phone.sealed.sealed, *world.blobs.values(), repr(node.log).encode()]
    assert not any(plain[at : at + 4] in data for data in seen for at in range(0, len(plain), 4))


def test_masked_updates_are_aggregated_incrementally() -> None:
    """(3) "The aggregator incrementally aggregates masked model updates"."""
    world, node = a_secure_world(a_secure_task(goal=4))
    expected = np.zeros(MODEL_LENGTH + 2, WORD)
    for count, phone in enumerate(world.secure_phones(node, 3), 1):
        assert phone.upload_for_good(float(count)) == COUNTED
        expected += np.frombuffer(phone.sealed.update, WORD)
        words, record = masked_sum(world)
        assert (words, len(record.members)) == (expected.tolist(), count)


def test_the_unmasking_vector_is_asked_for_once_the_goal_is_reached() -> None:
    """(4) "The aggregator requests the TSA to generate the unmasking vector once the configured
    aggregation goal is reached".
    """
    world, node = a_secure_world(a_secure_task(goal=3, threshold=1))
    released = releases_of(world)
    phones = world.secure_phones(node, 3)
    for phone in phones[:2]:
        phone.upload_for_good(1.0)
    assert released == []
    phones[2].upload_for_good(1.0)
    members = sorted(member.offer for member in world.consumed_members())
    assert released == [(1, tuple(members))]
    assert len(members) == 3


def test_the_unmasked_sum_makes_a_new_server_model() -> None:
    """(5) "The aggregator unmasks the aggregated model updates using the unmasking vector and
    creates a new server model."
    """
    world, node = a_secure_world(a_secure_task(goal=2))
    for phone, value in zip(world.secure_phones(node, 2), (1.0, 4.0), strict=True):
        phone.upload(value, -value)
    world.pass_s(1.0)
    assert [row.version for row in world.store.all(VersionRow)] == [0, 1]
    assert world.parameters(1) == pytest.approx([2.5, -2.5, 0, 0], abs=1e-5)


def test_what_a_client_tells_the_tsa_does_not_grow_with_the_model() -> None:
    """ "The random seed, usually 16 bytes shared between each client and the TSA, allows the two
    parties to share an as-large-as-the-model mask at a constant cost."
    """
    world, node = a_secure_world()
    [phone] = world.secure_phones(node, 1)
    phone.granted_and_sealed(1.0)
    assert len(phone.sealed.sealed) == 64  # a key, 16 bytes and a tag; 24 bytes of masked update
    assert len(phone.sealed.update) == 4 * (MODEL_LENGTH + 2)


# -- Protocol Detail -----------------------------------------------------------------------------


def test_each_client_gets_an_initial_message_of_its_own_with_its_signature() -> None:
    """2: "When the i'th client checks in with the server, the server sends the i'th initial message
    and the corresponding signature received from the trusted party to this
    client."
    """
    world, node = a_secure_world()
    indices = []
    for phone in world.secure_phones(node, 4):
        granted = phone.report()
        assert isinstance(granted, UploadGranted)
        assert granted.secure is not None
        parameters = PublicParameters.decode(granted.secure.parameters)
        assert parameters == world.config.public_parameters
        offer = Offer.decode(granted.secure.offer)
        offer.verify(world.tsa.identity_public_key, parameters.digest(), world.now)
        indices.append(offer.index)
    assert len(set(indices)) == 4


def test_an_initial_message_is_completed_once() -> None:
    """6: "After that, the trusted party will not process any further completing messages to i'th
    initial message."
    """
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    node.hold(Snapshot)
    phone.upload(1.0)
    world.pass_s(1.0)
    world.crash(node)  # the seed was taken; the holder that knew dies
    heir = world.start("agg-2")
    world.place(heir)
    phone.node = heir
    phone.seal(9.0)  # another seed and another update, for the same initial message
    assert phone.send_for_good() == Completed("seed_refused")
    assert (world.version, world.recorded()) == (0, [])


def step_of(node: SecureNode) -> Step:
    [step] = node.held_back
    assert isinstance(step, Step)
    return step


def why_not_released(world: SecureWorld, step: Step, count: int) -> str:
    """A curious server asks for the masks of some of a record's members."""
    parameters = step.config.public_parameters
    assert parameters is not None
    some = [member.offer for member in step.record.members[:count]]
    heard: list[int] = []
    with pytest.raises(TsaError) as caught:
        world.tsa.adapter.release(
            parameters, step.record.target, some, lambda start, masks: heard.append(start)
        )
    assert heard == []
    return caught.value.reason


def test_nothing_is_unmasked_below_the_threshold() -> None:
    """7: "the trusted party sends the running sum [...] to the server only if at least
    completing messages of t clients have been processed."
    """
    world, node = a_secure_world(a_secure_task(goal=3, threshold=3))
    node.hold(Step)
    for phone in world.secure_phones(node, 3):
        phone.upload(1.0)
    world.pass_s(1.0)
    released = releases_of(world)
    assert why_not_released(world, step_of(node), 2) == "refused_below_threshold"
    assert released == []
    node.release()  # the whole list is still to be had
    assert (world.version, node.dropped()) == (1, {})


def test_a_second_list_is_ignored_after_the_release() -> None:
    """7: "The trusted party ignores any further messages from the server." """
    world, node = a_secure_world(a_secure_task(goal=3, threshold=2))
    node.hold(Step)
    for phone in world.secure_phones(node, 3):
        phone.upload(1.0)
    world.pass_s(1.0)
    step = step_of(node)
    node.release()
    assert world.version == 1
    assert why_not_released(world, step, 2) == "refused_other_list"


def test_the_server_chooses_a_subset_of_those_who_sent_a_secret() -> None:
    """Ideal functionality, 3: "The server chooses a subset of clients C1 of C0"."""
    world, node = a_secure_world(a_secure_task(goal=2))
    forgotten, *counted = world.secure_phones(node, 3)
    node.hold(Snapshot)
    forgotten.upload(50.0)
    world.pass_s(1.0)
    world.crash(node)
    heir = world.start("agg-2")
    world.place(heir)
    for phone in counted:
        phone.node = heir
        phone.upload_for_good(1.0)
    assert world.consumed() == [phone.session for phone in counted]
    assert world.parameters(1)[0] == pytest.approx(1.0, abs=1e-5)


# -- asynchronous --------------------------------------------------------------------------------


def test_clients_that_never_overlap_are_aggregated_together() -> None:
    """Threat model: "The availability of any two clients may have no overlap on the timeline." """
    world, node = a_secure_world(a_secure_task(goal=3))
    for _ in range(3):
        [phone] = world.secure_phones(node, 1)
        assert phone.upload_for_good(6.0) == COUNTED
        assert not node.held().sessions.active
        world.pass_s(1000.0)
    assert world.version == 1
    assert world.parameters(1)[0] == pytest.approx(6.0, abs=1e-5)


def test_clients_that_drop_out_with_an_offer_hinder_nobody() -> None:
    """Appendix: "clients no longer rely on each other to protect their own private inputs or
    mitigate the dropout of their peers."
    """
    world, node = a_secure_world(a_secure_task(goal=2, concurrency=8))
    for phone in world.secure_phones(node, 6):
        phone.granted_and_sealed(1.0)
        phone.send_masked()  # and never a completing message
    world.pass_s(2 * H)
    make_secure_version(world, node, 2.0)
    assert (world.version, node.dropped()) == (1, {})
    assert world.parameters(1)[0] == pytest.approx(2.0, abs=1e-5)


@pytest.mark.parametrize("regime", ["async", "sync"])
def test_both_regimes_are_aggregated_by_the_same_protocol(regime: str) -> None:
    """ "an Asynchronous SecAgg mechanism", which needs no "cohort formulation and inter-client
    communication in each round": SyncFL is the special case.
    """
    by_rounds = a_secure_task(regime=SyncFL(0.5), concurrency=3)
    world, node = a_secure_world(a_secure_task(goal=2) if regime == "async" else by_rounds)
    for _ in range(3):
        make_secure_version(world, node, 1.0)
    assert (world.version, node.dropped()) == (3, {})
    assert world.parameters(3)[0] == pytest.approx(3.0, abs=1e-4)


# -- Fixed Point Conversion ----------------------------------------------------------------------


def test_negative_numbers_and_full_scale_sums_do_not_wrap_around() -> None:
    """ "To properly simulate the behavior of integer addition, wrap-round needs to be avoided." """
    world, node = a_secure_world(a_secure_task(goal=4))
    for phone in world.secure_phones(node, 4):
        assert isinstance(phone.join(), Joined)
        phone.upload(-64.0)
    world.pass_s(1.0)
    assert node.dropped() == {}
    assert world.parameters(1) == pytest.approx([-64.0, 0.0, 0.0, 0.0], abs=1e-4)
