"""Runs whose model nobody looks at: buffers have members and no numbers.

Whom the servers select and count, and when, depends on no number in an update, unless the server
checks it. So the arithmetic is left out, which saves time (docs/adr/0096).
"""

from __future__ import annotations

from collections.abc import Sequence

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
from papaya.messages.storage import Member
from papaya.secagg.words import Entropy
from papaya.sim.behaviour import Behaviour
from papaya.sim.devices import SimulatedDevice


class _Counted:
    """A buffer: its members, and how many examples they have."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self.sessions = [member.session for member in members]
        self.examples = sum(member.examples for member in members)

    def add(self, session: SessionId, examples: int) -> None:
        self.sessions.append(session)
        self.examples += examples


class CountedUpdates(Shards):
    """Takes the place of the arithmetic. Blobs are empty, and their keys are without a hash."""

    def __init__(self) -> None:
        super().__init__()
        # By task, sequence number and the version that they will become.
        self._counted: dict[tuple[TaskId, int], dict[int, _Counted]] = {}

    def keep(self, work: Keep) -> None:
        """No-op: nobody reads the bytes."""

    def fold(self, work: Fold, shard: int | None = None) -> Folded:
        task, target = work.config.task, work.target
        buffers = self._counted.setdefault((task, work.seq), {})
        if target not in buffers:
            buffers[target] = _Counted()
        buffers[target].add(work.session, work.examples)
        return Folded(task, work.seq, target, work.session)

    def snapshot(self, work: Snapshot) -> tuple[Snapshotted, NewBlobs]:
        buffers, sums = self._counted[work.task, work.seq], []
        for target in work.targets:
            found = buffers[target]
            blob = f"{work.task}/{work.seq}/sum-{target}-{len(found.sessions)}"
            sums.append(Sum(target, blob, tuple(found.sessions), float(found.examples)))
        return Snapshotted(work.task, work.seq, tuple(sums)), [(each.blob, b"") for each in sums]

    def step(
        self, work: Step, read: ReadBlob, read_part: ReadPart | None = None
    ) -> tuple[Stepped, NewBlobs]:
        task, version = work.config.task, work.record.target
        self._counted[task, work.seq].pop(version, None)
        made = [f"{task}/{work.seq}/{what}-{version}" for what in ("version", "optimizer")]
        return Stepped(task, work.seq, version, *made), [(key, b"") for key in made]

    def restore(self, work: Restore, read: ReadBlob) -> None:
        self._counted[work.config.task, work.seq] = {
            record.target: _Counted(record.members) for record in work.records
        }

    def drop(self, work: Drop) -> None:
        if work.session is None:
            self._counted.pop((work.task, work.seq), None)


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
