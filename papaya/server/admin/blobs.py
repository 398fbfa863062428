"""Blobs as the admin API and the supervisor use them: awaited, on threads.

A full disk raises NoStorage, which the admin API answers with 507.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from pathlib import Path
from typing import Protocol

from papaya.errors import OperatorError
from papaya.messages.base import BlobKey, TaskId
from papaya.server.admin.problems import NoStorage
from papaya.store.blobs import Blobs, Piece


class AdminBlobs(Protocol):
    """Immutable bytes by key. A missing blob raises MissingBlob, a full disk NoStorage."""

    async def get(self, key: BlobKey) -> bytes: ...

    async def put(self, key: BlobKey, data: Piece) -> None: ...

    async def sweep(self, task: TaskId, below_seq: int, keep: Set[BlobKey]) -> None: ...

    async def path(self, key: BlobKey) -> Path: ...


class ThreadedBlobs:
    """A blob store, without blocking the loop."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def get(self, key: BlobKey) -> bytes:
        return await asyncio.to_thread(self._blobs.get, key)

    async def put(self, key: BlobKey, data: Piece) -> None:
        try:
            await asyncio.to_thread(self._blobs.put, key, data)
        except OperatorError as error:
            raise NoStorage(str(error), hint=error.hint) from error

    async def sweep(self, task: TaskId, below_seq: int, keep: Set[BlobKey]) -> None:
        await asyncio.to_thread(self._blobs.sweep, task, below_seq, keep)

    async def path(self, key: BlobKey) -> Path:
        return await asyncio.to_thread(self._blobs.path, key)
