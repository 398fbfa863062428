"""Planted bugs: each breaks one rule of the protocol, to show that the swarm notices.

A checker that never fires proves nothing. `planted(name)` patches one small method while a seed
runs; nothing here is reachable without asking for it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from papaya.aggregator.ledger import Ledger
from papaya.aggregator.participation import Participation
from papaya.aggregator.phase import Phase
from papaya.aggregator.sessions import Session
from papaya.aggregator.shards import Blobs
from papaya.aggregator.task import HeldTask
from papaya.aggregator.work import Stepped
from papaya.coordinator.coordinator import Coordinator
from papaya.errors import OperatorError
from papaya.machine import Transact
from papaya.messages.base import Message, NodeId, TaskId
from papaya.messages.storage import Member, Row, Transaction, record_key
from papaya.messages.tickets import AnyTicket, Keyring, claim_of
from papaya.sim.hosts import AggregatorHost


def _no_fence(self: Ledger) -> tuple[str, Row | None]:
    return "never-written", None


_move = Coordinator._move


def _move_in_memory(self: Coordinator, task: TaskId, to: NodeId) -> Transact:
    effect = _move(self, task, to)
    return replace(effect, transaction=replace(effect.transaction, put=()))


def _forget_consumed(self: Ledger) -> Iterator[Member]:
    for record in self.records.values():
        yield from record.members


_advance = Ledger.advance


def _keep_record(self: Ledger, now: float, stepped: Stepped, life_s: float) -> Transaction:
    transaction = _advance(self, now, stepped, life_s)
    kept = record_key(self.task, stepped.version)
    return replace(transaction, delete=tuple(k for k in transaction.delete if k != kept))


def _forget_leases(self: Coordinator, task: TaskId) -> int:
    report = self._report_of(task)
    return 0 if report is None or self.tasks[task].state != "running" else report.demand


def _demand_at_once(self: HeldTask, now: float) -> int:
    return self.config_demand if self.phase is Phase.SERVING else 0


def _all_room(self: HeldTask) -> int:
    return self.config_demand


def _open_unchecked(self: Keyring, sealed: bytes, kind: type) -> AnyTicket:
    return claim_of(sealed)


def _staleness_from_next(self: Participation, held: HeldTask, session: Session) -> int:
    return max(0, held.ledger.version - session.version - 1)


def _write_without_sync(self: AggregatorHost, blobs: Blobs) -> None:
    for key, data in blobs:
        self.cluster.blobs.put(key, data, sync=False)


def _tell_before_writing(self: AggregatorHost, blobs: Blobs, result: Message) -> None:
    self.deliver(result)
    self.local(self.cluster.config.storage.blob_s, self.write_blobs, blobs)


_Patch = tuple[type, str, Callable[..., Any] | property]

BUGS: dict[str, tuple[_Patch, ...]] = {
    "fence-skipped": ((Ledger, "_fenced", _no_fence),),
    "sequence-number-in-memory": ((Coordinator, "_move", _move_in_memory),),
    "consumed-ids-forgotten": ((Ledger, "members", _forget_consumed),),
    "record-kept-with-its-version": ((Ledger, "advance", _keep_record),),
    "unconfirmed-leases-forgotten": ((Coordinator, "demand", _forget_leases),),
    "adoption-without-a-window": (
        (HeldTask, "demand", _demand_at_once),
        (HeldTask, "room", property(_all_room)),
    ),
    "adoption-without-a-ticket-check": ((Keyring, "open", _open_unchecked),),
    "staleness-from-the-wrong-version": ((Participation, "_staleness", _staleness_from_next),),
    "fsync-forgotten": ((AggregatorHost, "write_blobs", _write_without_sync),),
    "row-before-blob": ((AggregatorHost, "_written", _tell_before_writing),),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Break one rule for as long as the block runs."""
    if name not in BUGS:
        raise OperatorError(f"there is no bug named {name!r}", hint=f"one of: {', '.join(BUGS)}")
    patches = BUGS[name]
    sound = [(owner, method, owner.__dict__[method]) for owner, method, _ in patches]
    try:
        for owner, method, broken in patches:
            setattr(owner, method, broken)
        yield
    finally:
        for owner, method, original in sound:
            setattr(owner, method, original)
