"""Traces: what is written down is what the machines did, and a file gives it back."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from papaya.config import AsyncFL, SyncFL
from papaya.errors import InvariantError, OperatorError
from papaya.messages.storage import ConsumedRow, Member, Row, Transaction
from papaya.sim.cluster import Cluster
from papaya.sim.observer import Observer
from papaya.sim.population import Population
from papaya.study.trace import _COLUMNS, Recorder, Trace, least_s, record
from tests.unit.study.learners import ASYNC, POPULATION, SYNC, a_cluster, a_trace


class Overheard(Observer):
    """Keeps the members as the rows have them."""

    def __init__(self) -> None:
        self.rows: list[tuple[Member, ...]] = []

    def on_transaction(
        self, writer: object, transaction: Transaction, before: dict[str, Row]
    ) -> None:
        self.rows += [row.members for _, row in transaction.put if isinstance(row, ConsumedRow)]


def are_equal(ours: Trace, theirs: Trace) -> bool:
    names = ("device", "participation", "examples")
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in _COLUMNS]
    pairs += [(getattr(ours.clients, name), getattr(theirs.clients, name)) for name in names]
    is_alike = ours.seed == theirs.seed and ours.config == theirs.config
    return is_alike and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("regime", [ASYNC, SYNC])
@pytest.mark.parametrize("durability", ["commit", "step"])
def test_a_trace_is_what_the_machines_did(regime: AsyncFL | SyncFL, durability: str) -> None:
    config = a_cluster(regime, durability=durability, max_examples=30)
    recorder, overheard = Recorder(), Overheard()
    Cluster(config, 2, observers=[recorder, overheard]).run(900.0)
    trace, task = recorder.trace(), config.tasks[0]
    members = [member for row in overheard.rows for member in row]
    assert trace.versions == len(overheard.rows) > 5
    assert np.diff(trace.first).tolist() == [0] + [len(row) for row in overheard.rows]
    assert set(np.diff(trace.first)[1:]) == {task.aggregation_goal}
    assert trace.start.tolist() == [member.version for member in members]
    assert trace.staleness.tolist() == [member.staleness for member in members]
    held = np.minimum(trace.clients.examples, 30)
    assert held.tolist() == [member.examples for member in members]
    assert trace.clients.examples.max() > 30
    # Staleness is that of the report. An update that arrives when its buffer is full goes into
    # the next one, as stale as it was.
    version = np.repeat(np.arange(trace.versions + 1), np.diff(trace.first))
    late = version - 1 - trace.start - trace.staleness
    assert set(late.tolist()) <= {0, 1}
    assert late.mean() < 0.1
    assert (trace.staleness.max() > 0) == (regime is ASYNC)
    assert trace.staleness.max() <= task.max_staleness


@pytest.mark.parametrize("regime", [ASYNC, SYNC])
def test_members_are_participations_that_took_their_time(regime: AsyncFL | SyncFL) -> None:
    trace, report = record(a_cluster(regime), 2, updates=300, warm_up_s=0.0)
    clients = trace.clients
    assert len({*zip(clients.device, clients.participation, strict=True)}) == len(clients)
    population = Population(POPULATION, 2)
    assert np.array_equal(clients.examples, population.examples(clients.device))
    assert np.array_equal(trace.execution_s, population.execution_s(clients.device))
    created_s = np.repeat(trace.created_s, np.diff(trace.first))
    latency_s = population.latency_s(clients.device, clients.participation)
    assert (created_s >= trace.assigned_s + latency_s + trace.execution_s).all()
    assert (trace.assigned_s >= trace.created_s[trace.start]).all()
    assert (np.diff(trace.created_s) > 0).all()
    assert (trace.trips >= trace.first[1:]).all()
    [result] = report.tasks
    assert trace.trips[-1] <= result.trips
    assert result.trips - trace.trips[-1] <= trace.task.concurrency


def test_trips_are_more_than_counted_updates_when_some_are_discarded() -> None:
    """An update above the clip is answered, and not counted."""
    trace, report = record(a_cluster(clip=8.0), 2, updates=150, warm_up_s=0.0)
    [result] = report.tasks
    discarded = sum(result.discarded.values())
    assert discarded > 50
    assert abs(trace.trips[-1] - result.trips) < trace.task.concurrency
    assert trace.trips[-1] - trace.first[-1] > 0.9 * discarded


def test_a_run_ends_by_updates_or_hours() -> None:
    short, _ = record(a_cluster(), 1, updates=35)
    assert short.versions >= 7
    longer, _ = record(a_cluster(), 1, updates=300)
    assert longer.first[-1] >= 300
    assert np.array_equal(longer.created_s[:7], short.created_s[:7])
    by_hours, report = record(a_cluster(), 1, hours=0.02, updates=10**6)
    assert report.until_s == 72.0
    assert by_hours.created_s[-1] <= 72.0


def test_a_drain_waits_for_those_who_were_assigned() -> None:
    seen: list[float] = []
    trace, report = record(
        a_cluster(), 1, updates=25, drain_s=400.0, progress=lambda c: seen.append(c.engine.now)
    )
    plain, _ = record(a_cluster(), 1, updates=25)
    assert report.until_s == seen[-1] + 400.0
    assert trace.versions > plain.versions
    late = trace.assigned_s <= seen[-1]
    assert late.sum() > plain.first[-1]


def test_samples_are_coarse_in_a_long_run_and_change_nothing_else() -> None:
    fine, by_second = record(a_cluster(), 1, updates=50)
    coarse, by_minute = record(a_cluster(), 1, updates=50, sample_s=60.0)
    assert are_equal(fine, coarse)

    # 24 clients at a time, about half a minute each: a million updates take weeks
    _, by_length = record(a_cluster(), 1, updates=10**6, hours=1.1)
    times = [report.tasks[0].series.time_s for report in (by_second, by_minute, by_length)]
    assert [found[1] - found[0] for found in times] == [1.0, 60.0, 4.0]
    assert 10_000 < least_s(a_cluster(), 10_000) < 20_000
    assert least_s(a_cluster(), 10**6) == pytest.approx(100 * least_s(a_cluster(), 10_000))


def test_a_trace_is_of_one_task() -> None:
    config = a_cluster()
    two = (config.tasks[0], structs.replace(config.tasks[0], task="other"))
    with pytest.raises(InvariantError, match="of one task, not of 2"):
        record(structs.replace(config, tasks=two), 1, hours=0.01)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    trace, _ = record(a_cluster(), 1, updates=15)
    path = tmp_path / "a trace"
    trace.save(path)
    assert are_equal(Trace.load(path), trace)
    assert path.stat().st_size < 200 * int(trace.first[-1]) + 10_000


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_file_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, at: float, bit: int, cut: bool
) -> None:
    """Zip keeps checksums of its content; what is flipped beside it may not matter."""
    path = tmp_path_factory.mktemp("damaged") / "trace"
    whole = a_trace(4, 3)
    whole.save(path)
    data = bytearray(path.read_bytes())
    place = int(at * len(data))
    if cut:
        del data[place:]
    else:
        data[place] ^= 1 << bit
    path.write_bytes(data)
    if cut:
        with pytest.raises(OperatorError, match="cannot read trace"):
            Trace.load(path)
        return
    with suppress(OperatorError):
        assert are_equal(Trace.load(path), whole)


def test_a_file_of_another_kind_or_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for content in (b"", b"hello", b"\x93NUMPY\x01\x00"):
        path.write_bytes(content)
        with pytest.raises(OperatorError, match="cannot read trace"):
            Trace.load(path)
    with pytest.raises(OperatorError, match="cannot read trace") as caught:
        Trace.load(tmp_path / "nothing")
    assert caught.value.hint == "run the command that records it"  # not: delete it
    np.savez(path.with_suffix(".npz"), about=np.zeros(3))
    with pytest.raises(OperatorError, match="cannot read trace"):
        Trace.load(path.with_suffix(".npz"))
    a_trace(2, 2).save(path)
    with np.load(path) as file:
        columns = dict(file)
    later = columns["about"].tobytes().replace(b'"format":1', b'"format":2')
    columns["about"] = np.frombuffer(later, np.uint8)
    np.savez(path.with_suffix(".npz"), **columns)
    with pytest.raises(OperatorError, match="has format 2"):
        Trace.load(path.with_suffix(".npz"))
