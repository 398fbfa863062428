"""Twins of the state store and the blob store.

The state store commits whole transactions, durably, but the answer may be lost and the transaction
may be applied long after its sender gave up waiting, or died. The blob store keeps what was synced;
a power loss loses or tears the rest. Both keep everything across crashes of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from msgspec import Struct

from papaya.errors import MissingBlob
from papaya.messages.base import BlobKey, NodeId
from papaya.messages.storage import Outcome, Row, Transaction
from papaya.sim.engine import Engine


class StorageConfig(Struct, frozen=True, kw_only=True):
    transaction_s: float = 0.004
    blob_s: float = 0.02
    fold_s: float = 0.0
    folds_overtake: bool = False
    """Each fold takes between 0 and twice `fold_s`, so a later one may end first."""
    unknown: float = 0.0
    late_s: float = 30.0
    """How long after an unknown outcome the transaction may still be applied."""


Writer = tuple[NodeId, int]
"""Which boot of which process sent a transaction."""
OWNER: Writer = ("owner", 0)
OnTransaction = Callable[[Writer, Transaction, dict[str, Row]], None]


class StateTwin:
    """Rows, compare-and-set transactions and snapshot reads."""

    def __init__(self, engine: Engine, rng: Random, config: StorageConfig) -> None:
        self.rows: dict[str, Row] = {}
        self.config = config
        self.observers: list[OnTransaction] = []
        self._engine = engine
        self._rng = rng

    def apply(self, writer: Writer, transaction: Transaction) -> Outcome:
        """Atomic: everything or nothing. Observers see the rows as they were before."""
        for key, expected in transaction.require:
            if self.rows.get(key) != expected:
                return "refused"
        before = {
            key: self.rows[key]
            for key in (*transaction.delete, *(key for key, _ in transaction.put))
            if key in self.rows
        }
        for key in transaction.delete:
            self.rows.pop(key, None)
        for key, row in transaction.put:
            self.rows[key] = row
        for observe in self.observers:
            observe(writer, transaction, before)
        return "committed"

    def transact(
        self, writer: Writer, transaction: Transaction, done: Callable[[Outcome], None]
    ) -> None:
        if self.config.unknown and self._rng.random() < self.config.unknown:
            self._lose(writer, transaction, done)
            return
        delay_s = self.config.transaction_s * (0.5 + self._rng.random())
        self._engine.after(delay_s, lambda: done(self.apply(writer, transaction)))

    def read(self, prefixes: tuple[str, ...], done: Callable[[dict[str, Row]], None]) -> None:
        delay_s = self.config.transaction_s * (0.5 + self._rng.random())
        self._engine.after(delay_s, lambda: done(self.snapshot(prefixes)))

    def snapshot(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        return {key: self.rows[key] for key in sorted(self.rows) if key.startswith(prefixes)}

    def _lose(
        self, writer: Writer, transaction: Transaction, done: Callable[[Outcome], None]
    ) -> None:
        """The sender learns nothing: applied at once, later, or never."""
        fate = self._rng.random()
        if fate < 0.7:
            late_s = self.config.late_s * self._rng.random() if fate < 0.4 else 0.0
            self._engine.after(late_s, lambda: self._apply_unseen(writer, transaction))
        self._engine.after(1.0 + self._rng.random(), lambda: done("unknown"))

    def _apply_unseen(self, writer: Writer, transaction: Transaction) -> None:
        self.apply(writer, transaction)


class Blob:
    __slots__ = ("data", "is_synced")

    def __init__(self, data: bytes, is_synced: bool) -> None:
        self.data = data
        self.is_synced = is_synced


class BlobTwin:
    """Content-addressed bytes. Written is not synced; only synced survives a power loss."""

    def __init__(self, rng: Random) -> None:
        self.blobs: dict[BlobKey, Blob] = {}
        self.observers: list[Callable[[BlobKey], None]] = []  # told of each blob that is lost
        self._rng = rng

    def put(self, key: BlobKey, data: bytes, *, sync: bool = True) -> None:
        known = self.blobs.get(key)
        if known is not None and known.is_synced:
            return  # never overwritten
        self.blobs[key] = Blob(data, sync)

    def get(self, key: BlobKey) -> bytes:
        if key not in self.blobs:
            raise MissingBlob(f"blob {key} is missing")
        return self.blobs[key].data

    def get_part(self, key: BlobKey, start: int, end: int) -> bytes:
        return self.get(key)[start:end]

    def delete(self, key: BlobKey) -> None:
        if self.blobs.pop(key, None) is not None:
            self._tell_lost(key)

    def sweep(self, task: str, below_seq: int, keep: frozenset[BlobKey]) -> None:
        """Delete what earlier holders of a task left behind without a row."""
        for key in [key for key in self.blobs if key.startswith(f"{task}/") and key not in keep]:
            if int(key.split("/")[1]) < below_seq:
                self.delete(key)

    def lose_power(self) -> None:
        for key, blob in list(self.blobs.items()):
            if not blob.is_synced:
                if self._rng.random() < 0.5:
                    del self.blobs[key]
                else:
                    blob.data = blob.data[: int(len(blob.data) * self._rng.random())]
                self._tell_lost(key)

    def _tell_lost(self, key: BlobKey) -> None:
        for observe in self.observers:
            observe(key)
