"""A server that passes bundles on, for the tests of bundles on devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.bundle import archive
from papaya.bundle.errors import BundleError
from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import BlobRef, TaskManifest, run_id
from papaya.bundle.owner import SignedStatement
from papaya.device.bundles import Bundle, BundleStore
from papaya.device.owners import OwnerPolicy
from papaya.errors import ProtocolError
from papaya.learning.frozen_file import FrozenTensor, encode_frozen
from papaya.messages.base import BlobKey
from tests.unit.bundle.builders import ARCHIVE, KEY, NOW, RECOVERY, a_lease, a_manifest, public

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


Open = Callable[..., BundleStore]


def fetch(store: BundleStore, server: Server, key: BlobKey, now: float = NOW) -> Bundle:
    return asyncio.run(store.fetch(key, server, anything, now))


async def anything(_: Bundle) -> None:
    """A device that can run every program."""


def refusal(store: BundleStore, server: Server, key: BlobKey, now: float = NOW) -> BundleError:
    with pytest.raises(BundleError) as raised:
        fetch(store, server, key, now)
    return raised.value


FROZEN = encode_frozen(
    {"base": FrozenTensor("F32", (2, 500), np.arange(1000, dtype="<f4").view(np.uint8))}
)


def with_frozen(data: bytes = FROZEN, **changes: Any) -> TaskManifest:
    return a_manifest(frozen_file=BlobRef(archive.digest(data), len(data)), **changes)


def offer_frozen(server: Server, manifest: TaskManifest, data: bytes = FROZEN) -> BlobKey:
    server.blobs[frozen_key(manifest)] = data
    return server.offer(manifest)


def offered(server: Server, number: int, size: int = 900) -> BlobKey:
    """The bundle of another task, with a program of its own. At 900 bytes two of them fit into a
    cache of 4,500 bytes.
    """
    data = archive.pack({"task.py": bytes([65 + number]) * size})
    program = BlobRef(archive.digest(data), len(data))
    return server.offer(a_manifest(task=f"task-{number}", program=program), program=data)
