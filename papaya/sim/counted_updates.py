"""Runs whose model nobody looks at: buffers have members and no numbers.

Whom the servers select and count, and when, depends on no number in an update, unless the server
checks it. So the arithmetic is left out, which saves time (docs/adr/0096).
"""

from __future__ import annotations

from typing import NamedTuple

from papaya.aggregator.masked_sum import Tsa
from papaya.aggregator.shards import NewBlobs, ReadBlob, ReadPart, Shards
from papaya.aggregator.work import (
    Drop,
    Fold,
    Folded,
    Keep,
    Restore,
    Snapshot,
    Snapshotted,
    Step,
    Stepped,
    Sum,
)
from papaya.client.work import Train
from papaya.config import TaskConfig
from papaya.learning.aggregation_rules import takes_members
from papaya.messages.base import SessionId, TaskId
from papaya.secagg.words import Entropy
from papaya.sim.behaviour import Behaviour
from papaya.sim.devices import SimulatedDevice


class _Counted(NamedTuple):
    """A member of a buffer."""

    session: SessionId
    examples: int


class CountedUpdates(Shards):
    """Takes the place of the arithmetic. Blobs are empty, and their keys are without a hash."""

    def __init__(self) -> None:
        super().__init__()
        self._members: dict[tuple[TaskId, int], dict[int, list[_Counted]]] = {}

    def keep(self, work: Keep) -> None:
        """No-op: nobody reads the bytes."""

    def fold(self, work: Fold, shard: int | None = None) -> Folded:
        task, target = work.config.task, work.target
        buffers = self._members.setdefault((task, work.seq), {})
        buffers.setdefault(target, []).append(_Counted(work.session, work.examples))
        return Folded(task, work.seq, target, work.session)

    def snapshot(self, work: Snapshot) -> tuple[Snapshotted, NewBlobs]:
        sums = []
        for target in work.targets:
            members = self._members[work.task, work.seq][target]
            blob = f"{work.task}/{work.seq}/sum-{target}-{len(members)}"
            weight = float(sum(member.examples for member in members))
            sums.append(Sum(target, blob, tuple(member.session for member in members), weight))
        return Snapshotted(work.task, work.seq, tuple(sums)), [(found.blob, b"") for found in sums]

    def step(
        self, work: Step, read: ReadBlob, read_part: ReadPart | None = None
    ) -> tuple[Stepped, NewBlobs]:
        task, version = work.config.task, work.record.target
        self._members[task, work.seq].pop(version, None)
        made = [f"{task}/{work.seq}/{what}-{version}" for what in ("version", "optimizer")]
        return Stepped(task, work.seq, version, *made), [(key, b"") for key in made]

    def restore(self, work: Restore, read: ReadBlob) -> None:
        self._members[work.config.task, work.seq] = {
            record.target: [_Counted(member.session, member.examples) for member in record.members]
            for record in work.records
        }

    def drop(self, work: Drop) -> None:
        if work.session is None:
            self._members.pop((work.task, work.seq), None)


class WithoutModel(Behaviour):
    """Devices upload zeros, and servers do not add them up."""

    def train(self, device: SimulatedDevice, work: Train) -> bytes:
        joined = device.machine.joined
        assert joined is not None
        return bytes(4 * joined.update_length)

    def shards(self, tsa: Tsa, entropy: Entropy) -> Shards:
        return CountedUpdates()


def behaviour_without_model(tasks: tuple[TaskConfig, ...]) -> Behaviour:
    """For a run whose model nobody looks at: without arithmetic, unless servers check updates."""
    return Behaviour() if any(_depends_on_numbers(task) for task in tasks) else WithoutModel()


def _depends_on_numbers(task: TaskConfig) -> bool:
    """Can an update be refused for its numbers, or is it more than added up?"""
    is_checked = task.clip is not None or task.evaluates is not None or task.evaluation is not None
    return is_checked or task.secure_aggregation is not None or takes_members(task)
