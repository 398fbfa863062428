"""Reading a log as devices and auditors alike do: checkpoint and tiles from its public URL.

    "Note that both clients and auditors use the same API to request the log's latest snapshot.
    Therefore the auditors and clients share the same snapshots." (paper)

`LogReader` gets files through a function, so it works over HTTP, from a folder and in a test. It
remembers the newest checkpoint that it accepted and refuses anything that does not continue it: an
older one is a roll-back, another history is a fork. A new device starts from the checkpoint in its
package, and never forgets that one. What `entry` returns was proven to stand in the remembered
tree. `papaya/verifiable_log/memory.py` remembers on a disk.
"""

from __future__ import annotations

from papaya.verifiable_log.checkpoint import (
    Checkpoint,
    LogPolicy,
    open_checkpoint,
    open_remembered,
)
from papaya.verifiable_log.errors import (
    ForkError,
    LogError,
    ProofError,
    RollbackError,
)
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


class LogReader:
    """One log, from the remembered checkpoints on; keep `remembered` over restarts.

    All that are given must be continued: the one on the disk, and the one in the package.
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
        """The log has shown this checkpoint to somebody whom the reader believes."""
        known = open_remembered(note, self._policy)
        for other in self._to_continue:
            if other.size == known.size and other.root != known.root:
                raise ForkError(f"two different checkpoints of size {known.size} are remembered")
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
        """Accept the log's current checkpoint; raises, and keeps the old one, if it must not."""
        note = self._fetch(CHECKPOINT)
        fresh = open_checkpoint(note[: MAX_NOTE_BYTES + 1], self._policy, now)
        if fresh.size == 0 and fresh.root != EMPTY_ROOT:
            raise LogError("the log is empty, but its root is not that of an empty tree")
        for known in self._to_continue:
            self._check_continues(known, fresh)
        # Whatever continues this one continues those before it.
        self._note, self._checkpoint, self._to_continue = note, fresh, [fresh]
        return fresh

    def entry(self, index: int) -> bytes:
        """Entry `index`, proven to be in the tree of the remembered checkpoint."""
        size, root = self.checkpoint.size, self.checkpoint.root
        if not 0 <= index < size:
            raise LogError(f"there is no entry {index} in a log of {size}")
        number, offset = divmod(index, TILE_WIDTH)
        entry = self._bundle(number)[offset]
        proof = inclusion_proof(TileNodes(self._fetch, size), index, size)
        verify_inclusion(leaf_hash(entry), index, size, proof, root)
        return entry

    def entries(self) -> list[bytes]:
        """All entries, whose hashes give the root of the remembered checkpoint."""
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
            raise RollbackError(
                f"the log shows size {new.size}, but {old.size} entries were there before"
            )
        try:
            if old.size == 0:
                return
            nodes = TileNodes(self._fetch, new.size)
            proof = consistency_proof(nodes, old.size, new.size)
            verify_consistency(old.size, new.size, proof, old.root, new.root)
        except ProofError as error:
            raise ForkError(
                f"the log of size {new.size} does not continue the log of size {old.size}: {error}"
            ) from error
