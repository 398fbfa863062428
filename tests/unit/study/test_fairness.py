"""Who took part: the test against scipy's, the window, and a bias that is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from papaya.config import AsyncFL, SyncFL
from papaya.sim.cluster import ClusterConfig
from papaya.sim.population import PopulationConfig
from papaya.sim.simulate import protocol_tasks
from papaya.study.fairness import distance, fairness, noise_level, p_value
from papaya.study.trace import Trace, record

POPULATION = PopulationConfig(size=100_000, latency_mean_s=1.0)


@given(st.floats(0, 1), st.integers(30, 10**5), st.integers(30, 10**5))
def test_the_p_value_is_kolmogorovs(ks: float, sample: int, reference: int) -> None:
    scaled = ks * np.sqrt(sample * reference / (sample + reference))
    assert p_value(ks, sample, reference) == pytest.approx(stats.kstwobign.sf(scaled), abs=1e-9)


def test_the_noise_level_is_where_the_p_value_is_a_twentieth() -> None:
    assert p_value(noise_level(500, 60_000), 500, 60_000) == pytest.approx(0.05, rel=1e-3)


def test_of_one_distribution_one_sample_in_twenty_is_above_the_noise() -> None:
    rng = np.random.default_rng(8)
    reference = rng.normal(size=20_000)
    found = [distance(rng.normal(size=300), reference) for _ in range(400)]
    above = sum(one.ks > one.noise for one in found)
    assert 6 <= above <= 36  # 20 expected
    assert sum(one.p_value < 0.05 for one in found) == above


@pytest.fixture(scope="module")
def asynchronous() -> Trace:
    return a_trace(AsyncFL(10))


def a_trace(regime: AsyncFL | SyncFL) -> Trace:
    tasks = protocol_tasks(regime=regime, concurrency=60, participation_gap_s=0.0)
    return record(ClusterConfig(tasks=tasks, population=POPULATION), 3, updates=2000)[0]


def test_asynchronous_training_is_fair_and_over_selection_is_not(asynchronous: Trace) -> None:
    fair, biased = fairness(asynchronous), fairness(a_trace(SyncFL(0.5)))
    assert fair is not None
    assert biased is not None
    assert fair.clients > 500
    for name in ("execution_s", "examples"):
        assert getattr(fair, name).p_value > 0.001
        assert getattr(biased, name).ks > 2 * getattr(biased, name).noise
        assert getattr(biased, name).p_value < 1e-4


def test_the_window_is_of_those_who_were_assigned_in_it(asynchronous: Trace) -> None:
    found = fairness(asynchronous)
    assert found is not None
    end_s = float(asynchronous.created_s[-1])
    assert found.from_s == min(600.0, end_s / 4)
    assert found.until_s == end_s - asynchronous.task.training_timeout_s
    assigned_s = asynchronous.assigned_s
    inside = (assigned_s >= found.from_s) & (assigned_s < found.until_s)
    assert found.clients == inside.sum() < len(assigned_s)
    half = fairness(asynchronous, from_s=0.0, until_s=end_s / 2)
    assert half is not None
    assert half.clients == (assigned_s < end_s / 2).sum()


def test_the_start_favours_the_fast(asynchronous: Trace) -> None:
    """Why it is trimmed: who is counted first, was fast."""
    first_s = float(asynchronous.created_s[5])
    counted = np.arange(int(asynchronous.first[6]))
    assert asynchronous.assigned_s[counted].max() <= first_s
    usual = np.median(asynchronous.execution_s)
    assert np.median(asynchronous.execution_s[counted]) < usual


def test_of_a_few_clients_nothing_is_said(asynchronous: Trace) -> None:
    assert fairness(asynchronous, from_s=1e9) is None
    assert fairness(asynchronous, until_s=1.0) is None


def test_it_survives_the_traces_file(asynchronous: Trace, tmp_path: Path) -> None:
    asynchronous.save(tmp_path / "trace.npz")
    assert fairness(Trace.load(tmp_path / "trace.npz")) == fairness(asynchronous)
