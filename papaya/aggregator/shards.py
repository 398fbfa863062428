"""The arithmetic behind an aggregator's heavy work (paper, "Parallel Model Aggregation").

    "the ID of the thread performing intermediate aggregation is hashed to choose one of the
    intermediate aggregates. Once the cumulative number of aggregated model updates reaches the
    aggregation goal, the final aggregation is performed and a new server model is generated."

Plain numbers and bytes: it reads and writes no storage itself. A blob that has to be written is
returned, a blob that has to be read is asked for through `read`. Only complete and admitted
uploads reach a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

from papaya.aggregator.work import (
    Drop,
    Fold,
    Folded,
    Keep,
    Restore,
    Snapshot,
    Snapshotted,
    Step,
    StepFailed,
    Stepped,
    Sum,
)
from papaya.config import TaskConfig
from papaya.errors import OperatorError, UpdateRefused
from papaya.learning import parameters
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import WeightedSum, admit
from papaya.messages.base import BlobKey, SessionId, TaskId

Blobs = list[tuple[BlobKey, bytes]]
ReadBlob = Callable[[BlobKey], bytes]


def blob_key(task: TaskId, seq: int, what: str, content: bytes) -> BlobKey:
    """Content-addressed, under the fence of its writer."""
    return f"{task}/{seq}/{what}-{sha256(content).hexdigest()[:32]}"


def initial_blobs(config: TaskConfig, vector: parameters.Vector) -> Blobs:
    """The parameters and the optimizer state of version 0."""
    optimizer = server_optimizer(config.optimizer)
    state = optimizer.encode_state(optimizer.initial_state(config.model_length))
    encoded = parameters.encode(vector, {"task": config.task, "version": "0"})
    return [
        (blob_key(config.task, 0, "version-0", encoded), encoded),
        (blob_key(config.task, 0, "optimizer-0", state), state),
    ]


class _Buffer:
    """Intermediate aggregates of one target version."""

    def __init__(self, length: int, shards: int) -> None:
        self.shards = [WeightedSum.zero(length) for _ in range(shards)]
        self.sessions: list[SessionId] = []

    def total(self) -> WeightedSum:
        total = self.shards[0]
        for shard in self.shards[1:]:
            total = total + shard
        return total


class Shards:
    """Uploads being received and buffers being summed, for all tasks of one aggregator."""

    def __init__(self, shards: int = 1) -> None:
        self._shards = shards
        self._uploads: dict[tuple[TaskId, SessionId], bytearray] = {}
        self._buffers: dict[tuple[TaskId, int], dict[int, _Buffer]] = {}

    def keep(self, work: Keep) -> None:
        owner = (work.task, work.session)
        if owner not in self._uploads:
            self._uploads[owner] = bytearray(work.model_bytes)
        upload = self._uploads[owner]
        upload[work.offset : work.offset + len(work.data)] = work.data

    def fold(self, work: Fold, shard: int = 0) -> Folded:
        """Checks first, so that adding cannot fail half-way."""
        config = work.config
        upload = self._uploads.pop((config.task, work.session), b"")
        try:
            delta = admit(upload, config.model_length, config.clip, config.over_clip)
        except UpdateRefused as refused:
            return Folded(config.task, work.seq, work.target, work.session, refused.reason)
        buffer = self._buffer(config, work.seq, work.target)
        buffer.shards[shard].add(delta, work.examples, work.staleness)
        buffer.sessions.append(work.session)
        return Folded(config.task, work.seq, work.target, work.session)

    def snapshot(self, work: Snapshot) -> tuple[Snapshotted, Blobs]:
        sums, blobs = [], []
        for target in work.targets:
            buffer = self._buffers[work.task, work.seq][target]
            total = buffer.total()
            encoded = total.encode()
            what = f"sum-{target}-{len(buffer.sessions)}"
            key = blob_key(work.task, work.seq, what, encoded)
            sums.append(Sum(target, key, tuple(buffer.sessions), total.weight))
            blobs.append((key, encoded))
        return Snapshotted(work.task, work.seq, tuple(sums)), blobs

    def restore(self, work: Restore, read: ReadBlob) -> None:
        config = work.config
        self._buffers.pop((config.task, work.seq), None)
        for record in work.records:
            buffer = self._buffer(config, work.seq, record.target)
            buffer.shards[0] = WeightedSum.decode(read(record.sum), config.model_length)
            buffer.sessions = [member.session for member in record.members]

    def step(self, work: Step, read: ReadBlob) -> tuple[Stepped | StepFailed, Blobs]:
        config, task = work.config, work.config.task
        optimizer = server_optimizer(config.optimizer)
        before = parameters.decode(read(work.base.parameters), config.model_length)
        state = optimizer.decode_state(read(work.optimizer), config.model_length)
        total = WeightedSum.decode(read(work.record.sum), config.model_length)
        try:
            after, new_state = optimizer.step(before, total.mean(), state)
        except OperatorError as error:
            return StepFailed(task, work.seq, str(error)), []
        version = work.record.target
        encoded = parameters.encode(after, {"task": task, "version": str(version)})
        encoded_state = optimizer.encode_state(new_state)
        key = blob_key(task, work.seq, f"version-{version}", encoded)
        state_key = blob_key(task, work.seq, f"optimizer-{version}", encoded_state)
        self._buffers.get((task, work.seq), {}).pop(version, None)
        stepped = Stepped(task, work.seq, version, key, state_key)
        return stepped, [(key, encoded), (state_key, encoded_state)]

    def drop(self, work: Drop) -> None:
        if work.session is not None:
            self._uploads.pop((work.task, work.session), None)
            return
        self._buffers.pop((work.task, work.seq), None)
        for owner in [owner for owner in self._uploads if owner[0] == work.task]:
            del self._uploads[owner]

    def _buffer(self, config: TaskConfig, seq: int, target: int) -> _Buffer:
        buffers = self._buffers.setdefault((config.task, seq), {})
        if target not in buffers:
            buffers[target] = _Buffer(config.model_length, self._shards)
        return buffers[target]
