"""Memory for chunks that are being received: a pool of buffers, and a bound per upload.

The pool has a fixed amount of memory: when all is in use, `take` returns None and the peer is asked
to come back. A buffer is received into, travels with its chunk to the aggregator, and returns to
the pool when the update is folded, refused or dropped, on any thread. Buffers of a full chunk are
used again; shorter ones are allocated for what they hold.

A ticket names one upload, and an upload has a bounded number of bodies being received. Otherwise
one ticket could take every buffer. When the machine takes an upload's memory back, its bodies are
aborted.
"""

from __future__ import annotations

from threading import Lock
from typing import Protocol

from papaya.aggregator.upload import ARRIVING, Owner
from papaya.errors import InvariantError
from papaya.learning.weighting import BytesLike
from papaya.messages.base import SessionId, TaskId


class BufferPool:
    """Invariant: each buffer is either free or in use once; all of them fit. Thread-safe."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._free: list[bytearray] = []  # of `size` each
        self._out: dict[int, bytearray] = {}
        self._out_bytes = 0
        self._lock = Lock()

    @property
    def total_bytes(self) -> int:
        return self.count * self.size

    @property
    def free(self) -> int:
        """How many more full buffers there is memory for."""
        return (self.total_bytes - self._out_bytes) // self.size

    def take(self, length: int) -> memoryview | None:
        """A buffer with arbitrary content, or None if there is no memory for it."""
        with self._lock:
            if self._out_bytes + length > self.total_bytes:
                return None
            if length == self.size and self._free:
                buffer = self._free.pop()
            else:
                while self._free and self._kept_bytes + length > self.total_bytes:
                    self._free.pop()
                buffer = bytearray(length)
            self._out[id(buffer)] = buffer
            self._out_bytes += length
            return memoryview(buffer)

    @property
    def _kept_bytes(self) -> int:
        return self._out_bytes + len(self._free) * self.size

    def give_back(self, data: BytesLike) -> None:
        """Take the view, or any part of it. Bytes that are not pooled, as in tests, are ignored."""
        if not isinstance(data, memoryview):
            return
        with self._lock:
            buffer = self._out.pop(id(data.obj), None)
            if buffer is None:
                raise InvariantError("a buffer was given back twice, or belongs to another pool")
            self._out_bytes -= len(buffer)
            if len(buffer) == self.size:
                self._free.append(buffer)


class Body(Protocol):
    def break_off(self) -> None:
        """Answer the peer and read no more of the body."""
        ...


class ArrivingBodies:
    """Bodies that are being received, by upload. Invariant: at most `ARRIVING` per upload."""

    def __init__(self) -> None:
        self._bodies: dict[Owner, list[Body]] = {}

    def has_room(self, owner: Owner) -> bool:
        return len(self._bodies.get(owner, ())) < ARRIVING

    def add(self, owner: Owner, body: Body) -> None:
        self._bodies.setdefault(owner, []).append(body)

    def remove(self, owner: Owner, body: Body) -> None:
        """Call it when the body is complete or broken."""
        bodies = self._bodies.get(owner, [])
        if body in bodies:
            bodies.remove(body)
            if not bodies:
                del self._bodies[owner]

    def break_off(self, task: TaskId, session: SessionId | None) -> None:
        """Abort the bodies of one session, or of the whole task if `session` is None."""
        if session is not None:
            owners = [(task, session)]
        else:
            owners = [owner for owner in self._bodies if owner[0] == task]
        for owner in owners:
            for body in self._bodies.pop(owner, ()):
                body.break_off()
