"""The synthetic language: its odds, its entropy, and a judge that is exact."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.errors import ConfigError
from papaya.learning.definition import ClientSGD
from papaya.sim.population import DEFAULT, STRESS, Population, PopulationConfig, volume_quantiles
from papaya.study.workloads.base import Clients
from papaya.study.workloads.language import (
    GRAIN,
    BigramWorkload,
    EmbeddingWorkload,
    Judge,
    Language,
    LanguageConfig,
    LanguageWorkload,
)

LANGUAGE = Language()
KINDS: tuple[type[LanguageWorkload], ...] = (EmbeddingWorkload, BigramWorkload)


@settings(max_examples=30)
@given(st.builds(LanguageConfig, vocabulary=st.integers(4, 256), seed=st.integers(0, 2**32)))
def test_tables_have_the_frequencies_of_the_odds(config: LanguageConfig) -> None:
    language = Language(config)
    size = config.vocabulary
    assert language.contexts.shape == (GRAIN,)
    assert language.following.shape == (2, size, GRAIN)
    counted = np.bincount(language.contexts, minlength=size) / GRAIN
    assert np.array_equal(counted, language.context)
    for table, odds in zip(
        language.following, (language.next_common, language.next_dialect), strict=True
    ):
        rows = [np.bincount(row, minlength=size) / GRAIN for row in table]
        assert np.array_equal(np.stack(rows), odds)
        assert odds.min() > 0


def test_the_dialect_differs_in_the_declared_share_of_contexts() -> None:
    for conflict in (0.0, 0.25, 0.4, 1.0):
        language = Language(LanguageConfig(conflict=conflict))
        other = (language.next_common != language.next_dialect).any(axis=1)
        # Contexts are whole words: the last one may be too much.
        share = float(language.context[other].sum())
        assert conflict <= share <= conflict + language.context.max()
        ours, theirs = language.next_common, language.next_dialect
        assert np.array_equal(np.sort(ours, axis=1), np.sort(theirs, axis=1))


def test_another_seed_is_another_language_and_the_same_the_same() -> None:
    again, other = Language(LanguageConfig()), Language(LanguageConfig(seed=1))
    assert np.array_equal(LANGUAGE.following, again.following)
    assert not np.array_equal(LANGUAGE.following, other.following)
    assert len({LANGUAGE.state(0), LANGUAGE.state(1), other.state(0)}) == 3


@given(volume=st.floats(1, 1e4), width=st.floats(0.01, 5), examples=st.integers(1, 10**6))
def test_strength_is_logistic_in_the_logarithm_of_the_volume(
    volume: float, width: float, examples: int
) -> None:
    language = Language(LanguageConfig(vocabulary=4, dialect_volume=volume, dialect_width=width))
    [found] = language.strength(np.array([examples]))
    small, large = sorted((float(examples), volume))
    odds = (small / large) ** (1 / width)  # of the less likely
    expected = odds / (1 + odds) if examples < volume else 1 / (1 + odds)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_strength_is_a_half_at_the_dialect_volume_and_grows() -> None:
    assert LANGUAGE.strength(np.array([100]))[0] == 0.5
    assert (np.diff(LANGUAGE.strength(np.arange(1, 1500))) > 0).all()
    assert LANGUAGE.strength(np.array([20]))[0] < 1e-2


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_entropy_is_that_of_all_pairs_counted_out(strength: float) -> None:
    language = Language(LanguageConfig(vocabulary=6, seed=3))
    total = 0.0
    for word in range(6):
        for following in range(6):
            common = np.count_nonzero(language.following[0, word] == following) / GRAIN
            dialect = np.count_nonzero(language.following[1, word] == following) / GRAIN
            odds = (1 - strength) * common + strength * dialect
            total -= np.count_nonzero(language.contexts == word) / GRAIN * odds * math.log(odds)
    assert language.entropy(strength) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_no_model_has_less_loss_than_the_entropy(strength: float) -> None:
    best = (1 - strength) * LANGUAGE.next_common + strength * LANGUAGE.next_dialect

    def loss(odds: npt.NDArray[np.float64]) -> float:
        common, dialect = LANGUAGE.losses(np.log(odds))
        return (1 - strength) * common + strength * dialect

    assert loss(best) == pytest.approx(LANGUAGE.entropy(strength), rel=1e-12)
    rng = np.random.default_rng(1)
    for _ in range(5):
        bent = best * np.exp(rng.normal(0, 0.1, best.shape))
        assert loss(bent / bent.sum(axis=1, keepdims=True)) > LANGUAGE.entropy(strength)


def within_four_sigma(
    losses: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], expected: float
) -> bool:
    """Of a weighted mean over independent devices."""
    mean = float(np.average(losses, weights=weights))
    sigma = math.sqrt(float((weights**2 * (losses - mean) ** 2).sum())) / float(weights.sum())
    return abs(mean - expected) < 4 * sigma < 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("population", [DEFAULT, STRESS])
def test_the_judge_is_the_mean_over_real_devices(
    kind: type[LanguageWorkload], population: PopulationConfig
) -> None:
    workload = kind(population, seed=9)
    rng = np.random.default_rng(2)
    model = rng.normal(0, 0.7, workload.length).astype(np.float32)
    logits = workload.logits(model.astype(np.float64))
    log_odds = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    devices = np.arange(5000) * 1009
    volumes = Population(population, 4).examples(devices)
    hashes, coins = workload.hashes(devices), workload.coins(volumes)
    losses = np.empty(len(devices))
    for row, count in enumerate(volumes.tolist()):
        drawn = workload.examples(int(hashes[row]), int(coins[row]), count)
        losses[row] = -log_odds[drawn].mean()
    quality = workload.evaluate(model)
    weights = volumes.astype(np.float64)
    assert within_four_sigma(losses, np.ones(len(devices)), quality.all_by_clients)
    assert within_four_sigma(losses, weights, quality.all)
    exact = volume_quantiles(population, 1 << 16)
    for level, expected in ((0.75, quality.p75), (0.99, quality.p99)):
        high = volumes >= exact[int(level * len(exact))]
        assert within_four_sigma(losses[high], weights[high], expected)


def test_the_dialect_is_of_those_with_much_data() -> None:
    everyone, p75, p99, mean_client = Judge(LANGUAGE, DEFAULT).shares
    assert mean_client < everyone < p75 < p99
    assert p99 > 0.9


def test_version_0_of_the_table_finds_all_words_alike() -> None:
    workload = BigramWorkload(DEFAULT)
    quality = workload.evaluate(workload.initial(1))
    assert quality.all == pytest.approx(math.log(96))
    assert workload.length == 96 * 96


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_step_of_sgd_follows_the_gradient_of_the_mean_loss(
    kind: type[LanguageWorkload],
) -> None:
    """Against differences of the loss, coordinate by coordinate."""
    language = Language(LanguageConfig(vocabulary=5))
    workload = kind(DEFAULT, language)
    rng = np.random.default_rng(3)
    model = rng.normal(0, 0.5, workload.length).astype(np.float32)
    device, n = np.array([12345]), 20
    clients = Clients(device, np.zeros(1, np.int64), np.array([n]))
    [update] = workload.train([model], np.zeros(1, np.int64), clients, ClientSGD(rate=1.0))
    hashed, coin = int(workload.hashes(device)[0]), int(workload.coins(clients.examples)[0])
    pairs = workload.examples(hashed, coin, n)

    def loss(parameters: npt.NDArray[np.float64]) -> float:
        logits = workload.logits(parameters)
        log_odds = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return -float(log_odds[pairs].mean())

    wide, nudge = model.astype(np.float64), 1e-6
    for i in range(workload.length):
        way = np.zeros(workload.length)
        way[i] = nudge
        slope = (loss(wide + way) - loss(wide - way)) / (2 * nudge)
        assert -update[i] == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_trains_on_its_own_data_as_often_and_as_much_as_told(
    kind: type[LanguageWorkload],
) -> None:
    language = Language(LanguageConfig(vocabulary=8))
    workload, other = kind(DEFAULT, language), kind(DEFAULT, language, seed=1)
    model, start = workload.initial(1), np.zeros(2, np.int64)
    clients = Clients(np.array([7, 8]), np.zeros(2, np.int64), np.array([50, 50]))

    def trained(by: LanguageWorkload, **how: Any) -> npt.NDArray[np.float32]:
        return by.train([model], start, clients, ClientSGD(rate=0.5, **how))

    plain = trained(workload)
    assert np.array_equal(plain, trained(workload))
    assert not np.array_equal(plain[0], plain[1])
    for changed in (
        trained(other),
        trained(workload, epochs=2),
        trained(workload, batch_size=50),
        trained(workload, max_examples=40),
    ):
        assert (changed != plain).any(axis=1).all()
    assert np.array_equal(plain, trained(workload, max_examples=60))


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_whose_data_is_capped_speaks_as_one_that_has_all_of_it(
    kind: type[LanguageWorkload],
) -> None:
    workload = kind(DEFAULT, Language(LanguageConfig(vocabulary=8)))
    model, sgd = workload.initial(1), ClientSGD(rate=0.5, max_examples=40)
    start, device = np.zeros(3, np.int64), np.full(3, 7)
    clients = Clients(device, np.zeros(3, np.int64), np.array([1000, 1400, 40]))
    much, more, little = workload.train([model], start, clients, sgd)
    assert np.array_equal(much, more)
    assert not np.array_equal(much, little)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocabulary", 3),
        ("vocabulary", 257),
        ("conflict", -0.1),
        ("conflict", 1.1),
        ("conflict", math.nan),
        ("dialect_volume", 0.0),
        ("dialect_width", 0.0),
        ("dialect_width", math.nan),
    ],
)
def test_an_impossible_language_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        LanguageConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_momentum_on_the_client_is_refused(kind: type[LanguageWorkload]) -> None:
    workload = kind()
    clients = Clients(*(np.ones(1, np.int64) for _ in range(3)))
    sgd = ClientSGD(rate=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="momentum"):
        workload.train([workload.initial(1)], np.zeros(1, np.int64), clients, sgd)
