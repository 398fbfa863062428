"""Attacks on secure aggregation at the machines, each by its name.

First what is refused, then what is found out after unmasking, then what no code here can refuse:
those tests show how far an attacker gets, and docs/limitations.md lists them. Attacks on the
TSA itself are in test_tsa.py.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from papaya.aggregator.work import Fold, Snapshot
from papaya.client.client import Stage
from papaya.client.work import Download, Seal, Sealed
from papaya.messages.participation import (
    Complete,
    Completed,
    Refused,
    UploadGranted,
)
from papaya.messages.storage import RecordRow
from papaya.secagg.errors import UpdateError
from papaya.secagg.mask import sum_masks
from papaya.secagg.words import WORD
from papaya.sim.tsa_twin import TsaTwin
from papaya.tsa.tsa import TsaLimits
from tests.unit.aggregator.builders import MODEL_LENGTH, SERVER
from tests.unit.aggregator.secure_builders import (
    CLIP,
    SecureNode,
    SecureWorld,
    a_secure_task,
    a_secure_world,
    make_secure_version,
)
from tests.unit.client.builders import Phone as Device
from tests.unit.client.builders import joined

H = SERVER.heartbeat_s
COUNTED = Completed()
REFUSED_SEED = Completed("seed_refused")
WORDS = MODEL_LENGTH + 2


def moved(honest: Sealed, position: int, by: int) -> Sealed:
    """Something added to one word, under the mask."""
    vector = np.frombuffer(honest.update, WORD).copy()
    vector[position : position + 1] += np.array([by], WORD)
    return Sealed(vector.tobytes(), honest.sealed)


def successor(world: SecureWorld, node: SecureNode) -> SecureNode:
    world.crash(node)
    heir = world.start("agg-2")
    world.place(heir)
    return heir


# -- refused -------------------------------------------------------------------------------------


def test_a_completing_message_is_replayed() -> None:
    """At its holder, at a successor, before and after its version: it is counted once."""
    world, node = a_secure_world(a_secure_task(goal=2))
    victim, other = world.secure_phones(node, 2)
    assert victim.upload_for_good(3.0) == COUNTED
    [record] = world.store.all(RecordRow)
    assert victim.send_for_good() == COUNTED
    heir = successor(world, node)
    victim.node = other.node = heir
    assert victim.send_for_good() == COUNTED
    assert world.store.all(RecordRow) == [record]
    assert other.upload_for_good(5.0) == COUNTED
    assert victim.send_for_good() == COUNTED
    assert (world.version, world.recorded()) == (1, [])
    assert world.parameters(1)[0] == pytest.approx(4.0, abs=1e-5)
    assert heir.did(Fold)[0].session == other.session


def test_a_seed_for_a_used_index() -> None:
    """A client answers one offer twice, around a crash, to be in two sums or to shift one."""
    world, node = a_secure_world(a_secure_task(goal=2))
    liar, honest = world.secure_phones(node, 2)
    node.hold(Snapshot)
    liar.upload(1.0)
    world.pass_s(1.0)
    heir = successor(world, node)
    liar.node = honest.node = heir
    liar.seal(60.0)
    assert liar.send_for_good() == REFUSED_SEED
    assert heir.held().counters["discarded_seed_refused"] == 1
    assert honest.upload_for_good(2.0) == COUNTED
    make_secure_version(world, heir, 2.0)
    assert heir.dropped() == {}
    assert world.parameters(1)[0] == pytest.approx(2.0, abs=1e-5)


def test_a_completing_message_without_a_seed() -> None:
    """It is told what is missing, and may still send it: nothing was folded."""
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    phone.granted_and_sealed(1.0)
    phone.send_masked()
    answer = phone.ask(Complete(phone.ticket, "u1"))
    assert isinstance(answer, Refused)
    assert "seed" in answer.reason
    assert node.did(Fold) == []
    assert phone.send_for_good() == COUNTED


def test_another_client_s_sealed_seed() -> None:
    """Overheard and sent under one's own ticket; the owner's is still good."""
    world, node = a_secure_world(a_secure_task(goal=1))
    owner, thief = world.secure_phones(node, 2)
    owner.granted_and_sealed(1.0)
    thief.granted_and_sealed(60.0)
    thief.sealed = Sealed(thief.sealed.update, owner.sealed.sealed)
    assert thief.send_for_good() == REFUSED_SEED
    assert (world.version, world.recorded()) == (0, [])
    assert owner.send_for_good() == COUNTED
    assert world.parameters(1)[0] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("position", [0, 31, 32, 47, 48, 63])
def test_a_tampered_sealed_seed(position: int) -> None:
    """The device's key, the ciphertext, the tag."""
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    phone.granted_and_sealed(1.0)
    changed = bytearray(phone.sealed.sealed)
    changed[position] ^= 1
    phone.sealed = Sealed(phone.sealed.update, bytes(changed))
    assert phone.send_for_good() == REFUSED_SEED
    make_secure_version(world, node, 2.0)
    assert (world.version, node.dropped()) == (1, {})


@pytest.mark.parametrize("size", [1, 63, 65, 256])
def test_a_seed_of_the_wrong_length(size: int) -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    phone.granted_and_sealed(1.0)
    phone.sealed = Sealed(phone.sealed.update, bytes(size))
    assert phone.send_for_good() == REFUSED_SEED
    assert world.version == 0


def test_a_seed_under_an_offer_of_another_session_s_ticket() -> None:
    """A ticket names its offer and is sealed: what is sent beside it cannot change that."""
    world, node = a_secure_world(a_secure_task(goal=1))
    first, second = world.secure_phones(node, 2)
    first.granted_and_sealed(1.0)
    second.granted_and_sealed(2.0)
    first.sealed, second.sealed = second.sealed, first.sealed
    assert [first.send_for_good(), second.send_for_good()] == [REFUSED_SEED] * 2
    assert world.version == 0


def test_a_server_that_pretends_a_loss_to_get_an_update_sealed_twice() -> None:
    """Two sums that differ by one client are that client. The device has nothing left to seal."""
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    granted = phone.report()
    assert isinstance(granted, UploadGranted)
    assert granted.secure is not None
    device = Device().until(Stage.JOINING)
    device.answer(joined(secure=True))
    device.until(Stage.REPORTING)
    device.answer(granted)
    device.receive(Sealed(b"masked-bytes", b"sealed-seed"))
    device.answer(granted)
    assert device.stage is Stage.OVER
    assert sum(isinstance(effect, Seal) for effect in device.effects) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_do_not_leave_an_honest_device(value: float) -> None:
    """Nobody could see them under the mask."""
    world, node = a_secure_world(a_secure_task(goal=1))
    [phone] = world.secure_phones(node, 1)
    with pytest.raises(UpdateError, match="NaN or infinity"):
        phone.granted_and_sealed(value)
    assert isinstance(phone.report(), UploadGranted)


def test_a_crowd_that_takes_offers_and_leaves_starves_nobody() -> None:
    """They take more offers than the TSA keeps, in less time than one lives."""
    world = SecureWorld(a_secure_task(goal=1, concurrency=4))
    world.tsa = TsaTwin(world, Random(1), TsaLimits(outstanding_offers=16))
    node = world.start()
    world.place(node)
    world.pass_s(world.server.heartbeat_s)
    for _ in range(40):
        [phone] = world.secure_phones(node, 1)
        assert isinstance(phone.report(), UploadGranted)
        phone.leave()
        world.pass_s(0.1)
    make_secure_version(world, node, 1.0)
    assert (world.version, node.dropped()) == (1, {})


# -- found out after unmasking -------------------------------------------------------------------


def test_a_seed_that_does_not_match_its_vector() -> None:
    """The buffer is dropped and counted, its members stay consumed, and training goes on."""
    world, node = a_secure_world(a_secure_task(goal=2))
    make_secure_version(world, node, 1.0)
    honest, liar = world.secure_phones(node, 2)
    assert honest.upload_for_good(5.0) == COUNTED
    liar.granted_and_sealed(5.0)
    other_mask = sum_masks([b"another seed 123"], WORDS)
    vector = np.frombuffer(liar.sealed.update, WORD) + other_mask
    liar.sealed = Sealed(vector.tobytes(), liar.sealed.sealed)
    assert liar.send_for_good() == COUNTED
    assert node.dropped() == {"implausible": 1}
    assert world.version == 2
    assert world.parameters(2) == world.parameters(1)
    assert {honest.session, liar.session} <= set(world.consumed())
    make_secure_version(world, node, 1.0)
    assert world.parameters(3)[0] == pytest.approx(2.0, abs=1e-5)


@pytest.mark.parametrize(
    ("position", "added", "why"),
    [
        (WORDS - 1, 1, "a client that counts as two"),
        (WORDS - 1, 2**32 - 1, "a client that counts as none"),
        (WORDS - 2, 2**30, "a weight above one for each member"),
        (0, 2, "a coordinate above the clip for each member"),
    ],
)
def test_words_that_no_honest_client_sends(position: int, added: int, why: str) -> None:
    """Under a mask that fits: the sum is not plausible, so it is not used."""
    world, node = a_secure_world(a_secure_task(goal=2))
    honest, liar = world.secure_phones(node, 2)
    honest.upload_for_good(CLIP)
    liar.granted_and_sealed(CLIP)
    liar.sealed = moved(liar.sealed, position, added)
    assert liar.send_for_good() == COUNTED
    assert node.dropped() == {"implausible": 1}, why
    assert world.parameters(1) == world.parameters(0)


# -- beyond reach: shown, and listed in the limitations ------------------------------------------


def test_over_norm_inputs_under_the_mask_are_not_noticed() -> None:
    """Twice the norm, and the sum is no longer than others could have made it: they were quiet. In
    the clear this update is refused.
    """
    plain = a_secure_task(goal=2, secure_aggregation=None)
    world, node = a_secure_world(plain)
    [poisoner] = world.joined(node, 1)
    poisoner.report()
    poisoner.send(CLIP, CLIP, CLIP, CLIP)
    handle = world.ask(node, Complete(poisoner.ticket, "u1"))
    assert world.answers[handle] == Completed("over_norm")
    world, node = a_secure_world(a_secure_task(goal=2))
    quiet, poisoner_too = world.secure_phones(node, 2)
    quiet.upload_for_good(0.0)
    assert poisoner_too.upload_for_good(CLIP, CLIP, CLIP, CLIP) == COUNTED
    assert node.dropped() == {}
    assert world.parameters(1) == pytest.approx([CLIP / 2] * 4, abs=1e-4)


def test_over_norm_inputs_beside_loud_clients_are_found_out() -> None:
    """What bounds all of them together: the sum is no longer than its weight times the clip."""
    world, node = a_secure_world(a_secure_task(goal=2))
    loud, poisoner = world.secure_phones(node, 2)
    loud.upload_for_good(CLIP)
    assert poisoner.upload_for_good(CLIP, CLIP, CLIP, CLIP) == COUNTED
    assert node.dropped() == {"implausible": 1}
    assert world.parameters(1) == world.parameters(0)


def test_a_client_that_keeps_to_no_clip_moves_a_coordinate_by_more_than_its_own() -> None:
    """A sum that one liar has moved may be one that K honest clients could have made: the norm of
    that, their weight x clip, is what bounds it.
    """
    world, node = a_secure_world(a_secure_task(goal=4))
    liar, *honest = world.secure_phones(node, 4)
    for phone in honest:
        phone.upload(0.0)
    liar.granted_and_sealed(0.0)
    parameters = world.config.public_parameters
    assert parameters is not None
    liar.sealed = moved(liar.sealed, 0, 3 * parameters.levels)
    assert liar.send_for_good() == COUNTED
    assert node.dropped() == {}
    assert world.parameters(1)[0] == pytest.approx(3 * CLIP / 4, abs=1e-4)


def test_an_invented_number_of_examples_is_not_noticed() -> None:
    """Up to max_examples, as in the clear."""
    world, node = a_secure_world(a_secure_task(goal=2))
    honest, boaster = world.secure_phones(node, 2)
    honest.upload_for_good(0.0, examples=1)
    assert boaster.upload_for_good(10.0, examples=10**6) == COUNTED
    assert world.parameters(1)[0] == pytest.approx(10 / 1.01, abs=1e-4)


def test_one_liar_can_cost_each_buffer_that_it_gets_into() -> None:
    """A wrong seed spoils the whole sum, and nobody can tell whose it was."""
    world, node = a_secure_world(a_secure_task(goal=2))
    for turn in (1, 2, 3):
        honest, liar = world.secure_phones(node, 2)
        honest.upload_for_good(1.0)
        liar.granted_and_sealed(1.0)
        liar.sealed = Sealed(liar.sealed.update[::-1], liar.sealed.sealed)
        liar.send_for_good()
        assert (world.version, node.dropped()) == (turn, {"implausible": turn})
    assert world.parameters(3) == world.parameters(0)


def test_fake_clients_around_one_honest_one_uncover_it() -> None:
    """A server that invents K - 1 clients knows what they sent: the rest is the victim's update.
    The threshold counts offers, and a TSA cannot tell a device from a program.
    """
    world, node = a_secure_world(a_secure_task(goal=4, threshold=4))
    victim, *fakes = world.secure_phones(node, 4)
    secret = [0.25, -7.5, 31.0, 2.0]
    victim.upload(*secret, examples=100)
    for fake in fakes:
        fake.upload(0.0, examples=1)
    world.pass_s(1.0)
    assert (world.version, node.dropped()) == (1, {})
    weight = 1.0 + 3 * 0.01
    uncovered = [value * weight for value in world.parameters(1)]
    assert uncovered == pytest.approx(secret, abs=1e-4)


def test_a_server_that_sends_each_client_another_model_is_not_noticed() -> None:
    """A device trains from what it is given: parameters carry no signature of the model's owner."""
    asked = []
    for parameters in ("blob-6", "crafted-for-this-victim"):
        device = Device().until(Stage.JOINING)
        device.answer(joined(secure=True, version=6, parameters=parameters))
        asked += [e.parameters for e in device.effects if isinstance(e, Download)]
    assert asked == ["blob-6", "crafted-for-this-victim"]
