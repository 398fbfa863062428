"""Uploads in chunks (paper, "Participation": "the client uploads the model in chunks").

Chunks may arrive late, twice and out of order. The machine keeps which chunks are there; the bytes
stay with the driver, in a bounded number of slots. A slot comes with all the memory that its upload
can need, so an upload that has begun can always end. One that makes no progress for a heartbeat
gives its slot back, and its client sends the chunks again later.
"""

from __future__ import annotations

from collections import OrderedDict

from papaya.config import TaskConfig
from papaya.errors import InvariantError
from papaya.messages.base import SessionId, TaskId
from papaya.messages.participation import MAX_CHUNKS

try:
    from isal.isal_zlib import crc32
except ImportError:  # the same function, an order of magnitude slower
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
"""Bodies of one upload that may be on their way at a time: a chunk, and its repetition."""


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


def buffers_of(config: TaskConfig, chunk_bytes: int) -> int:
    """Buffers of one chunk that an upload of the task holds at most: what is kept and arrives."""
    return chunk_count(config.update_bytes, chunk_bytes) + ARRIVING


def why_not_served(config: TaskConfig, chunk_bytes: int, buffers: float) -> str:
    """Why updates of the task cannot be taken here; empty when they can."""
    chunks = chunk_count(config.update_bytes, chunk_bytes)
    if chunks > MAX_CHUNKS:
        return f"an update would take {chunks} chunks, the limit is {MAX_CHUNKS}"
    needed = buffers_of(config, chunk_bytes)
    if needed > buffers:
        return f"an update takes {needed} chunk buffers, there are {buffers}: more upload_memory_mb"
    return ""


Owner = tuple[TaskId, SessionId]


class Slots:
    """Memory for uploads in progress: a fixed number of slots and of chunk buffers for them.

    Invariant: the slots' owners together never need more than `buffers`.
    """

    def __init__(self, count: int, idle_after_s: float, buffers: float = float("inf")) -> None:
        self.buffers = buffers
        self._count = count
        self._idle_after_s = idle_after_s
        self._last_progress: OrderedDict[Owner, float] = OrderedDict()
        self._reserved: dict[Owner, int] = {}
        self._all_reserved = 0

    def has_room(self, owner: Owner, buffers: int) -> bool:
        """Has the owner a slot, or is one free, with so many buffers?"""
        return owner in self._reserved or (
            len(self._reserved) < self._count and self._all_reserved + buffers <= self.buffers
        )

    def take(self, now: float, owner: Owner, buffers: int) -> None:
        """A slot for an upload that begins; who has one keeps it as it is."""
        if owner not in self._reserved:
            self._reserved[owner] = buffers
            self._all_reserved += buffers
            self._last_progress[owner] = now

    def touch(self, now: float, owner: Owner) -> None:
        """Progress of an upload that has a slot."""
        if owner in self._reserved:
            self._last_progress[owner] = now
            self._last_progress.move_to_end(owner)

    def release(self, owner: Owner) -> None:
        self._all_reserved -= self._reserved.pop(owner, 0)
        self._last_progress.pop(owner, None)

    def is_held_by(self, owner: Owner) -> bool:
        return owner in self._reserved

    def idle(self, now: float) -> list[Owner]:
        """Owners without progress for a heartbeat, longest first."""
        found = []
        for owner, progress in self._last_progress.items():
            if now - progress < self._idle_after_s:
                break
            found.append(owner)
        return found

    def check(self) -> None:
        reserved = sum(self._reserved.values())
        if reserved != self._all_reserved or reserved > self.buffers:
            raise InvariantError(f"{reserved} chunk buffers are promised, there are {self.buffers}")
        if self._reserved.keys() != self._last_progress.keys():
            raise InvariantError("an upload has a slot and no time of progress, or the reverse")

    @property
    def used(self) -> float:
        """The share that is taken, of slots or of memory, whichever is scarcer."""
        return max(len(self._reserved) / self._count, self._all_reserved / self.buffers)
