"""The report of a run against counts taken another way: other hooks, rows and libraries."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from scipy import stats

from papaya.aggregator.aggregator import Aggregator
from papaya.client.client import Stage
from papaya.client.work import Finish
from papaya.config import AsyncFL, SyncFL
from papaya.errors import ConfigError
from papaya.machine import Reply
from papaya.messages.participation import Completed, Heartbeat, Joined
from papaya.messages.selection import Capabilities
from papaya.messages.storage import Member, RecordRow, Row, Transaction, VersionRow
from papaya.sim.cluster import Cluster, ClusterConfig, DeviceKind
from papaya.sim.devices import Path as AnswerPath
from papaya.sim.hosts import SimulatedHost
from papaya.sim.observer import Observer
from papaya.sim.plots import draw, without_short_dips
from papaya.sim.population import PopulationConfig
from papaya.sim.report import RunReport, RunWatch, ks_statistic
from papaya.sim.simulate import Moment, protocol_tasks, simulate

ROOT = Path(__file__).parents[3]
POPULATION = PopulationConfig(size=100_000, latency_mean_s=10.0, dropout=0.1)
GOAL, CONCURRENCY = 7, 40


def a_cluster(regime: AsyncFL | SyncFL = AsyncFL(GOAL), tasks: int = 1) -> ClusterConfig:  # noqa: B008
    return ClusterConfig(
        tasks=protocol_tasks(tasks, regime=regime, concurrency=CONCURRENCY), population=POPULATION
    )


def watched(config: ClusterConfig, **options: float) -> RunWatch:
    watch = RunWatch(**options)
    Cluster(config, 3, observers=[watch])
    return watch


def _asks_by_heartbeat(reply: Reply) -> bool:
    """A heartbeat that arrives after the end of its session gets the same answer once more."""
    return isinstance(reply.to, AnswerPath) and isinstance(reply.to.request, Heartbeat)


class Recount(Observer):
    """Counts again through hooks and rows that the report does not use."""

    def __init__(self) -> None:
        self.answers: dict[str | None, int] = {}
        self.joined = 0
        self.members: dict[str, tuple[int, Member]] = {}
        self.active_s = self._last = 0.0
        self._active_before = 0

    def on_reply(self, host: SimulatedHost, reply: Reply) -> None:
        match reply.message:
            case Completed(discarded=discarded) if not _asks_by_heartbeat(reply):
                self.answers[discarded] = self.answers.get(discarded, 0) + 1
            case Joined():
                self.joined += 1

    def after_event(self, host: SimulatedHost) -> None:
        """The exact integral of active over time, instead of samples."""
        if isinstance(host.machine, Aggregator):
            now = self.cluster.engine.now
            self.active_s += self._active_before * (now - self._last)
            self._last = now
            self._active_before = sum(
                len(held.sessions.active) for held in host.machine.tasks.values()
            )

    def on_transaction(
        self, writer: object, transaction: Transaction, before: dict[str, Row]
    ) -> None:
        for _, row in transaction.put:
            if isinstance(row, RecordRow):
                self.members |= {member.session: (row.target, member) for member in row.members}

    @property
    def completing(self) -> int:
        """Devices that wait for the answer to a complete upload."""
        devices = self.cluster.devices.values()
        return sum(device.machine.stage is Stage.COMPLETING for device in devices)

    @property
    def newest(self) -> int:
        rows = self.cluster.state.rows.values()
        return max(row.version for row in rows if isinstance(row, VersionRow))


@pytest.mark.parametrize("regime", [AsyncFL(GOAL), SyncFL(0.3)])
def test_a_report_agrees_with_counts_taken_another_way(regime: AsyncFL | SyncFL) -> None:
    watch, recount = RunWatch(), Recount()
    cluster = Cluster(a_cluster(regime), 3, observers=[watch, recount])
    cluster.run(900)
    result = watch.report().tasks[0]
    goal = cluster.config.tasks[0].aggregation_goal

    assert result.versions == recount.newest > 5
    assert result.counted == goal * result.versions
    in_versions = [m for target, m in recount.members.values() if target <= result.versions]
    levels = np.bincount([member.staleness for member in in_versions])
    assert result.staleness == {i: n for i, n in enumerate(levels.tolist()) if n}
    assert result.max_staleness == len(levels) - 1
    assert result.mean_staleness == pytest.approx(
        sum(member.staleness for member in in_versions) / len(in_versions)
    )

    # An answer is counted when the device has it: some are on their way.
    assert 0 <= sum(recount.answers.values()) - result.trips <= recount.completing
    assert sum(result.discarded.values()) <= recount.answers.get("round_over", 0)
    at_work = sum(device.machine.joined is not None for device in cluster.devices.values())
    ended = (*result.aborted.values(), *result.failed.values(), result.dropped, result.trips)
    assert abs(recount.joined - at_work - sum(ended)) <= 3  # joins answered but not yet heard
    assert watch.watches[result.task].working == at_work

    exact = recount.active_s / 900 / CONCURRENCY
    assert result.utilization == pytest.approx(exact, abs=0.005)
    assert 0 < result.at_work < 1
    assert result.versions_per_hour == pytest.approx(4 * result.versions)


def test_who_joins_and_leaves_before_its_download_was_never_at_work() -> None:
    """A device whose own history forbids the task learns that when it has joined."""
    run = watched(a_cluster())
    cluster = run.cluster
    devices = cluster.devices.values()
    cluster.run(900, lambda: {device.machine.joined is None for device in devices} == {True, False})
    works = next(device for device in devices if device.machine.joined is not None)
    comes = next(device for device in devices if device.machine.joined is None)
    watch = run.watches[cluster.config.tasks[0].task]
    before = watch.working

    comes.machine.joined = works.machine.joined
    cluster.departed(comes, Finish("gave_up", "too often"))
    assert watch.working == before
    cluster.departed(works, Finish("gave_up", "no power"))
    assert watch.working == before - 1


def test_who_took_part_is_compared_with_all_who_could() -> None:
    """ "two-sample Kolmogorov-Smirnov test [...] to measure the goodness of fit between AsyncFL,
    SyncFL with over-selection, and the ground truth distribution": over-selection drops the slow.
    """
    asynchronous, over_selected, full = (
        simulate(
            ClusterConfig(tasks=protocol_tasks(regime=regime, concurrency=130)), seed=1, hours=0.6
        ).tasks[0]
        for regime in (AsyncFL(), SyncFL(0.3), SyncFL(0.0))
    )
    assert asynchronous.execution_s.ks < 0.04
    assert over_selected.execution_s.ks > 0.07
    assert over_selected.examples.ks > 0.07
    assert over_selected.execution_s.counted[95] < over_selected.execution_s.everyone[95]
    assert full.examples.ks < over_selected.examples.ks
    assert over_selected.aborted["round_over"] > 0.15 * over_selected.trips
    assert over_selected.max_staleness == full.max_staleness == 0 < asynchronous.max_staleness


@given(
    sample=st.lists(st.integers(-5, 5), min_size=1, max_size=30),
    reference=st.lists(st.floats(-6, 6), min_size=1, max_size=30),
)
def test_the_statistic_is_scipys(sample: list[int], reference: list[float]) -> None:
    ours = ks_statistic(np.array(sample, np.float64), np.array(reference))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the p-value, which is not compared
        theirs = stats.ks_2samp(sample, reference, method="asymp").statistic
    assert ours == pytest.approx(theirs)


def test_the_window_begins_after_the_warm_up() -> None:
    config = a_cluster()
    whole, late = watched(config), watched(config, warm_up_s=300)
    whole.cluster.run(900)
    late.cluster.run(300)
    before = late.report().tasks[0]
    assert (before.counted, before.trips, before.dropped) == (0, 0, 0)
    assert math.isnan(before.utilization)
    late.cluster.run(900)
    everything, window = whole.report().tasks[0], late.report().tasks[0]
    early = sum(time_s < 300 for time_s in everything.series.time_s)
    assert window.series == everything.series
    assert window.versions == everything.versions - everything.series.version[early - 1]
    active = everything.series.active[early:]
    assert window.utilization == pytest.approx(sum(active) / len(active) / CONCURRENCY)
    assert window.lowest_active == min(active) > everything.lowest_active
    assert everything.lowest_active == min(everything.series.active)


def test_samples_do_not_depend_on_how_a_run_is_cut() -> None:
    once, often = watched(a_cluster()), watched(a_cluster())
    once.cluster.run(200)
    for step in range(1, 100):
        often.cluster.run(1.97 * step)
    often.cluster.run(200)
    assert once.report().tasks[0].series.time_s == tuple(i + 0.5 for i in range(200))
    assert once.report().tasks == often.report().tasks


def test_watching_does_not_change_a_run() -> None:
    plain, seen = Cluster(a_cluster(), 3), watched(a_cluster()).cluster
    plain.run(300)
    seen.run(300)
    assert seen.engine.events == plain.engine.events
    assert seen.state.rows == plain.state.rows


def test_a_stopped_run_takes_no_samples_of_the_future() -> None:
    watch = watched(a_cluster())
    watch.cluster.run(900, stop=lambda: watch.cluster.engine.now > 100)
    assert 100 < watch.report().until_s < 101
    assert watch.report().tasks[0].series.time_s[-1] < 101


def test_the_same_run_gives_the_same_report_in_another_process() -> None:
    program = (
        "import sys, msgspec; from papaya.sim.cluster import ClusterConfig; "
        "from papaya.sim.simulate import simulate; "
        "config = msgspec.json.decode(sys.stdin.buffer.read(), type=ClusterConfig); "
        "sys.stdout.buffer.write(msgspec.json.encode(simulate(config, 7, 0.1)))"
    )
    config = a_cluster(tasks=2)
    there = [
        subprocess.run(
            [sys.executable, "-c", program],
            input=msgspec.json.encode(config),
            capture_output=True,
            check=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    ]
    here = msgspec.json.encode(simulate(config, 7, 0.1))
    assert {hashlib.sha256(report).hexdigest() for report in (*there, here)} == {
        hashlib.sha256(here).hexdigest()
    }
    assert msgspec.json.encode(simulate(config, 8, 0.1)) != here


def test_a_report_survives_json() -> None:
    report = simulate(a_cluster(SyncFL(0.3), tasks=2), 3, 0.1)
    assert msgspec.json.decode(msgspec.json.encode(report), type=RunReport) == report


def test_the_summary_names_what_the_paper_names() -> None:
    report = simulate(a_cluster(SyncFL(0.3)), 3, 0.2)
    result, summary = report.tasks[0], report.summary()
    assert "task-1: SyncFL, 30 % over-selection, C = 40, K = 31" in summary
    assert f"{100 * result.utilization:.1f} %" in summary
    assert f"round_over {result.aborted['round_over']:,}" in summary
    assert f"{result.trips:,}" in summary


def test_progress_is_told_until_the_end() -> None:
    seen: list[Moment] = []
    simulate(a_cluster(), 3, 0.1, progress=seen.append)
    assert len(seen) >= 100
    assert [moment.now_s for moment in seen] == sorted(moment.now_s for moment in seen)
    assert seen[-1].now_s == seen[-1].until_s == 360
    assert seen[-1].active > 30
    assert seen[-1].versions > 5


@pytest.mark.parametrize("hours", [0, -1, math.nan, math.inf, 10_001])
def test_an_impossible_duration_is_refused(hours: float) -> None:
    with pytest.raises(ConfigError, match="hours"):
        simulate(a_cluster(), 3, hours)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tasks", ()),
        ("tasks", list(protocol_tasks())),
        ("tasks", protocol_tasks() * 2),
        *(
            (role, count)
            for role in ("coordinators", "selectors", "aggregators")
            for count in (0, 1001)
        ),
        *(("supply", supply) for supply in (0.0, -1.0, 1001.0, math.nan, math.inf)),
        ("kinds", ()),
        ("kinds", (DeviceKind(0.5, Capabilities()),)),
        ("kinds", (DeviceKind(1.5, Capabilities()), DeviceKind(-0.5, Capabilities()))),
        ("kinds", (DeviceKind(math.nan, Capabilities()),)),
    ],
)
def test_an_impossible_cluster_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field} = ") as refused:
        msgspec.structs.replace(a_cluster(), **{field: value})
    assert refused.value.hint


def test_more_clients_than_devices_are_refused() -> None:
    few = PopulationConfig(size=CONCURRENCY - 1)
    with pytest.raises(ConfigError, match=f"concurrency = {CONCURRENCY}: is more than 39, the"):
        msgspec.structs.replace(a_cluster(), population=few)


def test_shares_may_be_rounded() -> None:
    kinds = tuple(DeviceKind(0.1, Capabilities()) for _ in range(10))
    assert msgspec.structs.replace(a_cluster(), kinds=kinds).kinds == kinds


def test_what_a_short_run_cannot_tell_is_not_told() -> None:
    short = watched(a_cluster(), warm_up_s=300)
    short.cluster.run(300)
    summary = short.report().summary()
    assert "nan" not in summary
    assert "utilization     –, at work –" in summary
    assert "shorter than its warm-up" in summary
    assert "sampling bias   –" in summary
    long = simulate(a_cluster(), 3, 0.2)
    assert "sampling bias   K-S " in long.summary()
    assert "–" not in long.summary()


def test_a_warm_up_without_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="warm_up_s"):
        simulate(a_cluster(), 3, 0.1, warm_up_s=360)


# -- the picture ------------------------------------------------------------------------------


def test_a_plot_is_a_picture_of_every_report(tmp_path: Path) -> None:
    regimes = (AsyncFL(GOAL), SyncFL(0.3), SyncFL(0.0))
    reports = {str(each): simulate(a_cluster(each), 3, 0.1) for each in regimes}
    path = draw(reports, tmp_path / "new" / "plot.png", "A title")
    pixels = imread(path)
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 800
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50


def test_a_vector_plot_has_text_and_the_same_bytes_again(tmp_path: Path) -> None:
    reports = {"one": simulate(a_cluster(tasks=2), 3, 0.1)}
    first = draw(reports, tmp_path / "1.svg").read_bytes()
    assert draw(reports, tmp_path / "2.svg").read_bytes() == first
    assert ElementTree.fromstring(first).tag.endswith("svg")


def test_a_plot_without_one_stale_update_says_so(tmp_path: Path) -> None:
    report = simulate(a_cluster(SyncFL(0.3)), 3, 0.1)
    assert imread(draw({"SyncFL": report}, tmp_path / "plot.png")).any()


@pytest.mark.parametrize(
    ("samples", "drawn"),
    [
        ([9, 0, 9, 0, 0, 8, 7], [9, 9, 9, 8, 8, 8, 7]),
        ([9, 0, 0, 0, 9], [9, 0, 0, 0, 9]),
        ([0, 0, 5, 0, 0, 0], [0, 0, 5, 0, 0, 0]),
        ([4, 1], [4, 1]),
        ([], []),
    ],
)
def test_only_short_dips_are_left_out(samples: list[int], drawn: list[int]) -> None:
    assert without_short_dips(samples).tolist() == drawn


def test_an_unknown_format_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.txt"):
        draw({}, tmp_path / "plot.txt")
