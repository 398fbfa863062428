"""Reusable memory for chunks: a fixed number of buffers of one size.

DESIGN 5, memory bounded by slots: when all buffers are out, `take` says so and the peer is asked to
come back. A buffer is received into, travels with its chunk to the aggregator, and comes back when
the update is folded, refused or dropped, from whatever thread that happens on.
"""

from __future__ import annotations

from threading import Lock

from papaya.errors import InvariantError
from papaya.learning.weighting import BytesLike


class BufferPool:
    """Invariant: a buffer is either free or out, and out once. Threads may share it."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._free: list[bytearray] = []
        self._out: dict[int, bytearray] = {}
        self._lock = Lock()

    @property
    def free(self) -> int:
        return self.count - len(self._out)

    def take(self) -> memoryview | None:
        """A whole buffer with whatever was in it, or None when all are out."""
        with self._lock:
            if self._free:
                buffer = self._free.pop()
            elif len(self._out) < self.count:
                buffer = bytearray(self.size)  # memory is used only once it is needed
            else:
                return None
            self._out[id(buffer)] = buffer
            return memoryview(buffer)

    def give_back(self, data: BytesLike) -> None:
        """The view itself or any part of it. Bytes that are not pooled, as in tests, are let go."""
        if not isinstance(data, memoryview):
            return
        with self._lock:
            buffer = self._out.pop(id(data.obj), None)
            if buffer is None:
                raise InvariantError("a buffer was given back twice, or belongs to another pool")
            self._free.append(buffer)
