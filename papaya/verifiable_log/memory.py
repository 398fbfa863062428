"""The newest checkpoint of a log, on a disk: what was seen must not be unseen, by a crash or a lie.

A device that forgets shows itself to whoever serves it an older log, or another one. So the file
is written whole and synced, and never replaced by a shorter log. Processes may share it: each
replaces only what it has read, and continued, itself; otherwise it reads the log once more. Whoever
holds a `CheckpointFile` remembers also if the file is deleted meanwhile.

Refused: a file that is no checkpoint of this log. To start anew in silence would be a roll-back.
"""

from __future__ import annotations

from pathlib import Path

from papaya.verifiable_log.checkpoint import Checkpoint, LogPolicy, open_remembered
from papaya.verifiable_log.durable import locked, write_durably
from papaya.verifiable_log.errors import LogError, RollbackError
from papaya.verifiable_log.note import MAX_NOTE_BYTES
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.tiles import Fetch

_TRIES = 5


class CheckpointFile:
    """One file, for one log. Threads and processes may share it; its folder must be there."""

    def __init__(self, path: Path, policy: LogPolicy) -> None:
        self._path = path
        self._policy = policy
        self._last: bytes | None = None

    def read(self) -> bytes | None:
        """What the log showed last; None if it was never read."""
        try:
            with self._path.open("rb") as file:
                found = file.read(MAX_NOTE_BYTES + 1)
        except FileNotFoundError:
            return self._last
        try:
            open_remembered(found, self._policy)
        except LogError as error:
            raise LogError(f"invalid checkpoint of this log in {self._path}: {error}") from error
        self._last = found
        return found

    def replace(self, known: bytes | None, note: bytes) -> bool:
        """Durable when it returns; False: there is another checkpoint than `known` by now."""
        with locked(self._path.with_name(f"{self._path.name}.lock"), wait=True):
            there = self.read()
            if there == note and self._path.exists():
                return True
            if there != known:
                return False
            if there is not None and self._size(note) < self._size(there):
                raise RollbackError(f"{self._path} already has a checkpoint of a longer log")
            write_durably(self._path, note)
            self._last = note
            return True

    def _size(self, note: bytes) -> int:
        return open_remembered(note, self._policy).size


class RememberingReader(LogReader):
    """A reader that has written down what it accepted before anybody can make use of it."""

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
        raise LogError("the stored checkpoint changed repeatedly during this read; try again")
