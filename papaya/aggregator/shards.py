"""The arithmetic behind an aggregator's heavy work (paper, "Parallel Model Aggregation").

    "the ID of the thread performing intermediate aggregation is hashed to choose one of the
    intermediate aggregates. Once the cumulative number of aggregated model updates reaches the
    aggregation goal, the final aggregation is performed and a new server model is generated."

This file works on numbers and bytes and does not access storage: blobs to write are returned, blobs
to read are requested through `read`. Only complete and valid uploads are added to a sum.

An upload is a table of its chunks; nothing is copied before it is added. A buffer consists of the
sum at its last cut and the shards to which threads have added since. A cut adds the shards to the
sum and starts new ones, so the sum that a snapshot encodes does not change while later
updates are folded. Memory per model: the uploads, the shards, and a sum for each of the two buffers
that may be open. For all models together, the memory of up to `count` shards is kept to be used
again.

If the rule of a task needs single updates, a buffer consists of their blobs instead, and memory
holds those that are not written yet. The step reads all of them, block by block.

Threads (in `server`): with `lock`, folds may run in parallel with each other and with everything
else. A thread that adds updates or applies a step takes one of the shards with `take_shard`: so
folds never wait for each other in a buffer, and no more threads than shards do this at the same
time. (In the paper, the thread's ID selects it.) No shard is held while the TSA is asked or a blob
is read, nor for smaller work: cuts, hashes of sums, and masks, which are subtracted as they arrive.
`keep`, `take` and `drop_uploads` must be called from one thread. The other operations of one task
(cut and encode, restore, step, drop_sums) must not run at the same time. If a fold raises, the
content of its buffer is undefined: restore the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import structs

from papaya.aggregator.masked_sum import (
    LOST,
    MaskedSum,
    Tsa,
    TsaError,
    group_members,
    masked_update,
    unmasked,
)
from papaya.aggregator.private_sum import noised_mean
from papaya.aggregator.work import (
    UNREACHABLE,
    WAITS_FOR_TSA,
    Drop,
    Fold,
    Folded,
    Forget,
    GetOffers,
    Keep,
    Offered,
    Restore,
    Snapshot,
    Snapshotted,
    Step,
    StepFailed,
    Stepped,
    Sum,
)
from papaya.config import Evaluated, TaskConfig
from papaya.errors import ConfigError, InvariantError, OperatorError, UpdateRefused
from papaya.learning import parameters
from papaya.learning.aggregation_rules import (
    BufferMembers,
    combined,
    damped,
    shortened,
    takes_members,
)
from papaya.learning.compression import decode_update
from papaya.learning.evaluation import admit_evaluation
from papaya.learning.kernels import NUMPY, Kernel
from papaya.learning.parameters import FLOAT32
from papaya.learning.private_evaluation import admit_one_hot, admit_private_evaluation
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import BytesLike, Contribution, WeightedSum, admit
from papaya.messages.base import BlobKey, SessionId, TaskId
from papaya.messages.storage import RecordRow
from papaya.secagg.errors import Implausible
from papaya.secagg.noise import KEY_BYTES
from papaya.secagg.words import Entropy

NewBlobs = list[tuple[BlobKey, bytes]]
Pieces = Sequence[BytesLike]
"""A blob in pieces, in order."""
ReadBlob = Callable[[BlobKey], bytes]
ReadPart = Callable[[BlobKey, int, int], bytes]
"""Reads bytes of a blob: key, start, end."""
TakeLock = Callable[[], AbstractContextManager[Any]]
TakeShard = Callable[[], AbstractContextManager[int]]
"""Gives the number of a shard that no other thread has."""
UploadChunks = dict[int, BytesLike]
"""Chunks by their offset."""
Total = WeightedSum | MaskedSum
SeedRefusal = Literal["seed_refused", "trusted_party_lost"]


class KeptMember(NamedTuple):
    """An update that is kept for a rule that needs it, as `damped` makes it."""

    key: BlobKey
    examples: int
    data: bytes


class KeptMembers(NamedTuple):
    """All members of a buffer by their blobs, and the blobs that are not written yet."""

    updates: tuple[BlobKey, ...]
    unwritten: list[KeptMember]
    weight: float


class _Checked(NamedTuple):
    """Uploads for one buffer: all results, and the members among them with their sessions."""

    results: list[Folded]
    sessions: list[SessionId]
    members: list[Any]


class Cut(NamedTuple):
    """What a snapshot will contain: target, sum or members, and sessions."""

    work: Snapshot
    sums: list[tuple[int, Total | KeptMembers, tuple[SessionId, ...]]]


def blob_key(task: TaskId, seq: int, what: str, *content: BytesLike) -> BlobKey:
    """A key from the hash of the content, under the sequence number of the writer."""
    digest = sha256()
    for piece in content:
        digest.update(piece)
    return f"{task}/{seq}/{what}-{digest.hexdigest()[:32]}"


def initial_blobs(config: TaskConfig, vector: parameters.Vector) -> NewBlobs:
    """The parameters and the optimizer state of version 0."""
    optimizer = server_optimizer(config.optimizer)
    state = optimizer.encode_state(optimizer.initial_state(config.model_length))
    encoded = parameters.encode(vector, {"task": config.task, "version": "0"})
    return [
        (blob_key(config.task, 0, "version-0", encoded), encoded),
        (blob_key(config.task, 0, "optimizer-0", state), state),
    ]


def _take_first() -> AbstractContextManager[int]:
    """For one thread."""
    return nullcontext(0)


def _let_go(data: BytesLike) -> None:
    """No-op: the bytes do not belong to a pool."""


class _Spares:
    """Memory of shards that cuts have added to sums, to be used again: the newest of all tasks."""

    def __init__(self, most: int, lock: TakeLock) -> None:
        self._most = most
        self._kept: list[Total] = []
        self._lock = lock()

    def give(self, spare: Total) -> None:
        with self._lock:
            self._kept.append(spare)
            del self._kept[: -self._most]

    def zero(self, config: TaskConfig) -> Total:
        """The sum of no updates, in memory that was used before if some has the right size."""
        with self._lock:
            fitting = (i for i, spare in enumerate(self._kept) if _fits(config, spare))
            index = next(fitting, None)
            found = None if index is None else self._kept.pop(index)
        if found is None:
            return _zero(config)
        found.clear()
        return found


class _BufferSum:
    """The sum for one target version."""

    def __init__(self, shards: int, lock: TakeLock, spares: _Spares) -> None:
        self.total: Any = None
        self.sessions: list[SessionId] = []
        self._shards: list[Any] = [None] * shards
        self._spares = spares
        self._locks = [lock() for _ in range(shards)]

    def add(
        self,
        shard: int,
        zero: Callable[[], Total],
        sessions: list[SessionId],
        members: list[Any],
        kernel: Kernel,
    ) -> None:
        with self._locks[shard]:
            found = self._shards[shard]
            if found is None:
                found = self._shards[shard] = zero()
            found.add_all(members, kernel)
            self.sessions.extend(sessions)

    def cut(self) -> tuple[Total, tuple[SessionId, ...]]:
        """Everything folded so far. Holds all locks, so no fold is partly included."""
        with ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            for shard, part in enumerate(self._shards):
                if self.total is None:
                    self.total = part
                elif part is not None:
                    self.total += part
                    self._spares.give(part)
                self._shards[shard] = None
            return self.total, tuple(self.sessions)


class _BufferUpdates:
    """The updates for one target version, for a rule that needs each of them.

    Memory holds those that are not in a blob yet. Work on them is short, so there is one lock.
    """

    def __init__(self, lock: TakeLock) -> None:
        self.sessions: list[SessionId] = []
        self._updates: list[BlobKey] = []
        self._unwritten: list[KeptMember] = []
        self._weight = 0.0
        self._lock = lock()

    @classmethod
    def of_record(cls, record: RecordRow, lock: TakeLock) -> _BufferUpdates:
        found = cls(lock)
        found.sessions = [member.session for member in record.members]
        found._updates = list(record.updates or ())
        found._weight = record.weight
        return found

    def add(
        self,
        shard: int,
        zero: Callable[[], Total],
        sessions: list[SessionId],
        members: list[KeptMember],
        kernel: Kernel,
    ) -> None:
        """Takes what a `_BufferSum` takes; there is nothing to add up."""
        with self._lock:
            self.sessions.extend(sessions)
            self._updates += [member.key for member in members]
            self._unwritten += members
            self._weight += sum(member.examples for member in members)

    def cut(self) -> tuple[KeptMembers, tuple[SessionId, ...]]:
        """All of them. The caller writes those that are not written yet."""
        with self._lock:
            unwritten, self._unwritten = self._unwritten, []
            return KeptMembers(tuple(self._updates), unwritten, self._weight), tuple(self.sessions)


class Shards:
    """Uploads being received and buffers being summed, for all tasks of one aggregator.

    Every chunk passed to `keep` is passed to `release` once, when it is no longer needed.
    """

    def __init__(
        self,
        shards: int = 1,
        *,
        kernel: Kernel = NUMPY,
        lock: TakeLock = nullcontext,
        take_shard: TakeShard = _take_first,
        take_place: TakeLock = nullcontext,
        release: Callable[[BytesLike], object] = _let_go,
        tsa: Tsa | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        """`take_place` limits how many steps of secure tasks hold a model: a step takes a place
        before it reads its model, and holds it until the new version is encoded.

        `entropy`: for the noise of private tasks in the clear.
        """
        self.count = shards
        self._tsa = tsa
        self._entropy = entropy
        self._kernel = kernel
        self._lock = lock
        self._take_shard = take_shard
        self._take_place = take_place
        self._release = release
        self._uploads: dict[tuple[TaskId, SessionId], UploadChunks] = {}
        self._buffers: dict[tuple[TaskId, int], dict[int, _BufferSum | _BufferUpdates]] = {}
        # The mean of a step by its target, until the step is done. If the step is tried again after
        # an error of storage, the TSA is not asked again.
        self._means: dict[tuple[TaskId, int], dict[int, parameters.Vector]] = {}
        self._spares = _Spares(shards, lock)
        self._guard = lock()

    # -- uploads ----------------------------------------------------------------------------

    def keep(self, work: Keep) -> None:
        """Store the chunk without copying it."""
        upload = self._uploads.setdefault((work.task, work.session), {})
        replaced = upload.get(work.offset)
        upload[work.offset] = work.data
        if replaced is not None:
            self._release(replaced)

    def take(self, work: Fold) -> UploadChunks:
        """Remove the upload from the table, to be folded or released."""
        return self._uploads.pop((work.config.task, work.session), {})

    def release(self, upload: UploadChunks) -> None:
        for data in upload.values():
            self._release(data)

    def drop_uploads(self, task: TaskId, session: SessionId | None = None) -> None:
        """Drop the upload of one session, or all uploads of the task."""
        if session is not None:
            self.release(self._uploads.pop((task, session), {}))
            return
        for owner in [owner for owner in self._uploads if owner[0] == task]:
            self.release(self._uploads.pop(owner))

    # -- sums -------------------------------------------------------------------------------

    def fold(self, work: Fold) -> Folded:
        """Fold the upload that is in the table."""
        [folded] = self.fold_all([(work, self.take(work))])
        return folded

    def fold_all(self, given: Sequence[tuple[Fold, UploadChunks]]) -> list[Folded]:
        """Fold uploads into one buffer. Checks all of them first, so that adding cannot fail."""
        first = given[0][0]
        try:
            if first.config.secure_aggregation is None:
                with self._take_shard() as shard:
                    return self._add(first, self._check(given), shard)
            checked = self._check(given)  # asks the TSA
            with self._take_shard() as shard:
                return self._add(first, checked, shard)
        finally:
            for _, upload in given:
                self.release(upload)

    def _check(self, given: Sequence[tuple[Fold, UploadChunks]]) -> _Checked:
        checked = _Checked([], [], [])
        for work, upload in given:
            folded = Folded(work.config.task, work.seq, work.target, work.session)
            try:
                checked.members.append(self._member(work, _in_order(upload)))
                checked.sessions.append(work.session)
            except UpdateRefused as error:
                folded = structs.replace(folded, refused=error.reason)
            except TsaError as error:
                folded = _without_seed(folded, error)
            checked.results.append(folded)
        return checked

    def _add(self, first: Fold, checked: _Checked, shard: int) -> list[Folded]:
        if checked.members:
            buffer = self._buffer(first.config, first.seq, first.target)
            zero = partial(self._spares.zero, first.config)
            buffer.add(shard, zero, checked.sessions, checked.members, self._kernel)
        return checked.results

    def cut(self, work: Snapshot) -> Cut:
        """The sum and the sessions of each target. The sums do not change until the next cut."""
        with self._guard:
            buffers = {t: self._buffers[work.task, work.seq][t] for t in work.targets}
        return Cut(work, [(target, *buffer.cut()) for target, buffer in buffers.items()])

    def encode(self, cut: Cut) -> tuple[Snapshotted, list[tuple[BlobKey, Pieces]]]:
        """The blobs are views of the sums: write or copy them before the next cut."""
        task, seq = cut.work.task, cut.work.seq
        sums = []
        blobs: list[tuple[BlobKey, Pieces]] = []
        for target, total, sessions in cut.sums:
            if isinstance(total, KeptMembers):
                sums.append(Sum(target, "", sessions, total.weight, total.updates))
                blobs += [(member.key, [member.data]) for member in total.unwritten]
                continue
            pieces = _pieces(total)
            key = blob_key(task, seq, f"sum-{target}-{len(sessions)}", *pieces)
            sums.append(Sum(target, key, sessions, total.weight))
            blobs.append((key, pieces))
        return Snapshotted(task, seq, tuple(sums)), blobs

    def snapshot(self, work: Snapshot) -> tuple[Snapshotted, NewBlobs]:
        snapshotted, blobs = self.encode(self.cut(work))
        return snapshotted, [(key, b"".join(pieces)) for key, pieces in blobs]

    def restore(self, work: Restore, read: ReadBlob) -> None:
        config = work.config
        self.drop_sums(config.task, work.seq)
        buffers: dict[int, _BufferSum | _BufferUpdates] = {}
        for record in work.records:
            if record.updates:
                buffers[record.target] = _BufferUpdates.of_record(record, self._lock)
                continue
            buffer = buffers[record.target] = self._new_sum()
            buffer.total = _decoded(config, read(record.sum))
            buffer.sessions = [member.session for member in record.members]
        with self._guard:
            self._buffers[config.task, work.seq] = buffers

    def _total(self, work: Step, read: ReadBlob, read_part: ReadPart) -> Total | parameters.Vector:
        """The sum of the record's members, or the step if the rule needs each of them. Frees the
        buffer unless it is the only copy.
        """
        record, buffers = work.record, self._buffers.get((work.config.task, work.seq), {})
        total: Total | parameters.Vector
        if record.updates:
            with ExitStack() as held:
                held.enter_context(self._take_shard())

                @contextmanager
                def reading() -> Iterator[None]:
                    held.close()  # storage may not answer for a while
                    try:
                        yield
                    finally:
                        held.enter_context(self._take_shard())

                total = combined(work.config.aggregation, _members(work, read_part, reading))
        elif record.sum:
            total = _decoded(work.config, read(record.sum))
        else:
            buffer = buffers[record.target]
            assert isinstance(buffer, _BufferSum)
            total, sessions = buffer.cut()
            if sorted(sessions) != sorted(member.session for member in record.members):
                raise InvariantError(f"the sum of version {record.target} has other members")
            return total
        self._forget_buffer(work)
        return total

    def _forget_buffer(self, work: Step) -> None:
        with self._guard:
            buffers = self._buffers.get((work.config.task, work.seq), {})
            buffers.pop(work.record.target, None)

    def step(
        self, work: Step, read: ReadBlob, read_part: ReadPart | None = None
    ) -> tuple[Stepped | StepFailed, NewBlobs]:
        """`read_part`: None reads whole blobs. An error of storage is raised, to be tried again."""
        made = self._step(work, read, read_part or _part_of(read))
        self._forget_buffer(work)
        with self._guard:
            self._means.pop((work.config.task, work.seq), None)
        return made

    def _step(
        self, work: Step, read: ReadBlob, read_part: ReadPart
    ) -> tuple[Stepped | StepFailed, NewBlobs]:
        config, task, version = work.config, work.config.task, work.record.target
        optimizer = server_optimizer(config.optimizer)
        mean = self._means.get((task, work.seq), {}).get(version)
        if mean is None:
            try:
                self._reach_tsa(work)
                total = self._total(work, read, read_part)
            except ConfigError as error:
                return StepFailed(task, work.seq, str(error)), []
            except TsaError as error:
                return _unchanged(work, error), []
            try:
                mean = self._mean(work, total)
            except OperatorError as error:
                return StepFailed(task, work.seq, str(error)), []
            except (TsaError, Implausible) as error:
                return _unchanged(work, error), []
            del total
            with self._guard:
                self._means[task, work.seq] = {version: mean}
            self._forget_buffer(work)
        # Not before the TSA has answered: many tasks may wait for one TSA, each with a model. Steps
        # in the clear need no place, because their threads are few.
        is_secure = config.secure_aggregation is not None
        with self._take_place() if is_secure else nullcontext():
            base, state_data = read(work.base.parameters), read(work.optimizer)
            with self._take_shard():
                before = parameters.decode(base, config.model_length)
                state = optimizer.decode_state(state_data, config.model_length)
                try:
                    after, new_state = optimizer.step(before, mean, state)
                except OperatorError as error:
                    return StepFailed(task, work.seq, str(error)), []
                encoded = parameters.encode(after, {"task": task, "version": str(version)})
                encoded_state = optimizer.encode_state(new_state)
                key = blob_key(task, work.seq, f"version-{version}", encoded)
                state_key = blob_key(task, work.seq, f"optimizer-{version}", encoded_state)
        stepped = Stepped(task, work.seq, version, key, state_key)
        return stepped, [(key, encoded), (state_key, encoded_state)]

    # -- the TSA ------------------------------------------------------------------

    def get_offers(self, work: GetOffers) -> Offered:
        config, parameters = work.config, work.config.public_parameters
        assert parameters is not None
        if self._tsa is None:
            none = "this server has no TSA"
            return Offered(config.task, work.seq, problem=none, manifest=config.manifest)
        try:
            offers, terms = self._tsa.offers(parameters, work.count)
        except TsaError as error:
            is_unanswered = error.reason == UNREACHABLE
            return Offered(
                config.task,
                work.seq,
                # The error may have an address, and not only operators read this. The log has it.
                problem=WAITS_FOR_TSA if is_unanswered else str(error),
                is_unanswered=is_unanswered,
                manifest=config.manifest,
            )
        return Offered(config.task, work.seq, offers, terms, manifest=config.manifest)

    def forget(self, work: Forget) -> None:
        parameters = work.config.public_parameters
        if self._tsa is not None and parameters is not None:
            self._tsa.forget(parameters)

    def _member(
        self, work: Fold, pieces: list[BytesLike]
    ) -> Contribution | KeptMember | Sequence[BytesLike]:
        """What is added to the sum. Raises UpdateRefused, or TsaError if its seed is refused."""
        config = work.config
        if config.secure_aggregation is None:
            return _admitted(work, pieces)
        update_pieces = masked_update(config, pieces)
        agreed = config.public_parameters
        assert agreed is not None
        self._require_tsa().accept(agreed, work.offer, work.target, work.sealed)
        return update_pieces

    def _reach_tsa(self, work: Step) -> None:
        """The step of a secure task is tried about once a second while the TSA does not answer: do
        not read the sum each time, which is as large as the model. Raises TsaError.
        """
        agreed = (work.agreed or work.config).public_parameters
        if agreed is not None and not work.given_up:
            group_members(agreed, work.record)
            self._require_tsa().reach(agreed)

    def _mean(self, work: Step, total: Total | parameters.Vector) -> parameters.Vector:
        if isinstance(total, np.ndarray):
            return total
        if work.given_up:
            raise TsaError(work.given_up, "the buffer was given up")
        agreed = work.agreed or work.config
        if isinstance(total, MaskedSum):
            unmasking = unmasked(agreed, work.record, total, self._require_tsa())
            with self._take_shard():
                return unmasking.result().mean()
        with self._take_shard():
            if agreed.privacy is None:
                return total.mean()
            if self._entropy is None:
                raise InvariantError("no entropy for the noise of a private task")
            members = len(work.record.members)
            return noised_mean(agreed, total, members, self._entropy(KEY_BYTES))

    def _require_tsa(self) -> Tsa:
        if self._tsa is None:
            raise TsaError(LOST, "this server has no TSA")
        return self._tsa

    # -- forgetting -------------------------------------------------------------------------

    def drop_sums(self, task: TaskId, seq: int) -> None:
        with self._guard:
            self._buffers.pop((task, seq), None)
            self._means.pop((task, seq), None)

    def drop(self, work: Drop) -> None:
        self.drop_uploads(work.task, work.session)
        if work.session is None:
            self.drop_sums(work.task, work.seq)

    def _buffer(self, config: TaskConfig, seq: int, target: int) -> _BufferSum | _BufferUpdates:
        with self._guard:
            buffers = self._buffers.setdefault((config.task, seq), {})
            if target not in buffers:
                keeps = takes_members(config)
                buffers[target] = _BufferUpdates(self._lock) if keeps else self._new_sum()
            return buffers[target]

    def _new_sum(self) -> _BufferSum:
        return _BufferSum(self.count, self._lock, self._spares)


def _admitted(work: Fold, pieces: list[BytesLike]) -> Contribution | KeptMember:
    config = work.config
    if config.upload_bits != 32:
        pieces = [decode_update(pieces, config.model_length, config.upload_bits).data]
    update = admit(pieces, config.model_length, config.clip, config.over_clip)
    if config.evaluates is not None:
        _admit_measured(update.pieces, config.evaluates)
    update = shortened(update, config.aggregation)
    given = Contribution(update, work.examples, work.staleness, config.staleness)
    return _kept(work, given) if takes_members(config) else given


def _admit_measured(pieces: list[parameters.Vector], pinned: Evaluated) -> None:
    """Raise UpdateRefused unless an honest device can have uploaded this."""
    if pinned.norms:
        admit_one_hot(pieces)
    elif pinned.private is not None:
        admit_private_evaluation(pieces, len(pinned.metrics))
    else:
        admit_evaluation(pieces, pinned.max_examples, len(pinned.metrics))


def _part_of(read: ReadBlob) -> ReadPart:
    return lambda key, start, end: read(key)[start:end]


def _kept(work: Fold, given: Contribution) -> KeptMember:
    # The session makes the key unique: two devices may send the same bytes.
    data, name = damped(given).tobytes(), f"update-{work.target}"
    key = blob_key(work.config.task, work.seq, name, work.session.encode(), data)
    return KeptMember(key, work.examples, data)


def _members(work: Step, read: ReadPart, reading: TakeLock) -> BufferMembers:
    """The members of a durable record, read from their blobs block by block."""
    record, length = work.record, work.config.model_length
    keys = record.updates or ()
    if len(keys) != len(record.members):
        raise InvariantError(f"record {record.target} has {len(keys)} updates")

    def read_member(member: int, part: slice) -> parameters.Vector:
        return np.frombuffer(read(keys[member], 4 * part.start, 4 * part.stop), FLOAT32)

    weights = [member.examples for member in record.members]
    return BufferMembers(weights, length, read_member, reading=reading)


def _zero(config: TaskConfig) -> Total:
    if (agreed := config.public_parameters) is None:
        return WeightedSum.zero(config.model_length)
    return MaskedSum.zero(agreed.vector_words, agreed.ring)


def _fits(config: TaskConfig, spare: Total) -> bool:
    """Could `_zero` have made it?"""
    size = spare.vector.size
    if (agreed := config.public_parameters) is None:
        return isinstance(spare, WeightedSum) and size == config.model_length
    is_masked = isinstance(spare, MaskedSum) and spare.vector.dtype == agreed.ring.word
    return is_masked and size == agreed.vector_words


def _pieces(total: Total) -> Pieces:
    return total.pieces() if isinstance(total, WeightedSum) else [total.encode()]


def _decoded(config: TaskConfig, data: bytes) -> Total:
    if (agreed := config.public_parameters) is None:
        return WeightedSum.decode(data, config.model_length)
    return MaskedSum.decode(data, agreed.vector_words, agreed.ring)


def _without_seed(folded: Folded, error: TsaError) -> Folded:
    """The TSA did not take the seed, or did not answer: the update was not added."""
    if error.reason == UNREACHABLE:
        return structs.replace(folded, is_unanswered=True)
    reason: SeedRefusal = "trusted_party_lost" if error.reason == LOST else "seed_refused"
    return structs.replace(folded, refused=reason, seed_group=error.group)


def _unchanged(work: Step, error: TsaError | Implausible) -> Stepped:
    """Drop a masked buffer that cannot be used: publish the previous version again."""
    dropped = "implausible" if isinstance(error, Implausible) else error.reason
    return Stepped(
        work.config.task,
        work.seq,
        work.record.target,
        work.base.parameters,
        work.optimizer,
        dropped,
    )


def _in_order(upload: UploadChunks) -> list[BytesLike]:
    """The chunks before the first gap. Whether they are complete is checked by their size."""
    found: list[BytesLike] = []
    end = 0
    while (chunk := upload.get(end)) is not None and len(chunk) > 0:
        found.append(chunk)
        end += len(chunk)
    return found
