"""The paper's sentences on model aggregation, in AsyncFL and in SyncFL."""

from __future__ import annotations

import numpy as np
import pytest

from papaya.aggregator.shards import Shards
from papaya.aggregator.work import Fold, Keep, Snapshot
from papaya.config import TaskConfig
from papaya.learning.parameters import FLOAT32
from papaya.learning.weighting import WeightedSum
from papaya.messages.participation import Aborted, Alive, Completed, Joined
from tests.unit.aggregator.builders import (
    MODEL_LENGTH,
    SERVER,
    TASK,
    World,
    a_sync_task,
    a_world,
    an_async_task,
    chunks_of,
    in_turn,
    make_version,
)

H = SERVER.heartbeat_s

# -- the aggregation goal ---------------------------------------------------------------------


@pytest.mark.parametrize("config", [an_async_task(3), a_sync_task(3, 0.0)], ids=["async", "sync"])
def test_the_goal_is_the_number_of_updates_before_a_model_update(config: TaskConfig) -> None:
    """AsyncFL Algorithm: "The aggregator tracks progress towards an aggregation goal, the number of
    client updates that need to be received before the server performs a model update."
    """
    world, node = a_world(config)
    for received, phone in enumerate(world.joined(node, 3), start=1):
        phone.upload_for_good(1)
        assert world.version == (1 if received == 3 else 0)


def test_the_model_is_updated_as_soon_as_the_goal_is_achieved() -> None:
    """AsyncFL Algorithm: "As soon as the aggregation goal has been achieved, the aggregated update
    is released and the server model update is performed." No timer, no heartbeat in between.
    """
    world, node = a_world(an_async_task(2, commit_interval_s=60.0))
    one, other = world.joined(node, 2)
    one.upload(2)
    reached_at = world.now
    other.upload(4)
    assert world.now == reached_at
    assert world.version == 1
    assert world.parameters(1) == [3, 0, 0, 0]


def test_the_server_produces_a_new_model_every_k_updates() -> None:
    """Experimental Setup: "The server produces a new model every K client model updates"."""
    world, node = a_world(an_async_task(4, concurrency=7))
    for turn in range(1, 21):
        [phone] = world.joined(node, 1)
        assert phone.upload_for_good(1) == Completed()
        assert world.version == turn // 4


def test_the_asyncfl_goal_is_independent_of_concurrency() -> None:
    """Parallel Model Aggregation: the aggregation goal "in AsyncFL [...] is independent of
    concurrency." It may even be above.
    """
    for concurrency in (1, 3, 100):
        world, node = a_world(an_async_task(3, concurrency=concurrency))
        make_version(world, node)
        assert world.version == 1
        assert len(world.consumed()) == 3


# -- weights ----------------------------------------------------------------------------------


def test_updates_are_weighted_by_examples_and_staleness() -> None:
    """AsyncFL Algorithm: "Each client update is weighted by the number of examples the client
    trained on and a factor depending on the staleness of the update." 1 x 6 and 3 x 1/2 x 8, over
    1 + 3 examples.
    """
    world, node = a_world(an_async_task(2))
    [stale] = world.joined(node, 1)
    for _ in range(3):
        make_version(world, node)
    before = world.parameters(3)[1]
    [fresh] = world.joined(node, 1)
    fresh.upload_for_good(0, 6, examples=1)
    stale.upload_for_good(0, 8, examples=3)
    assert world.parameters(4)[1] - before == (6 + 12) / 4


# -- parallel aggregation ---------------------------------------------------------------------


def test_an_upload_is_queued_and_another_thread_aggregates_it() -> None:
    """Parallel Model Aggregation: "This update is then pushed into an in-memory queue on the
    Aggregator. A different thread drains the queue". The machine goes on answering meanwhile.
    """
    world, node = a_world(an_async_task(3))
    phones = world.joined(node, 3)
    node.hold(Fold)
    handles = [phone.upload(1) for phone in phones]
    assert len(node.held_back) == 3
    assert phones[0].heartbeat() == Alive()
    assert world.version == 0
    node.release()
    assert world.version == 1
    assert all(world.answers[handle] == Completed() for handle in handles)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_intermediate_aggregates_are_chosen_by_thread_and_combined_at_the_goal(shards: int) -> None:
    """Parallel Model Aggregation: "the ID of the thread performing intermediate aggregation is
    hashed to choose one of the intermediate aggregates. Once the cumulative number of aggregated
    model updates reaches the aggregation goal, the final aggregation is performed".
    """
    config = an_async_task(10, concurrency=10)
    work = Shards(shards, take_shard=in_turn(i * 7 % shards for i in range(shards)))
    expected = WeightedSum.zero(MODEL_LENGTH)
    for i in range(10):
        for index, piece in enumerate(chunks_of((i, 1, -i, 2), 8)):
            work.keep(Keep(TASK, f"s{i}", 8 * index, piece, config.model_bytes))
        folded = work.fold(Fold(config, 1, 1, f"s{i}", 1 + i % 3, 0))
        assert folded.refused is None
        expected.add(np.array((i, 1, -i, 2), FLOAT32), 1 + i % 3, 0)
    snapshotted, [(key, blob)] = work.snapshot(Snapshot(TASK, 1, (1,)))
    [total] = snapshotted.sums
    assert total.blob == key
    assert total.sessions == tuple(f"s{i}" for i in range(10))
    assert WeightedSum.decode(blob, MODEL_LENGTH) == expected
    assert total.weight == expected.weight


# -- AsyncFL ----------------------------------------------------------------------------------


def test_updates_are_aggregated_as_soon_as_they_are_ready() -> None:
    """Introduction: "clients return updates to be aggregated as soon as the updates are ready, and
    a new client may then begin computing updates immediately."
    """
    world, node = a_world(an_async_task(3, concurrency=2))
    slow, quick = world.joined(node, 2)
    for turn in range(1, 6):
        assert quick.upload_for_good(1) == Completed()
        assert len(world.consumed() + world.recorded()) == turn, "slow is not waited for"
        quick = world.phone(node)
        assert isinstance(quick.join(), Joined)
        slow.heartbeat()


def test_client_training_is_decoupled_from_server_updates() -> None:
    """Introduction: "Client training is decoupled from server model updates." A version more does
    not disturb whoever trains.
    """
    world, node = a_world(an_async_task(1))
    [training] = world.joined(node, 1)
    for _ in range(3):
        make_version(world, node)
        assert training.heartbeat() == Alive()
    assert training.upload_for_good(1) == Completed()
    assert training.session in world.consumed()


def test_a_goal_below_the_concurrency_wastes_no_client_in_asyncfl() -> None:
    """Figure 4: "running AsyncFL with aggregation goal less than concurrency does not result in
    wasted client effort, but rather some updates may be stale."
    """
    world, node = a_world(an_async_task(goal=1, concurrency=4))
    phones = world.joined(node, 4)
    answers = [phone.upload_for_good(1) for phone in phones]
    assert answers == 4 * [Completed()]
    assert world.consumed() == [phone.session for phone in phones]
    assert world.version == 4


# -- SyncFL -----------------------------------------------------------------------------------


def a_round(concurrency: int, over_selection: float) -> tuple[World, list[str]]:
    """Every client uploads, the first to join first; who was counted?"""
    world, node = a_world(a_sync_task(concurrency, over_selection))
    phones = world.joined(node, concurrency)
    for phone in phones:
        if phone.report() != Aborted("round_over"):
            phone.send(1)
            phone.complete()
            world.pass_s(1.0)
    order = {phone.session: f"{i}" for i, phone in enumerate(phones)}
    return world, [order[session] for session in world.consumed()]


def test_a_sync_model_is_updated_once_all_clients_are_ready() -> None:
    """Figure 1: "The server model is updated once all clients are ready (once the aggregation goal
    is achieved)".
    """
    world, counted = a_round(4, over_selection=0.0)
    assert counted == ["0", "1", "2", "3"]
    assert world.version == 1


def test_over_selection_discards_the_slowest() -> None:
    """Introduction: "Over-selection results in discarding updates from the slowest-responding
    clients selected in each round". 6 with 50 % over-selection need 4.
    """
    world, counted = a_round(6, over_selection=0.5)
    assert counted == ["0", "1", "2", "3"]
    assert world.version == 1


def test_updates_still_processing_are_discarded_when_the_goal_is_achieved() -> None:
    """Figure 1: "once the aggregation goal is achieved, updates from other devices still processing
    are discarded."
    """
    world, node = a_world(a_sync_task(4, 1.0))
    phones = world.joined(node, 4)
    node.hold(Fold)
    handles = [phone.upload(1) for phone in phones[:3]]
    node.release()
    assert world.answers[handles[2]] == Completed("round_over")
    assert phones[3].heartbeat() == Aborted("round_over")
    assert world.consumed() == [phones[0].session, phones[1].session]


def test_a_client_that_drops_out_is_replaced_in_the_middle_of_the_round() -> None:
    """Figure 1: "If one client drops out mid-round (e.g., Device E), a new client, (e.g., Device C)
    is selected to take its place."
    """
    world, node = a_world(a_sync_task(4, 0.0))
    a, b, d, e = world.joined(node, 4)
    a.upload_for_good(1)
    e.leave()
    assert node.held().slots.client_demand == 1
    [c] = world.joined(node, 1)
    assert c.version == 0, "it joins the same round"
    for phone in (b, c, d):
        phone.upload_for_good(1)
    assert world.version == 1
    assert world.consumed() == [phone.session for phone in (a, b, c, d)]
