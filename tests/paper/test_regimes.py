"""The paper's sentences on switching between SyncFL and AsyncFL: three changes, one setting."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest

import papaya.aggregator
from papaya.config import AsyncFL, SyncFL, TaskConfig
from papaya.messages.participation import Aborted, Alive, Completed
from papaya.messages.storage import ConsumedRow
from tests.unit.aggregator.builders import Node, Phone, World, a_task, a_world

BASE = a_task(concurrency=4)
ASYNC = msgspec.structs.replace(BASE, regime=AsyncFL(aggregation_goal=2))
SYNC = msgspec.structs.replace(BASE, regime=SyncFL(over_selection=1.0))


def four_clients(config: TaskConfig) -> tuple[World, Node, list[Phone]]:
    world, node = a_world(config)
    return world, node, world.joined(node, 4)


def test_both_regimes_have_the_same_goal_here() -> None:
    """What differs below is the regime, not the number."""
    assert ASYNC.aggregation_goal == SYNC.aggregation_goal == 2


# -- client demand computation ----------------------------------------------------------------


@pytest.mark.parametrize("completed", [0, 1, 3])
def test_asyncfl_demand_is_concurrency_less_active_clients(completed: int) -> None:
    """Client demand computation: "In AsyncFL, client demand is computed as
    concurrency - active_clients." Completed ones are replaced.
    """
    _, node, phones = four_clients(msgspec.structs.replace(BASE, regime=AsyncFL(10)))
    for phone in phones[:completed]:
        phone.upload_for_good(1)
    assert len(node.held().sessions.active) == 4 - completed
    assert node.held().slots.client_demand == completed


@pytest.mark.parametrize("completed", [0, 1, 3])
def test_syncfl_demand_decreases_as_clients_report_results(completed: int) -> None:
    """Client demand computation: "in a typical SyncFL round, client demand is high in the beginning
    of a round, but decreases as clients report results [...]. In SyncFL, client demand is computed
    as concurrency * (1 + o) - completed_clients". Here C is that product, and who is active already
    is not wanted again.
    """
    world, node = a_world(msgspec.structs.replace(BASE, regime=SyncFL(0.0)))
    assert node.held().slots.client_demand == 4
    phones = world.joined(node, completed)
    for phone in phones:
        phone.upload_for_good(1)
    assert node.held().slots.client_demand == 4 - completed
    world.joined(node, 1)
    assert node.held().slots.client_demand == 4 - completed - 1


def test_over_selection_is_part_of_what_a_sync_task_asks_for() -> None:
    """The same formula: concurrency * (1 + o), "where o is the over-selection factor". 1300 are
    asked for when 1000 updates are needed.
    """
    config = msgspec.structs.replace(BASE, concurrency=1300, regime=SyncFL(0.3))
    _, node = a_world(config)
    assert config.aggregation_goal == 1000
    assert node.held().slots.client_demand == 1300


# -- aborting stale clients -------------------------------------------------------------------


def test_a_sync_update_aborts_users_that_are_still_training() -> None:
    """Aborting stale clients: "When a server model update is performed in SyncFL, users that are
    still training are aborted (users may still be training because of over-selection)."
    """
    world, node, phones = four_clients(SYNC)
    for phone in phones[:2]:
        phone.upload_for_good(1)
    assert world.version == 1
    assert [phone.heartbeat() for phone in phones[2:]] == 2 * [Aborted("round_over")]
    assert node.held().sessions.active == {}


def test_an_async_update_lets_users_that_are_still_training_continue() -> None:
    """Aborting stale clients: "In AsyncFL, users that are still training continue normally"."""
    world, _, phones = four_clients(ASYNC)
    for phone in phones[:2]:
        phone.upload_for_good(1)
    assert world.version == 1
    assert [phone.heartbeat() for phone in phones[2:]] == 2 * [Alive()]
    assert [phone.upload_for_good(1) for phone in phones[2:]] == 2 * [Completed()]


def test_an_async_user_is_aborted_if_its_staleness_would_exceed_the_maximum() -> None:
    """The same sentence: "unless their staleness would exceed maximum staleness"."""
    config = msgspec.structs.replace(BASE, regime=AsyncFL(1, max_staleness=1))
    _, _, phones = four_clients(config)
    phones[0].upload_for_good(1)
    assert phones[3].heartbeat() == Alive()
    phones[1].upload_for_good(1)
    assert phones[3].heartbeat() == Aborted("stale")


# -- model aggregation ------------------------------------------------------------------------


def versions_in(world: World) -> list[list[int]]:
    """The initial versions of the members of every version."""
    return [[m.version for m in row.members] for row in world.store.all(ConsumedRow)]


def test_the_regimes_aggregate_differently() -> None:
    """Model Aggregation: "AsyncFL and SyncFL use different model aggregation algorithms." SyncFL
    averages updates of one version, AsyncFL buffers whatever comes, from versions old and new.
    """
    for config, expected in ((ASYNC, [[0, 0], [0, 1]]), (SYNC, [[0, 0], [1, 1]])):
        world, node, phones = four_clients(config)
        for phone in phones[:2]:
            phone.upload_for_good(1)
        phones += world.joined(node, 2)
        for phone in (phones[2], phones[4], phones[5]):
            if phone.heartbeat() == Alive() and world.version < 2:
                phone.upload_for_good(1)
        assert versions_in(world) == expected


# -- the switch -------------------------------------------------------------------------------


def test_switching_is_a_configuration_change() -> None:
    """Switching between SyncFL and AsyncFL: "switching between SyncFL and AsyncFL can be done via a
    configuration change." One field, and the same clients speak the same protocol.
    """
    different = [
        field
        for field in TaskConfig.__struct_fields__
        if getattr(ASYNC, field) != getattr(SYNC, field)
    ]
    assert different == ["regime"]
    for config in (ASYNC, SYNC):
        world, _, phones = four_clients(config)
        assert [phone.upload_for_good(6) for phone in phones[:2]] == 2 * [Completed()]
        assert world.parameters(1) == [6, 0, 0, 0]


def test_only_one_file_asks_which_regime_a_task_is_in() -> None:
    """Switching between SyncFL and AsyncFL: "requires three small changes in behavior: client
    demand computation, handling of stale clients, and model aggregation."
    """
    [folder] = papaya.aggregator.__path__
    asking = []
    for file in sorted(Path(folder).glob("*.py")):
        names = [n.id for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Name)]
        if "SyncFL" in names or "AsyncFL" in names:
            asking.append(file.name)
    assert asking == ["regime.py"]
