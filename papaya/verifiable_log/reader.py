"""Reading a log as devices and auditors alike do: checkpoint and tiles from its public URL.

    "Note that both clients and auditors use the same API to request the log's latest snapshot.
    Therefore the auditors and clients share the same snapshots." (paper)

`LogReader` gets files through a function, so it works over HTTP, from a folder and in a test. It
remembers the newest checkpoint that it accepted and refuses a log that does not extend it: an older
checkpoint is a roll-back, another history is a fork. A new device starts from the checkpoint in its
package. `entry` verifies an inclusion proof before it returns.

`RememberingReader` keeps the newest checkpoint in a file. Otherwise a server could show an older or
another log after a restart.
"""

from __future__ import annotations

from pathlib import Path

from papaya.verifiable_log.checkpoint import (
    Checkpoint,
    LogPolicy,
    open_checkpoint,
    open_remembered,
)
from papaya.verifiable_log.errors import (
    ForkError,
    LogError,
    MissingFile,
    NoCheckpoint,
    ProofError,
    RollbackError,
)
from papaya.verifiable_log.folder import locked, write_durably
from papaya.verifiable_log.merkle import (
    EMPTY_ROOT,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    tree_root,
    verify_consistency,
    verify_inclusion,
)
from papaya.verifiable_log.note import MAX_NOTE_BYTES
from papaya.verifiable_log.tiles import (
    CHECKPOINT,
    TILE_WIDTH,
    Fetch,
    TileNodes,
    entries_path,
    fetch_tile,
    split_entries,
    subtree_root,
    width_of,
)

_TRIES = 5


class LogReader:
    """Reads one log, which must extend every given checkpoint (from disk, from the package).

    Keep the property `remembered` over restarts.
    """

    def __init__(self, fetch: Fetch, policy: LogPolicy, *remembered: bytes | None) -> None:
        self._fetch = fetch
        self._policy = policy
        self._note: bytes | None = None
        self._checkpoint: Checkpoint | None = None
        self._to_continue: list[Checkpoint] = []
        for note in remembered:
            if note is not None:
                self.must_continue(note)

    def must_continue(self, note: bytes) -> None:
        """Refuse from now on every checkpoint that does not extend this one."""
        known = open_remembered(note, self._policy)
        for other in self._to_continue:
            if other.size == known.size and other.root != known.root:
                raise ForkError(
                    f"the remembered checkpoints of size {known.size} have different roots"
                )
        self._to_continue.append(known)
        if self._checkpoint is None or self._checkpoint.size < known.size:
            self._note, self._checkpoint = note, known

    @property
    def remembered(self) -> bytes | None:
        """The newest accepted checkpoint, as the log signed it."""
        return self._note

    @property
    def checkpoint(self) -> Checkpoint:
        if self._checkpoint is None:
            raise LogError("no checkpoint of this log has been accepted yet")
        return self._checkpoint

    def refresh(self, now: float) -> Checkpoint:
        """Accept the log's current checkpoint; on an error the old one is kept."""
        try:
            note = self._fetch(CHECKPOINT)
        except MissingFile as error:
            raise NoCheckpoint(str(error)) from error
        fresh = open_checkpoint(note[: MAX_NOTE_BYTES + 1], self._policy, now)
        if fresh.size == 0 and fresh.root != EMPTY_ROOT:
            raise LogError("the log is empty, but its root is not that of an empty tree")
        for known in self._to_continue:
            self._check_continues(known, fresh)
        # A log that extends this checkpoint also extends the earlier ones.
        self._note, self._checkpoint, self._to_continue = note, fresh, [fresh]
        return fresh

    def entry(self, index: int) -> bytes:
        """Entry `index`, proven to be in the tree of the remembered checkpoint."""
        size, root = self.checkpoint.size, self.checkpoint.root
        if not 0 <= index < size:
            raise LogError(f"the log has {size} entries; there is no entry {index}")
        number, offset = divmod(index, TILE_WIDTH)
        entry = self._bundle(number)[offset]
        proof = inclusion_proof(TileNodes(self._fetch, size), index, size)
        verify_inclusion(leaf_hash(entry), index, size, proof, root)
        return entry

    def entries(self) -> list[bytes]:
        """All entries, checked against the root of the remembered checkpoint."""
        size = self.checkpoint.size
        numbers = range(-(-size // TILE_WIDTH))
        entries = [entry for number in numbers for entry in self._bundle(number)]
        leaves = [leaf_hash(entry) for entry in entries]

        def nodes(level: int, index: int) -> bytes:
            return subtree_root(leaves[index << level : (index + 1) << level])

        if tree_root(nodes, size) != self.checkpoint.root:
            raise ProofError(f"the {size} entries do not give the root of the checkpoint")
        return entries

    def _bundle(self, number: int) -> list[bytes]:
        width = width_of(self.checkpoint.size, 0, number)
        raw = fetch_tile(self._fetch, lambda w: entries_path(number, w), width)
        return split_entries(raw, width)

    def _check_continues(self, old: Checkpoint, new: Checkpoint) -> None:
        if new.size < old.size:
            raise RollbackError(f"the log has {new.size} entries now, but had {old.size} before")
        try:
            if old.size == 0:
                return
            nodes = TileNodes(self._fetch, new.size)
            proof = consistency_proof(nodes, old.size, new.size)
            verify_consistency(old.size, new.size, proof, old.root, new.root)
        except ProofError as error:
            raise ForkError(
                f"the log of size {new.size} does not extend the log of size {old.size}: {error}"
            ) from error


class CheckpointFile:
    """The newest checkpoint of one log, in a file. Its folder must exist.

    Threads and processes may share the file: each replaces only the checkpoint that it has read.
    The file is written atomically, synced, and never replaced by a shorter log. If it is deleted,
    this object still remembers its content. A file that is not a checkpoint of this log is refused:
    starting over without a warning would allow a roll-back.
    """

    def __init__(self, path: Path, policy: LogPolicy) -> None:
        self._path = path
        self._policy = policy
        self._last: bytes | None = None

    def read(self) -> bytes | None:
        """The last checkpoint, or None."""
        try:
            with self._path.open("rb") as file:
                found = file.read(MAX_NOTE_BYTES + 1)
        except FileNotFoundError:
            return self._last
        try:
            open_remembered(found, self._policy)
        except LogError as error:
            raise LogError(f"{self._path} is not a checkpoint of this log: {error}") from error
        self._last = found
        return found

    def replace(self, known: bytes | None, note: bytes) -> bool:
        """Write `note` durably. Returns False if the file no longer contains `known`."""
        with locked(self._path.with_name(f"{self._path.name}.lock"), wait=True):
            there = self.read()
            if there == note and self._path.exists():
                return True
            if there != known:
                return False
            if there is not None and self._size(note) < self._size(there):
                raise RollbackError(f"{self._path} contains the checkpoint of a longer log")
            write_durably(self._path, note)
            self._last = note
            return True

    def _size(self, note: bytes) -> int:
        return open_remembered(note, self._policy).size


class RememberingReader(LogReader):
    """A reader that writes each accepted checkpoint to disk before it is used."""

    def __init__(
        self, fetch: Fetch, policy: LogPolicy, memory: CheckpointFile, pinned: bytes | None = None
    ) -> None:
        super().__init__(fetch, policy, memory.read(), pinned)
        self._memory = memory

    def refresh(self, now: float) -> Checkpoint:
        for _ in range(_TRIES):
            known = self._memory.read()
            if known is not None:
                self.must_continue(known)
            fresh = super().refresh(now)
            note = self.remembered
            assert note is not None
            if self._memory.replace(known, note):
                return fresh
        raise LogError("other processes updated the stored checkpoint at the same time; try again")
