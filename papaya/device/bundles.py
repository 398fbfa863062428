"""The bundles that a device has accepted: manifests, their blobs, and what must not be forgotten.

    bundles.db           marks, statements of owners, refused manifests; written before they count
    blobs/<sha256>       programs, in a cache of bounded size
    programs/<sha256>/   the same, unpacked for the engine

The signature is verified before a manifest is parsed, the hash of a blob before it is stored. A
manifest that is refused is remembered by its digest, so that the device does not ask for it again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from msgspec import Struct

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
from papaya.client.client import NoBundles
from papaya.device.device_file import DeviceFile
from papaya.device.owners import OwnerPolicy
from papaya.errors import OperatorError
from papaya.learning.definition import TaskTerms
from papaya.messages.base import BlobKey, TaskId
from papaya.messages.participation import Joined

_MAX_REFUSED: Final = 256
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
CREATE TABLE IF NOT EXISTS refused (
    name TEXT PRIMARY KEY, at REAL NOT NULL, reason TEXT NOT NULL
) STRICT, WITHOUT ROWID;
"""


class Bundle(Struct, frozen=True):
    """A manifest that this device has accepted, and where its program is."""

    manifest: TaskManifest
    lease_until: float
    program: Path

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
        )

    @property
    def counted_as(self) -> str:
        """The name under which participations count: of the run, or of all runs of the task."""
        manifest = self.manifest
        if manifest.participation.scope == "run":
            return self.run
        return f"{manifest.owner}/{manifest.task}"


FetchBlob: TypeAlias = Callable[[BlobKey, int], Awaitable[bytes]]
"""Downloads a blob of at most this many bytes."""


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
        self._fetching = asyncio.Lock()
        try:
            for part in ("blobs", "programs"):
                (folder / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(folder, error) from error
        self._file = DeviceFile(folder / "bundles.db", _SCHEMA)

    def close(self) -> None:
        self._file.close()

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(sorted(self._policies))

    def lacks(self, head_key: str, now: float) -> bool:
        """Does this bundle have to be fetched? Also if its lease is over: it may be renewed."""
        found = self._ready.get(head_key)
        return found is None or found.lease_until <= now

    def of_run(self, run: str) -> Bundle | None:
        return next((b for b in reversed(self._ready.values()) if b.run == run), None)

    def limits(self, bundle: Bundle) -> tuple[float, int]:
        """The gap between participations and their number, whatever a server says."""
        return self._policies[bundle.manifest.owner].limits(bundle.manifest)

    def refused(self) -> tuple[str, ...]:
        """The names of refused bundles, for a check-in."""
        with self._file.transaction():
            rows = self._file.rows("SELECT name FROM refused ORDER BY at DESC LIMIT 32")
        return tuple(name for [name] in rows)

    def refuse(self, name: str, reason: str, now: float) -> None:
        """Do not ask for this bundle again."""
        with self._file.transaction():
            self._file.change(
                "INSERT OR REPLACE INTO refused (name, at, reason) VALUES (?, ?, ?)",
                *(name, now, reason),
            )
            self._file.change(
                "DELETE FROM refused WHERE name NOT IN "
                f"(SELECT name FROM refused ORDER BY at DESC LIMIT {_MAX_REFUSED})"
            )

    # -- accepting --------------------------------------------------------------------------

    async def fetch(self, head_key: BlobKey, download: FetchBlob, now: float) -> Bundle:
        """Get a bundle and everything that it names, verify and keep it.

        Raises BundleError if this device must not use it, another PapayaError if it could not be
        fetched now.
        """
        async with self._fetching:
            if not self.lacks(head_key, now):
                return self._ready[head_key]
            run = head_key.partition("/")[0]
            head = await download(head_key, MAX_HEAD_BYTES)
            manifest = await asyncio.to_thread(self.check, head, run, now)
            program = manifest.program
            if program.size > MAX_ARCHIVE_BYTES:
                raise BundleError(
                    "not_allowed",
                    f"{manifest.task}: the program has {program.size} bytes, at most "
                    f"{MAX_ARCHIVE_BYTES} are allowed",
                )
            if not self.has_blob(program):
                data = await download(BundleHead.decode(head).program, program.size)
                await asyncio.to_thread(self.keep_blob, program, data, "program")
            return await asyncio.to_thread(self.prepare, head_key, head, manifest)

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

    def has_blob(self, reference: BlobRef) -> bool:
        return (self._folder / "blobs" / reference.sha256).is_file()

    def keep_blob(self, reference: BlobRef, data: bytes, what: str) -> None:
        """Store a downloaded blob, if it is the one that the owner signed."""
        reference.check(data, what)
        self._make_room(len(data))
        _write(self._folder / "blobs" / reference.sha256, data)

    def prepare(self, head_key: str, head: bytes, manifest: TaskManifest) -> Bundle:
        """Unpack the program. Now the device can take part in the run."""
        lease_until = Lease.verify(BundleHead.decode(head).lease).expires
        bundle = Bundle(manifest, lease_until, self._unpacked(manifest.program))
        self._ready.pop(head_key, None)
        self._ready[head_key] = bundle
        return bundle

    def _keys_for(self, head: BundleHead) -> tuple[OwnerPolicy, OwnerKeys]:
        """The pinned owner for whom the key of this head signs."""
        signer = key_id(head.manifest.key)
        problem: BundleError | None = None
        for owner, policy in self._policies.items():
            keys = OwnerKeys(policy.pin, self._statements(owner))
            for statement in head.statements:
                try:
                    keys.accept(statement)
                except BundleError as error:  # of another owner, or a conflict
                    problem = error if error.reason == "conflict" else problem
            if key_id(keys.current) == signer:
                self._keep_statements(keys)
                return policy, keys
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
            self._file.change(
                "INSERT OR REPLACE INTO mark (owner, task, recoveries, run, revision) "
                "VALUES (?, ?, ?, ?, ?)",
                *(keys.owner, manifest.task, keys.recoveries, manifest.run, manifest.revision),
            )

    # -- files ------------------------------------------------------------------------------

    def _unpacked(self, program: BlobRef) -> Path:
        """The folder of a program. It appears complete or not at all."""
        folder = self._folder / "programs" / program.sha256
        try:
            if folder.is_dir():
                return folder
            data = (self._folder / "blobs" / program.sha256).read_bytes()
            program.check(data, "program")
            temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpacking-"))
            for name, content in archive.unpack(data).items():
                path = temporary / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            temporary.rename(folder)
        except OSError as error:
            raise _unusable(self._folder, error) from error
        return folder

    def _make_room(self, needed: int) -> None:
        """Delete the blobs and programs that were used least recently, until this one fits."""
        blobs = sorted((self._folder / "blobs").iterdir(), key=lambda path: path.stat().st_atime)
        used = sum(path.stat().st_size for path in blobs)
        in_use = {bundle.program.name for bundle in self._ready.values()}
        for path in blobs:
            if used + needed <= self._max_bytes:
                return
            if path.name not in in_use:
                used -= path.stat().st_size
                path.unlink()
                shutil.rmtree(self._folder / "programs" / path.name, ignore_errors=True)


class VisitBundles(NoBundles):
    """What the client machine asks of the bundles, during one visit."""

    def __init__(self, store: BundleStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._refused = store.refused()

    def refused(self) -> tuple[str, ...]:
        return self._refused

    def lacks(self, bundle: BlobKey) -> bool:
        return self._store.lacks(bundle, self._now())

    def counted(self, joined: Joined) -> tuple[TaskId, float, int | None]:
        bundle = self._store.of_run(joined.parameters.partition("/")[0])
        if bundle is None:
            return super().counted(joined)
        if joined.evaluates:
            manifest = bundle.manifest
            return f"{manifest.owner}/{manifest.task}/evaluate", joined.participation_gap_s, None
        return bundle.counted_as, *self._store.limits(bundle)


def _write(path: Path, data: bytes) -> None:
    """Write a file that appears complete or not at all."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise _unusable(path.parent, error) from error


def _unusable(folder: Path, error: OSError) -> OperatorError:
    return OperatorError(
        f"cannot keep bundles in {folder}: {error.strerror}",
        hint="free some space, or choose another folder: --bundles DIR",
    )
