"""The bundles that a device has accepted: manifests, their blobs, and rollback protection.

    bundles.db           marks and statements of owners, written before they count; accepted heads
    blobs/<sha256>       programs and frozen tensors, in a cache of bounded size
    programs/<sha256>/   programs, unpacked for the engine; counted with the blobs
    parts/<sha256>       downloads that are not complete; counted as well

The signature is verified before a manifest is parsed, the hash of a blob before it is stored. The
device does not ask for a refused bundle again until the bundle changes or the device restarts. If
the reason may be temporary, such as a wrong clock, it asks again after an hour.

After a restart, `load` accepts the bundles on disk again, with the same checks as after a download.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias

from msgspec import UNSET, Struct

from papaya.bundle import archive
from papaya.bundle.archive import MAX_ARCHIVE_BYTES
from papaya.bundle.errors import BundleError
from papaya.bundle.head import MAX_HEAD_BYTES, BundleHead
from papaya.bundle.manifest import (
    BlobRef,
    Lease,
    RevisionMark,
    TaskManifest,
    run_id,
    verified,
)
from papaya.bundle.owner import OwnerKeys, SignedStatement, key_id
from papaya.client.client import CountedAs, NoBundles
from papaya.device.device_file import DeviceFile
from papaya.device.example_store import ExampleStore
from papaya.device.executor import GivenUp
from papaya.device.owners import OwnerPolicy
from papaya.errors import OperatorError, PapayaError, ProtocolError
from papaya.learning.definition import TaskTerms
from papaya.messages.base import BlobKey, TaskId
from papaya.messages.participation import Joined
from papaya.messages.selection import refused

MAX_NAMED: Final = 32
"""How many refused bundles a check-in names."""
_MAX_REFUSED: Final = 256
_ASK_AGAIN_S: Final = 3600.0
_MAY_PASS: Final = ("expired", "too_far_ahead", "wrong_bytes", "cannot_keep", "engine")
_FOLDERS: Final = ("blobs", "programs", "parts")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS mark (
    owner TEXT NOT NULL, task TEXT NOT NULL, recoveries INTEGER NOT NULL,
    run INTEGER NOT NULL, revision INTEGER NOT NULL,
    PRIMARY KEY (owner, task)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS statement (
    owner TEXT NOT NULL, body BLOB NOT NULL, key BLOB NOT NULL, signature BLOB NOT NULL,
    PRIMARY KEY (owner, body, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS head (
    owner TEXT NOT NULL, task TEXT NOT NULL, key TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (owner, task)
) STRICT;
"""


class Bundle(Struct, frozen=True):
    """A manifest that this device has accepted, and where its blobs are."""

    manifest: TaskManifest
    lease_until: float
    program: Path
    frozen: Path | None = None  # the file of frozen tensors
    memory_mb: int | None = None  # what the device allows the owner's jobs

    @property
    def run(self) -> str:
        """The id under which servers know the run."""
        manifest = self.manifest
        return run_id(manifest.owner, manifest.task, manifest.run)

    @property
    def terms(self) -> TaskTerms:
        """The privacy settings that the owner has signed."""
        manifest = self.manifest
        return TaskTerms(
            secure=manifest.secure is not None,
            model_length=manifest.model_length,
            max_examples=manifest.client.max_examples,
            max_staleness=manifest.max_staleness,
            clip=manifest.clip,
            threshold=None if manifest.secure is None else manifest.secure.threshold,
            manifest=manifest.digest,
            aggregation_goal=None if manifest.secure is None else manifest.secure.aggregation_goal,
            metrics=manifest.metrics,
            privacy=manifest.privacy or UNSET,
            collection=manifest.examples.collection,
            weighting=manifest.weights,
            staleness=manifest.staleness,
            upload_bits=16 if manifest.secure and manifest.upload_bits == 16 else UNSET,
        )

    def check_evaluation(self, clients: int | None = None) -> None:
        """Raise GivenUp unless the owner has signed evaluations with so few clients."""
        task, signed = self.manifest.task, self.manifest.evaluation_clients
        if signed == 0:
            raise GivenUp("mismatch", f"the owner of {task} has signed no evaluations")
        if clients is not None and clients < signed:
            raise GivenUp(
                "mismatch",
                f"an evaluation of {clients} clients; the owner of {task} has signed at least "
                f"{signed}",
            )

    @property
    def task_name(self) -> str:
        """The name under which the participations in all runs of the task count."""
        return f"{self.manifest.owner}/{self.manifest.task}"


class BlobSource(Protocol):
    """Downloads blobs of at most `limit` bytes. ProtocolError if nobody has them."""

    async def blob(self, key: BlobKey, limit: int) -> bytes: ...

    async def file(self, key: BlobKey, limit: int, path: Path) -> None:
        """Add to this file until it is complete. What it has may be wrong."""
        ...


class _OnDisk(NamedTuple):
    """A bundle that was accepted before the device was restarted. Nothing is downloaded."""

    head: bytes

    async def blob(self, key: BlobKey, limit: int) -> bytes:
        return self.head

    async def file(self, key: BlobKey, limit: int, path: Path) -> None:
        raise ProtocolError(f"{key} is missing on disk, or damaged")


AcceptBundle: TypeAlias = Callable[[Bundle], Awaitable[None]]
"""Raises BundleError if the device cannot run the program, GivenUp if it cannot be tried now."""


class BundleStore:
    """Bundles on disk, for all devices of a process."""

    def __init__(
        self, folder: Path, policies: Mapping[str, OwnerPolicy], max_bytes: int = 256 << 20
    ) -> None:
        self._folder = folder
        self._policies = policies
        self._max_bytes = max_bytes
        # Accepted bundles by the key of their head, newest last.
        self._ready: dict[BlobKey, Bundle] = {}
        # Runs that came from a bundle, whether or not it may still be used.
        self._runs: dict[TaskId, None] = {}
        # Refused bundles by their name in a check-in: reason code, time, and description.
        self._refused: dict[str, tuple[str, float, str]] = {}
        self._fetching = asyncio.Lock()
        # Heads on disk that `load` has not looked at; None before the first call.
        self._saved: dict[BlobKey, bytes] | None = None
        self._loading = asyncio.Lock()
        # Bundles from the disk that no server has named since the start: they give way to others.
        self._unnamed: dict[BlobKey, None] = {}
        try:
            for part in _FOLDERS:
                (folder / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(folder, error) from error
        self._file = DeviceFile(folder / "bundles.db", _SCHEMA)

    def close(self) -> None:
        self._file.close()

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(sorted(self._policies))

    def may_use(self, collection: str) -> bool:
        """Does a policy let an owner use this collection?"""
        return any(policy.may_use(collection) for policy in self._policies.values())

    def lacks(self, head_key: str, now: float) -> bool:
        """Does this bundle have to be fetched? Also if its lease is over: it may be renewed."""
        found = self._ready.get(head_key)
        return found is None or found.lease_until <= now

    def get(self, head_key: str) -> Bundle | None:
        return self._ready.get(head_key)

    def named(self, head_key: str) -> None:
        """A server has assigned the device to this bundle."""
        self._unnamed.pop(head_key, None)

    def of_run(self, run: str) -> Bundle | None:
        return next((b for b in reversed(self._ready.values()) if b.run == run), None)

    def why_not(self, run: str, now: float) -> str:
        """Why a run must not be trained now; empty if it may, or if it came from no bundle."""
        if run not in self._runs:
            return ""
        bundle = self.of_run(run)
        if bundle is None:
            return "the owner has replaced this run"
        return "" if now < bundle.lease_until else "the lease of this run is over"

    def policy_of(self, bundle: Bundle) -> OwnerPolicy:
        """What this device allows the owner of a bundle. Servers cannot change it."""
        return self._policies[bundle.manifest.owner]

    def refused(self, now: float) -> dict[str, str]:
        """Refused bundles by their name in a check-in, the newest first, with a description."""
        found = [
            (name, words)
            for name, (reason, at, words) in self._refused.items()
            if reason not in _MAY_PASS or now < at + _ASK_AGAIN_S
        ]
        return dict(reversed(found[-MAX_NAMED:]))

    def without_examples(self, store: ExampleStore) -> dict[str, str]:
        """Accepted bundles for which a device has nothing to train on, and why, as in `refused`."""
        return self.barred(
            lambda bundle: store.why_none(bundle.manifest.examples.collection, bundle.manifest.task)
        )

    def barred(self, why_not: Callable[[Bundle], str]) -> dict[str, str]:
        """Accepted bundles that a device cannot train now, and why, as in `refused`."""
        found = {}
        for key, bundle in list(self._ready.items()):
            if problem := why_not(bundle):
                found[refused(bundle.run, key)] = f"{bundle.manifest.task}: {problem}"
        return found

    def refuse(self, name: str, reason: str, now: float, words: str) -> None:
        """Do not ask for this bundle again."""
        self._refused.pop(name, None)
        self._refused[name] = (reason, now, words)
        while len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    # -- accepting --------------------------------------------------------------------------

    async def load(self, accept: AcceptBundle, now: float) -> dict[BlobKey, PapayaError]:
        """Accept the bundles on disk again, once per process, before the first check-in.

        Otherwise every visit after a restart would give up its slot to fetch its bundle. Returns
        what is wrong with bundles; they have to be fetched.
        """
        problems: dict[BlobKey, PapayaError] = {}
        async with self._loading:
            if self._saved is None:
                self._saved = await asyncio.to_thread(self._heads)
            while self._saved:
                head_key, data = self._saved.popitem()
                if head_key in self._ready:
                    continue
                try:
                    await self.fetch(head_key, _OnDisk(data), accept, now)
                    self._unnamed[head_key] = None
                except PapayaError as error:
                    problems[head_key] = error
                    # Such as a lease that is over, or a blob that is gone.
                    if isinstance(error, ProtocolError):
                        await asyncio.to_thread(self._forget_heads, (head_key,))
        return problems

    async def fetch(
        self, head_key: BlobKey, source: BlobSource, accept: AcceptBundle, now: float
    ) -> Bundle:
        """Get a bundle and everything that it names, verify and keep it.

        `accept` is called with a bundle before the device may take part with it. Raises BundleError
        if this device must not use it, another PapayaError if it could not be fetched now.
        """
        async with self._fetching:
            if not self.lacks(head_key, now):
                return self._ready[head_key]
            run = head_key.partition("/")[0]
            data = await source.blob(head_key, MAX_HEAD_BYTES)
            manifest = await asyncio.to_thread(self.check, data, run, now)
            head, program = BundleHead.decode(data), manifest.program
            if program.size > MAX_ARCHIVE_BYTES:
                raise BundleError(
                    "not_allowed",
                    f"{manifest.task}: the program has {program.size} bytes, at most "
                    f"{MAX_ARCHIVE_BYTES} are allowed",
                )
            frozen = manifest.frozen_blob
            # The archive and its unpacked files, which are no larger.
            await self._get(source, head.program, program, "program", 2 * program.size, frozen)
            if frozen is not None:
                key, what = head.frozen_file, "frozen tensors"
                await self._get(source, key, frozen, what, frozen.size, program)
            bundle = Bundle(
                manifest,
                Lease.verify(head.lease).expires,
                await asyncio.to_thread(self._unpacked, program),
                None if frozen is None else self._place(frozen),
                self._policies[manifest.owner].max_memory_mb,
            )
            await accept(bundle)
            if not isinstance(source, _OnDisk):
                await asyncio.to_thread(self._save_head, head_key, data, manifest)
            self._keep(head_key, bundle)
            return bundle

    def check(self, data: bytes, run: str, now: float) -> TaskManifest:
        """Verify the head of a bundle for this run, and remember its revision. BundleError."""
        head = BundleHead.decode(data)
        policy, keys = self._keys_for(head)
        mark = self._mark(keys, head)
        manifest = verified(keys, head.manifest, head.lease, mark, now)
        if run_id(manifest.owner, manifest.task, manifest.run) != run:
            raise BundleError("rolled_back", f"{manifest.task}: the bundle belongs to another run")
        policy.check(manifest)
        self._set_mark(keys, manifest)
        return manifest

    async def _get(
        self,
        source: BlobSource,
        key: BlobKey,
        reference: BlobRef,
        what: str,
        needed: int,
        other: BlobRef | None,
    ) -> None:
        """Download a blob unless it is stored and intact. `needed`: bytes that it takes here.
        `other`: the other blob of its bundle.
        """
        if await asyncio.to_thread(_is_intact, self._place(reference), reference):
            return
        part = self._folder / "parts" / reference.sha256
        try:
            # Nothing is deleted for a bundle on disk, which needs no room: the files of those that
            # `load` has not looked at do not count as in use.
            if not isinstance(source, _OnDisk):
                await self._room_for_download(needed, part, other)
            await source.file(key, reference.size, part)
            await asyncio.to_thread(self._keep_blob, reference, part, what)
        except OSError as error:
            raise _unusable(self._folder, error) from error

    async def _room_for_download(self, needed: int, part: Path, other: BlobRef | None) -> None:
        """Make room for a download. Bundles that no server has named give way to it."""
        try:
            await asyncio.to_thread(self._make_room, needed, part, other)
        except OperatorError:
            if not await self._drop_unnamed():
                raise
            await asyncio.to_thread(self._make_room, needed, part, other)

    def _keep_blob(self, reference: BlobRef, part: Path, what: str) -> None:
        """Store a downloaded blob, if it is the one that the owner signed."""
        if not _is_intact(part, reference):
            part.unlink(missing_ok=True)
            raise reference.wrong_bytes(what)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.rename(self._place(reference))

    def _place(self, reference: BlobRef) -> Path:
        return self._folder / "blobs" / reference.sha256

    def _keep(self, head_key: BlobKey, bundle: Bundle) -> None:
        """The device can now take part in the run, and no longer in the bundle that it replaces."""
        same = (bundle.manifest.owner, bundle.manifest.task)
        self._ready = {
            key: other
            for key, other in self._ready.items()
            if (other.manifest.owner, other.manifest.task) != same
        }
        self._ready[head_key] = bundle
        self._runs[bundle.run] = None

    async def _drop_unnamed(self) -> bool:
        """Stop using bundles of tasks that may have ended, also after a restart. Are there any?"""
        dropped, self._unnamed = self._unnamed, {}
        self._ready = {key: b for key, b in self._ready.items() if key not in dropped}
        await asyncio.to_thread(self._forget_heads, dropped)
        return bool(dropped)

    def _heads(self) -> dict[BlobKey, bytes]:
        with self._file.transaction():
            return dict(self._file.rows("SELECT key, data FROM head"))

    def _save_head(self, head_key: BlobKey, data: bytes, manifest: TaskManifest) -> None:
        with self._file.transaction():
            self._file.change(
                "INSERT OR REPLACE INTO head (owner, task, key, data) VALUES (?, ?, ?, ?)",
                *(manifest.owner, manifest.task, head_key, data),
            )

    def _forget_heads(self, head_keys: Iterable[BlobKey]) -> None:
        with self._file.transaction():
            for head_key in head_keys:
                self._file.change("DELETE FROM head WHERE key = ?", head_key)

    def _keys_for(self, head: BundleHead) -> tuple[OwnerPolicy, OwnerKeys]:
        """The pinned owner for whom the key of this head signs."""
        signer = key_id(head.manifest.key)
        problem: BundleError | None = None
        for owner, policy in self._policies.items():
            keys = OwnerKeys(policy.pin, self._statements(owner))
            conflict = keys.learn(head.statements)
            self._keep_statements(keys)
            try:
                if key_id(keys.current) == signer:
                    return policy, keys
            except BundleError as revoked:  # of this owner; the head may be of another one
                problem = revoked if keys.has(signer) else problem
            problem = conflict or problem
        raise problem or BundleError(
            "unknown_owner",
            f"signed by the key {signer}, which this device has not pinned",
            hint="if you trust this owner, pin its key: papaya client --owners FILE",
        )

    def _statements(self, owner: str) -> list[SignedStatement]:
        with self._file.transaction():
            rows = self._file.rows(
                "SELECT body, key, signature FROM statement WHERE owner = ?", owner
            )
        return [SignedStatement(*row) for row in rows]

    def _keep_statements(self, keys: OwnerKeys) -> None:
        with self._file.transaction():
            for statement in keys.accepted:
                self._file.change(
                    "INSERT OR IGNORE INTO statement (owner, body, key, signature) "
                    "VALUES (?, ?, ?, ?)",
                    *(keys.owner, statement.body, statement.key, statement.signature),
                )

    def _mark(self, keys: OwnerKeys, head: BundleHead) -> RevisionMark | None:
        manifest = TaskManifest.verify(head.manifest)
        with self._file.transaction():
            rows = self._file.rows(
                "SELECT recoveries, run, revision FROM mark WHERE owner = ? AND task = ?",
                *(keys.owner, manifest.task),
            )
        for recoveries, run, revision in rows:
            if recoveries == keys.recoveries:
                return RevisionMark(run, revision)
        return None  # the first one, or the recovery key has spoken since

    def _set_mark(self, keys: OwnerKeys, manifest: TaskManifest) -> None:
        with self._file.transaction():
            # Another process may use the same folder: the mark never goes back.
            self._file.change(
                "INSERT INTO mark (owner, task, recoveries, run, revision) "
                "VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET recoveries = "
                "excluded.recoveries, run = excluded.run, revision = excluded.revision "
                "WHERE (excluded.recoveries, excluded.run, excluded.revision) "
                "> (recoveries, run, revision)",
                *(keys.owner, manifest.task, keys.recoveries, manifest.run, manifest.revision),
            )

    # -- files ------------------------------------------------------------------------------

    def _unpacked(self, program: BlobRef) -> Path:
        """The folder of a program. It appears complete or not at all."""
        folder = self._folder / "programs" / program.sha256
        try:
            data = (self._folder / "blobs" / program.sha256).read_bytes()
            program.check(data, "program")
            files = archive.unpack(data)
            if _holds(folder, files):
                return folder
            shutil.rmtree(folder, ignore_errors=True)  # a power loss left a part of it
            _write_files(folder, files)
        except OSError as error:
            raise _unusable(self._folder, error) from error
        return folder

    def _make_room(self, needed: int, part: Path, other: BlobRef | None) -> None:
        """Delete what was used least recently, until this blob fits. `part`: what it has so far.

        The other blob of the bundle stays: otherwise a device might fetch both again and again.
        """
        cached = [
            path for name in _FOLDERS for path in (self._folder / name).iterdir() if path != part
        ]
        in_use = {
            path.name
            for bundle in self._ready.values()
            for path in (bundle.program, bundle.frozen)
            if path is not None
        }
        if other is not None:
            in_use.add(other.sha256)
        used = sum(map(_size, cached))
        for path in sorted(cached, key=lambda path: path.stat().st_atime):
            if used + needed <= self._max_bytes:
                return
            if path.name not in in_use:
                used -= _size(path)
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        if used + needed > self._max_bytes:
            raise OperatorError(
                f"no room for {needed} bytes in the cache of {self._max_bytes} bytes in "
                f"{self._folder}: {used} bytes are in use",
                hint="unpin an owner, or restart the device",
            )


def _is_intact(path: Path, reference: BlobRef) -> bool:
    """Has the file exactly the bytes that the owner signed? It may be too large for memory."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != reference.size:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == reference.sha256
    except OSError:
        return False


def _size(path: Path) -> int:
    """Size of a file, or of all files in a folder. OSError if another process deletes it."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder that appears complete or not at all."""
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpacking-"))
    try:
        for name, content in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Are exactly these files in the folder?"""
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    return found == files


class VisitBundles(NoBundles):
    """What the client machine asks of the bundles, during one visit."""

    def __init__(
        self, store: BundleStore, now: Callable[[], float], excluded: Iterable[str] = ()
    ) -> None:
        self._store = store
        self._now = now
        self._excluded = tuple(excluded)
        # What the owner has signed about the task to which the device was assigned.
        self.accepted: TaskManifest | None = None

    def refused(self) -> tuple[str, ...]:
        return self._excluded

    def lacks(self, bundle: BlobKey) -> bool:
        found = self._store.get(bundle)
        self.accepted = None if found is None else found.manifest
        self._store.named(bundle)
        return self._store.lacks(bundle, self._now())

    def counted(self, joined: Joined) -> tuple[CountedAs, ...]:
        bundle = self._store.of_run(joined.parameters.partition("/")[0])
        if bundle is None:
            return super().counted(joined)
        policy, manifest = self._store.policy_of(bundle), bundle.manifest
        gap_s, limit = policy.limits(manifest)
        if joined.evaluates:
            gap_s = max(joined.participation_gap_s, policy.min_gap_s)
            return (CountedAs(f"{bundle.task_name}/evaluate", gap_s, limit),)
        if manifest.participation.scope == "task":
            return (CountedAs(bundle.task_name, gap_s, limit),)
        # The owner's limits count per run, those of the device over all runs.
        return (
            CountedAs(bundle.run, gap_s, limit),
            CountedAs(bundle.task_name, policy.min_gap_s, policy.max_participations),
        )


def _unusable(folder: Path, error: OSError) -> OperatorError:
    return OperatorError(
        f"cannot keep bundles in {folder}: {error.strerror}",
        hint="free some space, or choose another folder: --bundles DIR",
    )
