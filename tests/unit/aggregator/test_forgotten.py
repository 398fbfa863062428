"""Secure tasks that are over: the TSA is told, and has room for the next ones."""

from __future__ import annotations

import pytest

from papaya.aggregator.work import Forget
from papaya.config import TaskConfig
from papaya.machine import Read
from papaya.messages.control import Placement
from papaya.messages.owner import change_state
from papaya.messages.participation import UploadGranted
from papaya.messages.storage import TaskRow, TaskState, task_key
from papaya.tsa.errors import RefusalReason, TsaRefused
from papaya.tsa.tsa import DEFAULT_LIMITS
from tests.unit.aggregator.builders import SERVER, TASK, World, a_task
from tests.unit.aggregator.secure_builders import (
    SecureNode,
    SecureWorld,
    a_secure_task,
    a_secure_world,
)

H = SERVER.heartbeat_s


def end(world: World, config: TaskConfig, state: TaskState = "completed") -> None:
    """What an owner or a stop rule does; the Coordinator's orders follow."""
    row = world.store.rows[task_key(config.task)]
    assert isinstance(row, TaskRow)
    assert world.store.apply(change_state(row, state, world.now)) == "committed"


def is_known(world: SecureWorld, config: TaskConfig) -> bool:
    """To the TSA."""
    parameters = config.public_parameters
    assert parameters is not None
    try:
        world.tsa.offers(parameters.digest(), 1)
    except TsaRefused as refused:
        return refused.reason is not RefusalReason.UNKNOWN_PARAMETERS
    return True


def forgotten(node: SecureNode) -> list[str]:
    return [effect.config.task for effect in node.did(Forget)]


def test_more_evaluations_than_the_tsa_holds_tasks() -> None:
    """A task with an evaluation every ten versions has as many of them as it lives long."""
    world, node = a_secure_world()
    held = Placement(TASK, node.held().fence.seq)
    for number in range(DEFAULT_LIMITS.tasks + 1):
        config = a_secure_task(task=f"{TASK}-eval-{number}")
        world.submit(config)
        world.place(node, config.task)
        world.pass_s(H)
        phone = world.phone(node, task=config.task)
        phone.join()
        assert isinstance(phone.report(), UploadGranted), f"evaluation {number} got no offer"
        end(world, config, "completed" if number % 2 else "cancelled")
        node.order([held])
        assert not is_known(world, config)
    assert is_known(world, world.config), "the task itself goes on"
    assert TASK not in forgotten(node)


def test_a_task_that_moves_is_not_forgotten() -> None:
    """Its next holder asks the same TSA for the masks of its open buffers."""
    world, node = a_secure_world()
    node.order([])
    assert forgotten(node) == []
    assert is_known(world, world.config)


def test_a_task_whose_rows_are_gone_is_forgotten() -> None:
    world, node = a_secure_world()
    del world.store.rows[task_key(TASK)]
    node.order([])
    assert forgotten(node) == [TASK]
    assert not is_known(world, world.config)


def test_a_task_whose_name_begins_anothers_is_not_taken_for_it() -> None:
    world, node = a_secure_world()
    longer = a_secure_task(task=f"{TASK}-2")
    world.submit(longer)
    end(world, longer)
    node.order([])
    assert forgotten(node) == []


def test_a_task_that_came_back_meanwhile_is_not_forgotten() -> None:
    world, node = a_secure_world()
    end(world, world.config)
    node.hold(Read)
    node.order([])
    world.place(node)
    node.release()
    assert forgotten(node) == []


def test_a_tsa_that_is_away_is_not_waited_for() -> None:
    world, node = a_secure_world()
    world.tsa.cut_off(H)
    end(world, world.config)
    node.order([])
    assert forgotten(node) == [TASK]


@pytest.mark.parametrize("state", ["completed", "cancelled"])
def test_in_the_clear_there_is_nobody_to_tell(state: TaskState) -> None:
    world = World(a_task())
    node = world.start()
    world.place(node)
    world.pass_s(H)
    end(world, a_task(), state)
    reads = len(node.did(Read))
    node.order([])
    assert node.did(Forget) == []
    assert len(node.did(Read)) == reads
