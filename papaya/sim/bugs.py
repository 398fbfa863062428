"""Planted bugs: each breaks one rule of the protocol, to show that the swarm notices.

They test the checkers: each must be found. `planted(name)` patches one small method while a seed
runs; nothing here is reachable without asking for it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from papaya.aggregator import masked_sum as masked
from papaya.aggregator.held_task import HeldTask, TaskPhase
from papaya.aggregator.leases import Promises
from papaya.aggregator.ledger import Ledger
from papaya.aggregator.masked_sum import TsaError
from papaya.aggregator.offers import Offers
from papaya.aggregator.participants import Participants
from papaya.aggregator.pipeline import Buffer, Pipeline
from papaya.aggregator.requests import Requests
from papaya.aggregator.revisions import Revisions
from papaya.aggregator.sessions import Session
from papaya.aggregator.shards import NewBlobs, Shards, TakeLock, _BufferUpdates
from papaya.aggregator.slots import Slots
from papaya.aggregator.task_events import TaskEvents
from papaya.aggregator.tsa import TsaAdapter
from papaya.aggregator.work import FAILED, UNREACHABLE, Fold, Stepped, StockedOffer
from papaya.client.client import Client
from papaya.config import TaskConfig
from papaya.coordinator.coordinator import Coordinator
from papaya.coordinator.demand import ClientDemand
from papaya.coordinator.leader_events import LeaderEvents
from papaya.coordinator.recovery import Leadership
from papaya.errors import OperatorError
from papaya.learning.weighting import BytesLike
from papaya.machine import Effects, Transact
from papaya.messages.base import Message, NodeId, SessionId, TaskId
from papaya.messages.events import BufferDropped
from papaya.messages.participation import Complete, SecureOffer
from papaya.messages.storage import (
    FenceRow,
    Member,
    Outcome,
    RecordRow,
    Row,
    Transaction,
    record_key,
)
from papaya.messages.tickets import AnyTicket, AssignmentTicket, Keyring, claim_of, pseudonym_of
from papaya.secagg import offer as secagg
from papaya.secagg import participant
from papaya.secagg.fixed_point import Encoder
from papaya.secagg.noise import KEY_BYTES, Noise
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import SealedUpdate, Terms, UnsealedUpdate
from papaya.secagg.rounding import RandomEncoder
from papaya.secagg.unmask import TakeBlock
from papaya.secagg.words import RING_16, SIGNED, WORD, Entropy, Reals, Words
from papaya.sim.hosts import SimulatedAggregatorHost
from papaya.sim.storage import StateTwin, Writer
from papaya.tsa.group import Group
from papaya.tsa.tsa import TSA


def _no_fence(self: Ledger) -> tuple[str, Row | None]:
    return "never-written", None


_move = Coordinator._move


def _move_in_memory(self: Coordinator, task: TaskId, to: NodeId, why: str) -> Transact:
    effect = _move(self, task, to, why)
    return replace(effect, transaction=replace(effect.transaction, put=()))


def _forget_consumed(self: Ledger, session: SessionId) -> bool:
    return False


def _ignore_settled(self: Ledger) -> int:
    return self.restarted_at


_advance = Ledger.advance


def _keep_record(
    self: Ledger,
    now: float,
    stepped: Stepped,
    life_s: float,
    oldest_kept: float,
    members: tuple[Member, ...],
) -> Transaction:
    transaction = _advance(self, now, stepped, life_s, oldest_kept, members)
    kept = record_key(self.task, stepped.version)
    return replace(transaction, delete=tuple(k for k in transaction.delete if k != kept))


def _forget_leases(self: ClientDemand, task: TaskId) -> int:
    report = self.report_of(task)
    return 0 if report is None or self._rows.tasks[task].state != "running" else report.demand


def _demand_at_once(self: HeldTask, now: float) -> int:
    return self.slots.client_demand if self.phase is TaskPhase.SERVING else 0


def _all_room(self: Slots) -> int:
    return self.client_demand


def _cover_every_epoch(self: Promises, assignment: AssignmentTicket) -> bool:
    return assignment.seq == self._seq or self.inherits(assignment.session)


def _open_unchecked(self: Keyring, sealed: bytes, kind: type) -> AnyTicket:
    return claim_of(sealed)


def _staleness_from_next(self: Requests, session: Session) -> int:
    return max(0, self._ledger.version - session.version - 1)


def _write_without_sync(self: SimulatedAggregatorHost, blobs: NewBlobs) -> None:
    for key, data in blobs:
        self.cluster.blobs.put(key, data, sync=False)


def _tell_before_writing(self: SimulatedAggregatorHost, blobs: NewBlobs, result: Message) -> None:
    self.deliver(result)
    self.local(self.cluster.config.storage.blob_s, self.write_blobs, blobs)


_accept = TSA.accept


def _accept_again(self: TSA, index: int, group: int, sealed: bytes, now: float) -> None:
    pending = {i: (t, t.pending[i]) for i, t in self._task_of_pending.items() if i == index}
    _accept(self, index, group, sealed, now)
    for task, kept in pending.values():
        task.pending[index] = kept
        self._task_of_pending[index] = task


_advance = Ledger.advance


def _require_one_record(self: Ledger, *given: Any) -> Transaction:
    made = _advance(self, *given)
    next_record = record_key(self.task, self.version + 2)
    require = tuple(wanted for wanted in made.require if wanted[0] != next_record)
    return replace(made, require=require)


_member = Shards._member


def _fold_before_accept(self: Shards, work: Fold, pieces: list[BytesLike]) -> Any:
    try:
        return _member(self, work, pieces)
    except TsaError:
        return pieces


def _take_any(self: Pipeline, buffer: Buffer, manifest: bytes) -> bool:
    return True


def _newest_terms(self: Revisions, manifest: bytes) -> TaskConfig:
    return self._pipeline.config


_release = TsaAdapter.release


def _release_fewer(
    self: TsaAdapter,
    parameters: PublicParameters,
    group: int,
    members: Sequence[int],
    take: TakeBlock,
) -> None:
    enough = len(members) > parameters.threshold
    _release(self, parameters, group, members[1:] if enough else members, take)


def _take_away_for_lost(
    self: TsaAdapter,
    parameters: PublicParameters,
    group: int,
    members: Sequence[int],
    take: TakeBlock,
) -> None:
    try:
        _release(self, parameters, group, members, take)
    except TsaError as error:
        raise TsaError(masked.LOST, str(error)) from error


_accept_seed = TsaAdapter.accept


def _take_silence_for_lost(
    self: TsaAdapter, parameters: PublicParameters, index: int, group: int, sealed: bytes
) -> None:
    try:
        _accept_seed(self, parameters, index, group, sealed)
    except TsaError as error:
        reason = masked.LOST if error.reason == UNREACHABLE else error.reason
        raise TsaError(reason, str(error), error.group) from error


def _take_failure_for_refusal(
    self: TsaAdapter,
    parameters: PublicParameters,
    group: int,
    members: Sequence[int],
    take: TakeBlock,
) -> None:
    try:
        _release(self, parameters, group, members, take)
    except TsaError as error:
        reason = "refused_internal" if error.reason == FAILED else error.reason
        raise TsaError(reason, str(error)) from error


_mark_lost = Offers.mark_lost


def _give_all_up(self: Offers, now: float, pipeline: Pipeline) -> None:
    _mark_lost(self, now, pipeline)
    pipeline.lose(now, pipeline.newest_seeds(self._config.manifest))


def _peek(self: Offers, now: float) -> tuple[StockedOffer, SecureOffer] | None:
    if not self._stock or self._terms is None:
        return None
    return self._stock[0], replace(self._terms, offer=self._stock[0].message)


_seal = UnsealedUpdate.seal


def _believe_to_be_fresh(
    self: UnsealedUpdate,
    terms: Terms,
    offer: secagg.Offer,
    current_version: int,
    now: float,
    entropy: Entropy,
    tag: bytes = b"",
) -> SealedUpdate:
    return _seal(self, terms, offer, self._initial_version, now, entropy, tag)


_ask = Client._ask


def _seal_again(self: Client, now: float, message: Message) -> Effects:
    if isinstance(message, Complete) and self._failures > 0:
        message = replace(message, sealed=message.sealed[::-1])
    return _ask(self, now, message)


def _accept_nan(self: Encoder, values: Reals, scaled: Reals) -> None:
    scaled[...] = 0.0


_on_stepped = HeldTask.on_stepped


def _drop_in_silence(self: HeldTask, now: float, message: Stepped) -> Effects:
    return _on_stepped(self, now, replace(message, dropped=""))


def _give_up_after_a_crash(self: Shards, work: Any, total: Any) -> Any:
    if isinstance(total, masked.MaskedSum):
        raise TsaError(masked.LOST, "dropped without asking")
    return total.mean()


_as_member = Session.as_member


def _as_stranger(self: Session, keep_until: float) -> Member:
    return replace(_as_member(self, keep_until), pseudonym=b"")


_of_record = Buffer.of_record


def _of_strangers(record: RecordRow, goal: int) -> Buffer:
    strangers = tuple(replace(member, pseudonym=b"") for member in record.members)
    return _of_record(replace(record, members=strangers), goal)


_of_members = _BufferUpdates.of_record


def _of_a_member_twice(record: RecordRow, lock: TakeLock) -> _BufferUpdates:
    first, *others = record.updates or ()
    return _of_members(
        replace(record, updates=(first, *others[:-1], *[first] * bool(others))), lock
    )


def _spare_revoked(self: Participants) -> Effects:
    key = self._ledger.pseudonym_key
    self.revoked = frozenset(pseudonym_of(device, key) for device in self.revoked_devices)
    return []


def _trust_revoked(self: Participants, session: SessionId) -> bool:
    return False


def _tell_nothing(self: LeaderEvents, now: float, own: Leadership) -> None:
    pass


_tell_fence = LeaderEvents.fence


def _tell_fence_twice(self: LeaderEvents, task: TaskId, run: int, fence: FenceRow) -> None:
    before = len(self._events)
    _tell_fence(self, task, run, fence)
    self._events += self._events[before:]


_tell_versions = TaskEvents.versions


def _keep_drops_secret(self: TaskEvents, ledger: Ledger, *, has_served: bool) -> None:
    events = len(self._events)
    _tell_versions(self, ledger, has_served=has_served)
    told = [e for e in self._events[events:] if not isinstance(e, BufferDropped)]
    self._events[events:] = told


def _delete_pinned(self: Ledger, now: float, settled: int) -> list[int]:
    last = self.version + 1 - self.config.keep_versions
    return [v for v, row in self.versions.items() if v < settled and v <= last and not row.marked]


_init_noise = Noise.__init__


def _half_noise(self: Noise, key: bytes, sigma: Fraction) -> None:
    _init_noise(self, key, sigma / 2 if sigma >= 128 else sigma)


def _no_noise(self: Noise, words: Words, start: int, end: int) -> None:
    pass


_release_masks = TSA.release


def _draw_again(self: Any, parameters_hash: bytes, group: int, members: Sequence[int]) -> Words:
    task = self._task(parameters_hash)
    length, sigma = task.parameters.length, task.parameters.sigma
    drawn = {} if not hasattr(self, "drawn") else self.drawn
    if task.parameters.is_private and group in task.groups:
        drawn[parameters_hash, group] = task.groups[group]._noise
    self.drawn = drawn
    is_again = task.released is not None and task.released.group == group
    masks = _release_masks(self, parameters_hash, group, members)
    if not is_again or not task.parameters.is_private:
        return masks
    old, new = np.zeros(masks.size, WORD), np.zeros(masks.size, WORD)
    drawn[parameters_hash, group].add_to(old, 0, length)
    Noise(self._entropy(KEY_BYTES), sigma).add_to(new, 0, length)
    changed: Words = masks - old + new
    return changed


def _any_tag(self: Group, tag: bytes) -> bool:
    return False


_masked_update = participant._masked


def _with_weight(
    delta: Reals, weight: float, damping: float, parameters: PublicParameters, seed: bytes
) -> Words:
    words = _masked_update(delta, weight, damping, parameters, seed).copy()
    if parameters.is_private:
        capped = min(1.0, float(np.abs(delta).sum()))
        words[-1] += np.uint32(round(1000 * capped))
    return words


def _round_down(self: RandomEncoder, fine: Words, block: Words) -> None:
    np.copyto(block.view(RING_16.signed), fine.view(SIGNED) >> 16, casting="unsafe")


_encode_at_random = RandomEncoder.__init__


def _all_levels(self: RandomEncoder, factor: float, limit: int, seed: bytes) -> None:
    most = RING_16.largest - 1
    _encode_at_random(self, factor * (most / limit), most, seed)


_transact = StateTwin.transact


def _answer_before_commit(
    self: StateTwin, writer: Writer, transaction: Transaction, done: Callable[[Outcome], None]
) -> None:
    records = [row for _, row in transaction.put if isinstance(row, RecordRow)]
    if not records or len(records) < len(transaction.put):
        _transact(self, writer, transaction, done)
        return
    self._engine.after(0.0, lambda: done("committed"))
    self._engine.after(self.config.transaction_s, lambda: self._apply_unseen(writer, transaction))


_lose = StateTwin._lose


def _lose_and_repeat(
    self: StateTwin, writer: Writer, transaction: Transaction, done: Callable[[Outcome], None]
) -> None:
    again = replace(transaction, require=())
    _lose(self, writer, transaction, done)
    self._engine.after(self.config.late_s, lambda: self._apply_unseen(writer, again))


_Patch = tuple[Any, str, Callable[..., Any] | property]


class Bug(NamedTuple):
    explanation: str
    patches: tuple[_Patch, ...]


BUGS: dict[str, Bug] = {
    "acknowledged-before-commit": Bug(
        "the record of a buffer is reported as committed before it is written",
        ((StateTwin, "transact", _answer_before_commit),),
    ),
    "unknown-transaction-repeated": Bug(
        "a transaction with an unknown outcome is written again later, whatever the rows are then",
        ((StateTwin, "_lose", _lose_and_repeat),),
    ),
    "fence-skipped": Bug(
        "an aggregator writes rows without checking that it still holds the task",
        ((Ledger, "_fenced", _no_fence),),
    ),
    "sequence-number-in-memory": Bug(
        "a coordinator moves a task without storing its new sequence number",
        ((Coordinator, "_move", _move_in_memory),),
    ),
    "consumed-ids-forgotten": Bug(
        "sessions of earlier versions are forgotten, so an update can count twice",
        ((Ledger, "has_consumed", _forget_consumed),),
    ),
    "settled-ignored": Bug(
        "tickets are accepted although the rows that tell whether they were used are deleted",
        ((Ledger, "void_below", property(_ignore_settled)),),
    ),
    "pinned-version-deleted": Bug(
        "a version is deleted while an evaluation pins it",
        ((Ledger, "_outlived_versions", _delete_pinned),),
    ),
    "record-kept-with-its-version": Bug(
        "the record of a buffer is not deleted when its version is committed",
        ((Ledger, "advance", _keep_record),),
    ),
    "unconfirmed-leases-forgotten": Bug(
        "a coordinator's demand ignores clients that are assigned but not confirmed",
        ((ClientDemand, "of", _forget_leases),),
    ),
    "adoption-without-a-window": Bug(
        "a new holder of a task reports its full demand before old clients return",
        (
            (HeldTask, "demand", _demand_at_once),
            (Slots, "room", property(_all_room)),
        ),
    ),
    "earlier-leaders-assignments-kept": Bug(
        "an assignment of an earlier leader takes a slot that was reported to the new one",
        ((Promises, "cover", _cover_every_epoch),),
    ),
    "adoption-without-a-ticket-check": Bug(
        "tickets are accepted without verifying their seal", ((Keyring, "open", _open_unchecked),)
    ),
    "staleness-from-the-wrong-version": Bug(
        "staleness is one version too low",
        ((Requests, "_staleness", _staleness_from_next),),
    ),
    "fsync-forgotten": Bug(
        "blobs are written without fsync",
        ((SimulatedAggregatorHost, "write_blobs", _write_without_sync),),
    ),
    "row-before-blob": Bug(
        "a result is reported before its blobs are written",
        ((SimulatedAggregatorHost, "_written", _tell_before_writing),),
    ),
    "device-twice-in-a-buffer": Bug(
        "an update takes a place in a buffer without the pseudonym of its device",
        ((Session, "as_member", _as_stranger),),
    ),
    "devices-forgotten-by-a-successor": Bug(
        "a new holder of a task does not know which devices are in the open buffers",
        ((Buffer, "of_record", staticmethod(_of_strangers)),),
    ),
    "member-twice-after-a-failover": Bug(
        "a new holder of a task combines one update of an open buffer twice, and another one never",
        ((_BufferUpdates, "of_record", staticmethod(_of_a_member_twice)),),
    ),
    "seed-accepted-twice": Bug(
        "the TSA accepts the seed of an offer a second time", ((TSA, "accept", _accept_again),)
    ),
    "record-of-the-next-buffer-ignored": Bug(
        "a version is made although a member of it may be in a late record of the next buffer",
        ((Ledger, "advance", _require_one_record),),
    ),
    "fold-before-accept": Bug(
        "a masked update is added although the TSA refused its seed",
        ((Shards, "_member", _fold_before_accept),),
    ),
    "manifests-mixed-in-a-buffer": Bug(
        "a masked update is added to those of clients that have agreed to another manifest",
        ((Pipeline, "_takes", _take_any),),
    ),
    "revised-client-weighed-by-the-new-manifest": Bug(
        "the updates of clients that joined before a revision are weighed by the settings after it",
        ((Revisions, "terms", _newest_terms),),
    ),
    "release-of-another-list": Bug(
        "masks are released for fewer members than the buffer has",
        ((TsaAdapter, "release", _release_fewer),),
    ),
    "offer-used-for-two-sessions": Bug(
        "two sessions get the same offer of the TSA", ((Offers, "take", _peek),)
    ),
    "staleness-not-computed-by-the-client": Bug(
        "a client seals its update with staleness 0",
        ((UnsealedUpdate, "seal", _believe_to_be_fresh),),
    ),
    "update-sealed-twice": Bug(
        "a client sends a different sealed seed when it repeats a request",
        ((Client, "_ask", _seal_again),),
    ),
    "nan-under-the-mask": Bug(
        "an update with NaN or infinity is masked instead of refused",
        ((Encoder, "_clamp", _accept_nan),),
    ),
    "drop-not-counted": Bug(
        "a dropped masked buffer is not counted", ((HeldTask, "on_stepped", _drop_in_silence),)
    ),
    "buffer-dropped-without-a-reason": Bug(
        "masked buffers are dropped without asking the TSA",
        ((Shards, "_mean", _give_up_after_a_crash),),
    ),
    "unreachable-taken-for-lost": Bug(
        "a TSA that cannot be reached is treated as having lost its seeds",
        ((TsaAdapter, "release", _take_away_for_lost),),
    ),
    "unanswered-seed-taken-for-lost": Bug(
        "an update is discarded because the TSA did not answer when it was given the seed",
        ((TsaAdapter, "accept", _take_silence_for_lost),),
    ),
    "failure-taken-for-a-refusal": Bug(
        "an internal failure of the TSA is treated as a refusal",
        ((TsaAdapter, "release", _take_failure_for_refusal),),
    ),
    "noise-halved": Bug(
        "the noise of private sums is half as large", ((Noise, "__init__", _half_noise),)
    ),
    "noise-skipped": Bug("private sums have no noise", ((Noise, "add_to", _no_noise),)),
    "noise-drawn-again": Bug(
        "a repeated release of a private sum has other noise", ((TSA, "release", _draw_again),)
    ),
    "tag-ignored": Bug(
        "the TSA takes several updates of a device into one private sum",
        ((Group, "has_tag", _any_tag),),
    ),
    "weight-released": Bug(
        "a device puts its weight into the word of a private sum that has no noise",
        ((participant, "_masked", _with_weight),),
    ),
    "rounding-down": Bug(
        "devices round down to words of 16 bits, instead of at random",
        ((RandomEncoder, "_round", _round_down),),
    ),
    "ring-wraps": Bug(
        "a device uses all levels of a word of 16 bits for itself, so that sums wrap around",
        ((RandomEncoder, "__init__", _all_levels),),
    ),
    "revoked-sessions-go-on": Bug(
        "a device that is revoked may finish its session",
        (
            (Participants, "end_revoked", _spare_revoked),
            (Participants, "is_revoked", _trust_revoked),
        ),
    ),
    "leader-not-logged": Bug(
        "a coordinator does not log that it gains or loses leadership",
        ((LeaderEvents, "leadership", _tell_nothing),),
    ),
    "move-logged-twice": Bug(
        "a coordinator logs the same move of a task twice",
        ((LeaderEvents, "fence", _tell_fence_twice),),
    ),
    "drop-not-logged": Bug(
        "an aggregator drops a masked buffer and does not log it",
        ((TaskEvents, "versions", _keep_drops_secret),),
    ),
    "open-buffer-given-up-too-soon": Bug(
        "a buffer is dropped although the TSA still has its seeds",
        ((Offers, "mark_lost", _give_all_up),),
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Break one rule for as long as the block runs."""
    if name not in BUGS:
        raise OperatorError(f"there is no bug named {name!r}", hint=f"one of: {', '.join(BUGS)}")
    patches = BUGS[name].patches
    sound = [(owner, method, owner.__dict__[method]) for owner, method, _ in patches]
    try:
        for owner, method, broken in patches:
            setattr(owner, method, broken)
        yield
    finally:
        for owner, method, original in sound:
            setattr(owner, method, original)
