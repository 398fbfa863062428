"""Test vectors of secure aggregation: parameters, masks, offers, sealed seeds, updates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from papaya.conformance.vectors.cases import (
    IDENTITY,
    IDENTITY_KEY,
    NOW,
    PUBLIC,
    Case,
    VectorFormat,
    as_json,
    case_of,
    flipped,
)
from papaya.learning.parameters import FLOAT32
from papaya.secagg import channel
from papaya.secagg.mask import sum_masks
from papaya.secagg.offer import Offer, context
from papaya.secagg.parameters import SCHEME_16, PublicParameters
from papaya.secagg.participant import ParticipantPolicy, Terms, UnsealedUpdate

_OFFER_KEY, _SEAL_KEY, _SEED = bytes(range(32, 64)), bytes(range(64, 96)), bytes(range(96, 112))
_PUBLIC_16 = replace(PUBLIC, scheme=SCHEME_16)
_UPDATE = (0.0, 0.25, -0.25, 0.875, -0.0078125)


def _public_parameters() -> Iterator[Case]:
    encoded = PUBLIC.encode().decode()
    yield case_of("valid", "training", encoded=encoded, sha256=PUBLIC.digest().hex())
    fields = json.loads(encoded)

    def changed(**changes: Any) -> str:
        whole = {**fields, **changes}
        return json.dumps(whole, sort_keys=True, separators=(",", ":"))

    for clip in (0.25, 1e-05, 1.5e-07, 8191.0):
        found = changed(clip=clip)
        digest = sha256(found.encode()).hexdigest()
        yield case_of("valid", f"a clip of {clip}", encoded=found, sha256=digest)
    narrow = _PUBLIC_16.encode().decode()
    yield case_of("valid", "words of 16 bits", encoded=narrow, sha256=_PUBLIC_16.digest().hex())
    manifest = sha256(b"a manifest").hexdigest()
    signed = changed(manifest=manifest, kind="train", number=0)
    evaluation = {"clip": 8191.0, "max_examples": 1, "max_staleness": 1, "weighting": "none"}
    evaluated = changed(**evaluation, manifest=manifest, kind="evaluate", number=7)
    for name, found in (("of a signed task", signed), ("of its evaluation", evaluated)):
        yield case_of("valid", name, encoded=found, sha256=sha256(found.encode()).hexdigest())
    for name, text in (
        ("a manifest without a kind", changed(manifest=manifest, number=0)),
        ("a kind without a manifest", changed(kind="train")),
        ("an empty manifest", changed(manifest="", kind="", number=0)),
        ("a manifest in capitals", changed(manifest=manifest.upper(), kind="train", number=0)),
        ("an unknown kind", changed(manifest=manifest, kind="test", number=0)),
        ("training with the kind of an evaluation", signed.replace('"train"', '"evaluate"')),
        ("training with a number", signed.replace('"number":0', '"number":1')),
        ("spaces", json.dumps(fields, sort_keys=True)),
        ("keys that are not sorted", as_json(dict(reversed(fields.items())))),
        ("a clip without a decimal point", encoded.replace("1.0", "1")),
        ("a clip with an exponent that it does not need", encoded.replace("1.0", "1e0")),
        ("a clip with a digit too many", encoded.replace("1.0", "1.00")),
        ("an unknown field", changed(new=1)),
        ("a missing field", encoded.replace('"max_examples":100,', "")),
        ("a repeated field", encoded.replace('"length":5', '"length":5,"length":5')),
        ("another scheme", changed(scheme="papaya-secagg-0")),
        ("a clip of zero", changed(clip=0.0)),
        ("a clip of infinity", encoded.replace("1.0", "Infinity")),
        ("a threshold above K", changed(threshold=5)),
        ("a threshold of zero", changed(threshold=0)),
        ("a length of zero", changed(length=0)),
        ("a length with a fraction", changed(length=5.0)),
        ("a length that is true", changed(length=True)),
        ("a task in capitals", changed(task="Next-Word")),
        ("an unknown weighting", changed(weighting="some")),
        ("too little precision", changed(aggregation_goal=131066, max_examples=2**31 - 1)),
        ("too few levels in 16 bits", changed(scheme=SCHEME_16, aggregation_goal=1928)),
        ("counts in words of 16 bits", changed(scheme=SCHEME_16, weighting="none")),
        ("more than 1,024 bytes", encoded[:-1] + " " * 1024 + "}"),
        ("not JSON", encoded[:-1]),
    ):
        yield case_of("invalid", name, encoded=text)


def _check_public_parameters(case: Case) -> object:
    return {"sha256": PublicParameters.decode(case["encoded"].encode()).digest().hex()}


def _masks() -> Iterator[Case]:
    for seed in (bytes(16), bytes(range(16)), _SEED):
        yield case_of("valid", "a seed", seed=seed.hex(), words=sum_masks([seed], 9).tolist())
    for size in (0, 15, 17, 32):
        yield case_of("invalid", f"a seed of {size} bytes", seed=bytes(size).hex(), words=[])


def _check_mask(case: Case) -> object:
    return {"words": sum_masks([bytes.fromhex(case["seed"])], len(case["words"])).tolist()}


def _an_offer(
    index: int = 7, expires: int = NOW + 3600, agreed: PublicParameters = PUBLIC
) -> Offer:
    key = channel.public_key(_OFFER_KEY)
    return Offer.signed(IDENTITY, agreed.digest(), index, key, expires)


def _offers() -> Iterator[Case]:
    digest, good = PUBLIC.digest(), _an_offer().encode()
    known = {"identity": IDENTITY_KEY.hex(), "parameters_sha256": digest.hex(), "now": NOW}
    yield case_of("valid", "an offer", offer=good.hex(), **known)
    yield case_of("valid", "in its last second", offer=good.hex(), **{**known, "now": NOW + 3599})
    for name, offer in (
        ("another index", flipped(good, 7)),
        ("another expiry", flipped(good, 15)),
        ("another key", flipped(good, 20)),
        ("another signature", flipped(good, 60)),
        ("too short", good[:-1]),
        ("too long", good + b"\0"),
        ("empty", b""),
    ):
        yield case_of("invalid", name, offer=offer.hex(), **known)
    for name, change in (
        ("expired", {"now": NOW + 3600}),
        ("of other parameters", {"parameters_sha256": flipped(digest, 3).hex()}),
        ("of another TSA", {"identity": flipped(IDENTITY_KEY, 3).hex()}),
        ("of a TSA whose key is no point", {"identity": "ff" * 32}),
    ):
        yield case_of("invalid", name, offer=good.hex(), **{**known, **change})


def _check_offer(case: Case) -> object:
    offer = Offer.decode(bytes.fromhex(case["offer"]))
    digest = bytes.fromhex(case["parameters_sha256"])
    offer.verify(bytes.fromhex(case["identity"]), digest, case["now"])
    return {}


def _sealed_seeds() -> Iterator[Case]:
    offer = _an_offer()
    bound = offer.context(PUBLIC.digest())
    good = channel.seal(_SEED, _SEAL_KEY, offer.key, bound)
    known = {"offer_private_key": _OFFER_KEY.hex(), "context": bound.hex()}
    yield case_of(
        "valid",
        "a sealed seed",
        seal_private_key=_SEAL_KEY.hex(),
        sealed=good.hex(),
        seed=_SEED.hex(),
        **known,
    )
    other = context(PUBLIC.digest(), 8, offer.key, offer.expires)
    for name, sealed in (
        ("a changed key", flipped(good, 0)),
        ("a changed seed", flipped(good, 33)),
        ("a changed tag", flipped(good, -1)),
        ("too short", good[:-1]),
        ("too long", good + b"\0"),
        ("a point of low order", bytes(32) + good[32:]),
        ("the point one, of low order", b"\1" + bytes(31) + good[32:]),
        ("a point of 2^255 - 19", (2**255 - 19).to_bytes(32, "little") + good[32:]),
        ("a point above 2^255", good[:31] + bytes([good[31] | 0x80]) + good[32:]),
        ("sealed for another index", channel.seal(_SEED, _SEAL_KEY, offer.key, other)),
    ):
        yield case_of("invalid", name, sealed=sealed.hex(), **known)


def _check_sealed_seed(case: Case) -> object:
    private, bound = bytes.fromhex(case["offer_private_key"]), bytes.fromhex(case["context"])
    seed, _ = channel.unseal(bytes.fromhex(case["sealed"]), private, bound)
    return {"seed": seed.hex()}


def _masked_updates() -> Iterator[Case]:
    known = {
        "parameters": PUBLIC.encode().decode(),
        "identity": IDENTITY_KEY.hex(),
        "offer": _an_offer().encode().hex(),
        "now": NOW,
        "seed": _SEED.hex(),
        "seal_private_key": _SEAL_KEY.hex(),
    }
    training = {"update": list(_UPDATE), "examples": 50, "initial_version": 10, "version": 13}
    valid: tuple[tuple[str, Case], ...] = (
        ("an update", {}),
        ("not stale", {"version": 10}),
        ("more examples than count", {"examples": 1000}),
        ("ties and signs", {"update": [0.5, -0.5, 0.1, -0.1, 0.0]}),
    )
    for name, change in valid:
        case = case_of("valid", name, **known, **{**training, **change})
        yield {**case, **_masked(case)}
    narrow = {
        "parameters": _PUBLIC_16.encode().decode(),
        "offer": _an_offer(agreed=_PUBLIC_16).encode().hex(),
    }
    for name, change in valid:
        case = case_of("valid", f"{name}, in 16 bits", **{**known, **narrow, **training, **change})
        yield {**case, **_masked(case)}
    invalid: tuple[tuple[str, Case], ...] = (
        ("infinity", {"update": ["inf", 0, 0, 0, 0]}),
        ("not a number", {"update": [0, "nan", 0, 0, 0]}),
        ("too few numbers", {"update": [0.0] * 4}),
        ("too many numbers", {"update": [0.0] * 6}),
        ("no examples", {"examples": 0}),
        ("too stale", {"version": 19}),
        ("a version that went backwards", {"version": 9}),
        ("an expired offer", {"now": NOW + 3600}),
        ("an offer for words of 16 bits", {"offer": narrow["offer"]}),
        ("words of 16 bits, an offer for 32", {"parameters": narrow["parameters"]}),
        ("infinity, in 16 bits", {**narrow, "update": [0, 0, 0, 0, "inf"]}),
    )
    for name, change in invalid:
        yield case_of("invalid", name, **{**known, **training, **change})


def _masked(case: Case) -> Case:
    draws = iter((bytes.fromhex(case["seed"]), bytes.fromhex(case["seal_private_key"])))
    parameters = PublicParameters.decode(case["parameters"].encode())
    policy = ParticipantPolicy(
        task=parameters.task,
        length=parameters.length,
        clip=parameters.clip,
        max_examples=parameters.max_examples,
        max_staleness=parameters.max_staleness,
        minimum_threshold=parameters.threshold,
        scheme=parameters.scheme,
    )
    terms = Terms(bytes.fromhex(case["identity"]), parameters, policy)
    delta = np.array([float(value) for value in case["update"]], FLOAT32)
    update = UnsealedUpdate(delta, case["examples"], case["initial_version"])
    offer = Offer.decode(bytes.fromhex(case["offer"]))
    done = update.seal(terms, offer, case["version"], case["now"], lambda _: next(draws))
    seed, words = bytes.fromhex(case["seed"]), parameters.vector_words
    mask = sum_masks([seed], words, parameters.ring)
    return {
        "words": (done.masked - mask).tolist(),
        "masked": done.masked.tolist(),
        "sealed": done.sealed.hex(),
    }


FORMATS: dict[str, VectorFormat] = {
    "public_parameters": (_public_parameters, _check_public_parameters),
    "masks": (_masks, _check_mask),
    "offers": (_offers, _check_offer),
    "sealed_seeds": (_sealed_seeds, _check_sealed_seed),
    "masked_updates": (_masked_updates, _masked),
}
