"""The device population: one seed, one fleet, whoever asks, in whatever order, on any machine.

The distributions are compared with scipy's under fixed seeds; the draws with a slow reference in
plain Python, which uses the standard library's normal distribution and `math.exp`.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from papaya.errors import ConfigError
from papaya.sim import population as module
from papaya.sim.draws import splitmix64
from papaya.sim.population import DEFAULT, STRESS, Arrivals, Population, PopulationConfig, Visit

Floats = npt.NDArray[np.float64]
ROOT = Path(__file__).parents[3]
SLOT_S, DAY_S = module.SLOT_S, 86400.0
N = 200_000
FLEET = np.arange(N)
DEVICES = st.integers(0, DEFAULT.size - 1)


def slow_visit(config: PopulationConfig, seed: int, arrival: int) -> Visit:
    """The definitions of PopulationConfig, one device at a time, with the standard library."""

    def cell(bits: int, quantity: int, *counters: int) -> float:
        state = splitmix64(splitmix64(seed, 0), quantity)
        for counter in counters:
            state = splitmix64(state, counter)
        return ((state >> (64 - bits)) + 0.5) * 2.0**-bits

    normal = NormalDist().inv_cdf
    device = splitmix64(splitmix64(splitmix64(seed, 0), 8), arrival) % config.size
    z, own = normal(cell(32, 1, device)), normal(cell(32, 2, device))
    wished = round(config.examples_median * math.exp(config.examples_sigma * z))
    examples = min(max(wished, 1), config.examples_cap)
    slowness = config.correlation * z + math.sqrt(1 - config.correlation**2) * own
    noise = math.exp(config.execution_sigma * slowness)
    mu = math.log(config.latency_mean_s) - config.latency_sigma**2 / 2
    latency_s = math.exp(mu + config.latency_sigma * normal(cell(32, 3, device, arrival)))
    drops = cell(52, 4, device, arrival) < config.dropout
    drops_at = cell(52, 5, device, arrival) if drops else None
    execution_s = config.execution_per_example_s * examples * noise
    return Visit(device, arrival, examples, execution_s, latency_s, drops_at)


@pytest.mark.parametrize("correlation", [0.0, 0.6, -1.0])
def test_visits_are_those_of_the_slow_reference(correlation: float) -> None:
    config = PopulationConfig(correlation=correlation)
    for visit in islice(Arrivals(Population(config, 5)), 2000):
        expected = slow_visit(config, 5, visit.participation)
        assert (visit.device, visit.examples) == (expected.device, expected.examples)
        assert visit.execution_s == pytest.approx(expected.execution_s, rel=1e-12)
        assert visit.latency_s == pytest.approx(expected.latency_s, rel=1e-12)
        assert visit.drops_at == expected.drops_at


def test_a_seed_means_the_same_fleet_on_every_machine_and_in_every_release() -> None:
    population = Population(PopulationConfig(correlation=0.3, availability_swing=0.4), 7)
    block = Arrivals(population).draw(10_000)
    eligible = population.is_available(block.device, np.linspace(0, 30 * DAY_S, 10_000))
    whole = np.stack([block.device, block.participation, block.examples, eligible])
    times = np.stack([block.execution_s, block.latency_s, block.drops_at])
    draws = whole.astype("<i8").tobytes() + times.astype("<f8").tobytes()
    assert hashlib.sha256(draws).hexdigest()[:32] == "4890c7c929f401969b6f8b67e07a4284"


def test_another_process_draws_the_same_visits() -> None:
    imports = "from itertools import islice; from papaya.sim.population import *"
    program = f"{imports}; print(list(islice(Arrivals(Population(DEFAULT, 11)), 20)))"
    here = repr(list(islice(Arrivals(Population(DEFAULT, 11)), 20)))
    for hash_seed in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program]
        there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert there.stdout.strip() == here


@given(arrivals=st.lists(st.integers(0, 2**62), min_size=1, max_size=30))
def test_one_device_gives_the_bits_of_the_array(arrivals: list[int]) -> None:
    population = Population(DEFAULT, 3)
    block = population.visitors(np.array(arrivals))
    assert (block.examples == population.examples(block.device)).all()
    assert (block.execution_s == population.execution_s(block.device)).all()
    assert (block.latency_s == population.latency_s(block.device, block.participation)).all()
    for visit in block:
        assert visit == population.visit(visit.device, visit.participation)


@given(devices=st.lists(DEVICES, min_size=1), now=st.floats(-1e9, 1e9))
def test_eligibility_of_one_device_is_that_of_the_array(devices: list[int], now: float) -> None:
    population = Population(PopulationConfig(availability_swing=0.7), 3)
    together = population.is_available(np.array(devices), now).tolist()
    assert together == [population.is_available(device, now) for device in devices]


def test_the_order_of_asking_does_not_matter() -> None:
    shuffled = np.random.default_rng(0).permutation(FLEET)
    population = Population(DEFAULT, 4)
    straight = population.execution_s(FLEET)
    assert (population.execution_s(shuffled) == straight[shuffled]).all()
    assert (Population(DEFAULT, 4).execution_s(FLEET[::-1]) == straight[::-1]).all()
    assert (population.execution_s(FLEET.reshape(100, -1)).ravel() == straight).all()


def test_blocks_of_any_size_and_single_visits_are_one_sequence_of_plain_values() -> None:
    population = Population(DEFAULT, 6)
    expected = list(Arrivals(population).draw(10_000))
    arrivals, seen = Arrivals(population), []
    for n in (0, 1, 5000, 17):
        seen += list(arrivals.draw(n)) + list(islice(arrivals, n // 2 + 1))
        assert arrivals.position == len(seen)
    seen += list(islice(arrivals, 10_000 - len(seen)))
    assert seen == expected
    assert [visit.participation for visit in seen] == list(range(10_000))
    assert next(Arrivals(population, position=4321)) == expected[4321]
    plain = (int, int, int, float, float)
    kinds = {tuple(type(value) for value in visit) for visit in seen}
    assert kinds == {(*plain, float), (*plain, type(None))}


@pytest.mark.parametrize(("config", "sigma"), [(DEFAULT, 1.2), (STRESS, 1.1)])
def test_examples_are_whole_at_least_one_and_capped(config: PopulationConfig, sigma: float) -> None:
    examples = Population(config, 2).examples(np.arange(1_000_000))
    assert examples.dtype == np.int64
    assert (examples.min(), examples.max()) == (1, 1500)
    assert np.median(examples) == 20
    capped = NormalDist().cdf(-math.log(1499.5 / 20) / sigma) * len(examples)
    assert abs((examples == 1500).sum() - capped) < 5 * math.sqrt(capped)


def per_example_s(population: Population) -> Floats:
    return population.execution_s(FLEET) / population.examples(FLEET)


def drop_points(population: Population) -> Floats:
    drops_at = population.visitors(FLEET).drops_at
    assert stats.binomtest(int(np.isfinite(drops_at).sum()), N, 0.1).pvalue > 0.01
    return drops_at[np.isfinite(drops_at)]


FINE = PopulationConfig(examples_median=1e5, examples_cap=10**9)  # rounding does not show
LATENCY = stats.lognorm(0.5, scale=50 * math.exp(-0.125))  # its mean is 50


@pytest.mark.parametrize(
    ("config", "draw", "expected"),
    [
        (FINE, lambda fleet: fleet.examples(FLEET), stats.lognorm(1.2, scale=1e5)),
        (DEFAULT, per_example_s, stats.lognorm(0.5, scale=0.55)),
        (STRESS, per_example_s, stats.lognorm(0.5, scale=0.26)),
        (PopulationConfig(correlation=0.7), per_example_s, stats.lognorm(0.5, scale=0.55)),
        (DEFAULT, lambda fleet: fleet.latency_s(FLEET, 0 * FLEET), LATENCY),
        (DEFAULT, lambda fleet: fleet.latency_s(0 * FLEET, FLEET), LATENCY),
        (DEFAULT, drop_points, stats.uniform()),
        (DEFAULT, lambda fleet: fleet.visitors(FLEET).device / DEFAULT.size, stats.uniform()),
    ],
)
def test_distributions(
    config: PopulationConfig, draw: Callable[[Population], Floats], expected: stats.rv_continuous
) -> None:
    sample = draw(Population(config, 1))
    assert stats.kstest(sample, expected.cdf).pvalue > 0.01
    assert sample.mean() == pytest.approx(expected.mean(), rel=0.02)


def test_what_is_switched_off_never_happens() -> None:
    block = Population(PopulationConfig(dropout=0, latency_sigma=0), 1).visitors(FLEET)
    assert np.isnan(block.drops_at).all()
    assert (block.latency_s == 50).all()
    assert not Population(STRESS, 1).visitors(FLEET).latency_s.any()
    assert Population(PopulationConfig(availability=1), 1).is_available(FLEET, 5e6).all()


def test_the_slowest_devices_have_more_examples() -> None:
    """Evaluation: "the slowest clients often have more training examples"."""
    population = Population(DEFAULT, 4)
    examples, execution_s = population.examples(FLEET), population.execution_s(FLEET)
    slowest = execution_s >= np.quantile(execution_s, 0.9)
    assert examples[slowest].mean() > 3 * examples.mean()
    assert np.median(examples[slowest]) > np.quantile(examples, 0.9)


@pytest.mark.parametrize("correlation", [-1.0, -0.4, 0.0, 0.4, 0.8, 1.0])
def test_correlation_is_that_of_two_normals(correlation: float) -> None:
    population = Population(msgspec.structs.replace(FINE, correlation=correlation), 5)
    spearman = stats.spearmanr(population.examples(FLEET), per_example_s(population)).statistic
    assert spearman == pytest.approx(6 / math.pi * math.asin(correlation / 2), abs=0.01)


def test_quantities_participations_devices_and_seeds_are_independent() -> None:
    population, ones = Population(DEFAULT, 8), np.ones(N, dtype=np.int64)
    columns = [
        population.examples(FLEET),
        np.roll(population.examples(FLEET), 1),
        Population(DEFAULT, 9).examples(FLEET),
        per_example_s(population),
        population.latency_s(FLEET, ones),
        population.latency_s(FLEET, 2 * ones),
        population.drops(FLEET, ones),
        population.drops(FLEET, 2 * ones),
        population.drop_point(FLEET, ones),
        population.is_available(FLEET, 0.0),
        population.is_available(FLEET, SLOT_S),
        population.visitors(FLEET).device,
    ]
    correlations = stats.spearmanr(np.column_stack(columns)).statistic
    assert np.abs(correlations - np.eye(len(columns))).max() < 4.5 / math.sqrt(N)


def test_every_device_comes_by_equally_often_whatever_its_data_volume() -> None:
    small, large = Population(PopulationConfig(size=1000), 9), Population(DEFAULT, 10)
    assert stats.chisquare(np.bincount(small.visitors(FLEET).device)).pvalue > 0.01
    assert stats.ks_2samp(large.visitors(FLEET).examples, large.examples(FLEET)).pvalue > 0.01


@pytest.mark.parametrize("availability", [0.05, 0.5, 0.93])
def test_availability_is_the_share_of_devices_and_of_time(availability: float) -> None:
    population = Population(PopulationConfig(availability=availability), 11)
    for now in (0.0, 1234.5, 9 * DAY_S + 7000):
        eligible = int(population.is_available(FLEET, now).sum())
        assert stats.binomtest(eligible, N, availability).pvalue > 0.001
    hours = np.linspace(0, 500 * DAY_S, 24 * 500)
    share = population.is_available(np.full(len(hours), 77), hours).mean()
    assert share == pytest.approx(availability, abs=0.02)


def test_eligibility_is_constant_within_a_slot() -> None:
    population, step_s = Population(DEFAULT, 14), 20
    seconds = np.arange(0, 5 * DAY_S, step_s, dtype=np.float64)
    for device in range(20):
        states = population.is_available(np.full(len(seconds), device), seconds).tolist()
        changes = [i * step_s for i, (a, b) in enumerate(pairwise(states)) if a != b]
        assert len(changes) > 20
        assert len({change_s % SLOT_S for change_s in changes}) == 1


def test_the_fleet_does_not_change_its_mind_at_one_instant() -> None:
    population = Population(DEFAULT, 15)
    before = population.is_available(FLEET, 0.0)
    for minutes in (15, 30, 45):
        changed = (population.is_available(FLEET, minutes * 60.0) != before).mean()
        assert changed == pytest.approx(0.5 * minutes / 60, abs=0.01)


@pytest.mark.parametrize("hour", [0, 3, 6, 12, 18, 24, 36, 48 + 21])
def test_the_swing_follows_the_time_of_day(hour: int) -> None:
    population = Population(PopulationConfig(availability=0.4, availability_swing=0.8), 16)
    expected = 0.4 * (1 + 0.8 * math.cos(2 * math.pi * hour / 24))
    share = population.is_available(FLEET, hour * 3600.0).mean()
    assert share == pytest.approx(expected, abs=0.005)


def peak_bytes(size: int, blocks: int) -> int:
    tracemalloc.start()
    try:
        arrivals = Arrivals(Population(PopulationConfig(size=size), 18))
        for _ in islice(arrivals, blocks * module.BLOCK):
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_grows_neither_with_the_fleet_nor_with_the_visits() -> None:
    peak_bytes(10, 1)  # numpy's own caches
    small = peak_bytes(1000, 2)
    assert small < 10_000_000
    assert peak_bytes(10**10, 2) == pytest.approx(small, rel=0.05)
    assert peak_bytes(10**10, 20) == pytest.approx(small, rel=0.05)


NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "20", None]
OUTSIDE: dict[str, list[object]] = {
    "size": [0, -1, 10**10 + 1, 1e8],
    "examples_median": [0, 0.99, -20, 1e10],
    "examples_sigma": [-0.1, 10.1],
    "examples_cap": [0, -1, 1500.0, 10**10],
    "execution_per_example_s": [0, -0.55, 1e7],
    "execution_sigma": [-0.5, 11],
    "correlation": [-1.01, 1.01],
    "latency_mean_s": [-1, 1e7],
    "latency_sigma": [-0.5, 11],
    "dropout": [-0.1, 1, 1.5],
    "availability": [0, -0.5, 1.01],
    "availability_swing": [-0.1, 1, 2],
}


@pytest.mark.parametrize("field", OUTSIDE)
def test_an_impossible_value_is_refused_by_name(field: str) -> None:
    for value in OUTSIDE[field] + NOT_NUMBERS:
        with pytest.raises(ConfigError) as refusal:
            PopulationConfig(**{field: value})  # type: ignore[arg-type]
        assert f"{field} = {value!r}" in str(refusal.value)
        assert field in refusal.value.hint
        with pytest.raises(ConfigError):
            msgspec.structs.replace(DEFAULT, **{field: value})


@pytest.mark.parametrize(
    "extreme",
    [
        PopulationConfig(size=10**10, examples_median=1, examples_sigma=0, examples_cap=1),
        PopulationConfig(examples_sigma=10, examples_cap=10**9, execution_sigma=10, correlation=1),
        PopulationConfig(correlation=-1, latency_mean_s=1e6, latency_sigma=10, dropout=0.999),
        PopulationConfig(size=1, availability=0.5, availability_swing=0.999),
    ],
)
def test_the_bounds_themselves_work(extreme: PopulationConfig) -> None:
    block = Population(extreme, 2**64 - 1).visitors(FLEET)
    assert (np.isfinite(block.execution_s) & (block.execution_s > 0)).all()
    assert (np.isfinite(block.latency_s) & (block.latency_s > 0)).all()


def test_values_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"examples_median = 2000\.5.*examples_cap = 1500") as e:
        PopulationConfig(examples_median=2000.5)
    assert "2001" in e.value.hint
    with pytest.raises(ConfigError, match=r"availability_swing = 0\.5.*availability = 0\.8") as e:
        PopulationConfig(availability=0.8, availability_swing=0.5)
    assert "0.25" in e.value.hint
    PopulationConfig(examples_median=2000.5, examples_cap=2001)
    PopulationConfig(availability=0.8, availability_swing=0.25)


def test_a_configuration_file_is_checked_like_a_call() -> None:
    decode = msgspec.json.Decoder(PopulationConfig).decode
    assert decode(b"{}") == DEFAULT
    with pytest.raises(ConfigError, match="dropout = -1"):
        decode(b'{"dropout": -1}')
    with pytest.raises(msgspec.ValidationError, match="drop_out"):
        decode(b'{"drop_out": 0.1}')


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", None, True])
def test_an_impossible_seed_is_refused(seed: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        Population(DEFAULT, seed)  # type: ignore[arg-type]
    assert f"seed = {seed!r}" in str(refusal.value)


@pytest.mark.parametrize("stranger", [-1, 1000, 2**40])
def test_a_device_outside_the_fleet_is_refused(stranger: int) -> None:
    population = Population(PopulationConfig(size=1000), 0)
    for ask in (
        lambda: population.examples(np.array([5, stranger])),
        lambda: population.is_available(np.array([stranger]), 0.0),
        lambda: population.is_available(stranger, 0.0),
        lambda: population.visit(stranger, 0),
    ):
        with pytest.raises(IndexError, match=str(stranger)):
            ask()


def test_counters_are_arrays_of_whole_numbers_from_zero() -> None:
    population = Population(DEFAULT, 0)
    with pytest.raises(IndexError, match="-3"):
        population.visit(0, -3)
    for strange in (np.array([1.5]), np.array(1)):
        with pytest.raises(TypeError, match="integers"):
            population.examples(strange)
