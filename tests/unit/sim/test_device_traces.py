"""Measured devices: FedScale's two files, what a population makes of them, and what is refused."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from papaya.config import AsyncFL, TaskConfig
from papaya.errors import OperatorError
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.device_traces import TraceFile, availabilities, capacities
from papaya.sim.population import DEFAULT, Population, PopulationConfig, with_traces

SPEEDS = {
    12: {"computation": 100.0, "communication": 1000.0},
    5: {"computation": 200.0, "communication": 4000.0},
    "odd": {"computation": 800.0, "communication": 500},
}
NIGHTS = {
    1: {"duration": 7, "inactive": [30, 80], "finish_time": 100, "active": [10, 60], "model": "A"},
    2: {"inactive": [100], "finish_time": 100, "active": [0]},
    3: {"inactive": [20, 100], "finish_time": 100, "active": [0, 90]},
}


def a_file(path: Path, content: object) -> TraceFile:
    data = json.dumps(content).encode() if path.suffix == ".json" else pickle.dumps(content)
    path.write_bytes(data)
    return TraceFile.of(path)


@pytest.mark.parametrize("name", ["capacity", "capacity.json"])
def test_speeds_are_those_of_the_entries(name: str, tmp_path: Path) -> None:
    file = a_file(tmp_path / name, SPEEDS)
    config = with_traces(structs.replace(DEFAULT, size=10_000), capacity=file)
    assert config.execution_per_example_s == pytest.approx(3 * 0.2), "thrice the median inference"
    population, devices = Population(config, 1), np.arange(3000)
    example_s = population.execution_s(devices) / population.examples(devices)
    found, counts = np.unique(example_s.round(9), return_counts=True)
    assert found.tolist() == pytest.approx([0.3, 0.6, 2.4])
    assert counts.min() > 900, "each entry has its share of the devices"
    slow = structs.replace(config, execution_per_example_s=6.0)
    assert Population(slow, 1).execution_s(devices) == pytest.approx(
        10 * population.execution_s(devices)
    )


def test_connections_take_the_place_of_latency_when_a_size_is_given(tmp_path: Path) -> None:
    config = with_traces(DEFAULT, capacity=a_file(tmp_path / "capacity", SPEEDS))
    devices, zeros = np.arange(1000), np.zeros(1000, np.int64)
    drawn = Population(DEFAULT, 1).latency_s(devices, zeros)
    assert Population(config, 1).latency_s(devices, zeros).tolist() == drawn.tolist()
    sized = Population(structs.replace(config, transfer_kbit=8000), 1)
    latency_s = sized.latency_s(devices, zeros)
    assert np.unique(latency_s).tolist() == [2.0, 8.0, 16.0]
    example_s = (sized.execution_s(devices) / sized.examples(devices)).round(9)
    pairs = {(e, t) for e, t in zip(example_s.tolist(), latency_s.tolist(), strict=True)}
    assert len(pairs) == 3, "speed and connection are of one entry"


def test_devices_are_available_when_their_entry_is(tmp_path: Path) -> None:
    found = availabilities(a_file(tmp_path / "behave", NIGHTS))
    assert found.mean == pytest.approx((0.4 + 1.0 + 0.3) / 3)
    first = [found.remaining_s(0, now) for now in (0, 10, 25, 30, 45, 60, 79, 80, 110, 260)]
    assert first == [0, 20, 5, 0, 0, 20, 1, 0, 20, 20]
    assert found.remaining_s(1, 55) == math.inf
    assert found.remaining_s(2, 95) == 25, "its interval goes on in the next period"
    assert found.remaining_s(2, 205) == 15
    config = with_traces(DEFAULT, availability=a_file(tmp_path / "behave", NIGHTS))
    population, devices = Population(config, 3), np.arange(2000)
    assert config.availability == pytest.approx(found.mean, rel=1e-5)
    for now in (5.0, 20.0, 85.0):
        shares = population.is_available(devices, now)
        one_by_one = [population.is_available(int(device), now) for device in devices]
        assert shares.tolist() == one_by_one
        expected = {5.0: 2 / 3, 20.0: 2 / 3, 85.0: 1 / 3}[now]
        assert shares.mean() == pytest.approx(expected, abs=0.05)


def test_a_fleet_works_only_while_it_is_available(tmp_path: Path) -> None:
    """Everybody is there in the first half of each half hour, and gone in the second."""
    halves = {i: {"active": [0], "inactive": [900], "finish_time": 1800} for i in range(3)}
    population = with_traces(
        PopulationConfig(size=10_000, dropout=0.0, latency_mean_s=1.0),
        availability=a_file(tmp_path / "behave", halves),
    )
    task = TaskConfig(task="t", concurrency=20, model_length=4, regime=AsyncFL(5))
    cluster = Cluster(ClusterConfig(tasks=(task,), population=population), seed=1)
    present: list[tuple[float, int]] = []
    for step in range(1, 61):
        cluster.run(60.0 * step - 1)
        present.append((cluster.engine.now % 1800, len(cluster.devices)))
    there = [count for now, count in present if 120 <= now <= 840]
    gone = [count for now, count in present if now >= 960]
    assert min(there) > 0
    assert max(gone) == 0


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def test_other_files_are_refused_and_unusable_entries_counted(tmp_path: Path) -> None:
    odd = {**SPEEDS, 7: {"computation": -1, "communication": 3}, 8: {"computation": 3}, 9: None}
    assert capacities(a_file(tmp_path / "odd", odd)).left_out == 3
    for content, problem in (
        ({1: Harmful()}, "it contains builtins.print"),
        ([1, 2], "is a list"),
        ({}, "no usable entry"),
        ({1: {"x": 2}}, "no usable entry among 1"),
    ):
        file = a_file(tmp_path / "bad", content)
        with pytest.raises(OperatorError, match=problem):
            capacities(file)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(OperatorError, match="cannot read device trace"):
        capacities(TraceFile.of(tmp_path / "text"))
    with pytest.raises(OperatorError, match="cannot read device trace"):
        TraceFile.of(tmp_path / "nothing")
    file = a_file(tmp_path / "changed", SPEEDS)
    a_file(tmp_path / "changed", odd)
    with pytest.raises(OperatorError, match="has changed"):
        capacities(file)
