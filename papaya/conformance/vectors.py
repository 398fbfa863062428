"""Test vectors of every format that a client reads or writes, most of them invalid.

Each case has a `name`, a `verdict` (`valid` or `invalid`) and its inputs; a valid one may have the
expected outputs. Bytes are hexadecimal. `check` runs a case through the code that the servers and
the reference client run; the tests compare its verdict with the one stated here. Keys and seeds are
fixed, so the files are the same every time.
"""

from __future__ import annotations

import json
import math
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.attestation.policy import DevicePolicy
from papaya.attestation.software import make_collateral, make_quote
from papaya.attestation.verify import Evidence, report_data, verify_quote, verify_report_data
from papaya.errors import PapayaError
from papaya.learning import parameters as parameters_files
from papaya.learning.evaluation import EVALUATION_LENGTH, admit_evaluation, evaluation_vector
from papaya.learning.parameters import FLOAT32
from papaya.learning.weighting import admit
from papaya.messages import wire
from papaya.secagg import channel
from papaya.secagg.errors import SecureAggregationError
from papaya.secagg.mask import sum_masks
from papaya.secagg.offer import Offer, context
from papaya.secagg.parameters import SCHEME_16, PublicParameters
from papaya.secagg.participant import ParticipantPolicy, Terms, UnsealedUpdate
from papaya.verifiable_log.checkpoint import (
    Checkpoint,
    LogPolicy,
    open_checkpoint,
    sign_checkpoint,
)
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.merkle import (
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    node_hash,
    tree_root,
    verify_consistency,
    verify_inclusion,
)
from papaya.verifiable_log.note import COSIGNATURE, LOG_SIGNATURE, SignerKey, VerifierKey
from papaya.verifiable_log.record import Record

Case = dict[str, Any]
REFUSALS = (PapayaError, SecureAggregationError, LogError)
"""What `check` raises for an invalid case."""

NOW = 1_700_000_000
_IDENTITY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_IDENTITY_KEY = _IDENTITY.public_key().public_bytes_raw()
_OFFER_KEY, _SEAL_KEY, _SEED = bytes(range(32, 64)), bytes(range(64, 96)), bytes(range(96, 112))
_MEASUREMENT = sha256(b"a TSA").digest()
_PUBLIC = PublicParameters(
    task="next-word",
    length=5,
    aggregation_goal=4,
    threshold=2,
    clip=1.0,
    max_examples=100,
    max_staleness=8,
)
_PUBLIC_16 = replace(_PUBLIC, scheme=SCHEME_16)
_UPDATE = (0.0, 0.25, -0.25, 0.875, -0.0078125)
_LOG_KEY = SignerKey("example.org/log", bytes(32), LOG_SIGNATURE)
_WITNESS = SignerKey("example.org/witness", bytes(range(32)), COSIGNATURE)


def all_vectors() -> dict[str, list[Case]]:
    """The cases of each format, by the name of its file."""
    return {name: list(make()) for name, (make, _) in FORMATS.items()}


def check(name: str, case: Case) -> object:
    """The outputs of a case, or one of `REFUSALS`."""
    return FORMATS[name][1](case)


def _case(verdict: str, name: str, **fields: Any) -> Case:
    return {"name": name, "verdict": verdict, **fields}


def _flipped(data: bytes, at: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


# -- messages -------------------------------------------------------------------------------

_TICKET = b64encode(b"a ticket").decode()
_JOINED: Case = {
    "type": "Joined",
    "ticket": _TICKET,
    "task": "next-word",
    "session": "ab12",
    "version": 7,
    "parameters": f"next-word/3/version-7-{'0a' * 16}",
    "model_length": 5,
    "update_length": 5,
    "evaluates": False,
    "heartbeat_s": 10.0,
    "training_timeout_s": 240,
    "participation_gap_s": 3600.0,
    "max_participations": None,
}
_GRANTED: Case = {
    "type": "UploadGranted",
    "ticket": _TICKET,
    "version": 9,
    "chunk_bytes": 1048576,
    "upload_timeout_s": 120.0,
}
_SECURE: Case = {
    "parameters": b64encode(b"{}").decode(),
    "offer": b64encode(bytes(112)).decode(),
    "identity": b64encode(bytes(32)).decode(),
    "platform": "software",
    "evidence": b64encode(b"a quote").decode(),
    "collateral": b64encode(b"{}").decode(),
    "leaf": 3,
}
_ANSWERS: tuple[Case, ...] = (
    {"type": "Accepted", "ticket": _TICKET, "task": "next-word", "session": "ab12"},
    {"type": "Rejected", "reason": "full", "retry_from_s": 5.0, "retry_until_s": 15},
    _JOINED,
    {"type": "Alive"},
    _GRANTED,
    {**_GRANTED, "secure": _SECURE},
    {**_GRANTED, "upload_url": "https://aggregator-1.example:8750"},
    {"type": "ChunkReceived", "upload": "u-1", "index": 4095},
    {"type": "Incomplete", "missing": [0, 2]},
    {"type": "Completed"},
    {"type": "Completed", "discarded": None},
    {"type": "Completed", "discarded": "round_over"},
    {"type": "Left"},
    {"type": "Aborted", "reason": "stale"},
    {"type": "Refused", "reason": "no"},
    {"type": "Retry", "reason": "busy", "after_s": 0.5},
    {"type": "Retry", "reason": "moved", "after_s": 0.5, "elsewhere": True},
)
_REQUESTS: tuple[Case, ...] = (
    {
        "type": "CheckIn",
        "protocol": 1,
        "capabilities": {
            "engine": "torch",
            "modules": [f"sha256:{'0a' * 16}"],
            "memory_mb": 1024,
            "labels": ["wifi"],
        },
        "excluded": ["next-word"],
    },
    {"type": "CheckIn", "protocol": 2, "capabilities": {}},
    {"type": "Join", "ticket": _TICKET},
    {"type": "Heartbeat", "ticket": _TICKET},
    {"type": "Report", "ticket": _TICKET, "examples": 2**31},
    {"type": "Complete", "ticket": _TICKET, "upload": "u-1"},
    {"type": "Complete", "ticket": _TICKET, "upload": "u-1", "sealed": b64encode(bytes(64))},
    {"type": "Leave", "ticket": _TICKET, "reason": "x" * 128},
)
_OPTIONAL = ("discarded", "hint", "secure", "sealed", "excluded", "upload_url", "elsewhere")
_ABORTED_ONLY = "an unknown reason to abort"
_BAD_FIELDS: tuple[tuple[str, Case], ...] = (
    ("a ticket that is not base64", {"ticket": "no base64!"}),
    ("a ticket without padding", {"ticket": _TICKET.rstrip("=")}),
    ("a ticket of 1,025 bytes", {"ticket": b64encode(bytes(1025)).decode()}),
    ("a ticket that is a number", {"ticket": 7}),
    ("a negative count", {"version": -1}),
    ("a count with a fraction", {"version": 1.5}),
    ("a count above 2^53", {"version": 2**53 + 1}),
    ("a count that is a string", {"protocol": "1"}),
    ("negative seconds", {"after_s": -0.5}),
    ("seconds that are a string", {"heartbeat_s": "10"}),
    ("a boolean that is a number", {"evaluates": 1}),
    ("chunks of no bytes", {"chunk_bytes": 0}),
    ("a chunk index of 4,096", {"index": 4096}),
    ("a missing chunk of 4,096", {"missing": [4096]}),
    (_ABORTED_ONLY, {"reason": "because"}),
    ("an unknown reason to discard", {"discarded": "because"}),
    ("a reason of 129 characters", {"reason": "x" * 129}),
    ("no examples", {"examples": 0}),
    ("more than 2^31 examples", {"examples": 2**31 + 1}),
    ("65 excluded tasks", {"excluded": ["a"] * 65}),
    ("a name with a character that names do not have", {"excluded": ["a\u00e9"]}),
    ("a name of 65 characters", {"excluded": ["a" * 65]}),
    ("33 labels", {"capabilities": {"labels": ["a"] * 33}}),
    ("negative memory", {"capabilities": {"memory_mb": -1}}),
    ("an upload_url of 513 characters", {"upload_url": "https://" + "a" * 505}),
    ("an elsewhere that is a number", {"elsewhere": 1}),
    ("an upload id of 129 characters", {"upload": "u" * 129}),
    ("a sealed seed of 257 bytes", {"sealed": b64encode(bytes(257)).decode()}),
    ("an offer of 111 bytes", {"secure": {**_SECURE, "offer": b64encode(bytes(111))}}),
    ("an identity of 33 bytes", {"secure": {**_SECURE, "identity": b64encode(bytes(33))}}),
    ("parameters of 1,025 bytes", {"secure": {**_SECURE, "parameters": b64encode(bytes(1025))}}),
    ("a quote above 16 KiB", {"secure": {**_SECURE, "evidence": b64encode(bytes(16385))}}),
    ("a leaf of -2", {"secure": {**_SECURE, "leaf": -2}}),
    ("a platform that is no name", {"secure": {**_SECURE, "platform": "<script>"}}),
)


def _messages(valid: tuple[Case, ...]) -> Iterator[Case]:
    """Every message, and every message with one mistake. Equal bodies appear once."""
    cases = {case["body"]: case for case in _message_cases(valid)}
    return iter(cases.values())


def _message_cases(valid: tuple[Case, ...]) -> Iterator[Case]:
    for message in valid:
        kind = message["type"]
        yield _case("valid", kind, body=_json(message))
        yield _case("valid", f"{kind} with an unknown field", body=_json({**message, "new": [1]}))
        for field in message:
            if field not in _OPTIONAL:
                left = {name: value for name, value in message.items() if name != field}
                yield _case("invalid", f"{kind} without {field}", body=_json(left))
        for what, change in _BAD_FIELDS:
            if change.keys() <= message.keys() and (what != _ABORTED_ONLY or kind == "Aborted"):
                yield _case("invalid", f"{kind} with {what}", body=_json({**message, **change}))
    whole = _json(valid[0])
    yield _case("invalid", "an unknown type", body=_json({**valid[0], "type": "Unheard"}))
    yield _case("invalid", "a type in lower case", body=_json({**valid[0], "type": "alive"}))
    yield _case("invalid", "a list", body=f"[{whole}]")
    yield _case("invalid", "half an object", body=whole[: len(whole) // 2])
    yield _case("invalid", "two objects", body=whole + whole)
    yield _case("invalid", "nothing", body="")
    yield _case("invalid", "a page of a proxy", body="<html>502 Bad Gateway</html>")
    yield _case("invalid", "null", body="null")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# -- parameters and updates -----------------------------------------------------------------


def _parameters_files() -> Iterator[Case]:
    values = np.array([1.0, -2.5, 0.0], FLOAT32)
    plain = parameters_files.encode(values, {})
    named = parameters_files.encode(values, {"task": "next-word", "version": "7"})
    size = int.from_bytes(plain[:8], "little")
    header, body = plain[8 : 8 + size], plain[8 + size :]

    def file(changed: bytes, data: bytes = body) -> str:
        return (struct.pack("<Q", len(changed)) + changed + data).hex()

    known = {"length": 3, "sha256": sha256(plain).hexdigest(), "values": values.tolist()}
    yield _case("valid", "three numbers", file=plain.hex(), **known)
    known["sha256"] = sha256(named).hexdigest()
    yield _case("valid", "with metadata", file=named.hex(), **known)
    for name, length, found in (
        ("of another length", 4, plain.hex()),
        ("cut short", 3, plain[:-1].hex()),
        ("with a byte too many", 3, plain.hex() + "00"),
        ("empty", 3, ""),
        ("a header that is longer than the file", 3, (struct.pack("<Q", 2**40) + plain[8:]).hex()),
        ("float64 numbers", 3, file(header.replace(b"F32", b"F64"))),
        ("another tensor", 3, file(header.replace(b"parameters", b"parameterz"))),
        ("spaces in the header", 3, file(header.replace(b'":', b'": ', 1))),
        ("a header that is not JSON", 3, file(b"{" * len(header))),
        ("not a number", 3, file(header, struct.pack("<3f", 1, math.nan, 0))),
        ("infinity", 3, file(header, struct.pack("<3f", 1, 0, -math.inf))),
    ):
        yield _case("invalid", name, length=length, file=found)


def _check_parameters_file(case: Case) -> object:
    found = parameters_files.decode(bytes.fromhex(case["file"]), case["length"])
    return {"values": found.tolist(), "sha256": sha256(bytes.fromhex(case["file"])).hexdigest()}


def _updates() -> Iterator[Case]:
    def update(*values: float) -> bytes:
        return struct.pack(f"<{len(values)}f", *values)

    whole = update(1.0, -1.0, 0.5, 0.0, 0.0, 2.0)
    chunks = [whole[start : start + 8] for start in range(0, len(whole), 8)]
    yield _case(
        "valid",
        "in three chunks",
        update=whole.hex(),
        length=6,
        clip=None,
        chunk_bytes=8,
        chunks=[{"data": c.hex(), "crc32": f"{crc32(c):08x}"} for c in chunks],
    )
    yield _case("valid", "of zeros", update=bytes(24).hex(), length=6, clip=1.0)
    yield _case("valid", "at the clip", update=update(0.6, 0.0, 0.8).hex(), length=3, clip=1.0001)
    for name, data, length, clip in (
        ("not a number", update(0.0, math.nan, 0.0), 3, None),
        ("infinity", update(0.0, math.inf, 0.0), 3, None),
        ("minus infinity", update(0.0, -math.inf, 0.0), 3, 1.0),
        ("above the clip", update(0.6, 0.1, 0.8), 3, 1.0),
        ("above 2^60 without a clip", update(2.0**61, 0.0, 0.0), 3, None),
        ("too short", update(0.0, 0.0), 3, None),
        ("too long", update(0.0, 0.0, 0.0, 0.0), 3, None),
        ("cut inside a number", update(0.0, 0.0, 0.0)[:-1], 3, None),
    ):
        yield _case("invalid", name, update=data.hex(), length=length, clip=clip)


def _check_update(case: Case) -> object:
    data = bytes.fromhex(case["update"])
    size = case.get("chunk_bytes", len(data) or 1)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    admit(pieces, case["length"], case["clip"])
    if "chunks" not in case:
        return {}
    return {"chunks": [{"data": p.hex(), "crc32": f"{crc32(p):08x}"} for p in pieces]}


def _evaluations() -> Iterator[Case]:
    for volume, loss_sum, examples in ((0, 0.0, 1), (3, 12.5, 2), (2**15, 999.0, 100)):
        yield _case(
            "valid",
            f"{examples} examples of a device with {volume} training examples",
            volume=volume,
            loss_sum=loss_sum,
            examples=examples,
            max_examples=100,
            update=evaluation_vector(volume, loss_sum, examples).tolist(),
        )
    good = evaluation_vector(3, 12.5, 2).tolist()
    start = next(index for index, value in enumerate(good) if value) // 9 * 9
    for name, place, value in (
        ("a number that is not whole", start + 1, 0.5),
        ("a negative number", start + 1, -1.0),
        ("a digit of 8,192", start + 1, 8192.0),
        ("two clients", start + 8, 2.0),
        ("no client", start + 8, 0.0),
        ("more examples than the task takes", start + 5, 101.0),
        ("no examples", start + 5, 0.0),
        ("a mean loss above 1,000", start + 4, 8191.0),
        ("two buckets", (start + 9) % EVALUATION_LENGTH, 1.0),
    ):
        changed = [value if index == place else number for index, number in enumerate(good)]
        yield _case("invalid", name, max_examples=100, update=changed)


def _check_evaluation(case: Case) -> object:
    admit_evaluation([np.array(case["update"], FLOAT32)], case["max_examples"])
    made = evaluation_vector(case["volume"], case["loss_sum"], case["examples"])
    return {"update": made.tolist()}


# -- secure aggregation ---------------------------------------------------------------------


def _public_parameters() -> Iterator[Case]:
    encoded = _PUBLIC.encode().decode()
    yield _case("valid", "training", encoded=encoded, sha256=_PUBLIC.digest().hex())
    fields = json.loads(encoded)

    def changed(**changes: Any) -> str:
        whole = {**fields, **changes}
        return json.dumps(whole, sort_keys=True, separators=(",", ":"))

    for clip in (0.25, 1e-05, 1.5e-07, 8191.0):
        found = changed(clip=clip)
        digest = sha256(found.encode()).hexdigest()
        yield _case("valid", f"a clip of {clip}", encoded=found, sha256=digest)
    narrow = _PUBLIC_16.encode().decode()
    yield _case("valid", "words of 16 bits", encoded=narrow, sha256=_PUBLIC_16.digest().hex())
    manifest = sha256(b"a manifest").hexdigest()
    signed = changed(manifest=manifest, kind="train", number=0)
    evaluation = {"clip": 8191.0, "max_examples": 1, "max_staleness": 1, "weighting": "none"}
    evaluated = changed(**evaluation, manifest=manifest, kind="evaluate", number=7)
    for name, found in (("of a signed task", signed), ("of its evaluation", evaluated)):
        yield _case("valid", name, encoded=found, sha256=sha256(found.encode()).hexdigest())
    for name, text in (
        ("a manifest without a kind", changed(manifest=manifest, number=0)),
        ("a kind without a manifest", changed(kind="train")),
        ("an empty manifest", changed(manifest="", kind="", number=0)),
        ("a manifest in capitals", changed(manifest=manifest.upper(), kind="train", number=0)),
        ("an unknown kind", changed(manifest=manifest, kind="test", number=0)),
        ("training with the kind of an evaluation", signed.replace('"train"', '"evaluate"')),
        ("training with a number", signed.replace('"number":0', '"number":1')),
        ("spaces", json.dumps(fields, sort_keys=True)),
        ("keys that are not sorted", _json(dict(reversed(fields.items())))),
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
        yield _case("invalid", name, encoded=text)


def _check_public_parameters(case: Case) -> object:
    return {"sha256": PublicParameters.decode(case["encoded"].encode()).digest().hex()}


def _masks() -> Iterator[Case]:
    for seed in (bytes(16), bytes(range(16)), _SEED):
        yield _case("valid", "a seed", seed=seed.hex(), words=sum_masks([seed], 9).tolist())
    for size in (0, 15, 17, 32):
        yield _case("invalid", f"a seed of {size} bytes", seed=bytes(size).hex(), words=[])


def _check_mask(case: Case) -> object:
    return {"words": sum_masks([bytes.fromhex(case["seed"])], len(case["words"])).tolist()}


def _an_offer(
    index: int = 7, expires: int = NOW + 3600, agreed: PublicParameters = _PUBLIC
) -> Offer:
    key = channel.public_key(_OFFER_KEY)
    return Offer.signed(_IDENTITY, agreed.digest(), index, key, expires)


def _offers() -> Iterator[Case]:
    digest, good = _PUBLIC.digest(), _an_offer().encode()
    known = {"identity": _IDENTITY_KEY.hex(), "parameters_sha256": digest.hex(), "now": NOW}
    yield _case("valid", "an offer", offer=good.hex(), **known)
    yield _case("valid", "in its last second", offer=good.hex(), **{**known, "now": NOW + 3599})
    for name, offer in (
        ("another index", _flipped(good, 7)),
        ("another expiry", _flipped(good, 15)),
        ("another key", _flipped(good, 20)),
        ("another signature", _flipped(good, 60)),
        ("too short", good[:-1]),
        ("too long", good + b"\0"),
        ("empty", b""),
    ):
        yield _case("invalid", name, offer=offer.hex(), **known)
    for name, change in (
        ("expired", {"now": NOW + 3600}),
        ("of other parameters", {"parameters_sha256": _flipped(digest, 3).hex()}),
        ("of another TSA", {"identity": _flipped(_IDENTITY_KEY, 3).hex()}),
        ("of a TSA whose key is no point", {"identity": "ff" * 32}),
    ):
        yield _case("invalid", name, offer=good.hex(), **{**known, **change})


def _check_offer(case: Case) -> object:
    offer = Offer.decode(bytes.fromhex(case["offer"]))
    digest = bytes.fromhex(case["parameters_sha256"])
    offer.verify(bytes.fromhex(case["identity"]), digest, case["now"])
    return {}


def _sealed_seeds() -> Iterator[Case]:
    offer = _an_offer()
    bound = offer.context(_PUBLIC.digest())
    good = channel.seal(_SEED, _SEAL_KEY, offer.key, bound)
    known = {"offer_private_key": _OFFER_KEY.hex(), "context": bound.hex()}
    yield _case(
        "valid",
        "a sealed seed",
        seal_private_key=_SEAL_KEY.hex(),
        sealed=good.hex(),
        seed=_SEED.hex(),
        **known,
    )
    other = context(_PUBLIC.digest(), 8, offer.key, offer.expires)
    for name, sealed in (
        ("a changed key", _flipped(good, 0)),
        ("a changed seed", _flipped(good, 33)),
        ("a changed tag", _flipped(good, -1)),
        ("too short", good[:-1]),
        ("too long", good + b"\0"),
        ("a point of low order", bytes(32) + good[32:]),
        ("the point one, of low order", b"\1" + bytes(31) + good[32:]),
        ("a point of 2^255 - 19", (2**255 - 19).to_bytes(32, "little") + good[32:]),
        ("a point above 2^255", good[:31] + bytes([good[31] | 0x80]) + good[32:]),
        ("sealed for another index", channel.seal(_SEED, _SEAL_KEY, offer.key, other)),
    ):
        yield _case("invalid", name, sealed=sealed.hex(), **known)


def _check_sealed_seed(case: Case) -> object:
    private, bound = bytes.fromhex(case["offer_private_key"]), bytes.fromhex(case["context"])
    seed, _ = channel.unseal(bytes.fromhex(case["sealed"]), private, bound)
    return {"seed": seed.hex()}


def _masked_updates() -> Iterator[Case]:
    known = {
        "parameters": _PUBLIC.encode().decode(),
        "identity": _IDENTITY_KEY.hex(),
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
        case = _case("valid", name, **known, **{**training, **change})
        yield {**case, **_masked(case)}
    narrow = {
        "parameters": _PUBLIC_16.encode().decode(),
        "offer": _an_offer(agreed=_PUBLIC_16).encode().hex(),
    }
    for name, change in valid:
        case = _case("valid", f"{name}, in 16 bits", **{**known, **narrow, **training, **change})
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
        yield _case("invalid", name, **{**known, **training, **change})


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


# -- evidence and the log -------------------------------------------------------------------


def _evidence() -> Iterator[Case]:
    digest = _PUBLIC.digest()
    bound = report_data(_IDENTITY_KEY, digest)
    quote, collateral = make_quote(_MEASUREMENT, bound), make_collateral(NOW)
    known = {
        "platform": "software",
        "quote": quote.hex(),
        "collateral": collateral.decode(),
        "identity": _IDENTITY_KEY.hex(),
        "parameters_sha256": digest.hex(),
        "now": NOW,
    }
    yield _case("valid", "software evidence", **known, mrenclave=_MEASUREMENT.hex())
    debug = make_quote(_MEASUREMENT, bound, debug=True)
    other = make_quote(_MEASUREMENT, report_data(_IDENTITY_KEY, bytes(32)))
    old_tcb = make_collateral(NOW, tcb_status="OutOfDate").decode()
    for name, change in (
        ("another version", {"quote": _flipped(quote, 0).hex()}),
        ("a changed measurement", {"quote": _flipped(quote, 120).hex()}),
        ("changed report data", {"quote": _flipped(quote, 370).hex()}),
        ("a changed signature", {"quote": _flipped(quote, 440).hex()}),
        ("a changed attestation key", {"quote": _flipped(quote, 510).hex()}),
        ("a changed report of the quoting enclave", {"quote": _flipped(quote, 570).hex()}),
        ("a changed certificate", {"quote": _flipped(quote, 1500).hex()}),
        ("cut short", {"quote": quote[:1000].hex()}),
        ("empty", {"quote": ""}),
        ("a debug enclave", {"quote": debug.hex()}),
        ("of other parameters", {"quote": other.hex()}),
        ("another identity", {"identity": _flipped(_IDENTITY_KEY, 1).hex()}),
        ("collateral that has expired", {"now": NOW + 400 * 86400}),
        ("a revoked processor", {"collateral": make_collateral(NOW, revoked=True).decode()}),
        ("an old TCB", {"collateral": old_tcb}),
        ("collateral that is not JSON", {"collateral": collateral.decode()[:-1]}),
        ("collateral of another signer", {"collateral": _other_signature(collateral)}),
        ("software evidence that claims to be SGX", {"platform": "sgx"}),
        ("an unknown platform", {"platform": "paper"}),
    ):
        yield _case("invalid", name, **{**known, **change})


def _other_signature(collateral: bytes) -> str:
    fields = json.loads(collateral)
    first = fields["tcb_info_signature"]
    fields["tcb_info_signature"] = ("1" if first[0] == "0" else "0") + first[1:]
    return json.dumps(fields)


def _check_evidence(case: Case) -> object:
    policy = DevicePolicy(
        log_key=str(_LOG_KEY.verifier),
        platforms=("sgx", "software"),
        allow_insecure_software=True,
        allow_smt=True,
    )
    quote, collateral = bytes.fromhex(case["quote"]), case["collateral"].encode()
    quoted = verify_quote(Evidence(case["platform"], quote, collateral), policy, case["now"])
    digest = bytes.fromhex(case["parameters_sha256"])
    verify_report_data(quoted, bytes.fromhex(case["identity"]), digest)
    return {"mrenclave": quoted.registers["mrenclave"]}


def _checkpoints() -> Iterator[Case]:
    checkpoint = Checkpoint(_LOG_KEY.name, 5, sha256(b"root").digest())
    good = sign_checkpoint(checkpoint, _LOG_KEY)
    cosigned = good + _WITNESS.signature_line(checkpoint.text, NOW - 60).encode()
    known = {"log_key": str(_LOG_KEY.verifier), "witness": None, "now": NOW}
    found = {"size": 5, "root": checkpoint.root.hex()}
    yield _case("valid", "a checkpoint", note=good.decode(), **known, **found)
    witnessed = {**known, "witness": str(_WITNESS.verifier)}
    yield _case("valid", "with a cosignature", note=cosigned.decode(), **witnessed, **found)
    stranger = SignerKey(_LOG_KEY.name, bytes([9]) * 32, LOG_SIGNATURE)
    text = good.decode()
    for name, note, setting in (
        ("signed by another key", sign_checkpoint(checkpoint, stranger).decode(), known),
        ("another size", text.replace("\n5\n", "\n6\n"), known),
        ("a size with a leading zero", text.replace("\n5\n", "\n05\n"), known),
        ("another origin", text.replace("example.org/log\n5", "example.com/log\n5"), known),
        ("without a signature", text.partition("\u2014")[0], known),
        ("without its empty line", text.replace("\n\n", "\n"), known),
        ("without its last line break", text[:-1], known),
        ("with carriage returns", text.replace("\n", "\r\n"), known),
        ("without the required cosignature", text, witnessed),
        ("empty", "", known),
    ):
        yield _case("invalid", name, note=note, **setting)


def _check_checkpoint(case: Case) -> object:
    witness = case["witness"]
    witnesses = () if witness is None else (VerifierKey.parse(witness),)
    policy = LogPolicy(VerifierKey.parse(case["log_key"]), witnesses, len(witnesses))
    found = open_checkpoint(case["note"].encode(), policy, case["now"])
    return {"size": found.size, "root": found.root.hex()}


class _Leaves:
    """The hashes of a small tree, for `papaya/verifiable_log/merkle.py`."""

    def __init__(self, size: int) -> None:
        self.hashes = [leaf_hash(f"entry {index}".encode()) for index in range(size)]

    def __call__(self, level: int, index: int) -> bytes:
        if level == 0:
            return self.hashes[index]
        return node_hash(self(level - 1, 2 * index), self(level - 1, 2 * index + 1))


def _inclusion_proofs() -> Iterator[Case]:
    for size, index in ((1, 0), (5, 0), (5, 4), (8, 3), (11, 10)):
        nodes = _Leaves(size)
        root, proof = tree_root(nodes, size), inclusion_proof(nodes, index, size)
        known: Case = {
            "leaf": nodes.hashes[index].hex(),
            "index": index,
            "size": size,
            "proof": [item.hex() for item in proof],
            "root": root.hex(),
        }
        what = f"leaf {index} of {size}"
        yield _case("valid", what, **known)
        changes: list[tuple[str, Case]] = [
            ("another leaf", {"leaf": _flipped(nodes.hashes[index], 0).hex()}),
            ("another root", {"root": _flipped(root, 31).hex()}),
            ("an index beyond the tree", {"index": size}),
            ("a proof that is too long", {"proof": [*known["proof"], "00" * 32]}),
            ("a hash of 31 bytes", {"leaf": known["leaf"][:-2]}),
        ]
        if proof:
            changes.append(("a proof that is too short", {"proof": known["proof"][:-1]}))
            changes.append(("a changed proof", {"proof": ["00" * 32, *known["proof"][1:]]}))
        for name, change in changes:
            yield _case("invalid", f"{what}: {name}", **{**known, **change})


def _check_inclusion(case: Case) -> object:
    proof = [bytes.fromhex(item) for item in case["proof"]]
    leaf, root = bytes.fromhex(case["leaf"]), bytes.fromhex(case["root"])
    verify_inclusion(leaf, case["index"], case["size"], proof, root)
    return {}


def _consistency_proofs() -> Iterator[Case]:
    for old, new in ((1, 2), (3, 7), (4, 8), (6, 11)):
        nodes = _Leaves(new)
        known: Case = {
            "old_size": old,
            "new_size": new,
            "proof": [item.hex() for item in consistency_proof(nodes, old, new)],
            "old_root": tree_root(nodes, old).hex(),
            "new_root": tree_root(nodes, new).hex(),
        }
        what = f"from {old} to {new}"
        yield _case("valid", what, **known)
        for name, change in (
            ("another old root", {"old_root": "00" * 32}),
            ("another new root", {"new_root": "00" * 32}),
            ("no proof", {"proof": []}),
            ("a proof that is too long", {"proof": [*known["proof"], "00" * 32]}),
            ("a log that shrank", {"old_size": new, "new_size": old}),
        ):
            yield _case("invalid", f"{what}: {name}", **{**known, **change})


def _check_consistency(case: Case) -> object:
    proof = [bytes.fromhex(item) for item in case["proof"]]
    roots = bytes.fromhex(case["old_root"]), bytes.fromhex(case["new_root"])
    verify_consistency(case["old_size"], case["new_size"], proof, *roots)
    return {}


def _records() -> Iterator[Case]:
    measured = _MEASUREMENT.hex()
    record = Record(
        measured,
        {"software": {"mrenclave": measured}, "sgx": {"mrenclave": "0a" * 32}},
        "https://example.org/papaya",
        "0b" * 20,
        "papaya tsa build",
    )
    good = record.encode().decode()
    yield _case("valid", "a record", record=good, leaf=leaf_hash(good.encode()).hex())
    for name, text in (
        ("spaces", good.replace(":", ": ")),
        ("another format", good.replace("release/v1", "release/v2")),
        ("a hash in capitals", good.replace("0a" * 32, "0A" * 32)),
        ("a hash that is too short", good.replace("0a" * 32, "0a" * 31)),
        ("no measurements", good.replace(good[good.index("{", 1) : good.index(',"recipe')], "{}")),
        ("an unknown platform", good.replace('"sgx"', '"paper"')),
        ("a software measurement of another artifact", good.replace(measured, "00" * 32, 1)),
        ("a revision that is too short", good.replace("0b" * 20, "0b" * 19)),
        ("an unknown field", good[:-1] + ',"zz":1}'),
        ("not JSON", good[:-1]),
        ("a list", f"[{good}]"),
    ):
        yield _case("invalid", name, record=text)


def _check_record(case: Case) -> object:
    raw = case["record"].encode()
    Record.decode(raw)
    return {"leaf": leaf_hash(raw).hex()}


FORMATS: dict[str, tuple[Callable[[], Iterator[Case]], Callable[[Case], object]]] = {
    "answers": (
        lambda: _messages(_ANSWERS),
        lambda case: wire.to_device.parse(case["body"].encode()),
    ),
    "requests": (
        lambda: _messages(_REQUESTS),
        lambda case: wire.from_device.parse(case["body"].encode()),
    ),
    "parameters_files": (_parameters_files, _check_parameters_file),
    "updates": (_updates, _check_update),
    "evaluations": (_evaluations, _check_evaluation),
    "public_parameters": (_public_parameters, _check_public_parameters),
    "masks": (_masks, _check_mask),
    "offers": (_offers, _check_offer),
    "sealed_seeds": (_sealed_seeds, _check_sealed_seed),
    "masked_updates": (_masked_updates, _masked),
    "evidence": (_evidence, _check_evidence),
    "checkpoints": (_checkpoints, _check_checkpoint),
    "inclusion_proofs": (_inclusion_proofs, _check_inclusion),
    "consistency_proofs": (_consistency_proofs, _check_consistency),
    "records": (_records, _check_record),
}
