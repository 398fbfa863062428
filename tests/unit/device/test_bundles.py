"""Bundles on a device: what is accepted, what is refused, what survives a restart."""

from __future__ import annotations

import pytest
from msgspec import structs

from papaya.bundle import archive
from papaya.bundle.manifest import DAY_S, LEASE_S, BlobRef, TaskManifest
from papaya.bundle.owner import KeyRevocation, KeySuccessor, OwnerKeys, key_id
from papaya.errors import ProtocolError
from tests.unit.bundle.builders import (
    KEY,
    NEXT,
    NOW,
    PIN,
    RECOVERY,
    STRANGER,
    a_key,
    a_manifest,
    public,
)
from tests.unit.device.bundle_server import POLICY, Open, Server, a_head, fetch, refusal, run_of


def test_a_bundle_is_fetched_verified_and_unpacked(opened: Open, server: Server) -> None:
    store, manifest = opened(), a_manifest()
    key = server.offer(manifest)
    assert store.lacks(key, NOW)
    bundle = fetch(store, server, key)
    assert not store.lacks(key, NOW)
    assert bundle.manifest == manifest
    assert (bundle.program / "task.py").read_bytes() == b"task = 1\n"
    assert (bundle.program / "tools" / "words.py").read_bytes() == b"words = ()\n"
    assert store.of_run(run_of(manifest)) == bundle


def test_the_program_is_downloaded_once(opened: Open, server: Server) -> None:
    """A second revision with the same program, or a second visit, downloads the head only."""
    store = opened()
    fetch(store, server, server.offer(a_manifest()))
    server.asked.clear()
    second = server.offer(a_manifest(revision=4))
    fetch(store, server, second)
    assert server.asked == [second]
    server.asked.clear()
    fetch(store, server, second)
    assert server.asked == []


def test_a_lease_that_is_over_makes_the_device_ask_again(opened: Open, server: Server) -> None:
    store, manifest = opened(), a_manifest()
    key = server.offer(manifest)
    fetch(store, server, key)
    late = NOW + LEASE_S
    assert store.lacks(key, late)
    assert refusal(store, server, key, late).reason == "expired"
    renewed = server.offer(manifest, a_head(manifest, issued=late))
    assert fetch(store, server, renewed, late).manifest == manifest


@pytest.mark.parametrize(
    ("manifest", "reason", "words"),
    [
        (a_manifest(engine="executorch"), "not_allowed", "engine executorch"),
        (
            structs.replace(
                a_manifest(), examples=structs.replace(a_manifest().examples, collection="mail")
            ),
            "not_allowed",
            "collection 'mail'",
        ),
        (a_manifest(training_timeout_s=601.0), "not_allowed", "601 s of training"),
        (
            a_manifest(client=structs.replace(a_manifest().client, max_examples=1501)),
            "not_allowed",
            "1501 examples",
        ),
        (a_manifest(program=BlobRef("0" * 64, 5)), "wrong_bytes", "not the bytes"),
        (
            a_manifest(program=BlobRef("0" * 64, 1 << 26 | 1)),
            "not_allowed",
            "a download of 67108865",
        ),
        (a_manifest(program=BlobRef("0" * 64, 1 << 25)), "not_allowed", "the program has"),
        (a_manifest(run=int((NOW + 2 * DAY_S) * 1000)), "too_far_ahead", "in the future"),
    ],
)
def test_a_bundle_that_must_not_be_used_is_refused(
    opened: Open, server: Server, manifest: TaskManifest, reason: str, words: str
) -> None:
    store = opened()
    key = server.offer(manifest)
    error = refusal(store, server, key)
    assert (error.reason, words in str(error)) == (reason, True)
    assert store.lacks(key, NOW)
    assert store.of_run(run_of(manifest)) is None


def test_a_bundle_of_a_stranger_is_refused(opened: Open, server: Server) -> None:
    manifest = a_manifest()
    key = server.offer(manifest, a_head(manifest, STRANGER))
    error = refusal(opened(), server, key)
    assert error.reason == "unknown_owner"
    assert "--owners" in error.hint


def test_a_bundle_of_another_run_does_not_fit(opened: Open, server: Server) -> None:
    """A server cannot offer one task of an owner and deliver another."""
    manifest, other = a_manifest(), a_manifest(task="mail")
    key = server.offer(manifest, a_head(other))
    assert refusal(opened(), server, key).reason == "rolled_back"


def test_an_older_revision_is_refused_also_after_a_restart(opened: Open, server: Server) -> None:
    store = opened()
    old = server.offer(a_manifest(revision=3))
    fetch(store, server, server.offer(a_manifest(revision=4)))
    assert refusal(store, server, old).reason == "rolled_back"
    store.close()
    assert refusal(opened(), server, old).reason == "rolled_back"


def test_a_policy_that_refuses_leaves_no_mark(opened: Open, server: Server) -> None:
    """What a device does not accept must not keep it from what it would accept."""
    store = opened()
    refused = server.offer(a_manifest(revision=900, training_timeout_s=601.0))
    assert refusal(store, server, refused).reason == "not_allowed"
    assert fetch(store, server, server.offer(a_manifest())).manifest.revision == 3


def test_a_successor_is_remembered_and_the_recovery_key_resets_marks(
    opened: Open, server: Server
) -> None:
    owner, new = PIN.owner, public(NEXT)
    succession = KeySuccessor(owner, key_id(new), new)
    store = opened()
    latest = a_manifest(revision=4)
    fetch(store, server, server.offer(latest, a_head(latest, NEXT, (succession.sign(KEY),))))
    earlier = a_manifest(revision=3)
    # The old key no longer speaks for its owner, also for a device that restarts.
    store.close()
    store = opened()
    assert refusal(store, server, server.offer(latest)).reason == "unknown_owner"
    recovered = a_head(earlier, NEXT, (succession.sign(RECOVERY),))
    assert fetch(store, server, server.offer(earlier, recovered)).manifest == earlier


def test_refused_bundles_are_remembered(opened: Open) -> None:
    store = opened()
    assert store.refused(NOW) == {}
    for number in range(300):
        store.refuse(f"digits@{number:08x}", "not_allowed", NOW + number, "too many")
    assert len(store.refused(NOW)) == 32
    assert next(iter(store.refused(NOW))) == f"digits@{299:08x}", "the newest first"
    store.close()
    assert opened().refused(NOW) == {}, "a new policy may allow it"


def test_a_reason_that_may_pass_excludes_a_bundle_for_an_hour(opened: Open) -> None:
    store = opened()
    store.refuse("digits@00000001", "expired", NOW, "digits: the lease ended")
    store.refuse("digits@00000002", "not_allowed", NOW, "digits: not allowed")
    assert len(store.refused(NOW + 3599)) == 2
    assert store.refused(NOW + 3600) == {"digits@00000002": "digits: not allowed"}


def test_a_replaced_run_and_an_old_lease_are_not_trained_whatever_a_server_says(
    opened: Open, server: Server
) -> None:
    store, first = opened(), a_manifest()
    second = a_manifest(run=first.run + 1, revision=1)
    key = server.offer(first)
    fetch(store, server, key)
    assert store.why_not(run_of(first), NOW) == ""
    assert "lease" in store.why_not(run_of(first), NOW + LEASE_S)
    fetch(store, server, server.offer(second))
    assert "replaced" in store.why_not(run_of(first), NOW)
    assert refusal(store, server, key).reason == "rolled_back"
    assert store.why_not("next-word", NOW) == "", "a task file of this device"


def test_statements_of_strangers_do_not_count(opened: Open, server: Server) -> None:
    """A server adds revocations of random keys, so that no room is left for the owner's own."""
    store, manifest = opened(), a_manifest()
    strangers = tuple(
        KeyRevocation(key_id(public(key))).sign(key) for key in map(a_key, range(100, 164))
    )
    fetch(store, server, server.offer(manifest, a_head(manifest, statements=strangers)))
    new = public(NEXT)
    succession = KeySuccessor(PIN.owner, key_id(new), new).sign(KEY)
    later = a_manifest(revision=4)
    found = fetch(store, server, server.offer(later, a_head(later, NEXT, (succession,))))
    assert found.manifest == later


def test_a_revoked_owner_does_not_get_in_the_way_of_another(opened: Open, server: Server) -> None:
    other = structs.replace(POLICY, key=public(STRANGER).hex(), recovery=None)
    store, manifest = opened(other, POLICY), a_manifest()
    revoked = KeyRevocation(key_id(public(STRANGER))).sign(STRANGER)
    key = server.offer(manifest, a_head(manifest, statements=(revoked,)))
    assert fetch(store, server, key).manifest == manifest
    foreign = a_manifest(owner=key_id(public(STRANGER)), task="mail")
    assert refusal(store, server, server.offer(foreign, a_head(foreign, STRANGER))).reason == (
        "revoked"
    )


def test_a_program_that_was_damaged_on_disk_is_unpacked_again(opened: Open, server: Server) -> None:
    store = opened()
    key = server.offer(a_manifest())
    task_file = fetch(store, server, key).program / "task.py"
    task_file.write_bytes(b"")
    store.close()
    assert (fetch(opened(), server, key).program / "task.py").read_bytes() == b"task = 1\n"


def test_the_mark_never_goes_back_when_two_processes_share_a_folder(
    opened: Open, server: Server
) -> None:
    one, other = opened(), opened()
    old = server.offer(a_manifest(revision=3))
    fetch(one, server, server.offer(a_manifest(revision=4)))
    keys = OwnerKeys(PIN)
    other._set_mark(keys, a_manifest(revision=3))
    assert refusal(other, server, old).reason == "rolled_back"


def test_a_broken_download_leaves_nothing_behind(opened: Open, server: Server) -> None:
    store, manifest = opened(), a_manifest()
    key = server.offer(manifest)
    program = next(key for key in server.blobs if "program" in key)
    kept = server.blobs.pop(program)
    with pytest.raises(ProtocolError, match="no such blob"):
        fetch(store, server, key)
    assert store.lacks(key, NOW)
    server.blobs[program] = kept
    assert fetch(store, server, key).manifest == manifest


def test_a_program_that_is_no_archive_is_refused(opened: Open, server: Server) -> None:
    data = b"PK\x03\x04 not an archive"
    manifest = a_manifest(program=BlobRef(archive.digest(data), len(data)))
    key = server.offer(manifest, program=data)
    assert refusal(opened(), server, key).reason == "encoding"
