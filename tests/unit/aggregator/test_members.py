"""Rules that need single updates: the record names a blob for each member."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from papaya.aggregator.work import Snapshot, Step
from papaya.config import Aggregation, OptimizerConfig, TaskConfig, Weighting
from papaya.errors import ConfigError
from papaya.learning import extensions
from papaya.learning.aggregation_rules import BufferMembers, MembersRule, SumRule
from papaya.learning.parameters import Vector
from papaya.machine import Transact
from papaya.messages.participation import Completed, Incomplete
from papaya.messages.storage import RecordRow
from tests.unit.aggregator.builders import ONE_UPLOAD, Node, World, a_world, an_async_task


def a_median_task(goal: int = 3, **changes: Any) -> TaskConfig:
    settings: dict[str, Any] = {
        "concurrency": 8,
        "optimizer": OptimizerConfig(kind="fedavg", rate=1.0),
        "aggregation": Aggregation("median"),
        "weighting": Weighting("equal"),
    }
    return an_async_task(goal, **(settings | changes))


def the_record(world: World) -> RecordRow:
    [record] = world.store.all(RecordRow)
    return record


def updates_of(world: World) -> list[list[float]]:
    blobs = [world.blobs[key] for key in the_record(world).updates or ()]
    return [np.frombuffer(blob, np.float32).tolist() for blob in blobs]


def test_a_record_names_one_blob_for_each_member() -> None:
    world, node = a_world(a_median_task())
    one, other, last = world.joined(node, 3)
    one.upload_for_good(1, 2, 3, 4)
    assert updates_of(world) == [[1, 2, 3, 4]]
    other.upload_for_good(5, 5, 5, 5)
    assert (the_record(world).sum, updates_of(world)) == ("", [[1, 2, 3, 4], [5, 5, 5, 5]])
    last.upload_for_good(100, -100, 3, 4)
    assert (world.version, world.parameters(1)) == (1, [5, 2, 3, 4])
    assert not [key for key in world.blobs if "/update-" in key], "the blobs are deleted"


def test_a_buffer_that_is_full_at_its_first_commit_is_recorded_before_its_step() -> None:
    world, node = a_world(a_median_task(1))
    [phone] = world.joined(node, 1)
    node.hold(Step)
    phone.upload(7)
    [step] = node.held_back
    assert isinstance(step, Step)
    assert step.record.updates
    assert len(node.did(Snapshot)) == 1
    node.release()
    assert world.parameters(1) == [7, 0, 0, 0]


def successor_of(world: World, node: Node) -> Node:
    world.crash(node)
    heir = world.start("agg-2")
    world.place(heir, active=1)
    return heir


def test_a_successor_continues_with_the_recorded_members() -> None:
    world, node = a_world(a_median_task())
    one, other, last = world.joined(node, 3)
    one.upload_for_good(1)
    other.upload_for_good(2)
    heir = successor_of(world, node)
    assert updates_of(world) == [[1, 0, 0, 0], [2, 0, 0, 0]]
    last.node = heir
    last.upload_for_good(90)
    assert (world.version, world.parameters(1)) == (1, [2, 0, 0, 0])
    assert sorted(world.consumed()) == sorted(phone.session for phone in (one, other, last))


def test_a_crash_between_blob_and_record_counts_nothing_and_leaves_garbage_only() -> None:
    world, node = a_world(a_median_task())
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    handle = phone.upload(5)
    [written] = [key for key in world.blobs if "/update-" in key]
    heir = successor_of(world, node)
    assert handle not in world.answers
    assert world.recorded() == []
    phone.node = heir
    phone.send(5)
    handle = phone.complete()
    world.pass_s(1.0)
    assert world.answers[handle] == Completed()
    [named] = the_record(world).updates or ()
    assert named != written, "a key of an earlier holder is never written again"
    assert world.recorded() == [phone.session]


@pytest.mark.parametrize("fate", ["applied", "lost"])
def test_an_unknown_outcome_is_looked_up(fate: Literal["applied", "lost"]) -> None:
    world, node = a_world(a_median_task())
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    handle = phone.upload(1)
    node.settle(fate)
    node.release()
    if fate == "applied":
        assert world.answers[handle] == Completed()
    else:
        assert isinstance(world.answers[handle], Incomplete)
        phone.send(1)
        again = phone.complete()
        world.pass_s(1.0)
        assert world.answers[again] == Completed()
    assert (world.recorded(), updates_of(world)) == ([phone.session], [[1, 0, 0, 0]])


@pytest.mark.parametrize("fate", ["applied", "lost"])
def test_the_updates_of_a_version_of_unknown_outcome_are_deleted(
    fate: Literal["applied", "lost"],
) -> None:
    world, node = a_world(a_median_task(2))
    one, other = world.joined(node, 2)
    one.upload_for_good(1)
    node.hold(Transact)
    other.upload(3)
    node.settle("committed")
    node.settle(fate)
    node.release()
    assert (world.version, world.parameters(1)) == (1, [2, 0, 0, 0])
    assert not [key for key in world.blobs if "/update-" in key]


def test_updates_keep_their_memory_until_they_are_durable() -> None:
    world = World(a_median_task(), upload_bytes=4 * ONE_UPLOAD)
    node = world.start()
    world.place(node)
    one, other = world.joined(node, 2)
    node.hold(Transact)
    one.upload(1)
    other.upload(2)
    assert node.memory_used > 0
    node.release()
    world.pass_s(1.0)
    assert node.memory_used == 0
    assert len(world.recorded()) == 2


def test_an_update_that_is_refused_gives_its_memory_back() -> None:
    world, node = a_world(a_median_task(clip=1.0))
    [phone] = world.joined(node, 1)
    assert world.answers[phone.upload(5)] == Completed("over_norm")
    assert node.memory_used == 0
    assert world.store.all(RecordRow) == []


def test_a_lost_blob_halts_the_task_and_loses_no_record() -> None:
    world, node = a_world(a_median_task(2))
    one, other = world.joined(node, 2)
    one.upload_for_good(1)
    [key] = the_record(world).updates or ()
    kept = world.blobs.pop(key)
    other.upload(2)
    world.pass_s(1.0)
    held = node.machine.tasks["words"]
    assert key in held.halted_because
    assert len(world.recorded()) == 2
    world.blobs[key] = kept
    world.pass_s(30.0)
    assert (world.version, world.parameters(1)) == (1, [1.5, 0, 0, 0])


def test_updates_are_damped_before_they_are_combined() -> None:
    world, node = a_world(a_median_task(1))
    one, other = world.joined(node, 2)
    one.upload_for_good(4)
    other.upload_for_good(4)  # made from version 0, and version 1 is there
    world.pass_s(1.0)
    expected = 4 + float(np.float32(4) * np.float32(1 / np.sqrt(2)))
    assert world.parameters(2) == [np.float32(expected), 0, 0, 0]


class Largest(MembersRule):
    def combine(self, members: BufferMembers) -> Vector:
        found = np.empty(members.length, np.float32)
        for part, block in members.blocks():
            found[part] = block.max(axis=0) * self.parameters["by"]
        return found


class Failing(MembersRule):
    def combine(self, members: BufferMembers) -> Vector:
        raise ZeroDivisionError("on purpose")


class Listing(MembersRule):
    def combine(self, members: BufferMembers) -> Any:
        return [0.0] * members.length


class Halved(SumRule):
    def scale(self, length: float) -> float:
        return 0.5 if length > self.parameters["above"] else 1.0


def an_extension(name: str, rule: type, **parameters: float) -> TaskConfig:
    extensions.add("aggregation_rules", name, rule)
    chosen = Aggregation(name, parameters=tuple(parameters.items()))
    return a_median_task(2, aggregation=chosen)


def test_an_extension_may_combine_members() -> None:
    world, node = a_world(an_extension("largest", Largest, by=2.0))
    for phone, value in zip(world.joined(node, 2), (3, -5), strict=True):
        phone.upload_for_good(value, value)
    assert world.parameters(1) == [6, 6, 0, 0]


def test_an_extension_that_fails_halts_the_task() -> None:
    world, node = a_world(an_extension("failing", Failing))
    for phone in world.joined(node, 2):
        phone.upload_for_good(1)
    assert "failing failed: ZeroDivisionError" in node.machine.tasks["words"].halted_because
    assert len(world.recorded()) == 2, "nothing is lost"


def test_an_extension_that_returns_no_array_halts_the_task_with_a_reason() -> None:
    world, node = a_world(an_extension("listing", Listing))
    for phone in world.joined(node, 2):
        phone.upload_for_good(1)
    assert "listing returned list" in node.machine.tasks["words"].halted_because


def test_an_extension_may_shorten_updates_of_a_sum() -> None:
    world, node = a_world(an_extension("halved", Halved, above=5.0))
    for phone, value in zip(world.joined(node, 2), (4, 8), strict=True):
        phone.upload_for_good(value)
    assert world.parameters(1) == [4, 0, 0, 0]
    assert not [key for key in world.blobs if "/update-" in key]


def test_a_holder_without_the_extension_does_not_serve_the_task() -> None:
    world = World()
    with pytest.raises(ConfigError, match="no server optimizer 'elsewhere'"):
        world.submit(a_median_task(optimizer=OptimizerConfig(kind="elsewhere")))
    world = World(a_median_task(aggregation=Aggregation("elsewhere")))
    node = world.start()
    world.place(node)
    halted = node.machine.tasks["words"].halted_because
    assert "no aggregation rule 'elsewhere'" in halted
    assert 'extensions = ["aggregation_rules:elsewhere"]' in halted
