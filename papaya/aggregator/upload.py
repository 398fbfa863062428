"""Uploads in chunks (paper, "Participation": "the client uploads the model in chunks").

Chunks may arrive late, twice and out of order. The machine tracks which chunks have arrived; the
bytes stay with the driver. `UploadMemory` decides whose bytes are received and kept: memory is
limited, each task has a share of it, and an upload that is too slow does not keep it from others.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    "STARTER_BYTES",
    "Claim",
    "Owner",
    "Upload",
    "UploadMemory",
    "chunk_count",
    "chunk_length",
    "crc32",
    "needed_bytes",
    "why_not_served",
]

ARRIVING = 2
"""How many chunks of one upload may be in transit at a time: a chunk and its duplicate."""

STARTER_BYTES = 16 << 10
"""Memory for a chunk in transit while nothing else of its upload has arrived."""

MIN_BYTES_PER_S = 1024.0
"""The least rate of any upload that keeps pace."""


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


def held_per_byte(config: TaskConfig) -> int:
    """The memory for each byte of an upload: for itself, and for the float32 numbers that an update
    in fewer bits becomes. Masked words stay as they are.
    """
    return 1 if config.upload_bits == 32 or config.is_secure else 1 + 32 // config.upload_bits


def needed_bytes(config: TaskConfig, chunk_bytes: int) -> int:
    """All the memory that an upload of the task may need, for chunks kept and in transit."""
    size = config.update_bytes
    return held_per_byte(config) * size + ARRIVING * min(chunk_bytes, size)


def why_not_served(config: TaskConfig, chunk_bytes: int, memory_bytes: float) -> str:
    """Why this aggregator cannot accept updates of the task; empty if it can."""
    chunks = chunk_count(config.update_bytes, chunk_bytes)
    if chunks > MAX_CHUNKS:
        return f"an update has {chunks} chunks, the limit is {MAX_CHUNKS}"
    needed = needed_bytes(config, chunk_bytes)
    if needed > memory_bytes:
        return f"an update needs {needed} of {memory_bytes:.0f} bytes: raise upload_memory_mb"
    return ""


Owner = tuple[TaskId, SessionId]


class Claim:
    """What one upload holds of the memory, and how fast it has been. Lasts as long as its session.

    Bytes that arrive pay for time: `bytes_per_s` of them for one second, up to `paid_until`. An
    upload that has paid keeps pace.
    """

    __slots__ = (
        "bytes_per_s",
        "chunk_bytes",
        "has_begun",
        "has_grown",
        "held_per_byte",
        "is_complete",
        "is_promised",
        "kept_bytes",
        "needed_bytes",
        "owner",
        "paid_until",
        "told_bytes",
    )

    def __init__(self, owner: Owner, config: TaskConfig, chunk_bytes: int) -> None:
        self.owner = owner
        size = config.update_bytes
        self.chunk_bytes = min(chunk_bytes, size)
        self.held_per_byte = held_per_byte(config)
        # All that the upload may ever hold.
        self.needed_bytes = needed_bytes(config, chunk_bytes)
        # Half the rate that is needed to end in time. An upload slower than that is hopeless.
        in_time = size / config.upload_timeout_s
        self.bytes_per_s = max(MIN_BYTES_PER_S, in_time / 2)
        # What chunks that are kept hold, now or when the update is folded.
        self.kept_bytes = 0
        # Chunks in transit may use whole buffers; before, `STARTER_BYTES` each.
        self.has_grown = False
        # The upload has held memory before, and has had the time to show its pace.
        self.has_begun = False
        # Memory for all of the upload is promised to it, as long as it keeps pace.
        self.is_promised = False
        # The update is being folded: it ends by itself, and cannot be taken back.
        self.is_complete = False
        self.paid_until = 0.0
        # Bytes of chunks in transit that have been paid for already.
        self.told_bytes = 0

    @property
    def transit_bytes(self) -> int:
        """Room for chunks in transit."""
        return ARRIVING * (
            self.chunk_bytes if self.has_grown else min(self.chunk_bytes, STARTER_BYTES)
        )

    @property
    def held_bytes(self) -> int:
        """What has arrived or will soon."""
        return self.kept_bytes + self.transit_bytes


class UploadMemory:
    """Memory for uploads in progress, shared by all tasks of an aggregator.

    A new upload begins when all that it needs can be promised to it, so that uploads that have
    begun can end. It holds only what has arrived or will soon. The promise lasts while the upload
    keeps pace. Without a promise it may go on with memory that is promised to nobody, and after
    `patience_s` it loses what it holds as soon as another upload has no room.

    A task is guaranteed an equal share, and at least one upload: for it, the newest uploads of
    tasks above their share lose what they hold.

    Invariant: what is promised, and what uploads without a promise hold, never exceeds
    `total_bytes`.
    """

    def __init__(self, total_bytes: float, heartbeat_s: float) -> None:
        self.total_bytes = total_bytes
        # Claims that lost their memory to others. The aggregator drops their bytes.
        self.taken_back: list[Claim] = []
        self._claims: dict[Owner, Claim] = {}  # in the order in which they began
        self._needed_bytes = 0  # of all claims: if it fits, nothing else has to be counted
        self._trial_s = heartbeat_s / 4
        self._max_paid_s = 2 * heartbeat_s
        self._patience_s = 2 * heartbeat_s

    def may_send(self, now: float, claim: Claim, length: int) -> bool:
        """May a chunk of this length be received? If so, it can be kept as long as others wait for
        no memory. The first chunk begins the upload.
        """
        kept = claim.kept_bytes + claim.held_per_byte * length if claim.has_grown else 0
        return self._reserve(now, claim, kept + claim.transit_bytes)

    def may_grow(self, now: float, claim: Claim) -> bool:
        """May chunks in transit use whole buffers? If not, the upload should be dropped."""
        if claim.owner not in self._claims:
            return False
        if not claim.has_grown:
            room = (ARRIVING + claim.held_per_byte) * claim.chunk_bytes
            claim.has_grown = self._reserve(now, claim, room)
        return claim.has_grown

    def may_keep(self, now: float, claim: Claim, length: int) -> bool:
        """Is there room for a chunk that has arrived as a whole?"""
        kept = claim.kept_bytes + claim.held_per_byte * length
        return self._reserve(now, claim, kept + ARRIVING * claim.chunk_bytes)

    def keep(self, now: float, claim: Claim, length: int) -> None:
        """`may_keep` has just been true."""
        claim.kept_bytes += claim.held_per_byte * length
        claim.has_grown = True
        untold = max(0, length - claim.told_bytes)
        claim.told_bytes = max(0, claim.told_bytes - length)
        self._pay(now, claim, untold)

    def arrived(self, now: float, claim: Claim, count: int) -> None:
        """Part of a chunk has arrived."""
        claim.told_bytes += count
        self._pay(now, claim, count)

    def extend(self, stop_s: float) -> None:
        """The process was stopped for so long: what arrived meanwhile was not read."""
        for claim in self._claims.values():
            claim.paid_until += stop_s

    def release(self, claim: Claim | None) -> None:
        """Everything that the upload held is gone. Its pace is not forgotten."""
        if claim is not None and self._claims.pop(claim.owner, None) is not None:
            self._needed_bytes -= claim.needed_bytes
            claim.kept_bytes = claim.told_bytes = 0
            claim.has_grown = claim.is_promised = claim.is_complete = False

    def holds(self, claim: Claim | None) -> bool:
        return claim is not None and claim.owner in self._claims

    def used(self, now: float) -> float:
        """The share of memory that is promised, or held without a promise."""
        return sum(self._counted_bytes(now, c) for c in self._claims.values()) / self.total_bytes

    def check(self) -> None:
        held = sum(claim.held_bytes for claim in self._claims.values())
        if held > self.total_bytes:
            raise InvariantError(f"uploads hold {held} of {self.total_bytes} bytes")
        needed = sum(claim.needed_bytes for claim in self._claims.values())
        if needed != self._needed_bytes:
            raise InvariantError(f"uploads need {needed} bytes, {self._needed_bytes} are counted")

    # -- pace -------------------------------------------------------------------------------

    def _pay(self, now: float, claim: Claim, count: int) -> None:
        if now > claim.paid_until:
            claim.is_promised = False  # the memory may be promised to others by now
        paid_until = max(now, claim.paid_until) + count / claim.bytes_per_s
        claim.paid_until = min(paid_until, now + self._max_paid_s)

    def _is_overdue(self, now: float, claim: Claim) -> bool:
        return not claim.is_complete and claim.paid_until + self._patience_s < now

    def _counted_bytes(self, now: float, claim: Claim) -> int:
        if claim.is_promised and now <= claim.paid_until and not claim.is_complete:
            return claim.needed_bytes
        return claim.held_bytes

    # -- room -------------------------------------------------------------------------------

    def _reserve(self, now: float, claim: Claim, wanted: int) -> bool:
        """Promise the upload all that it needs; else let it hold `wanted` bytes in all."""
        if claim.is_promised and now <= claim.paid_until:
            return True
        is_new = not claim.has_begun
        keeps_pace = is_new or now <= claim.paid_until
        claim.is_promised = keeps_pace and self._make_room(now, claim, claim.needed_bytes)
        if not claim.is_promised and (is_new or not self._make_room(now, claim, wanted)):
            return False
        if is_new:
            claim.has_begun = True
            claim.paid_until = now + self._trial_s
        if claim.owner not in self._claims:
            self._claims[claim.owner] = claim
            self._needed_bytes += claim.needed_bytes
        return True

    def _make_room(self, now: float, claim: Claim, wanted: int) -> bool:
        """Can the claim have `wanted` bytes, if others give up what they may not keep?"""
        own = claim.needed_bytes if claim.owner in self._claims else 0
        if self._needed_bytes - own + wanted <= self.total_bytes:
            return True
        others = [other for other in self._claims.values() if other is not claim]
        missing = wanted - self.total_bytes
        missing += sum(self._counted_bytes(now, other) for other in others)
        chosen: list[Claim] = []
        victims = self._victims(now, claim, others)
        while missing > 0:
            victim = next(victims, None)
            if victim is None:
                return False
            chosen.append(victim)
            missing -= self._counted_bytes(now, victim)
        for victim in chosen:
            self.release(victim)
        self.taken_back += chosen
        return True

    def _victims(self, now: float, claim: Claim, others: list[Claim]) -> Iterator[Claim]:
        """The slowest first. Then, for a task within its share, the newest of those above it."""
        overdue = [other for other in others if self._is_overdue(now, other)]
        yield from sorted(
            # Of two slow uploads the faster one goes on, or they would stop each other in turns.
            (
                other
                for other in overdue
                if not claim.has_begun or other.paid_until <= claim.paid_until
            ),
            key=lambda other: other.paid_until,
        )
        if claim.has_begun and now > claim.paid_until:
            return
        task = claim.owner[0]
        used = {task: 0}
        for other in others:
            counted = self._counted_bytes(now, other)
            used[other.owner[0]] = used.get(other.owner[0], 0) + counted
        share = self.total_bytes / len(used)
        if used[task] + claim.needed_bytes > max(share, claim.needed_bytes):
            return
        for other in reversed(others):
            theirs = other.owner[0]
            is_above = used[theirs] > max(share, other.needed_bytes)
            if theirs != task and is_above and not other.is_complete and other not in overdue:
                used[theirs] -= self._counted_bytes(now, other)
                yield other
