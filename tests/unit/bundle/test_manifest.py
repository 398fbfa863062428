"""Manifests and leases: only what the owner signed, only now, never an older one."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from msgspec import UNSET, structs

from papaya.bundle.errors import BundleError
from papaya.bundle.manifest import (
    DAY_S,
    LEASE_S,
    BlobRef,
    Lease,
    Participation,
    RevisionMark,
    SecureTerms,
    TaskManifest,
    run_id,
    verified,
)
from papaya.bundle.owner import OwnerKeys, SignedStatement, decode
from papaya.config import MetricBounds, Staleness, Weighting
from papaya.errors import ConfigError
from papaya.learning.definition import ClientSGD
from tests.unit.bundle.builders import (
    ARCHIVE,
    KEY,
    NOW,
    PIN,
    STRANGER,
    a_lease,
    a_manifest,
    public,
)


def accepted(
    manifest: TaskManifest, mark: RevisionMark | None = None, now: float = NOW
) -> TaskManifest:
    signed, lease = manifest.sign(KEY), a_lease(manifest)
    return verified(OwnerKeys(PIN), signed, lease, mark, now)


def refusal(*arguments: Any) -> str:
    with pytest.raises(BundleError) as raised:
        verified(*arguments)
    return raised.value.reason


def test_a_signed_and_leased_manifest_is_accepted() -> None:
    manifest = a_manifest()
    assert accepted(manifest) == manifest
    assert manifest.model_length == 9


def test_the_encoding_and_the_digest_are_fixed() -> None:
    """Other implementations read these bytes: a change here is a change of the format."""
    manifest = a_manifest()
    fields = {name for name, value in structs.asdict(manifest).items() if value is not UNSET}
    assert list(json.loads(manifest.encode())) == sorted(fields)
    assert manifest.digest == ("734300caf14a051fd93d8e97df57fff336ab25681a8284a4a4c875adb2c7a4d5")


def test_every_value_is_part_of_the_digest() -> None:
    changes: list[dict[str, Any]] = [
        {"task": "other"},
        {"run": 1},
        {"revision": 4},
        {"engine": "executorch"},
        {"engine_version": "2.7"},
        {"program": BlobRef("0" * 64, 1)},
        {"frozen": "0" * 64},
        {"frozen_file": BlobRef("0" * 64, 1)},
        {"frozen_file": BlobRef("1" * 64, 1)},
        {"layout": (("weight", (3, 2)), ("bias", (3,)))},
        {"client": ClientSGD(rate=0.2)},
        {"training_timeout_s": 241.0},
        {"secure": SecureTerms(10, 10)},
        {"clip": 2.0},
        {"max_staleness": 51},
        {"upload_timeout_s": 121.0},
        {"participation": Participation(3600.0, 5, "task")},
        {"participation": Participation(3600.0, None, "run")},
        {"evaluation_clients": 21},
        {"metrics": (MetricBounds("accuracy"),)},
        {"metrics": (MetricBounds("accuracy", 0.0, 2.0),)},
        {"metrics": (MetricBounds("accuracy"), MetricBounds("precision"))},
    ]
    digests = [a_manifest(**change).digest for change in changes]
    assert len({a_manifest().digest, *digests}) == len(changes) + 1


def test_thousands_of_changed_manifests_are_refused() -> None:
    """Whatever is changed, also where the signature itself was recomputed by someone else."""
    rng, manifest = Random(1), a_manifest()
    signed, lease, keys = manifest.sign(KEY), a_lease(manifest), OwnerKeys(PIN)
    still_valid = 0
    for _ in range(3000):
        body = bytearray(signed.body)
        kind = rng.randrange(3)
        place = rng.randrange(len(body))
        if kind == 0:
            body[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del body[place : place + rng.randrange(1, 9)]
        else:
            body[place:place] = rng.randbytes(rng.randrange(1, 9))
        changed = structs.replace(signed, body=bytes(body))
        assert refusal(keys, changed, lease, None, NOW) == "signature"
        with suppress(BundleError):  # most changes are no manifest at all
            forged = decode(TaskManifest, bytes(body)).sign(STRANGER)
            assert refusal(keys, forged, lease, None, NOW) == "signature"
            claimed = structs.replace(forged, key=public(KEY))
            assert refusal(keys, claimed, lease, None, NOW) == "signature"
            still_valid += 1
    assert still_valid > 10


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[" * 5000,
        b"\xff",
        a_manifest().encode() + b" ",
        a_manifest().encode().replace(b'"clip":1.0', b'"clip":1'),
        a_manifest().encode().replace(b'"clip":1.0', b'"clip":1.00'),
        a_manifest().encode().replace(b'"clip":1.0', b'"clip":NaN'),
        a_manifest().encode().replace(b'"clip":1.0', b'"clip":-1.0'),
        a_manifest().encode().replace(b'"clip":1.0', b'"clip":1e999'),
        a_manifest().encode().replace(b'"clip":1.0,', b""),
        a_manifest().encode().replace(b'"clip":1.0', b'"clip":1.0,"clip":1.0'),
        a_manifest().encode().replace(b'"clip":1.0', b'"clip":1.0,"extra":1'),
        a_manifest().encode().replace(b'"task":"digits"', b'"task":"../digits"'),
        a_manifest().encode().replace(b'"rate":0.1', b'"rate":0.0'),
        a_manifest().encode().replace(b'["bias",', b'["weight",'),
        a_manifest().encode().replace(b'"task":"digits"', b'"task":"digit\\u0073"'),
    ],
)
def test_another_encoding_is_refused_although_it_is_signed(body: bytes) -> None:
    signature = KEY.sign(TaskManifest.label + body)
    with pytest.raises(BundleError) as raised:
        TaskManifest.verify(SignedStatement(body, public(KEY), signature))
    assert raised.value.reason == "encoding"


def test_a_signature_of_one_kind_is_not_valid_for_another() -> None:
    lease = a_lease(a_manifest())
    with pytest.raises(BundleError, match="signature is invalid"):
        TaskManifest.verify(lease)


def test_metrics_are_signed_with_their_bounds() -> None:
    manifest = a_manifest(metrics=(MetricBounds("accuracy"), MetricBounds("error", -1.0, 5.0)))
    assert accepted(manifest) == manifest
    assert [metric.name for metric in manifest.metric_bounds] == ["accuracy", "error"]
    assert a_manifest().metric_bounds == ()


@pytest.mark.parametrize(
    "metrics",
    [
        b"[]",
        b'[{"name":"accuracy"}]',
        b'[{"high":1.0,"low":0.0,"name":"loss"}]',
        b'[{"high":1.0,"low":0.0,"name":"Accuracy"}]',
        b'[{"high":1.0,"low":1.0,"name":"accuracy"}]',
        b"[%s]" % b",".join([b'{"high":1.0,"low":0.0,"name":"accuracy"}'] * 2),
        b"[%s]" % b",".join(b'{"high":1.0,"low":0.0,"name":"m%d"}' % n for n in range(17)),
    ],
)
def test_invalid_metrics_are_refused_although_they_are_signed(metrics: bytes) -> None:
    good = a_manifest(metrics=(MetricBounds("accuracy"),)).encode()
    body = good.replace(b'[{"high":1.0,"low":0.0,"name":"accuracy"}]', metrics)
    assert body != good
    with pytest.raises(BundleError) as raised:
        TaskManifest.verify(SignedStatement(body, public(KEY), KEY.sign(TaskManifest.label + body)))
    assert raised.value.reason == "encoding"


def test_a_secure_manifest_needs_a_clip() -> None:
    with pytest.raises(ConfigError, match="a secure task needs one"):
        a_manifest(secure=SecureTerms(10, 10), clip=None)


@pytest.mark.parametrize(
    ("issued", "reason"),
    [
        (NOW - LEASE_S, "expired"),
        (NOW - LEASE_S + 1, None),
        (NOW + 3600, None),
        (NOW + 3601, "expired"),
    ],
)
def test_a_lease_is_valid_for_its_time(issued: float, reason: str | None) -> None:
    manifest = a_manifest()
    lease = a_lease(manifest, issued=issued)
    arguments = (OwnerKeys(PIN), manifest.sign(KEY), lease, None, NOW)
    if reason is None:
        assert verified(*arguments) == manifest
    else:
        assert refusal(*arguments) == reason


def test_a_lease_of_another_manifest_or_owner_is_refused() -> None:
    manifest, keys = a_manifest(), OwnerKeys(PIN)
    other = a_lease(a_manifest(revision=4))
    assert refusal(keys, manifest.sign(KEY), other, None, NOW) == "expired"
    foreign = a_lease(manifest, key=STRANGER)
    assert refusal(keys, manifest.sign(KEY), foreign, None, NOW) == "signature"
    forever = Lease(manifest.digest, NOW, float("inf"))
    with pytest.raises(BundleError):
        Lease.verify(forever.sign(KEY))


def test_an_older_run_or_revision_is_refused() -> None:
    """A server cannot bring back what the owner has replaced."""
    old, new = a_manifest(revision=3), a_manifest(revision=4)
    mark = RevisionMark(new.run, new.revision)
    assert accepted(new, mark) == new
    signed, lease = old.sign(KEY), a_lease(old)
    assert refusal(OwnerKeys(PIN), signed, lease, mark, NOW) == "rolled_back"
    earlier = a_manifest(run=new.run - 1, revision=900)
    signed, lease = earlier.sign(KEY), a_lease(earlier)
    assert refusal(OwnerKeys(PIN), signed, lease, mark, NOW) == "rolled_back"
    later = a_manifest(run=new.run + 1, revision=1)
    assert accepted(later, mark) == later


def test_a_manifest_far_ahead_is_refused() -> None:
    """One bad signature must not bar the owner's next thousand revisions."""
    keys = OwnerKeys(PIN)
    ahead = a_manifest(run=int((NOW + DAY_S) * 1000) + 1)
    assert refusal(keys, ahead.sign(KEY), a_lease(ahead), None, NOW) == "too_far_ahead"
    today = a_manifest(run=int((NOW + DAY_S) * 1000))
    assert accepted(today) == today
    mark = RevisionMark(a_manifest().run, 3)
    many = a_manifest(revision=1004)
    assert refusal(keys, many.sign(KEY), a_lease(many), mark, NOW) == "too_far_ahead"
    assert accepted(a_manifest(revision=1003), mark).revision == 1003


def test_blobs_are_compared_before_anyone_parses_them() -> None:
    reference = a_manifest().program
    reference.check(ARCHIVE, "program")
    for wrong in (ARCHIVE[:-1], ARCHIVE + b"x", ARCHIVE[:-1] + b"x", b""):
        with pytest.raises(BundleError, match="not the bytes that the owner signed"):
            reference.check(wrong, "program")


def test_runs_have_their_own_ids() -> None:
    ids = {
        run_id(owner, task, run)
        for owner in ("a" * 32, "b" * 32)
        for task in ("digits", "d" * 64)
        for run in (1, 2)
    }
    assert len(ids) == 8
    assert all(len(found) <= 53 for found in ids)


def test_weights_and_staleness_functions_are_signed() -> None:
    """Left out of the encoding if they are the defaults: earlier manifests keep their digests."""
    ordinary = a_manifest()
    assert b"weight_cap" not in ordinary.encode()
    assert b'"staleness"' not in ordinary.encode()
    chosen = a_manifest(
        weighting="capped", weight_cap=20, staleness=Staleness("hinge", slope=0.5, grace=3)
    )
    assert accepted(chosen) == chosen
    assert chosen.digest != ordinary.digest
    assert chosen.weights == Weighting("capped", 20)
    assert a_manifest(weighting="equal").weights == Weighting("equal")
    assert ordinary.weights is UNSET


@pytest.mark.parametrize(
    "changes",
    [
        {"weighting": "capped"},
        {"weight_cap": 20},
        {"weighting": "equal", "weight_cap": 20},
        {"staleness": Staleness()},
    ],
)
def test_weights_that_could_be_said_in_two_ways_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        a_manifest(**changes)


def test_a_program_cannot_be_signed_for_bfloat16() -> None:
    half = ClientSGD(rate=0.1, precision="bfloat16")
    assert a_manifest(client=half).client == half
    with pytest.raises(ConfigError, match=r"client\.precision"):
        a_manifest(client=half, engine="executorch")


@pytest.mark.parametrize("bits", [8, 16])
def test_fewer_bits_are_part_of_the_digest(bits: int) -> None:
    assert a_manifest(upload_bits=bits).digest != a_manifest().digest
