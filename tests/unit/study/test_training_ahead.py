"""Clients that train ahead: the same numbers, each client once, never before its model is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.errors import Diverged
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import Ints
from papaya.study import training_ahead
from papaya.study.checkpoint import Checkpoints
from papaya.study.replay import learn
from papaya.study.trace import Trace
from papaya.study.workloads.base import Clients, Matrix
from tests.unit.study.learners import RATES, Drift, Kept, a_trace


class Pulled(Drift):
    """Updates that depend on the model, client by client. Device `bad` diverges."""

    def __init__(self, bad: int | None = None) -> None:
        self._bad = bad

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        rows = super().train(models, start, clients, sgd)
        if self._bad in clients.device.tolist():
            raise Diverged("it diverged")
        for row, index in zip(rows, start.tolist(), strict=True):
            row -= FLOAT32.type(0.125) * models[index]
        return rows


class Later(Kept):
    """Trains what was begun when it is asked for the updates. Remembers what happened."""

    workers = 2

    def __init__(self, workload: Pulled) -> None:
        super().__init__(workload)
        self.begun: list[int] = []
        self.collected: list[int] = []
        self.cancelled: list[int] = []
        self.most_held = 0
        self.begun_before: dict[int, set[int]] = {}  # who was begun when this one was collected

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        raise AssertionError("workers train")

    def begin(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD, together: int
    ) -> _Begun:
        assert 0 < len(clients) <= together
        self.begun += clients.device.tolist()
        self.most_held = max(self.most_held, len(self.begun) - len(self.collected))
        return _Begun(self, [model.copy() for model in models], start, clients, sgd)

    def trained(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        begun = set(self.begun)
        self.begun_before |= dict.fromkeys(clients.device.tolist(), begun)
        self.collected += clients.device.tolist()
        return self._workload.train(models, start, clients, sgd)


class _Begun:
    def __init__(
        self, later: Later, models: list[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> None:
        self._later = later
        self._models, self._start, self._clients, self._sgd = models, start, clients, sgd

    def updates(self) -> Matrix:
        return self._later.trained(self._models, self._start, self._clients, self._sgd)

    def cancel(self) -> None:
        self._later.cancelled += self._clients.device.tolist()


def members(trace: Trace, version: int) -> list[int]:
    devices: list[int] = trace.clients.device[trace.members(version)].tolist()
    return devices


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    versions=st.integers(1, 12),
    goal=st.integers(1, 30),
    stale=st.integers(0, 12),
)
def test_numbers_are_those_without_it_and_each_client_trains_once(
    seed: int, versions: int, goal: int, stale: int
) -> None:
    trace = a_trace(versions, goal, stale=stale, seed=seed)
    alone, later = Kept(Pulled()), Later(Pulled())
    assert learn(trace, later, RATES) == learn(trace, alone, RATES)
    for found, expected in zip(later.judged, alone.judged, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert sorted(later.begun) == sorted(trace.clients.device.tolist())
    assert later.most_held <= max(goal, trace.task.concurrency)


def test_members_of_later_versions_train_before_the_next_version_is_made() -> None:
    """Those that start from an older version. The others have no model yet."""
    trace = a_trace(6, 4, stale=3)
    later = Later(Pulled())
    learn(trace, later, RATES)
    for version in range(1, 6):
        begun = later.begun_before[members(trace, version)[0]]
        starts = trace.start[trace.members(version + 1)].tolist()
        for device, start in zip(members(trace, version + 1), starts, strict=True):
            assert (device in begun) == (start < version)


def test_an_update_that_fails_ends_learning_at_its_own_version() -> None:
    trace = a_trace(8, 5, stale=3)
    [ahead] = [
        device
        for device, start in zip(members(trace, 6), trace.start[trace.members(6)], strict=True)
        if start == 3
    ][:1]
    later = Later(Pulled(bad=ahead))
    curve = learn(trace, later, RATES)
    assert curve == learn(trace, Kept(Pulled(bad=ahead)), RATES)
    assert curve.diverged == "it diverged"
    assert [point.version for point in curve.points] == [0, 1, 2, 3, 4, 5]
    assert later.cancelled


class Stopped(Exception):
    """The run is interrupted."""


def test_a_run_that_is_resumed_has_the_same_numbers(tmp_path: Path) -> None:
    trace, alone = a_trace(10, 4, stale=3), Kept(Pulled())
    expected = learn(trace, alone, RATES)
    checkpoint = tmp_path / "checkpoint"

    def stop(version: int, model: Vector) -> None:
        if version == 6:
            raise Stopped

    interrupted, resumed = Later(Pulled()), Later(Pulled())
    with pytest.raises(Stopped):
        learn(trace, interrupted, RATES, judged=stop, checkpoints=Checkpoints(checkpoint, 0.0))
    assert interrupted.cancelled
    found = learn(trace, resumed, RATES, checkpoints=Checkpoints(checkpoint, 0.0))
    assert found == expected
    np.testing.assert_array_equal(resumed.judged[-1], alone.judged[-1])
    later = [device for version in range(6, 11) for device in members(trace, version)]
    assert sorted(resumed.begun) == sorted(later)


def test_what_nobody_needs_is_cancelled_when_the_target_is_reached() -> None:
    trace = a_trace(20, 4, stale=3)
    later = Later(Pulled())
    curve = learn(trace, later, RATES, target=10.0)
    last = curve.points[-1].version
    assert last < 20
    counted = [device for version in range(1, last + 1) for device in members(trace, version)]
    assert sorted(later.collected) == sorted(counted)
    assert sorted(later.cancelled) == sorted(set(later.begun) - set(counted))
    assert later.cancelled


def test_large_updates_are_not_trained_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = a_trace(6, 4, stale=3)
    monkeypatch.setattr(training_ahead, "_MOST_BYTES", 2 * 4 * 4 * Pulled.length)
    later = Later(Pulled())
    learn(trace, later, RATES)
    assert later.most_held == 8
