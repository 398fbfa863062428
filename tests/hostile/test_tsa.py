"""A server, clients and strangers that attack secure aggregation, each by its name.

First what is refused, then what is found out after unmasking, then what no code here can refuse.
What a device refuses by itself is in test_device_trust.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from papaya.secagg.channel import SEALED_BYTES
from papaya.secagg.errors import Implausible, OfferRefused, SecureAggregationError
from papaya.secagg.mask import sum_masks
from papaya.secagg.participant import Terms, UnsealedUpdate, weight_and_damping
from papaya.secagg.words import WORD, Reals
from papaya.tsa import wire
from papaya.tsa.errors import RefusalReason, TsaRefused
from papaya.tsa.tsa import TSA
from tests.unit.secagg.builders import (
    NOW,
    Deployment,
    a_policy,
    a_task,
    decoded,
    entropy,
    tampered,
)

SECRET = np.array([0.5, -0.25, 0.125, 0.0, 1.0], np.float32)


@contextmanager
def refused(reason: RefusalReason) -> Iterator[None]:
    with pytest.raises(TsaRefused) as caught:
        yield
    assert caught.value.reason is reason


# --- Refused: the server and its clients --------------------------------------------------------


def test_a_completing_message_is_replayed() -> None:
    """To count one client twice, and to fill a group up to its threshold with it."""
    deployment = Deployment()
    update = deployment.accept(deployment.any_sealed())
    with refused(RefusalReason.REPLAYED):
        deployment.accept(update)
    with refused(RefusalReason.BELOW_THRESHOLD):
        deployment.tsa.release(deployment.hash, 0, [update.index])
    with refused(RefusalReason.MALFORMED):
        deployment.tsa.release(deployment.hash, 0, [update.index, update.index])


def test_a_completing_message_is_replayed_into_another_group() -> None:
    """Two sums with one client in both would differ by that client."""
    deployment = Deployment()
    update = deployment.accept(deployment.any_sealed(), group=0)
    with refused(RefusalReason.OTHER_GROUP):
        deployment.accept(update, group=1)
    others = [u.index for u in deployment.accepted(2, group=0)]
    deployment.tsa.release(deployment.hash, 0, sorted([update.index, *others]))
    with refused(RefusalReason.INDEX_USED):
        deployment.accept(update, group=1)


def test_a_seed_for_a_used_index() -> None:
    """A second device was given the same offer."""
    deployment = Deployment()
    offer = deployment.offer()
    first, second = (
        UnsealedUpdate(SECRET, 1, 0).seal(deployment.terms(), offer, 0, NOW, deployment.draw)
        for _ in range(2)
    )
    deployment.accept(first)
    with refused(RefusalReason.INDEX_USED):
        deployment.accept(second)


@pytest.mark.parametrize("index", [-1, 1, 2**40])
def test_a_seed_for_an_index_that_was_never_offered(index: int) -> None:
    deployment = Deployment()
    update = deployment.any_sealed()
    with refused(RefusalReason.UNKNOWN_INDEX):
        deployment.tsa.accept(index, 0, update.sealed, NOW)


def test_a_release_below_the_threshold() -> None:
    deployment = Deployment(a_task(threshold=3))
    members = [update.index for update in deployment.accepted(4)]
    for few in ([], members[:1], members[:2]):
        with refused(RefusalReason.BELOW_THRESHOLD):
            deployment.tsa.release(deployment.hash, 0, few)
    deployment.tsa.release(deployment.hash, 0, members[:3])


def test_a_second_release_with_another_list() -> None:
    """The difference of the two sums would be one client's mask."""
    deployment = Deployment()
    members = [update.index for update in deployment.accepted(4)]
    deployment.tsa.release(deployment.hash, 0, members)
    for other in (members[1:], members[:-1], [*members, 99], []):
        with refused(RefusalReason.OTHER_LIST):
            deployment.tsa.release(deployment.hash, 0, other)


def test_a_seed_left_out_of_a_release_gets_no_second_group() -> None:
    deployment = Deployment()
    left_out, *members = deployment.accepted(3)
    deployment.tsa.release(deployment.hash, 0, [update.index for update in members])
    with refused(RefusalReason.INDEX_USED):
        deployment.accept(left_out, group=1)
    newer = [update.index for update in deployment.accepted(2, group=1)]
    with refused(RefusalReason.NOT_A_MEMBER):
        deployment.tsa.release(deployment.hash, 1, sorted([left_out.index, *newer]))


def test_members_of_another_group() -> None:
    deployment = Deployment()
    here = [update.index for update in deployment.accepted(2, group=0)]
    there = [update.index for update in deployment.accepted(1, group=1)]
    with refused(RefusalReason.NOT_A_MEMBER):
        deployment.tsa.release(deployment.hash, 0, here + there)


def test_parameters_are_swapped_between_tasks_under_one_key() -> None:
    """The server registers a second task with t = 1 and shows its offers to the first one's."""
    deployment = Deployment()
    weak = deployment.tsa.register(a_task(threshold=1).encode())
    [weak_offer] = deployment.tsa.offers(weak, 1, NOW)
    with pytest.raises(OfferRefused) as caught:
        UnsealedUpdate(SECRET, 1, 0).seal(deployment.terms(), weak_offer, 0, NOW, deployment.draw)
    assert caught.value.reason == "signature"
    update = deployment.accept(deployment.any_sealed())
    for parameters_hash, reason in (
        (weak, RefusalReason.UNKNOWN_GROUP),
        (deployment.hash, RefusalReason.BELOW_THRESHOLD),
    ):
        with refused(reason):
            deployment.tsa.release(parameters_hash, 0, [update.index])


def test_a_seed_is_carried_over_to_a_weaker_tasks_offer() -> None:
    deployment = Deployment()
    weak = deployment.tsa.register(a_task(threshold=1).encode())
    [weak_offer] = deployment.tsa.offers(weak, 1, NOW)
    update = deployment.any_sealed()
    with refused(RefusalReason.SEAL):
        deployment.tsa.accept(weak_offer.index, 0, update.sealed, NOW)


def test_an_attested_threshold_below_the_devices_minimum() -> None:
    parameters = a_task(threshold=9, aggregation_goal=100)
    with pytest.raises(OfferRefused) as caught:
        Terms(bytes(32), parameters, a_policy(parameters, minimum_threshold=10))
    assert caught.value.reason == "threshold"


def test_a_tsa_that_the_device_has_not_verified() -> None:
    deployment = Deployment()
    impostor = TSA(entropy("impostor"))
    [offer] = impostor.offers(impostor.register(deployment.parameters.encode()), 1, NOW)
    with pytest.raises(OfferRefused) as caught:
        UnsealedUpdate(SECRET, 1, 0).seal(deployment.terms(), offer, 0, NOW, deployment.draw)
    assert caught.value.reason == "signature"


def test_a_tampered_sealed_seed() -> None:
    """Also: a failed try does not use up the honest client's index."""
    deployment = Deployment()
    update = deployment.any_sealed()
    for position in range(SEALED_BYTES):
        with refused(RefusalReason.SEAL):
            deployment.accept(tampered(update, position))
    deployment.accept(update)


def test_a_seed_from_before_a_restart() -> None:
    """Sealed for the last life's key; the new TSA has the same index open."""
    deployment = Deployment()
    update = deployment.any_sealed()
    reborn = TSA(entropy("after the restart"))
    reborn.offers(reborn.register(deployment.parameters.encode()), 1, NOW)
    with refused(RefusalReason.SEAL):
        reborn.accept(update.index, 0, update.sealed, NOW)


def test_no_claim_about_versions_lifts_a_weight() -> None:
    parameters = a_task()
    for claimed in (-1, -100, parameters.max_staleness + 1, 2**63):
        with pytest.raises(OfferRefused):
            weight_and_damping(parameters, 1, claimed)
    for claimed in range(parameters.max_staleness + 1):
        weight, damping = weight_and_damping(parameters, 10**9, claimed)
        assert 1 / 3 <= weight * damping <= 1


def sealed_under(point: bytes, secret: bytes, context: bytes) -> bytes:
    """As a client of its own seals: the tag holds if the TSA derives this secret."""
    info = b"papaya secagg 1 seal\0" + context + point
    derived = HKDF(algorithm=SHA256(), length=44, salt=None, info=info).derive(secret)
    return point + AESGCM(derived[:32]).encrypt(derived[32:], bytes(16), context)


LOW_ORDER = [bytes(32), b"\1" + bytes(31), (2**255 - 20).to_bytes(32, "little")]


@pytest.mark.parametrize("point", LOW_ORDER)
def test_a_point_of_low_order(point: bytes) -> None:
    """The secret would be zeros, whatever the TSA's key is: anyone could open it."""
    deployment = Deployment()
    offer = deployment.offer()
    sealed = sealed_under(point, bytes(32), offer.context(deployment.hash))
    with refused(RefusalReason.SEAL):
        deployment.tsa.accept(offer.index, 0, sealed, NOW)


def test_a_point_that_is_not_written_as_it_should_be() -> None:
    """X25519 ignores the highest bit: one point with two names would be two seals of one seed."""
    deployment = Deployment()
    offer = deployment.offer()
    own = X25519PrivateKey.from_private_bytes(bytes(range(32)))
    secret = own.exchange(X25519PublicKey.from_public_bytes(offer.key))
    honest = own.public_key().public_bytes_raw()
    other_name = honest[:31] + bytes([honest[31] | 0x80])
    context = offer.context(deployment.hash)
    with refused(RefusalReason.SEAL):
        deployment.tsa.accept(offer.index, 0, sealed_under(other_name, secret, context), NOW)
    deployment.tsa.accept(offer.index, 0, sealed_under(honest, secret, context), NOW)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 10_000])
def test_wrong_lengths(size: int) -> None:
    deployment = Deployment()
    update = deployment.any_sealed()
    with refused(RefusalReason.SEAL):
        deployment.tsa.accept(update.index, 0, (update.sealed * 200)[:size], NOW)
    with refused(RefusalReason.MALFORMED):
        wire.accept_request(update.index, 0, (update.sealed * 200)[:size])


# --- Found out after unmasking ------------------------------------------------------------------


def test_a_seed_that_does_not_match_its_vector() -> None:
    deployment = Deployment()
    updates = deployment.accepted(3)
    liar = deployment.any_sealed()
    deployment.accept(liar)
    total = sum((u.masked for u in [*updates, liar]), np.zeros(7, WORD))
    total += sum_masks([b"another seed 123"], 7)
    members = [u.index for u in [*updates, liar]]
    with pytest.raises(Implausible):
        decoded(total - deployment.tsa.release(deployment.hash, 0, members), 4, a_task())


@pytest.mark.parametrize("attempt", range(20))
def test_a_seed_that_matches_only_where_it_is_counted(attempt: int) -> None:
    """The liar knows which words are looked at: constant and weight are under the seed that it
    sealed, its 64 coordinates under another. They are noise in the sum, and noise is too long.
    """
    task = a_task(length=64, aggregation_goal=4, threshold=4)
    deployment = Deployment(task)
    updates = deployment.accepted(3, value=0.01)
    liar = deployment.accept(deployment.any_sealed(0.01))
    vector = liar.masked.copy()
    vector[:64] += sum_masks([b"another seed %3d" % attempt], 64)
    lie = replace(liar, masked=vector)
    with pytest.raises(Implausible) as caught:
        decoded(deployment.unmasked([*updates, lie]), 4, task)
    assert caught.value.reason in ("coordinate", "norm")


@pytest.mark.parametrize(
    ("position", "added", "reason"),
    [(-1, 5, "constant"), (-2, 2**30, "weight"), (0, 2, "coordinate"), (1, 2**29, "norm")],
)
def test_an_implausible_sum(position: int, added: int, reason: str) -> None:
    """One client adds what no honest client has, under its mask."""
    deployment = Deployment(a_task(aggregation_goal=3))
    at_the_clip = np.array([1.0, 0, 0, 0, 0], np.float32)
    members = [deployment.accept(deployment.sealed(at_the_clip)) for _ in range(3)]
    words = deployment.unmasked(members)
    words[position] += np.uint32(added)
    with pytest.raises(Implausible) as caught:
        decoded(words, 3, deployment.parameters)
    assert caught.value.reason == reason


# --- Beyond reach: shown, and listed in the limitations -----------------------------------------


def test_fake_clients_around_one_honest_one_are_not_noticed() -> None:
    """The server knows what its own clients sent, and t counts them too."""
    deployment = Deployment(a_task(threshold=4))
    honest = deployment.accept(deployment.sealed(SECRET, examples=100))
    fakes = [deployment.accept(deployment.sealed(np.zeros(5, np.float32))) for _ in range(3)]
    found = decoded(deployment.unmasked([honest, *fakes]), 4, deployment.parameters)
    assert np.allclose(found.vector, SECRET, atol=1e-6)


def test_over_norm_inputs_under_the_mask_are_not_noticed() -> None:
    """Every coordinate at the clip: beyond the norm, and no rule on the sum can tell as long as
    the others leave room for it.
    """
    deployment = Deployment()
    quiet = [deployment.accept(deployment.any_sealed(0.1)) for _ in range(2)]
    poisoned = deployment.accept(deployment.sealed(np.full(5, 1e30, np.float32)))
    found = decoded(deployment.unmasked([*quiet, poisoned]), 3, deployment.parameters)
    assert np.allclose(found.vector, 2 * 0.1 + 1.0)


def trained(model: Reals, example: Reals) -> Reals:
    """One honest step on one neuron, relu(weights · example + bias), towards 1."""
    *weights, bias = model
    seen = float(np.dot(weights, example) + bias)
    slope = 0.5 * (1.0 - seen) if seen > 0 else 0.0
    update: Reals = slope * np.array([*example, 1.0], np.float32)
    return update


def test_a_server_that_sends_different_models_reads_one_client_out_of_a_sum() -> None:
    """Every client is honest and the threshold is kept. All but one got a model whose neuron is
    dead for any example, so the sum is the victim's update, and that is its example times a number.
    """
    task = a_task(aggregation_goal=12, threshold=12, max_examples=1)
    deployment = Deployment(task)
    dead, alive = (np.array([0.1, 0.1, 0.1, 0.1, bias], np.float32) for bias in (-9.0, 0.1))
    draw = np.random.default_rng(1)
    examples = [draw.uniform(0, 0.5, 4).astype(np.float32) for _ in range(12)]
    victim = 7
    members = []
    for number, example in enumerate(examples):
        update = trained(alive if number == victim else dead, example)
        members.append(deployment.accept(deployment.sealed(update, examples=1)))
    found = decoded(deployment.unmasked(members), 12, task).vector
    assert np.allclose(found, trained(alive, examples[victim]), atol=1e-6)
    assert np.allclose(found[:4] / found[4], examples[victim], atol=1e-5)
    # With one model for everybody the same sum says nothing of the kind.
    members = [deployment.sealed(trained(alive, example), examples=1) for example in examples]
    mixed = decoded(deployment.unmasked([deployment.accept(m, 1) for m in members], 1), 12, task)
    assert not np.allclose(mixed.vector[:4] / mixed.vector[4], examples[victim], atol=1e-2)


def test_errors_carry_no_secret() -> None:
    """Neither seed, nor key, nor sealed bytes are in what is refused."""
    deployment = Deployment()
    update = deployment.any_sealed()
    said = []
    for attempt in (tampered(update, 40), tampered(update, 0)):
        with pytest.raises(TsaRefused) as caught:
            deployment.accept(attempt)
        said.append(str(caught.value))
    with pytest.raises(SecureAggregationError) as failed:
        decoded(update.masked.copy(), 2, deployment.parameters)
    said.append(str(failed.value))
    assert all(len(text) < 200 and update.sealed.hex()[:16] not in text for text in said)
