"""Data sources: the split is the devices' own, and a population takes their volumes."""

from __future__ import annotations

import numpy as np
import pytest

from papaya.device.example_store import MAX_EXAMPLE_BYTES, split_of
from papaya.device.use_policy import UsePolicy
from papaya.errors import ConfigError, OperatorError
from papaya.sim.population import DEFAULT, Population, client_of
from papaya.study.data.source import Memory, described, population_of

CLIENTS = [[b"%d/%d" % (client, i) for i in range(10 + 40 * client)] for client in range(5)]


def a_source() -> Memory:
    return Memory("numbers", CLIENTS)


def test_each_example_is_on_the_side_that_a_device_would_put_it() -> None:
    source = a_source()
    for client, examples in enumerate(CLIENTS):
        sides = {
            split: [e for e in examples if split_of(e, UsePolicy()) == split] for split in SIDES
        }
        assert source.training(client) == sides["train"]
        assert source.held_out(client) == sides["validation"]
    assert source.volumes.tolist() == [len(source.training(c)) for c in range(5)]
    held_out = sum(len(source.held_out(c)) for c in range(5))
    assert 0.05 < held_out / sum(map(len, CLIENTS)) < 0.15


SIDES = ("train", "validation", "test")


def test_clients_with_nothing_to_train_on_are_left_out_and_counted() -> None:
    held_out = next(b"%d" % i for i in range(100) if split_of(b"%d" % i, UsePolicy()) != "train")
    source = Memory("gaps", [[], CLIENTS[0], [held_out], CLIENTS[1]])
    assert source.left_out == {"no_examples": 1, "no_training_examples": 1}
    assert (len(source.volumes), source.names) == (2, ["1", "3"])
    told = described(source)
    assert "gaps: 2 clients" in told
    assert "left out of 4 clients: 1 without examples, 1 without training examples" in told
    assert "left out" not in described(a_source())
    assert source.training(1) == a_source().training(1)


def test_the_digest_is_of_all_examples_and_whose_they_are() -> None:
    again = a_source().digest
    assert again == a_source().digest
    assert Memory("other name", CLIENTS).digest == again
    others = (CLIENTS[1:], CLIENTS[::-1], [CLIENTS[0] + CLIENTS[1], *CLIENTS[2:]])
    joined = [[b"".join(CLIENTS[0][:2]), *CLIENTS[0][2:]], *CLIENTS[1:]]
    digests = {Memory("numbers", clients).digest for clients in (*others, joined)}
    assert len(digests | {again}) == 5


def test_no_data_and_too_large_examples_are_refused() -> None:
    with pytest.raises(OperatorError, match="numbers contains no examples"):
        Memory("numbers", [[], []])
    with pytest.raises(ConfigError, match=f"an example of big = {MAX_EXAMPLE_BYTES + 1}"):
        Memory("big", [[b"x" * (MAX_EXAMPLE_BYTES + 1)]])


def test_devices_share_the_clients_out() -> None:
    devices = [0, 4, 5, 99_999_999]
    volumes = a_source().volumes
    assert client_of(np.array(devices, np.uint64), len(volumes)).tolist() == [0, 4, 0, 4]
    assert [client_of(device, len(volumes)) for device in devices] == [0, 4, 0, 4]
    held = Population(population_of(a_source(), max_examples=1000), 1).examples(np.array(devices))
    assert held.tolist() == volumes[[0, 4, 0, 4]].tolist()


def test_a_population_has_the_sources_volumes_as_far_as_the_task_trains_on_them() -> None:
    source = a_source()
    config = population_of(source, max_examples=60)
    assert config.volumes == tuple(min(60, v) for v in source.volumes.tolist())
    assert config.volumes[-1] == 60
    assert config.size == DEFAULT.size


def test_execution_takes_as_long_in_the_mean_as_usual_unless_it_is_given() -> None:
    devices = np.arange(50_000)
    config = population_of(a_source(), max_examples=1000)
    usual = Population(DEFAULT, 9).execution_s(devices).mean()
    assert Population(config, 9).execution_s(devices).mean() == pytest.approx(usual, rel=0.03)
    fixed = population_of(a_source(), 1000, seconds_per_example=0.25)
    assert fixed.execution_per_example_s == 0.25
