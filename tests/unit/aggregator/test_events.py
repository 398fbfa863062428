"""What an aggregator tells its operator: tasks that it takes and leaves, versions, lost buffers."""

from __future__ import annotations

import pytest

from papaya.aggregator.work import StepFailed
from papaya.messages.events import (
    BufferDropped,
    TaskHalted,
    TaskLeft,
    TaskResumed,
    TaskTaken,
    VersionPublished,
)
from tests.unit.aggregator.builders import TASK, a_world, an_async_task, make_version
from tests.unit.aggregator.secure_builders import a_secure_task, a_secure_world, make_secure_version
from tests.unit.aggregator.test_tsa_lost import drop_a_buffer
from tests.unit.aggregator.test_unknown_outcomes import a_held_version


def test_a_task_is_taken_and_left() -> None:
    world, node = a_world(an_async_task(1))
    assert node.events == [TaskTaken(TASK, 0, 1, 0, 0)]
    make_version(world, node)
    node.order([])
    assert node.events[1:] == [VersionPublished(TASK, 0, 1, 1), TaskLeft(TASK, 0, 1, 1)]


@pytest.mark.parametrize("fate", ["committed", "applied", "lost"])
def test_a_version_is_told_once_whatever_its_outcome_was_called(fate: str) -> None:
    world, node, _, _ = a_held_version()
    node.settle(fate)  # type: ignore[arg-type]
    node.release()
    assert world.version == 1
    assert node.events[1:] == [VersionPublished(TASK, 0, 1, 2)]


def test_a_dropped_buffer_is_told_instead_of_a_version() -> None:
    world, node = a_secure_world(a_secure_task(goal=1))
    make_secure_version(world, node, 1.0)
    drop_a_buffer(world, node)
    told = [e for e in node.events if isinstance(e, VersionPublished | BufferDropped)]
    [dropped] = [e for e in told if isinstance(e, BufferDropped)]
    assert (dropped.version, dropped.why) == (world.version, "trusted_party_lost")
    assert dropped.updates > 0
    assert [event.version for event in told] == list(range(1, world.version + 1))


def test_a_halted_task_is_told_once_and_told_when_it_resumes() -> None:
    world, node = a_world(an_async_task(1))
    for _ in range(3):
        node.receive(StepFailed(TASK, 1, "the model is not finite"))
    assert node.events[1:] == [TaskHalted(TASK, 1, "the model is not finite")]
    world.pass_s(20.0)  # the rows are read again
    assert node.events[2:] == [TaskResumed(TASK, 1, 0)]
