"""Learning inside the loop and learning along a trace are one and the same.

And a workload keeps its promise in every kernel: an update is a function of the start model and
the client, the same bits in any batch, order and process.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from papaya.config import (
    Aggregation,
    AsyncFL,
    OptimizerConfig,
    SecureAggregation,
    Staleness,
    SyncFL,
    Weighting,
)
from papaya.errors import ConfigError, InvariantError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import Vector
from papaya.secagg import fixed_point
from papaya.sim.population import Population, PopulationConfig
from papaya.sim.report import RunWatch
from papaya.study.learning_in_loop import LearningRun, learn_in_loop
from papaya.study.replay import Curve, Rates, learn
from papaya.study.trace import Trace, record
from papaya.study.workloads.base import Clients, Workload
from papaya.study.workloads.language import (
    BigramWorkload,
    EmbeddingWorkload,
    KernelName,
    Language,
    LanguageWorkload,
)
from tests.unit.study.learners import (
    ASYNC,
    LANGUAGE,
    POPULATION,
    RATES,
    SYNC,
    Drift,
    Kept,
    a_cluster,
)

ROOT = Path(__file__).parents[2]
UPDATES = 150
KINDS: tuple[type[LanguageWorkload], ...] = (EmbeddingWorkload, BigramWorkload)


def both(
    regime: AsyncFL | SyncFL, workload: Workload, rates: Rates = RATES, **task: Any
) -> tuple[Trace, Curve, list[Vector], Curve, list[Vector]]:
    """A recorded run of which learning knows nothing, and replay and loop with their models."""
    config = a_cluster(regime, **task)
    trace, _ = record(config, 3, updates=UPDATES)
    last = math.ceil(UPDATES / trace.task.aggregation_goal)
    along, inside = Kept(workload), Kept(workload)
    replayed = learn(trace, along, rates, until=last)
    looped = learn_in_loop(config, inside, rates, 3, updates=UPDATES)
    assert len(along.judged) == len(inside.judged) == last + 1
    return trace, replayed, along.judged, looped, inside.judged


def assert_the_same(replayed: Curve, looped: Curve) -> None:
    """A replay takes all norms in one call, and also measures the error of rounding."""
    assert replayed.norms == pytest.approx(looped.norms, rel=1e-12)
    assert structs.replace(replayed, norms=looped.norms, rounding={}, masked=None) == looped


@pytest.mark.parametrize("regime", [ASYNC, SYNC])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_replay_is_learning_in_the_loop_bit_for_bit(
    regime: AsyncFL | SyncFL, clip: float | None
) -> None:
    """With one cut per buffer the machines add in the order of the trace."""
    workload = EmbeddingWorkload(POPULATION, LANGUAGE)
    rates = structs.replace(RATES, clip=clip)
    trace, replayed, along, looped, inside = both(regime, workload, rates, durability="step")
    assert (trace.staleness.max() > 1) == (regime is ASYNC)
    assert_the_same(replayed, looped)
    assert replayed.diverged is None
    assert replayed.points[-1].quality.all < 2.0
    assert all(np.array_equal(a, b) for a, b in zip(along, inside, strict=True))
    if clip is not None:
        assert max(replayed.norms) > clip > min(replayed.norms)


METHODS: list[dict[str, Any]] = [
    {"weighting": Weighting("equal"), "aggregation": Aggregation("median")},
    {"weighting": Weighting("equal"), "aggregation": Aggregation("trimmed_mean", trim=0.3)},
    {"aggregation": Aggregation("norm_bound", factor=0.5), "staleness": Staleness("constant")},
    {"weighting": Weighting("capped", 5), "staleness": Staleness("hinge", slope=2.0, grace=1)},
]


@pytest.mark.parametrize("methods", METHODS, ids="-".join)
def test_rules_weights_and_damping_are_those_of_the_servers_bit_for_bit(
    methods: dict[str, Any],
) -> None:
    rates = structs.replace(RATES, **methods)
    cuts = {} if "aggregation" in methods else {"durability": "step"}  # one per buffer, as above
    workload = BigramWorkload(POPULATION, LANGUAGE)
    _, replayed, along, looped, inside = both(ASYNC, workload, rates, **methods, **cuts)
    assert_the_same(replayed, looped)
    assert all(np.array_equal(a, b) for a, b in zip(along, inside, strict=True))
    plain = both(ASYNC, workload, RATES, durability="step")[2]
    assert not np.array_equal(along[-1], plain[-1])


@pytest.mark.parametrize("regime", [ASYNC, SYNC])
def test_with_several_cuts_per_buffer_they_differ_by_rounding(regime: AsyncFL | SyncFL) -> None:
    workload = BigramWorkload(POPULATION, LANGUAGE)
    _, replayed, along, looped, inside = both(regime, workload)
    for ours, theirs in zip(replayed.points, looped.points, strict=True):
        assert structs.replace(ours, quality=theirs.quality) == theirs
    # Adam divides by small numbers: what is the last bit of a sum is more of a step.
    assert max(float(np.abs(a - b).max()) for a, b in zip(along, inside, strict=True)) < 1e-3
    assert abs(replayed.points[-1].quality.all - looped.points[-1].quality.all) < 1e-5


@pytest.mark.parametrize("regime", [ASYNC, SYNC])
def test_a_secure_task_learns_the_same_within_fixed_point(regime: AsyncFL | SyncFL) -> None:
    rates = Rates(client=ClientSGD(rate=1.0), optimizer=OptimizerConfig(kind="fedavg"), clip=0.1)
    secure = a_cluster(regime, secure_aggregation=SecureAggregation(), clip=0.1)
    inside, along = Kept(Drift()), Kept(Drift())
    learn_in_loop(secure, inside, rates, 3, updates=UPDATES)
    run = LearningRun(secure, Drift(), rates, 3)
    run.cluster.run(1e6, lambda: run.version >= len(inside.judged) - 1)
    trace = run.recorder.trace()
    learn(trace, along, rates)
    assert np.array_equal(run.parameters(), inside.judged[-1])
    goal = trace.task.aggregation_goal
    off = 0.0  # errors add up, as updates do not depend on the model
    for version in range(1, trace.versions + 1):
        share = trace.clients.examples[trace.members(version)] / rates.client.max_examples
        weight = float(np.minimum(share, 1).sum())
        # Of the sum, and of its weight, by which a mean of at most the clip is divided.
        off += fixed_point.error_bound(goal, goal, 0.1) * 2 / weight + 1e-6
        assert float(np.abs(along.judged[version] - inside.judged[version]).max()) <= off
    assert off < 2e-3 < float(np.abs(inside.judged[-1] - inside.judged[0]).max())


@pytest.mark.parametrize("regime", [ASYNC, SYNC])
def test_few_are_trained_who_are_not_counted(regime: AsyncFL | SyncFL) -> None:
    """Half of all drop out, some time out, and in SyncFL a third is over-selected."""
    population = structs.replace(POPULATION, dropout=0.5, execution_sigma=1.0)
    config = a_cluster(regime, population)
    workload = Kept(EmbeddingWorkload(population, LANGUAGE))
    watch = RunWatch()
    run = LearningRun(config, workload, RATES, 1, batch=8, observers=[watch])
    while run.recorder.counted < 300:
        run.cluster.run(run.cluster.engine.now + 5.0)
        assert len(run._in_flight) + len(run._updates) <= 2 * 24
    [result] = watch.report().tasks
    counted = run.recorder.counted
    assert result.dropped > 150
    assert run.trained == sum(workload.batches)
    spare = 24 if regime is ASYNC else 24 + 0.25 * counted
    assert counted <= run.trained <= counted + spare
    assert 4 < max(workload.batches) <= 8


@pytest.mark.parametrize("kernel", ["fastest", "numpy"])
@pytest.mark.parametrize(
    ("rates", "why"),
    [
        (structs.replace(RATES, client=ClientSGD(rate=1e38)), "at most 1.15292e+18 is"),
        (structs.replace(RATES, client=ClientSGD(rate=1e38, epochs=9)), "contains NaN or infinity"),
        (
            structs.replace(RATES, optimizer=OptimizerConfig(kind="fedavg", rate=1e45)),
            "the model diverged: step 1 of fedavg",
        ),
    ],
)
def test_both_end_alike_when_a_model_diverges(rates: Rates, why: str, kernel: KernelName) -> None:
    workload = EmbeddingWorkload(POPULATION, LANGUAGE, kernel=kernel)
    config = a_cluster(durability="step")
    trace, _ = record(config, 3, updates=15)
    replayed = learn(trace, workload, rates)
    looped = learn_in_loop(config, workload, rates, 3, updates=15)
    assert replayed.diverged is not None
    assert why in replayed.diverged
    assert looped.diverged is not None
    assert why in looped.diverged
    assert looped.points == replayed.points


def test_what_cannot_be_trained_is_an_error_and_not_a_divergence() -> None:
    workload = EmbeddingWorkload(POPULATION, LANGUAGE)
    rates = structs.replace(RATES, client=ClientSGD(rate=0.1, momentum=0.5))
    trace, _ = record(a_cluster(), 3, updates=5)
    with pytest.raises(ConfigError, match="momentum"):
        learn(trace, workload, rates)
    with pytest.raises(ConfigError, match="momentum"):
        learn_in_loop(a_cluster(), workload, rates, 3, updates=5)
    config = a_cluster()
    two = structs.replace(
        config, tasks=(*config.tasks, structs.replace(config.tasks[0], task="more"))
    )
    with pytest.raises(InvariantError, match="one task learns at a time"):
        learn_in_loop(two, workload, RATES, 3, updates=5)


def test_the_loop_ends_in_time_and_at_its_target() -> None:
    workload = Drift()
    short = learn_in_loop(a_cluster(), workload, RATES, 3, updates=10_000, hours=0.05)
    assert short.points[0].hours == 0
    assert short.points[-1].hours <= 0.05
    easy = learn_in_loop(a_cluster(), workload, RATES, 3, updates=10_000, target=10.0)
    assert len(easy.points) == 4
    assert easy.reached(10.0) == easy.points[0]


def some_clients(count: int, population: PopulationConfig = POPULATION) -> Clients:
    device = np.arange(count) * 37
    return Clients(device, np.zeros(count, np.int64), Population(population, 5).examples(device))


def some_models(workload: LanguageWorkload, count: int) -> list[Vector]:
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 0.5, (count, workload.length)).astype(np.float32)
    return [workload.initial(1) + row for row in noise]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["fastest", "numpy"])
def test_a_client_gives_the_same_bits_in_any_batch(
    kind: type[LanguageWorkload], kernel: KernelName
) -> None:
    workload = kind(POPULATION, LANGUAGE, kernel=kernel)
    models, clients, sgd = some_models(workload, 3), some_clients(24), RATES.client
    start = np.arange(24) % 3
    together = workload.train(models, start, clients, sgd)
    order = np.random.default_rng(2).permutation(24)
    shuffled = workload.train(models, start[order], clients.take(order), sgd)
    assert np.array_equal(shuffled, together[order])
    for row in range(0, 24, 5):
        one = slice(row, row + 1)
        alone = workload.train([models[row % 3]], np.zeros(1, np.int64), clients.take(one), sgd)
        assert np.array_equal(alone, together[one])
    assert len(workload.train(models, start[:0], clients.take(slice(0)), sgd)) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", [LANGUAGE, Language()], ids=["8 words", "96 words"])
@pytest.mark.parametrize(
    "sgd",
    [
        ClientSGD(rate=1.0),
        ClientSGD(rate=0.3, epochs=3, batch_size=7, max_examples=40),
        ClientSGD(rate=0.2, batch_size=1),
    ],
)
def test_the_compiled_loop_is_the_numpy_one_within_rounding(
    kind: type[LanguageWorkload], language: Language, sgd: ClientSGD
) -> None:
    fast, slow = (kind(POPULATION, language, kernel=kernel) for kernel in ("fastest", "numpy"))
    models, clients = some_models(slow, 2), some_clients(30)
    start = np.arange(30) % 2
    ours, theirs = (workload.train(models, start, clients, sgd) for workload in (fast, slow))
    assert float(np.abs(theirs).max()) > 0.01
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-5 * sgd.rate)


PROGRAM = """
from tests.contracts.test_learning import fingerprint
print(fingerprint())
"""


def fingerprint() -> str:
    """Of all that is learnt in the loop and along a trace."""
    hasher = hashlib.sha256()
    for kind in KINDS:
        workload = kind(POPULATION, LANGUAGE)
        curve = learn_in_loop(a_cluster(), workload, RATES, 7, updates=40)
        trace, _ = record(a_cluster(), 7, updates=40)
        hasher.update(msgspec.json.encode((curve, learn(trace, workload, RATES))))
    return hasher.hexdigest()


def test_another_process_learns_the_same_curve(tmp_path: Path) -> None:
    """Also if it has to compile its loops first: here they come from numba's cache by now."""
    environment = os.environ | {"PYTHONHASHSEED": "4711", "NUMBA_CACHE_DIR": str(tmp_path)}
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=True,
    )
    assert other.stdout.strip() == fingerprint()
