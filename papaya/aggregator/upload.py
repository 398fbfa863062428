"""Uploads in chunks (paper, "Participation": "the client uploads the model in chunks").

Chunks may arrive late, twice and out of order. The machine keeps which chunks are there; the bytes
stay with the driver, in a bounded number of slots. An upload that makes no progress for a heartbeat
gives its slot back, and its client sends the chunks again later.
"""

from __future__ import annotations

from collections import OrderedDict

from papaya.config import TaskConfig
from papaya.messages.base import SessionId, TaskId
from papaya.messages.participation import MAX_CHUNKS

try:
    from isal.isal_zlib import crc32
except ImportError:  # the same function, an order of magnitude slower
    from zlib import crc32

__all__ = [
    "Slots",
    "Upload",
    "chunk_count",
    "chunk_length",
    "crc32",
    "why_not_served",
]


class Upload:
    """Which chunks of one upload id are there."""

    __slots__ = ("chunks", "id", "is_folding", "missing")

    def __init__(self, upload_id: str, chunks: int) -> None:
        self.id = upload_id
        self.chunks = chunks
        self.missing = dict.fromkeys(range(chunks))
        self.is_folding = False

    def has(self, index: int) -> bool:
        return index not in self.missing


def chunk_count(update_bytes: int, chunk_bytes: int) -> int:
    return -(-update_bytes // chunk_bytes)


def chunk_length(update_bytes: int, chunk_bytes: int, index: int) -> int:
    """The exact length of chunk `index`; every chunk but the last is full."""
    return min(chunk_bytes, update_bytes - index * chunk_bytes)


def why_not_served(config: TaskConfig, chunk_bytes: int) -> str:
    """Why updates of the task cannot be taken here; empty when they can."""
    chunks = chunk_count(config.update_bytes, chunk_bytes)
    if chunks > MAX_CHUNKS:
        return f"an update would take {chunks} chunks, the limit is {MAX_CHUNKS}"
    return ""


class Slots:
    """Memory for uploads in progress: a fixed number for the whole aggregator."""

    def __init__(self, count: int, idle_after_s: float) -> None:
        self._count = count
        self._idle_after_s = idle_after_s
        self._last_progress: OrderedDict[tuple[TaskId, SessionId], float] = OrderedDict()

    def has_room(self, owner: tuple[TaskId, SessionId]) -> bool:
        """Has the owner a slot, or is one free?"""
        return owner in self._last_progress or len(self._last_progress) < self._count

    def touch(self, now: float, owner: tuple[TaskId, SessionId]) -> None:
        """Progress: take a slot or keep it."""
        self._last_progress[owner] = now
        self._last_progress.move_to_end(owner)

    def release(self, owner: tuple[TaskId, SessionId]) -> None:
        self._last_progress.pop(owner, None)

    def idle(self, now: float) -> list[tuple[TaskId, SessionId]]:
        """Owners without progress for a heartbeat, longest first."""
        found = []
        for owner, progress in self._last_progress.items():
            if now - progress < self._idle_after_s:
                break
            found.append(owner)
        return found

    @property
    def used(self) -> float:
        return len(self._last_progress) / self._count
