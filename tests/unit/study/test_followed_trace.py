"""Learning along a trace while another process records it gives what learning afterwards gives."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from papaya.config import AsyncFL, OptimizerConfig, SyncFL, TaskConfig
from papaya.errors import InvariantError, OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import Vector
from papaya.sim.draws import Ints
from papaya.sim.population import PopulationConfig
from papaya.study.checkpoint import Checkpoints
from papaya.study.followed_trace import FollowedTrace, can_follow, follow
from papaya.study.replay import Rates
from papaya.study.run import (
    RecordingPlan,
    Run,
    clients_to_train,
    fleet_of,
    learn_run,
    most_updates,
    record_plan,
    recordable,
)
from papaya.study.trace import MOST_HOURS
from papaya.study.workloads.base import Clients, Matrix
from papaya.study.workloads.language import BigramWorkload

POPULATION = PopulationConfig(size=10_000)
RATES = Rates(client=ClientSGD(rate=1.0), optimizer=OptimizerConfig(kind="fedadam", rate=0.01))


def a_plan(regime: AsyncFL | SyncFL, hours: float = MOST_HOURS) -> RecordingPlan:
    task = TaskConfig(task="followed", concurrency=60, model_length=4, regime=regime)
    cluster = recordable(task, POPULATION)
    return RecordingPlan(cluster=cluster, seed=3, updates=330, hours=hours)


RUN = Run(recording_plan=a_plan(AsyncFL(20)), workload="bigram", data="", rates=RATES, updates=310)


@pytest.mark.parametrize("regime", [AsyncFL(20), SyncFL(over_selection=0.3)])
def test_learning_along_a_followed_trace_gives_the_same_run(regime: AsyncFL | SyncFL) -> None:
    plan = a_plan(regime)
    run = Run(recording_plan=plan, workload="bigram", data="", rates=RATES, updates=310)
    trace, report = record_plan(plan)
    workload = BigramWorkload(POPULATION)
    expected = learn_run(run, trace, fleet_of(report), workload)
    with follow(plan) as followed:
        found = learn_run(run, followed, None, BigramWorkload(POPULATION))
        whole, its_report = followed.whole()
        assert clients_to_train(run, followed) == clients_to_train(run, trace)
    assert found == expected
    assert its_report == report
    for name in ("created_s", "trips", "first", "start", "staleness", "execution_s"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(trace, name))
    np.testing.assert_array_equal(whole.clients.device, trace.clients.device)


class _Counting(BigramWorkload):
    """Kills its process when it is to train its n-th cohort."""

    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__(POPULATION)
        self.trained = 0
        self._dies_at = dies_at

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        self.trained += 1
        if self.trained == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(models, start, clients, sgd)


def _learns_and_is_killed(checkpoint: Path) -> None:
    with follow(RUN.recording_plan) as followed:
        checkpoints = Checkpoints(checkpoint, every_s=0)
        learn_run(RUN, followed, None, _Counting(dies_at=9), checkpoints=checkpoints)


def test_learning_that_is_killed_while_it_is_recorded_resumes_with_the_same_numbers(
    tmp_path: Path,
) -> None:
    """The recording starts again, learning does not."""
    checkpoint = tmp_path / "checkpoint"
    killed = get_context("spawn").Process(target=_learns_and_is_killed, args=(checkpoint,))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    kept = Checkpoints(checkpoint, every_s=0).load()
    assert kept is not None
    assert kept.version == 8
    whole, resumed = _Counting(), _Counting()
    with follow(RUN.recording_plan) as followed:
        expected = learn_run(RUN, followed, None, whole)
    with follow(RUN.recording_plan) as followed:
        checkpoints = Checkpoints(checkpoint, every_s=0)
        found = learn_run(RUN, followed, None, resumed, checkpoints=checkpoints)
    assert found == expected
    assert resumed.trained == whole.trained - 8


def test_a_recording_that_ends_early_is_reported() -> None:
    followed = FollowedTrace(a_plan(AsyncFL(20)))
    followed.collect(io.BytesIO(), lambda followed: None)
    with pytest.raises(OperatorError, match="ended early"):
        followed.until(1)
    with pytest.raises(OperatorError, match="ended early"):
        followed.whole()


def test_a_recording_of_hours_is_not_followed() -> None:
    with pytest.raises(InvariantError, match="hours"), follow(a_plan(AsyncFL(20), hours=1.0)):
        pass
    updates = most_updates(None, MOST_HOURS)  # `--hours 10000` alone
    assert not can_follow(structs.replace(a_plan(AsyncFL(20)), updates=updates))
