"""The paper's sentences on model updates, their weights and the server's optimizer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from papaya.config import OptimizerConfig
from papaya.learning.parameters import Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import WeightedSum, model_update, staleness_weight


def a_vector(*coordinates: float) -> Vector:
    return np.array(coordinates, np.float32)


def test_an_update_is_the_difference_between_trained_and_initial_model() -> None:
    """AsyncFL Algorithm: "After a client finishes local training, it uploads the model update
    (difference between the trained local model and initial model it received from the server
    before training)."
    """
    initial, trained = a_vector(1, 2, 3), a_vector(1.5, 2, 1)
    assert model_update(trained, initial).tolist() == [0.5, 0, -2]


def test_the_difference_is_to_the_model_the_client_started_from_not_to_the_current_one() -> None:
    """The same sentence: the "initial model it received from the server before training"."""
    received, trained, current = a_vector(0), a_vector(1), a_vector(10)
    total = WeightedSum.zero(1)
    total.add(model_update(trained, received), examples=1, staleness=0)
    optimizer = server_optimizer(OptimizerConfig(kind="fedavg"))
    following, _ = optimizer.step(current, total.mean(), optimizer.initial_state(1))
    assert following.tolist() == [11]


def test_an_update_is_weighted_by_its_examples() -> None:
    """AsyncFL Algorithm: "Each client update is weighted by the number of examples the client
    trained on and a factor depending on the staleness of the update."
    """
    total = WeightedSum.zero(1)
    total.add(a_vector(4), examples=3, staleness=0)
    total.add(a_vector(0), examples=1, staleness=0)
    assert total.mean().tolist() == [3]


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 8, 15, 99, 1000])
def test_a_stale_update_is_down_weighted(staleness: int) -> None:
    """Handling Staleness: "let w_i be the weight of client i whose staleness is s_i, then
    w_i := 1 / sqrt(1 + s_i)."
    """
    assert staleness_weight(staleness) == 1 / math.sqrt(1 + staleness)
    total = WeightedSum.zero(1)
    total.add(a_vector(1), examples=7, staleness=staleness)
    assert total.mean()[0] == pytest.approx(1 / math.sqrt(1 + staleness), rel=1e-6)


def test_the_two_weights_multiply() -> None:
    """AsyncFL Algorithm: "the number of examples the client trained on and a factor depending on
    the staleness": fresh 1 x 6 and stale 3 x 1/2 x 8 over 1 + 3 examples.
    """
    total = WeightedSum.zero(1)
    total.add(a_vector(6), examples=1, staleness=0)
    total.add(a_vector(8), examples=3, staleness=3)
    assert total.mean().tolist() == [(6 + 12) / 4]


def test_equally_stale_clients_still_move_the_model_less() -> None:
    """Handling Staleness: "We down-weight client i's update". Were the step divided by the
    down-weighted examples, a buffer of equally stale clients would not be down-weighted at all.
    """
    total = WeightedSum.zero(1)
    for _ in range(2):
        total.add(a_vector(1), examples=1, staleness=3)
    assert total.mean().tolist() == [0.5]


def test_intermediate_aggregates_combine_into_the_final_one() -> None:
    """Parallel Model Aggregation: "the ID of the thread performing intermediate aggregation is
    hashed to choose one of the intermediate aggregates. Once the cumulative number of aggregated
    model updates reaches the aggregation goal, the final aggregation is performed".
    """
    whole = WeightedSum.zero(2)
    shards = [WeightedSum.zero(2) for _ in range(3)]
    for client in range(20):
        update, examples = a_vector(client, -client), 1 + client % 5
        whole.add(update, examples, staleness=0)
        shards[client * 7 % 3].add(update, examples, staleness=0)
    assert shards[2] + shards[0] + shards[1] == whole


def test_the_server_uses_adam_at_its_default_rate() -> None:
    """Experimental Setup: "we use SGD on the client and FedAdam on the server. For the server
    optimizer, we use Adam's default learning rate and tune the first-moment parameter".
    """
    config = OptimizerConfig()
    assert config.kind == "fedadam"
    assert server_optimizer(config).rate == 1e-3
    assert server_optimizer(OptimizerConfig(beta1=0.5)).config.beta1 == 0.5
