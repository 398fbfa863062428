"""Uploads in chunks (paper, "Participation": "the client uploads the model in chunks").

Chunks may arrive late, twice and out of order. The machine tracks which chunks have arrived; the
bytes stay with the driver, in a limited number of slots. A slot reserves all the memory that its
upload may need, so an upload that has started can always finish. An upload without progress for a
heartbeat loses its slot, and the client sends the chunks again later.
"""

from __future__ import annotations

from collections import OrderedDict

from papaya.config import TaskConfig
from papaya.errors import InvariantError
from papaya.messages.base import SessionId, TaskId
from papaya.messages.participation import MAX_CHUNKS

try:
    from isal.isal_zlib import crc32
except ImportError:  # same result, about ten times slower
    from zlib import crc32

__all__ = [
    "ARRIVING",
    "Slots",
    "Upload",
    "buffers_of",
    "chunk_count",
    "chunk_length",
    "crc32",
    "why_not_served",
]

ARRIVING = 2
"""How many chunks of one upload may be in transit at a time: a chunk and its duplicate."""


class Upload:
    """Which chunks of one upload id have arrived."""

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
    """The exact length of chunk `index`. All chunks except the last are full."""
    return min(chunk_bytes, update_bytes - index * chunk_bytes)


def buffers_of(config: TaskConfig, chunk_bytes: int) -> int:
    """How many chunk buffers an upload of the task may need, for chunks kept and in transit."""
    return chunk_count(config.update_bytes, chunk_bytes) + ARRIVING


def why_not_served(config: TaskConfig, chunk_bytes: int, buffers: float) -> str:
    """Why this aggregator cannot accept updates of the task; empty if it can."""
    chunks = chunk_count(config.update_bytes, chunk_bytes)
    if chunks > MAX_CHUNKS:
        return f"an update has {chunks} chunks, the limit is {MAX_CHUNKS}"
    needed = buffers_of(config, chunk_bytes)
    if needed > buffers:
        return f"an update needs {needed} chunk buffers of {buffers}: raise upload_memory_mb"
    return ""


Owner = tuple[TaskId, SessionId]


class Slots:
    """Memory for uploads in progress: a fixed number of slots, and of chunk buffers to share.

    Invariant: the buffers reserved by all slots together never exceed `buffers`.
    """

    def __init__(self, count: int, idle_after_s: float, buffers: float = float("inf")) -> None:
        self.buffers = buffers
        self._count = count
        self._idle_after_s = idle_after_s
        self._last_progress: OrderedDict[Owner, float] = OrderedDict()
        self._reserved: dict[Owner, int] = {}
        self._all_reserved = 0

    def has_room(self, owner: Owner, buffers: int) -> bool:
        """Does the owner have a slot, or is one free with this many buffers?"""
        return owner in self._reserved or (
            len(self._reserved) < self._count and self._all_reserved + buffers <= self.buffers
        )

    def take(self, now: float, owner: Owner, buffers: int) -> None:
        """Reserve a slot. No-op if the owner has one."""
        if owner not in self._reserved:
            self._reserved[owner] = buffers
            self._all_reserved += buffers
            self._last_progress[owner] = now

    def touch(self, now: float, owner: Owner) -> None:
        """The upload has made progress. No-op without a slot."""
        if owner in self._reserved:
            self._last_progress[owner] = now
            self._last_progress.move_to_end(owner)

    def release(self, owner: Owner) -> None:
        self._all_reserved -= self._reserved.pop(owner, 0)
        self._last_progress.pop(owner, None)

    def is_held_by(self, owner: Owner) -> bool:
        return owner in self._reserved

    def idle(self, now: float) -> list[Owner]:
        """Owners without progress for a heartbeat, the longest idle first."""
        found = []
        for owner, progress in self._last_progress.items():
            if now - progress < self._idle_after_s:
                break
            found.append(owner)
        return found

    def check(self) -> None:
        reserved = sum(self._reserved.values())
        if reserved != self._all_reserved or reserved > self.buffers:
            raise InvariantError(f"{reserved} chunk buffers are reserved, there are {self.buffers}")
        if self._reserved.keys() != self._last_progress.keys():
            raise InvariantError("slots and times of progress differ")

    @property
    def used(self) -> float:
        """The share in use of slots or of memory, whichever is higher."""
        return max(len(self._reserved) / self._count, self._all_reserved / self.buffers)
