"""Small systems that learn, and traces written by hand, for tests of learning in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from papaya.config import AsyncFL, OptimizerConfig, SyncFL, TaskConfig
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.cluster import ClusterConfig
from papaya.sim.draws import Ints
from papaya.sim.population import PopulationConfig
from papaya.study.replay import Rates
from papaya.study.trace import Trace
from papaya.study.workloads.base import Clients, Matrix, Quality, Workload
from papaya.study.workloads.language import Language, LanguageConfig

POPULATION = PopulationConfig(size=100_000, latency_mean_s=5.0)
LANGUAGE = Language(LanguageConfig(vocabulary=8))
RATES = Rates(
    client=ClientSGD(rate=0.5),
    optimizer=OptimizerConfig(kind="fedadam", rate=0.02, beta1=0.5, epsilon=1e-3),
)
ASYNC, SYNC = AsyncFL(aggregation_goal=5), SyncFL(over_selection=0.5)


def a_cluster(
    regime: AsyncFL | SyncFL = ASYNC, population: PopulationConfig = POPULATION, **task: Any
) -> ClusterConfig:
    config = TaskConfig(task="words", concurrency=24, model_length=4, regime=regime, **task)
    return ClusterConfig(tasks=(config,), population=population)


def a_trace(versions: int, goal: int, *, stale: int = 3, seed: int = 0, **task: Any) -> Trace:
    """Members that start from one of the `stale` versions before the newest, or from it."""
    rng = np.random.default_rng(seed)
    made_from = np.repeat(np.arange(versions), goal)
    staleness = np.minimum(rng.integers(0, stale + 1, len(made_from)), made_from)
    device = rng.permutation(len(made_from))
    return Trace(
        config=a_cluster(AsyncFL(goal), **task),
        seed=seed,
        created_s=np.arange(0.0, 10.0 * versions + 1, 10.0),
        trips=np.arange(versions + 1) * (goal + 1),
        first=np.concatenate([[0], np.arange(versions + 1) * goal]),
        clients=Clients(device, np.zeros_like(device), rng.integers(1, 60, len(device))),
        start=made_from - staleness,
        staleness=staleness,
        assigned_s=np.zeros(len(device)),
        execution_s=np.ones(len(device)),
    )


class Kept:
    """A workload that keeps every model it is asked to judge, and counts whom it trains."""

    def __init__(self, workload: Workload) -> None:
        self.name = workload.name
        self.length = workload.length
        self.judged: list[Vector] = []
        self.batches: list[int] = []
        self._workload = workload

    def initial(self, seed: int) -> Vector:
        return self._workload.initial(seed)

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        self.batches.append(len(clients))
        return self._workload.train(models, start, clients, sgd)

    def evaluate(self, parameters: Vector) -> Quality:
        self.judged.append(parameters.copy())
        return self._workload.evaluate(parameters)


class Drift:
    """Updates that do not depend on the model: what goes wrong in one version stays as it is.

    `length` values around a hundredth, from the device's own numbers.
    """

    name = "drift"
    length = 6

    def initial(self, seed: int) -> Vector:
        return np.full(self.length, 0.25, FLOAT32)

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        waves = np.sin(np.outer(clients.device + 1.0, np.arange(1.0, self.length + 1)))
        return (0.01 * sgd.rate * waves).astype(FLOAT32)

    def evaluate(self, parameters: Vector) -> Quality:
        loss = float(np.abs(parameters).mean())
        return Quality(loss, loss, loss, loss)
