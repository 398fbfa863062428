"""Populations whose data volumes come from a source: device i has those of client i mod n."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from papaya.errors import ConfigError
from papaya.sim.population import DEFAULT, Population, PopulationConfig, volume_quantiles

VOLUMES = (3, 500, 20, 20, 7, 1)
DEVICES = np.arange(60_000)


def test_a_device_has_the_volume_of_its_client() -> None:
    population = Population(PopulationConfig(volumes=VOLUMES), seed=4)
    assert (population.examples(DEVICES) == np.array(VOLUMES)[DEVICES % 6]).all()
    visit = population.visit(99_999_999, 3)
    assert visit.examples == VOLUMES[99_999_999 % 6]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50), st.integers(0, 10**8 - 1))
def test_one_device_gives_the_bits_of_the_array(volumes: list[int], device: int) -> None:
    population = Population(PopulationConfig(volumes=tuple(volumes), correlation=0.5), seed=1)
    visit = population.visit(device, 0)
    assert visit.examples == volumes[device % len(volumes)]
    assert visit.execution_s == population.execution_s(np.array([7, device]))[1]


def test_time_is_still_volume_times_the_devices_own_noise() -> None:
    config = PopulationConfig(volumes=VOLUMES)
    population = Population(config, seed=4)
    per_example = population.execution_s(DEVICES) / population.examples(DEVICES)
    noise = np.log(per_example / config.execution_per_example_s) / config.execution_sigma
    assert stats.kstest(noise, "norm").pvalue > 0.001
    assert abs(np.corrcoef(noise, population.examples(DEVICES))[0, 1]) < 0.02


def test_with_correlation_those_with_much_data_are_slower_per_example() -> None:
    volumes = tuple(range(1, 1001))
    slowness = []
    for correlation in (0.0, 0.8):
        population = Population(PopulationConfig(volumes=volumes, correlation=correlation), 2)
        per_example = population.execution_s(DEVICES) / population.examples(DEVICES)
        found = stats.spearmanr(population.examples(DEVICES), per_example)
        slowness.append(float(found.statistic))
    assert abs(slowness[0]) < 0.02
    assert slowness[1] == pytest.approx(0.786, abs=0.02)  # 6/π · asin(0.8/2)


def test_equal_volumes_are_alike() -> None:
    population = Population(PopulationConfig(volumes=(5, 5, 5), correlation=1.0), 2)
    assert len(np.unique(population.execution_s(DEVICES))) == 1


def test_nothing_else_about_a_device_changes() -> None:
    plain, given_ = Population(DEFAULT, 5), Population(PopulationConfig(volumes=VOLUMES), 5)
    for name in ("latency_s", "drops", "drop_point"):
        ours = getattr(given_, name)(DEVICES, DEVICES)
        assert (ours == getattr(plain, name)(DEVICES, DEVICES)).all()
    arrivals = plain.visitors(DEVICES).device
    assert (given_.visitors(DEVICES).device == arrivals).all()


def test_quantiles_are_those_of_the_volumes() -> None:
    config = PopulationConfig(volumes=VOLUMES)
    assert volume_quantiles(config, 6).tolist() == sorted(VOLUMES)
    assert volume_quantiles(config, 600).mean() == pytest.approx(np.mean(VOLUMES))


def test_a_configuration_with_volumes_survives_its_json() -> None:
    config = PopulationConfig(volumes=VOLUMES)
    assert msgspec.json.decode(msgspec.json.encode(config), type=PopulationConfig) == config


@pytest.mark.parametrize("volume", [0, -1, 10**10, 2.0, True])
def test_an_impossible_volume_is_refused_by_its_value(volume: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        PopulationConfig(volumes=(3, volume))  # type: ignore[arg-type]
    assert f"one of volumes = {volume!r}" in str(refusal.value)
