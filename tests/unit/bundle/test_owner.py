"""Keys of owners: successors, revocations, and a second signature by somebody else."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.bundle.errors import BundleError
from papaya.bundle.owner import (
    MAX_STATEMENTS,
    KeyRevocation,
    KeySuccessor,
    OwnerKeys,
    OwnerPin,
    SignedStatement,
    key_id,
)
from tests.unit.bundle.builders import KEY, NEXT, PIN, RECOVERY, STRANGER, THIRD, a_key, public


def succession(
    old: Ed25519PrivateKey, new: Ed25519PrivateKey, signer: Ed25519PrivateKey
) -> SignedStatement:
    named = public(new)
    return KeySuccessor(key_id(public(old)), key_id(named), named).sign(signer)


def revocation(key: Ed25519PrivateKey, signer: Ed25519PrivateKey) -> SignedStatement:
    return KeyRevocation(key_id(public(key))).sign(signer)


def test_the_pinned_key_speaks_until_it_names_a_successor() -> None:
    keys = OwnerKeys(PIN)
    assert keys.current == public(KEY)
    keys.accept(succession(KEY, NEXT, KEY))
    keys.accept(succession(NEXT, THIRD, NEXT))
    assert keys.current == public(THIRD)
    assert keys.owner == key_id(public(KEY)), "the owner's id stays"
    assert keys.recoveries == 0


def test_statements_may_arrive_in_any_order_and_twice() -> None:
    made = [
        succession(KEY, NEXT, KEY),
        succession(NEXT, THIRD, NEXT),
        revocation(KEY, KEY),
        revocation(NEXT, RECOVERY),
    ]
    for order in permutations(made):
        keys = OwnerKeys(PIN, [*order, *order])
        assert keys.current == public(THIRD)
        assert len(keys.accepted) == 4


def test_a_second_successor_is_refused_and_reported() -> None:
    keys = OwnerKeys(PIN, [succession(KEY, NEXT, KEY)])
    with pytest.raises(BundleError, match="has named two successors") as raised:
        keys.accept(succession(KEY, THIRD, KEY))
    assert raised.value.reason == "conflict"
    assert keys.current == public(NEXT)


def test_a_revoked_key_is_never_believed_again() -> None:
    keys = OwnerKeys(PIN, [revocation(KEY, KEY)])
    with pytest.raises(BundleError, match="was revoked") as raised:
        _ = keys.current
    assert raised.value.reason == "revoked"


def test_the_recovery_key_replaces_what_a_stolen_key_has_said() -> None:
    stolen = [succession(KEY, STRANGER, KEY), revocation(KEY, KEY)]
    keys = OwnerKeys(PIN, [*stolen, succession(KEY, NEXT, RECOVERY)])
    assert keys.current == public(NEXT)
    assert keys.recoveries == 1


def test_others_have_no_say() -> None:
    keys = OwnerKeys(PIN)
    for statement in (
        succession(KEY, STRANGER, STRANGER),
        revocation(KEY, STRANGER),
        succession(KEY, STRANGER, NEXT),
    ):
        with pytest.raises(BundleError, match="may not sign statements about"):
            keys.accept(statement)
    without_recovery = OwnerKeys(OwnerPin(public(KEY)))
    with pytest.raises(BundleError, match="may not sign statements about"):
        without_recovery.accept(succession(KEY, NEXT, RECOVERY))
    assert (keys.current, keys.accepted) == (public(KEY), [])


def test_a_successor_names_its_own_key() -> None:
    lie = KeySuccessor(key_id(public(KEY)), key_id(public(NEXT)), public(THIRD)).sign(KEY)
    with pytest.raises(BundleError, match="is not the id of its key"):
        OwnerKeys(PIN).accept(lie)


def test_a_circle_of_successors_ends() -> None:
    keys = OwnerKeys(PIN, [succession(KEY, NEXT, KEY), succession(NEXT, KEY, NEXT)])
    assert keys.current == public(NEXT)


def test_statements_are_limited() -> None:
    chain = [a_key(number) for number in range(1, MAX_STATEMENTS + 3)]
    keys = OwnerKeys(PIN)
    pairs = list(pairwise(chain))
    for old, new in pairs[:MAX_STATEMENTS]:
        keys.accept(succession(old, new, old))
    with pytest.raises(BundleError, match="more than 64 statements"):
        keys.accept(succession(*pairs[MAX_STATEMENTS], pairs[MAX_STATEMENTS][0]))
