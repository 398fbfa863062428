"""Bundles on a device: what is accepted, what is refused, what survives a restart."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from papaya.bundle import archive
from papaya.bundle.errors import BundleError
from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import DAY_S, LEASE_S, BlobRef, Participation, TaskManifest, run_id
from papaya.bundle.owner import (
    KeyRevocation,
    KeySuccessor,
    OwnerKeys,
    SignedStatement,
    key_id,
)
from papaya.client.client import Client
from papaya.client.history import History
from papaya.client.work import Answered, Download, Downloaded, Remember, Trained
from papaya.config import DeviceConfig
from papaya.device.bundles import Bundle, BundleStore, VisitBundles
from papaya.device.download import Downloads, DownloadsFrom
from papaya.device.owners import OwnerPolicy, parse_owners
from papaya.device.selectors import open_session
from papaya.errors import ConfigError, OperatorError, ProtocolError
from papaya.learning.definition import ClientSGD
from papaya.learning.frozen_file import FrozenTensor, encode_frozen, map_frozen
from papaya.messages.base import BlobKey
from papaya.messages.participation import Joined, UploadGranted
from papaya.messages.selection import Accepted, Capabilities
from tests.unit.bundle.builders import (
    ARCHIVE,
    KEY,
    NEXT,
    NOW,
    PIN,
    RECOVERY,
    STRANGER,
    a_key,
    a_lease,
    a_manifest,
    public,
)
from tests.unit.device.fake_selector import raw, serving
from tests.unit.device.test_download import breaking

POLICY = OwnerPolicy(
    key=public(KEY).hex(),
    recovery=public(RECOVERY).hex(),
    collections=("digits",),
    engines=("torch",),
)


def run_of(manifest: TaskManifest) -> str:
    return run_id(manifest.owner, manifest.task, manifest.run)


def a_head(
    manifest: TaskManifest,
    key: Ed25519PrivateKey = KEY,
    statements: tuple[SignedStatement, ...] = (),
    issued: float = NOW,
) -> bytes:
    lease = a_lease(manifest, key, issued)
    program = f"{run_of(manifest)}/0/program-0-{manifest.program.sha256[:32]}"
    frozen = "" if manifest.frozen_blob is None else frozen_key(manifest)
    return BundleHead(manifest.sign(key), lease, program, statements, frozen).encode()


def frozen_key(manifest: TaskManifest) -> BlobKey:
    assert manifest.frozen_blob is not None
    return f"{run_of(manifest)}/0/frozen-0-{manifest.frozen_blob.sha256[:32]}"


class Server:
    """Passes bundles on. `blobs` are what it answers, by key."""

    def __init__(self) -> None:
        self.blobs: dict[BlobKey, bytes] = {}
        self.asked: list[BlobKey] = []

    def offer(
        self, manifest: TaskManifest, head: bytes | None = None, program: bytes = ARCHIVE
    ) -> BlobKey:
        data = a_head(manifest) if head is None else head
        key = f"{run_of(manifest)}/0/bundle-{manifest.revision}-{archive.digest(data)[:32]}"
        self.blobs[key] = data
        self.blobs[f"{run_of(manifest)}/0/program-0-{manifest.program.sha256[:32]}"] = program
        return key

    async def blob(self, key: BlobKey, limit: int) -> bytes:
        self.asked.append(key)
        if key not in self.blobs:
            raise ProtocolError(f"no such blob: {key}")
        assert len(self.blobs[key]) <= limit or "bundle" not in key
        return self.blobs[key]

    async def file(self, key: BlobKey, limit: int, path: Path) -> None:
        data = await self.blob(key, limit)
        with path.open("wb") as file:
            file.write(data)


@pytest.fixture
def server() -> Server:
    return Server()


Open = Callable[..., BundleStore]


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Open:
    def open_store(*policies: OwnerPolicy, **settings: Any) -> BundleStore:
        chosen = {policy.pin.owner: policy for policy in policies or (POLICY,)}
        store = BundleStore(tmp_path / "bundles", chosen, **settings)
        request.addfinalizer(store.close)
        return store

    return open_store


def fetch(store: BundleStore, server: Server, key: BlobKey, now: float = NOW) -> Bundle:
    return asyncio.run(store.fetch(key, server, anything, now))


async def anything(_: Bundle) -> None:
    """A device that can run every program."""


def refusal(store: BundleStore, server: Server, key: BlobKey, now: float = NOW) -> BundleError:
    with pytest.raises(BundleError) as raised:
        fetch(store, server, key, now)
    return raised.value


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


FROZEN = encode_frozen(
    {"base": FrozenTensor("F32", (2, 500), np.arange(1000, dtype="<f4").view(np.uint8))}
)


def with_frozen(data: bytes = FROZEN, **changes: Any) -> TaskManifest:
    return a_manifest(frozen_file=BlobRef(archive.digest(data), len(data)), **changes)


def offer_frozen(server: Server, manifest: TaskManifest, data: bytes = FROZEN) -> BlobKey:
    server.blobs[frozen_key(manifest)] = data
    return server.offer(manifest)


def test_frozen_tensors_are_a_blob_of_their_own_and_downloaded_once(
    opened: Open, server: Server
) -> None:
    """A revision that changes the rate, a new run and a restart download the head only."""
    store = opened()
    bundle = fetch(store, server, offer_frozen(server, with_frozen()))
    assert bundle.frozen is not None
    assert map_frozen(bundle.frozen)["base"].shape == (2, 500)
    assert [key.split("/")[2].split("-")[0] for key in server.asked] == [
        *("bundle", "program", "frozen")
    ]
    later = [
        with_frozen(revision=4, client=ClientSGD(rate=0.05)),
        with_frozen(run=int(NOW * 1000), revision=1),
    ]
    for manifest in later:
        server.asked.clear()
        head = offer_frozen(server, manifest)
        assert fetch(store, server, head).frozen == bundle.frozen
        assert server.asked == [head]
    server.asked.clear()
    head = offer_frozen(server, later[-1])
    fetch(opened(), server, head)
    assert server.asked == [head]


@pytest.mark.parametrize(
    "wrong",
    [
        FROZEN[:-1],
        FROZEN + b"x",
        bytes([*FROZEN[:-1], FROZEN[-1] ^ 1]),
        encode_frozen({}),
        ARCHIVE,
    ],
    ids=["truncated", "longer", "flipped", "another file", "the program"],
)
def test_other_frozen_tensors_than_the_signed_ones_are_refused(
    opened: Open, server: Server, tmp_path: Path, wrong: bytes
) -> None:
    store, manifest = opened(), with_frozen()
    key = offer_frozen(server, manifest, wrong)
    error = refusal(store, server, key)
    assert (error.reason, str(error)) == (
        "wrong_bytes",
        "frozen tensors: not the bytes that the owner signed",
    )
    assert store.lacks(key, NOW)
    assert list((tmp_path / "bundles" / "parts").iterdir()) == []
    assert fetch(store, server, offer_frozen(server, manifest)).frozen is not None


def test_frozen_tensors_that_were_damaged_on_disk_are_fetched_again(
    opened: Open, server: Server
) -> None:
    key = offer_frozen(server, with_frozen())
    path = fetch(opened(), server, key).frozen
    assert path is not None
    for damage in (FROZEN[:100], FROZEN[:-1] + b"?"):
        path.write_bytes(damage)
        assert fetch(opened(), server, key).frozen == path
        assert path.read_bytes() == FROZEN


def test_a_device_that_was_restarted_goes_on_with_a_download(
    opened: Open, server: Server, tmp_path: Path
) -> None:
    key, begun, is_cut = offer_frozen(server, with_frozen()), 1000, True
    asked: list[tuple[str, str | None]] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        data = server.blobs[request.path.removeprefix("/v1/parameters/")]
        part = request.headers.get("Range")
        asked.append((request.path.split("/")[-1].split("-")[0], part))
        if not (is_cut and data == FROZEN):
            return await breaking(data, after=len(data))(request)
        return await (breaking(data, after=begun) if part is None else raw(b"", 503))(request)

    async def fetched() -> Bundle:
        async with serving() as selector, open_session() as session:
            selector.replace["parameters"] = reply
            source = DownloadsFrom(Downloads(session, 10.0), [selector.url])
            store = opened()
            try:
                return await store.fetch(key, source, anything, NOW)
            finally:
                store.close()

    with pytest.raises(ProtocolError, match="cannot download the frozen"):
        asyncio.run(fetched())
    [part] = (tmp_path / "bundles" / "parts").iterdir()
    assert part.read_bytes() == FROZEN[:begun]
    asked.clear()
    is_cut = False
    bundle = asyncio.run(fetched())
    assert bundle.frozen is not None
    assert bundle.frozen.read_bytes() == FROZEN
    assert asked == [("bundle", None), ("frozen", f"bytes={begun}-")]


def test_frozen_tensors_count_in_the_cache_and_in_the_policy(
    opened: Open, server: Server, tmp_path: Path
) -> None:
    store = opened(max_bytes=len(FROZEN) + 2 * len(ARCHIVE))
    first = fetch(store, server, offer_frozen(server, with_frozen()))
    assert first.frozen is not None
    other = encode_frozen({"other": FrozenTensor("U8", (900,), np.zeros(900, np.uint8))})
    with pytest.raises(OperatorError, match="no room for"):
        fetch(store, server, offer_frozen(server, with_frozen(other, task="other"), other))
    assert first.frozen.exists(), "it is in use"
    large = structs.replace(with_frozen(), frozen_file=BlobRef("0" * 64, 1 << 26))
    error = refusal(opened(), server, server.offer(large))
    assert error.reason == "not_allowed"
    assert f"a download of {(1 << 26) + len(ARCHIVE)} bytes" in str(error)


def test_frozen_tensors_do_not_displace_the_program_of_their_bundle(
    opened: Open, server: Server
) -> None:
    key = offer_frozen(server, with_frozen())
    for _ in range(2):
        store = opened(max_bytes=len(FROZEN) + len(ARCHIVE) - 1)
        with pytest.raises(OperatorError, match="no room for"):
            fetch(store, server, key)
        store.close()
    assert sum("frozen" in asked for asked in server.asked) == 0, "it does not fit anyway"


def offered(server: Server, number: int, size: int = 900) -> BlobKey:
    """The bundle of another task, with a program of its own."""
    data = archive.pack({"task.py": bytes([65 + number]) * size})
    program = BlobRef(archive.digest(data), len(data))
    return server.offer(a_manifest(task=f"task-{number}", program=program), program=data)


def cached_bytes(folder: Path) -> int:
    parts = (folder / "blobs", folder / "programs")
    return sum(f.stat().st_size for part in parts for f in part.rglob("*") if f.is_file())


def test_the_cache_is_bounded_with_its_unpacked_copies(
    opened: Open, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "bundles" / "programs" / ".unpacking-1").mkdir(parents=True)
    (tmp_path / "bundles" / "programs" / ".unpacking-1" / "left").write_bytes(bytes(2_000))
    for number in range(8):
        store = opened(max_bytes=4_500)  # a restart: nothing is in use
        fetch(store, server, offered(server, number))
        store.close()
        assert 1_800 < cached_bytes(tmp_path / "bundles") <= 4_500
    assert not (tmp_path / "bundles" / "programs" / ".unpacking-1").exists()


def test_a_cache_full_of_programs_in_use_takes_no_other(
    opened: Open, server: Server, tmp_path: Path
) -> None:
    store = opened(max_bytes=4_500)
    keys = [offered(server, number) for number in range(3)]
    used = [fetch(store, server, key) for key in keys[:2]]
    with pytest.raises(OperatorError, match=r"no room for .* in the cache of 4500 bytes"):
        fetch(store, server, keys[2])
    assert cached_bytes(tmp_path / "bundles") <= 4_500
    assert all((bundle.program / "task.py").stat().st_size == 900 for bundle in used)


@pytest.mark.parametrize("where", ["fsync", "write_bytes"])
def test_a_full_disk_has_a_reason_and_leaves_nothing_behind(
    opened: Open, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """While the blob is written, or while it is unpacked."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store, key = opened(), server.offer(a_manifest())
    with monkeypatch.context() as broken:
        broken.setattr(os if where == "fsync" else Path, where, full)
        with pytest.raises(
            OperatorError, match=r"cannot keep bundles in .*: No space left"
        ) as told:
            fetch(store, server, key)
    assert "--bundles DIR" in told.value.hint
    assert store.lacks(key, NOW)
    assert list((tmp_path / "bundles" / "programs").iterdir()) == []
    assert len(list((tmp_path / "bundles" / "blobs").iterdir())) == (where == "write_bytes")
    assert (fetch(store, server, key).program / "task.py").read_bytes() == b"task = 1\n"


@pytest.mark.parametrize("what", ["blob", "temporary blob", "unpacked file", "unpacked folder"])
def test_a_device_that_died_at_any_byte_of_a_write_goes_on(
    opened: Open, server: Server, tmp_path: Path, what: str
) -> None:
    manifest = a_manifest()
    key, folder = server.offer(manifest), tmp_path / "bundles"
    for size in range(0, len(ARCHIVE), 3):
        store = opened()
        fetch(store, server, key)
        store.close()
        blob = folder / "blobs" / manifest.program.sha256
        task_file = folder / "programs" / blob.name / "task.py"
        if what == "temporary blob":
            blob.rename(folder / "blobs" / ".half")
            shutil.rmtree(task_file.parent)
        if what == "unpacked folder":
            shutil.rmtree(task_file.parent / "tools")
        left = {"blob": blob, "temporary blob": folder / "blobs" / ".half"}.get(what, task_file)
        os.truncate(left, min(size, left.stat().st_size))
        store = opened()
        bundle = fetch(store, server, key)
        assert (bundle.program / "task.py").read_bytes() == b"task = 1\n"
        assert (bundle.program / "tools" / "words.py").read_bytes() == b"words = ()\n"
        store.close()


def test_a_disk_that_cannot_be_written_is_the_operators_business(tmp_path: Path) -> None:
    (tmp_path / "bundles").write_text("a file")
    with pytest.raises(OperatorError, match="cannot keep bundles in"):
        BundleStore(tmp_path / "bundles", {})


# -- participations ----------------------------------------------------------------------------


def joined(manifest: TaskManifest, *, evaluates: bool = False, **changes: Any) -> Joined:
    run = run_of(manifest)
    values: dict[str, Any] = {
        "ticket": b"",
        "task": f"{run}-eval-1" if evaluates else run,
        "session": "s",
        "version": 1,
        "parameters": f"{run}/1/version-1-{'0' * 32}",
        "model_length": 9,
        "update_length": 9,
        "training_timeout_s": 1.0,
        "heartbeat_s": 1.0,
        "participation_gap_s": 0.0,
        "max_participations": None,
        "evaluates": evaluates,
        "secure": False,
    }
    return Joined(**(values | changes))


def test_the_signed_limits_count_whatever_a_server_says(opened: Open, server: Server) -> None:
    manifest = a_manifest(participation=Participation(60.0, 5, "task"))
    store = opened()
    fetch(store, server, server.offer(manifest))
    found = VisitBundles(store, lambda: NOW).counted(joined(manifest))
    assert found == ((f"{PIN.owner}/digits", 60.0, 5),)


def test_the_memory_that_a_policy_allows_comes_with_the_bundle(
    opened: Open, server: Server
) -> None:
    key = server.offer(a_manifest())
    assert fetch(opened(), server, key).memory_mb is None
    assert fetch(opened(structs.replace(POLICY, max_memory_mb=64)), server, key).memory_mb == 64


def test_the_device_may_be_stricter_than_the_owner(opened: Open, server: Server) -> None:
    manifest = a_manifest(participation=Participation(60.0, None, "run"))
    policy = structs.replace(POLICY, max_participations=2, min_gap_s=3600.0)
    store = opened(policy)
    fetch(store, server, server.offer(manifest))
    found = VisitBundles(store, lambda: NOW).counted(joined(manifest))
    assert found == ((run_of(manifest), 3600.0, 2), (f"{PIN.owner}/digits", 3600.0, 2))


def test_new_runs_do_not_raise_the_limit_of_the_device(opened: Open, server: Server) -> None:
    """The owner counts each run alone, the device all runs of the task."""
    store, history = opened(structs.replace(POLICY, max_participations=3)), History(0.0)
    taken_part = []
    for run in range(5):
        manifest = a_manifest(
            run=a_manifest().run + run, participation=Participation(0.0, 2, "run")
        )
        key = server.offer(manifest)
        fetch(store, server, key)
        for _ in range(3):
            client = Client(
                ["selector"],
                Capabilities("torch", ()),
                history,
                DeviceConfig(participation_floor_s=0.0),
                Random(1),
                VisitBundles(store, lambda: NOW),
            )
            if uploads(client, manifest, key):
                taken_part.append(run)
    assert taken_part == [0, 0, 1]


def uploads(client: Client, manifest: TaskManifest, key: BlobKey) -> bool:
    """Does a visit to this run come to its upload?"""
    update, run = bytes(4 * 9), run_of(manifest)
    client.start(NOW)
    client.receive(NOW, Answered(1, Accepted(b"", run, "s", key)))
    [effect] = client.receive(NOW, Answered(2, joined(manifest)))[:1]
    if not isinstance(effect, Download):
        return False
    client.receive(NOW, Downloaded())
    client.receive(NOW, Trained(update, 1))
    granted = UploadGranted(b"", 1, 36, 60.0)
    effects = client.receive(NOW, Answered(3, granted))
    return any(isinstance(effect, Remember) for effect in effects)


def test_evaluations_count_together_across_runs(opened: Open, server: Server) -> None:
    store, manifest = opened(), a_manifest()
    fetch(store, server, server.offer(manifest))
    [found] = VisitBundles(store, lambda: NOW).counted(joined(manifest, evaluates=True))
    assert found.name == f"{PIN.owner}/digits/evaluate"


def test_a_task_without_a_bundle_counts_as_before(opened: Open) -> None:
    found = VisitBundles(opened(), lambda: NOW).counted(joined(a_manifest(), participation_gap_s=7))
    assert found == ((run_of(a_manifest()), 7.0, None),)


# -- the file of the device's policy -----------------------------------------------------------


def test_owners_are_read_from_a_file() -> None:
    text = f'[owners.acme]\nkey = "{public(KEY).hex()}"\ncollections = ["digits"]\n'
    [(owner, policy)] = parse_owners(text.encode(), "owners.toml").items()
    assert owner == PIN.owner
    assert policy.engines == ("executorch",), "code of others runs only where a person said so"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[owners.a]\n", "key"),
        ('[owners.a]\nkey = "zz"\n', "key"),
        (f'[owners.a]\nkey = "{"0" * 64}"\nmax_examples = 0\n', "max_examples"),
        (f'[owners.a]\nkey = "{"0" * 64}"\nmax_memory_mb = 0\n', "max_memory_mb"),
        (f'[owners.a]\nkey = "{"0" * 64}"\nengine = "torch"\n', "engine"),
        (f'[owners.a]\nkey = "{"0" * 64}"\n[owners.b]\nkey = "{"0" * 64}"\n', "a key twice"),
        ("".join(f'[owners.o{n}]\nkey = "{n:064x}"\n' for n in range(33)), "more than 32"),
        ("owners = 1", "owners"),
    ],
)
def test_an_invalid_list_of_owners_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        parse_owners(text.encode(), "owners.toml")
    assert raised.value.hint
    assert "regex" not in str(raised.value)


def test_a_key_that_is_no_key_is_named_in_words() -> None:
    text = f'[owners.a]\nkey = "{"0" * 63}"\n'
    with pytest.raises(ConfigError, match=r"owners.toml: key = '0{63}': must be 64 hex digits"):
        parse_owners(text.encode(), "owners.toml")
