"""Learning along a trace, against sums and steps that are written out in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from papaya.config import OptimizerConfig, Privacy, Weighting
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import Vector
from papaya.learning.weighting import clipped
from papaya.sim.draws import Ints
from papaya.study.checkpoint import Checkpoints
from papaya.study.replay import NORMS_KEPT, Curve, Point, Rates, learn
from papaya.study.trace import Trace
from papaya.study.workloads.base import Clients, Matrix, Quality, Workload
from papaya.study.workloads.language import EmbeddingWorkload
from tests.unit.study.learners import LANGUAGE, POPULATION, RATES, Drift, Kept, a_trace

Floats = npt.NDArray[np.float64]


def slow_models(trace: Trace, workload: Workload, rates: Rates) -> list[Floats]:
    """Every version, one client at a time, all versions kept, Adam as its authors write it."""
    models = [workload.initial(trace.seed).astype(np.float64)]
    config = rates.optimizer
    assert config.kind == "fedadam"
    assert config.rate is not None
    assert config.epsilon is not None
    m = v = np.zeros(workload.length)
    for version in range(1, trace.versions + 1):
        total, weight = np.zeros(workload.length), 0.0
        for i in range(int(trace.first[version]), int(trace.first[version + 1])):
            start = models[trace.start[i]].astype(np.float32)
            client = trace.clients.take(slice(i, i + 1))
            [update] = workload.train([start], np.zeros(1, np.int64), client, rates.client)
            change = update.astype(np.float64)
            if rates.clip is not None:
                change *= min(1.0, rates.clip / math.sqrt(float(change @ change)))
            most = min(trace.task.max_examples, rates.client.max_examples)
            n = min(int(trace.clients.examples[i]), most)
            total += n / math.sqrt(1 + int(trace.staleness[i])) * change
            weight += n
        step = total / weight
        m = config.beta1 * m + (1 - config.beta1) * step
        v = config.beta2 * v + (1 - config.beta2) * step**2
        m_hat, v_hat = m / (1 - config.beta1**version), v / (1 - config.beta2**version)
        models.append(models[-1] + config.rate * m_hat / (np.sqrt(v_hat) + config.epsilon))
    return models


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    versions=st.integers(1, 12),
    goal=st.integers(1, 7),
    stale=st.integers(0, 12),
    clip=st.sampled_from([None, 0.05, 0.4, 100.0]),
    most=st.sampled_from([5, 20, 1500]),
)
def test_versions_are_those_of_the_slow_reference(
    seed: int, versions: int, goal: int, stale: int, clip: float | None, most: int
) -> None:
    trace = a_trace(versions, goal, stale=stale, seed=seed, max_examples=25)
    rates = structs.replace(RATES, clip=clip, client=ClientSGD(rate=0.5, max_examples=most))
    workload = Kept(EmbeddingWorkload(POPULATION, LANGUAGE, seed=seed))
    curve = learn(trace, workload, rates)
    expected = slow_models(trace, workload, rates)
    assert [point.version for point in curve.points] == list(range(versions + 1))
    for found, reference in zip(workload.judged, expected, strict=True):
        np.testing.assert_allclose(found, reference, atol=2e-4)


def test_points_are_the_times_and_counts_of_the_trace() -> None:
    trace = a_trace(20, 3)
    curve = learn(trace, Drift(), RATES, evaluations=4)
    assert [point.version for point in curve.points] == [0, 5, 10, 15, 20]
    assert [point.hours for point in curve.points] == [v / 360 for v in (0, 5, 10, 15, 20)]
    assert [point.updates for point in curve.points] == [0, 15, 30, 45, 60]
    assert [point.trips for point in curve.points] == [0, 20, 40, 60, 80]
    assert (curve.workload, curve.rates, curve.diverged) == ("drift", RATES, None)
    until = learn(trace, Drift(), RATES, until=5)
    assert until.points == learn(trace, Drift(), RATES).points[:6]
    assert len(learn(trace, Drift(), RATES, until=99, evaluations=1).points) == 2


def test_each_version_is_trained_in_one_batch_and_old_ones_are_forgotten() -> None:
    class Few(Drift):
        """Sees which models it is given."""

        given = 0

        def train(
            self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
        ) -> Matrix:
            self.given = max(self.given, len(models))
            assert sorted(set(start.tolist())) == list(range(len(models)))
            return super().train(models, start, clients, sgd)

    few = Few()
    kept = Kept(few)
    learn(a_trace(12, 30, stale=2), kept, RATES)
    assert kept.batches == [30] * 12
    assert few.given == 3


@pytest.mark.parametrize("clip", [None, 0.05])
def test_uploads_in_fewer_bits_are_rounded_and_within_the_clip(clip: float | None) -> None:
    """FedAvg with rate 1: the models differ by the rounding errors of the means, no more."""
    trace = a_trace(4, 10)
    average = OptimizerConfig(kind="fedavg")
    models = {}
    for bits in (32, 16, 8):
        rates = Rates(ClientSGD(rate=0.5), average, clip)
        rates = structs.replace(rates, upload_bits=bits)
        workload = Kept(EmbeddingWorkload(POPULATION, LANGUAGE, seed=3))
        curve = learn(trace, workload, rates)
        assert curve.diverged is None
        models[bits] = workload.judged[-1]
        assert curve.rounding[16].update < curve.rounding[8].update / 50
    start = EmbeddingWorkload(POPULATION, LANGUAGE, seed=3).initial(trace.seed)
    moved = np.linalg.norm(models[32] - start)
    off = {bits: np.linalg.norm(models[bits] - models[32]) / moved for bits in (16, 8)}
    assert 0 < off[16] < off[8] < 0.1


def test_masked_words_of_16_bits_learn_nearly_the_same() -> None:
    trace = a_trace(4, 10)
    start = EmbeddingWorkload(POPULATION, LANGUAGE, seed=3).initial(trace.seed)
    rates = Rates(
        ClientSGD(rate=0.5),
        OptimizerConfig(kind="fedavg"),
        clip=0.5,
        weighting=Weighting("equal"),
        masked=True,
    )
    models = {}
    for bits in (32, 16):
        workload = Kept(EmbeddingWorkload(POPULATION, LANGUAGE, seed=3))
        curve = learn(trace, workload, structs.replace(rates, upload_bits=bits))
        assert curve.diverged is None
        assert curve.masked is not None
        models[bits] = workload.judged[-1]
    moved = np.linalg.norm(models[32] - start)
    assert 0 < np.linalg.norm(models[16] - models[32]) / moved < 0.1


def test_norms_are_of_the_first_updates_before_any_clip() -> None:
    trace = a_trace(5, 1000)
    workload = EmbeddingWorkload(POPULATION, LANGUAGE)
    rates = structs.replace(RATES, clip=0.01, optimizer=OptimizerConfig(kind="fedavg", rate=1e-9))
    curve = learn(trace, workload, rates)
    assert len(curve.norms) == NORMS_KEPT < 5000
    first = trace.members(1)
    updates = workload.train(
        [workload.initial(trace.seed)],
        np.zeros(1000, np.int64),
        trace.clients.take(first),
        rates.client,
    )
    expected = np.linalg.norm(updates.astype(np.float64), axis=1)
    np.testing.assert_allclose(curve.norms[:1000], expected, rtol=1e-12)


@pytest.mark.parametrize("clip", [None, 1.0, 3.0, 1e30])
def test_updates_are_clipped_and_admitted_one_by_one(clip: float | None) -> None:
    """All rows are looked at together, yet each is clipped as a device clips its own."""

    class Long(Drift):
        def train(
            self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
        ) -> Matrix:
            lengths = np.array([0.5, 1.0, 1 - 1e-8, 2.0, 3.0, 4.0], np.float32)
            rows = np.zeros((6, self.length), np.float32)
            rows[np.arange(6), np.arange(6)] = lengths
            return rows

    trace = a_trace(1, 6, stale=0)
    rates = Rates(client=ClientSGD(rate=1.0), optimizer=OptimizerConfig(kind="fedavg"), clip=clip)
    kept = Kept(Long())
    learn(trace, kept, rates)
    rows = Long().train([], np.zeros(6, np.int64), trace.clients, rates.client)
    n = trace.clients.examples
    each = [row if clip is None else clipped(row, clip) for row in rows]
    mean = sum(k * row.astype(np.float64) for k, row in zip(n, each, strict=True)) / n.sum()
    np.testing.assert_allclose(kept.judged[1] - kept.judged[0], mean, atol=1e-6)


class Breaking(Drift):
    """Fine until the third version, then as told."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.calls = 0

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        self.calls += 1
        updates = super().train(models, start, clients, sgd)
        if self.calls == 3:
            updates[len(updates) // 2, 0] = self.value
        return updates


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_ends_the_replay(value: float, clip: float | None) -> None:
    curve = learn(a_trace(9, 4), Breaking(value), structs.replace(RATES, clip=clip))
    assert curve.diverged == "update contains NaN or infinity"
    assert [point.version for point in curve.points] == [0, 1, 2]


def test_an_update_that_no_server_takes_ends_the_replay_unless_it_is_clipped() -> None:
    curve = learn(a_trace(9, 4), Breaking(1e30), RATES)
    assert curve.diverged is not None
    assert "1e+30" in curve.diverged
    assert len(curve.points) == 3
    clipping = learn(a_trace(9, 4), Breaking(1e30), structs.replace(RATES, clip=1.0))
    assert clipping.diverged is None
    assert len(clipping.points) == 10


def test_a_loss_that_is_not_finite_ends_the_replay() -> None:
    class Lost(Drift):
        def evaluate(self, parameters: Vector) -> Quality:
            return Quality(*[math.nan if parameters[0] != 0.25 else 1.0] * 4)

    curve = learn(a_trace(9, 4), Lost(), RATES)
    assert curve.diverged == "the loss of version 1 is not finite"
    assert [point.version for point in curve.points] == [0]


def test_a_step_that_is_not_finite_ends_the_replay() -> None:
    rates = structs.replace(RATES, optimizer=OptimizerConfig(kind="fedavg", rate=1e45))
    curve = learn(a_trace(9, 4), Drift(), rates)
    assert curve.diverged is not None
    assert "the model diverged: step 1 of fedavg" in curve.diverged
    assert len(curve.points) == 1


def a_curve(*losses: float) -> Curve:
    points = [
        Point(version, version / 10, 5 * version, 6 * version, Quality(loss, 9.0, 9.0, 9.0))
        for version, loss in enumerate(losses)
    ]
    return Curve("drift", RATES, tuple(points), ())


@pytest.mark.parametrize(
    ("losses", "version"),
    [
        ((5, 4, 3, 3, 3), 2),
        ((5, 4, 3, 2, 1), 2),
        ((5, 2, 5, 5, 5, 2, 2, 2), 5),  # a single lucky version does not count
        ((5, 3, 3.5, 2, 5, 5), 1),  # on average it stays there
        ((5, 3, 3.5, 3, 5, 5), None),
        ((5, 4, 3.1, 3.05), None),
        ((5, 4, 4, 4, 2), None),  # nor does it when it is the last
        ((5, 4, 4, 2, 2), None),
        ((5, 2, math.nan), None),
        ((), None),
    ],
)
def test_a_target_is_reached_when_it_is_kept(
    losses: tuple[float, ...], version: int | None
) -> None:
    found = a_curve(*losses).reached(3.0)
    assert (None if found is None else found.version) == version


class Scripted(Drift):
    """Its versions have these losses, whatever is learnt."""

    def __init__(self, losses: Sequence[float]) -> None:
        self.losses = iter(losses)

    def evaluate(self, parameters: Vector) -> Quality:
        return Quality(next(self.losses), 0.0, 0.0, 0.0)


FALLING = (5.0, 2.0, 5.0, 4.0, 3.0, 2.9, 2.8, 2.7, 2.6, 2.5)


def test_a_replay_stops_when_its_target_is_kept() -> None:
    curve = learn(a_trace(9, 4), Scripted(FALLING), RATES, target=3.0)
    reached = curve.reached(3.0)
    assert reached is not None
    assert reached.version == 4
    assert curve.points[-1].version == 7
    assert len(learn(a_trace(9, 4), Scripted(FALLING), RATES).points) == 10


def test_a_replay_stops_when_its_target_cannot_be_reached_in_time() -> None:
    """Versions are 10 s apart. Version 1 meets the target; version 3 shows that it is not kept."""
    for deadline_s, ends in ((5, 3), (25, 3), (30, 7), (1000, 7)):
        losses = Scripted(FALLING)
        curve = learn(a_trace(9, 4), losses, RATES, target=3.0, deadline_h=deadline_s / 3600)
        assert curve.points[-1].version == ends


@given(st.lists(st.integers(1, 5), min_size=10, max_size=10), st.integers(0, 100))
def test_a_deadline_hides_no_target_that_is_reached_before_it(
    losses: list[int], deadline_s: int
) -> None:
    deadline_h = deadline_s / 3600
    whole = learn(a_trace(9, 4), Scripted(losses), RATES)
    raced = learn(a_trace(9, 4), Scripted(losses), RATES, target=3.0, deadline_h=deadline_h)
    found = whole.reached(3.0)
    if found is not None and whole.points[max(0, found.version - 1)].hours <= deadline_h:
        assert raced.reached(3.0) == found
    else:
        assert raced.reached(3.0) in (None, found)


class Interrupted(Drift):
    """Stops once, when it has trained the members of so many versions."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().train(models, start, clients, sgd)


@pytest.mark.parametrize("after", [0, 1, 5, 11])
def test_an_interrupted_run_resumes_with_the_same_bits(after: int, tmp_path: Path) -> None:
    trace = a_trace(12, 5, stale=3)
    whole: list[bytes] = []
    expected = learn(trace, Drift(), RATES, judged=lambda v, model: whole.append(model.tobytes()))
    path = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        learn(trace, Interrupted(after), RATES, checkpoints=Checkpoints(path, every_s=0))
    resumed = Interrupted(12 - after)  # what was trained before is not trained again
    found: list[bytes] = []
    curve = learn(
        trace,
        resumed,
        RATES,
        judged=lambda v, model: found.append(model.tobytes()),
        checkpoints=Checkpoints(path, every_s=0),
    )
    assert curve == expected
    assert found == whole[after:], "the last one that was judged before, and those after it"
    assert resumed.left == 0


def test_a_damaged_checkpoint_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(b"damaged")
    trace, checkpoints = a_trace(3, 4), Checkpoints(tmp_path / "checkpoint", every_s=0)
    assert learn(trace, Drift(), RATES, checkpoints=checkpoints) == learn(trace, Drift(), RATES)


def test_a_private_task_steps_with_the_noise_of_an_aggregator() -> None:
    """With a huge rate of noise, the first step is the noise and nothing else, whoever trains."""
    clip, z, goal = 0.05, 40.0, 4
    privacy = Privacy(clip=clip, max_participations=1, delta=1e-6, noise_multiplier=z)
    rates = structs.replace(
        RATES, optimizer=OptimizerConfig(kind="fedavg", rate=1.0), privacy=privacy
    )
    workload = Kept(EmbeddingWorkload(POPULATION, LANGUAGE, seed=3))
    learn(a_trace(2, goal, stale=0, seed=3), workload, rates)
    steps = np.diff(np.array(workload.judged, np.float64), axis=0)
    assert steps.std(axis=1) == pytest.approx([z * clip / goal] * 2, rel=0.1)
    first, second = steps
    alike = float(first @ second) / math.sqrt(float(first @ first) * float(second @ second))
    assert abs(alike) < 0.15, "each version has noise of its own"


def test_a_repeated_trace_is_that_of_a_larger_fleet() -> None:
    trace = a_trace(5, 3, stale=2, seed=9)
    larger = trace.repeated(4)
    assert larger.versions == trace.versions
    for version in range(1, 6):
        before, after = trace.members(version), larger.members(version)
        assert after.stop - after.start == 4 * (before.stop - before.start)
        assert larger.start[after].tolist() == np.repeat(trace.start[before], 4).tolist()
        assert larger.staleness[after].tolist() == np.repeat(trace.staleness[before], 4).tolist()
    devices = larger.clients.device.reshape(-1, 4)
    assert (devices[:, 0] == trace.clients.device).all()
    assert len(np.unique(devices)) == 4 * len(np.unique(trace.clients.device))
    assert larger.clients.examples.reshape(-1, 4)[:, 3].tolist() == trace.clients.examples.tolist()
