"""What a simulated run was like: utilization, staleness, trips, server updates, who took part.

Paper, figure "AsyncFL achieves high client utilization while SyncFL client utilization fluctuates",
and section "Sampling bias" (the Kolmogorov-Smirnov statistic of those who took part).

Everything is seen from outside: committed transactions, departing devices, and samples of the
aggregator that holds a task. No machine counts anything for a report, and watching a run does not
change it. Counts and means are of the window after the warm-up; series are of the whole run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from papaya.aggregator.aggregator import Aggregator
from papaya.client.work import Finish
from papaya.config import SyncFL, TaskConfig
from papaya.messages.base import TaskId
from papaya.messages.storage import (
    ConsumedRow,
    FenceRow,
    Row,
    Transaction,
    VersionRow,
    fence_key,
)
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.devices import SimulatedDevice
from papaya.sim.draws import Floats
from papaya.sim.observer import Observer
from papaya.sim.population import Population, Visit
from papaya.sim.storage import Writer

_REFERENCE_VISITS = 1 << 16
_MIN_TRIPS_FOR_KS = 30


class Series(Struct, frozen=True):
    """Sampled at equal distances from the start of the run, warm-up included."""

    time_s: tuple[float, ...]
    active: tuple[int, ...]
    at_work: tuple[int, ...]
    version: tuple[int, ...]


class Compared(Struct, frozen=True):
    """Percentiles 0..100 of those who were counted and of all who could be, and their distance.

    `ks` is the Kolmogorov-Smirnov statistic. "All" are the devices of the population that neither
    drop out nor exceed the task's timeout: no regime can count the others.
    """

    ks: float
    counted: tuple[float, ...]
    everyone: tuple[float, ...]


class TaskResult(Struct, frozen=True, kw_only=True):
    """One task in the window.

    utilization   active as the aggregator counts ÷ C
    at_work       devices that really work for the task ÷ C, whether the aggregator knows or not
    trips         complete uploads that were answered, counted or discarded
    counted       updates that a committed server model holds
    dropped       devices that joined and vanished without a word
    failed        devices that joined and gave up, by reason
    """

    task: TaskId
    utilization: float
    at_work: float
    lowest_active: int
    versions: int
    versions_per_hour: float
    counted: int
    trips: int
    discarded: dict[str, int]
    aborted: dict[str, int]
    failed: dict[str, int]
    dropped: int
    staleness: dict[int, int]
    mean_staleness: float
    max_staleness: int
    execution_s: Compared
    examples: Compared
    series: Series


class RunReport(Struct, frozen=True, kw_only=True):
    """A function of (configuration, seed, window): the same in any process."""

    configuration: ClusterConfig
    seed: int
    from_s: float
    until_s: float
    events: int
    tasks: tuple[TaskResult, ...]

    def config_of(self, task: TaskId) -> TaskConfig:
        return next(config for config in self.configuration.tasks if config.task == task)

    @property
    def window(self) -> str:
        """What was measured, in words."""
        minutes = f"minutes {self.from_s / 60:g} to {self.until_s / 60:g} of virtual time"
        heading = f"{minutes}, seed {self.seed}"
        if any(math.isnan(task.utilization) for task in self.tasks):
            heading += (
                "\nthe run is shorter than its warm-up, or than a second: nothing was sampled"
            )
        return heading

    def summary(self) -> str:
        """For people; the fields are for programs."""
        described = (_describe(self.config_of(t.task), t) for t in self.tasks)
        return "\n\n".join([self.window, *described])


class TaskWatch:
    """What was seen of one task since the window began."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self.version = 0
        self.versions = 0
        self.counted = 0
        self.staleness: dict[int, int] = {}
        self.endings: dict[tuple[str, str], int] = {}
        self.working = 0  # devices, now
        self.execution_s = array("d")
        self.examples = array("d")
        self.time_s = array("d")
        self.active = array("q")
        self.at_work = array("q")
        self.version_at = array("q")

    def departed(self, visit: Visit, finish: Finish | None) -> None:
        key = ("dropped", "") if finish is None else (finish.ending, finish.reason)
        self.endings[key] = self.endings.get(key, 0) + 1
        if key[0] == "counted":
            self.execution_s.append(visit.execution_s)
            self.examples.append(visit.examples)

    def consumed(self, row: ConsumedRow) -> None:
        self.versions += 1
        self.counted += len(row.members)
        for member in row.members:
            self.staleness[member.staleness] = self.staleness.get(member.staleness, 0) + 1

    def sample(self, now: float, active: int) -> None:
        self.time_s.append(now)
        self.active.append(active)
        self.at_work.append(self.working)
        self.version_at.append(self.version)

    def by_reason(self, *endings: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for (ending, reason), count in sorted(self.endings.items()):
            if ending in endings:
                found[reason] = found.get(reason, 0) + count
        return found


class RunWatch(Observer):
    """Watches all tasks of a run and takes samples. `warm_up_s` is where the window begins."""

    def __init__(self, *, warm_up_s: float = 0.0, sample_s: float = 1.0) -> None:
        self.watches: dict[TaskId, TaskWatch] = {}
        self.warm_up_s = warm_up_s
        self._sample_s = sample_s
        self._samples = 0

    def attach(self, cluster: Cluster) -> None:
        super().attach(cluster)
        self._engine = cluster.engine
        self.watches = {task.task: TaskWatch(task) for task in cluster.config.tasks}

    def active(self, task: TaskId) -> int:
        """Clients that the task's holder, as its fence names it, counts as active."""
        fence = self.cluster.state.rows.get(fence_key(task))
        host = self.cluster.hosts.get(fence.aggregator) if isinstance(fence, FenceRow) else None
        if host is None or not host.is_alive or not isinstance(host.machine, Aggregator):
            return 0
        held = host.machine.tasks.get(task)
        return 0 if held is None else len(held.sessions.active)

    def on_assigned(self, device: SimulatedDevice) -> None:
        assert device.machine.joined is not None
        self.watches[device.machine.joined.task].working += 1

    def on_departed(self, device: SimulatedDevice, finish: Finish | None) -> None:
        joined = device.machine.joined
        if joined is None:
            return
        watch = self.watches[joined.task]
        if device.assigned_s is not None:
            watch.working -= 1
        if self._engine.now >= self.warm_up_s:
            watch.departed(device.visit, finish)

    def on_transaction(
        self, writer: Writer, transaction: Transaction, before: dict[str, Row]
    ) -> None:
        for key, row in transaction.put:
            if isinstance(row, VersionRow) and key not in before:
                self.watches[key.split("/")[1]].version = row.version
            elif isinstance(row, ConsumedRow) and self._engine.now >= self.warm_up_s:
                self.watches[key.split("/")[1]].consumed(row)

    def next_sample_s(self) -> float:
        """Half an interval off the multiples, where heartbeats are sent."""
        return (self._samples + 0.5) * self._sample_s

    def sample(self, now: float) -> None:
        self._samples += 1
        for task, watch in self.watches.items():
            watch.sample(now, self.active(task))

    def report(self) -> RunReport:
        return RunReport(
            configuration=self.cluster.config,
            seed=self.cluster.seed,
            from_s=min(self.warm_up_s, self._engine.now),
            until_s=self._engine.now,
            events=self._engine.events,
            tasks=tuple(self._result(watch) for watch in self.watches.values()),
        )

    def _result(self, watch: TaskWatch) -> TaskResult:
        config = watch.config
        is_in_window = np.array(watch.time_s) >= self.warm_up_s
        active = np.array(watch.active)[is_in_window]
        hours = max(0.0, self._engine.now - self.warm_up_s) / 3600
        endings, staleness = watch.endings, watch.staleness
        stale_sum = sum(value * count for value, count in staleness.items())
        discarded = watch.by_reason("discarded")
        reference = everyone(self.cluster.population, config.training_timeout_s)
        return TaskResult(
            task=config.task,
            utilization=_mean(active) / config.concurrency,
            at_work=_mean(np.array(watch.at_work)[is_in_window]) / config.concurrency,
            lowest_active=int(active.min()) if len(active) else 0,
            versions=watch.versions,
            versions_per_hour=watch.versions / hours if hours else 0.0,
            counted=watch.counted,
            trips=endings.get(("counted", ""), 0) + sum(discarded.values()),
            discarded=discarded,
            aborted=watch.by_reason("aborted"),
            failed=watch.by_reason("failed", "gave_up", "refused"),
            dropped=endings.get(("dropped", ""), 0),
            staleness=dict(sorted(staleness.items())),
            mean_staleness=stale_sum / watch.counted if watch.counted else 0.0,
            max_staleness=max(staleness, default=0),
            execution_s=_compare(watch.execution_s, reference[0]),
            examples=_compare(watch.examples, reference[1]),
            series=Series(
                tuple(watch.time_s),
                tuple(watch.active),
                tuple(watch.at_work),
                tuple(watch.version_at),
            ),
        )


def ks_statistic(sample: Floats, reference: Floats) -> float:
    """The largest distance between two empirical distribution functions."""
    sample, reference = np.sort(sample), np.sort(reference)
    points = np.concatenate([sample, reference])
    below = np.searchsorted(sample, points, side="right") / len(sample)
    expected = np.searchsorted(reference, points, side="right") / len(reference)
    return float(np.abs(below - expected).max())


def everyone(population: Population, timeout_s: float, first: int = 0) -> tuple[Floats, Floats]:
    """Execution times and example counts of devices as they come, as far as any can finish."""
    block = population.visitors(np.arange(first, first + _REFERENCE_VISITS))
    finishes = np.isnan(block.drops_at) & (block.latency_s + block.execution_s < timeout_s)
    return block.execution_s[finishes], block.examples[finishes].astype(np.float64)


def _compare(counted: Iterable[float], everyone: Floats) -> Compared:
    sample = np.fromiter(counted, np.float64)
    if not len(sample) or not len(everyone):
        return Compared(0.0, (), ())
    levels = np.arange(101)
    return Compared(
        ks_statistic(sample, everyone),
        tuple(np.percentile(sample, levels).tolist()),
        tuple(np.percentile(everyone, levels).tolist()),
    )


def _mean(values: npt.NDArray[np.int64]) -> float:
    return int(values.sum()) / len(values) if len(values) else math.nan


def regime_name(config: TaskConfig) -> str:
    """As the paper calls it."""
    if isinstance(config.regime, SyncFL):
        share = config.regime.over_selection
        return f"SyncFL, {100 * share:g} % over-selection" if share else "SyncFL, no over-selection"
    return "AsyncFL"


def percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def _describe(config: TaskConfig, result: TaskResult) -> str:
    rows = [
        ("utilization", f"{percent(result.utilization)}, at work {percent(result.at_work)}"),
        ("server updates", f"{result.versions_per_hour:,.0f} per hour"),
        ("staleness", f"mean {result.mean_staleness:.1f}, at most {result.max_staleness}"),
        ("trips", f"{result.trips:,}{_reasons('discarded: ', result.discarded)}"),
        ("aborted", f"{sum(result.aborted.values()):,}{_reasons('', result.aborted)}"),
        ("failed", f"{sum(result.failed.values()):,}{_reasons('', result.failed)}"),
        ("dropped out", f"{result.dropped:,}"),
        ("sampling bias", _bias(result)),
    ]
    head = f"{config.task}: {regime_name(config)}, C = {config.concurrency}, "
    return "\n".join(
        [f"{head}K = {config.aggregation_goal}", *(f"  {name:<15} {text}" for name, text in rows)]
    )


def _bias(result: TaskResult) -> str:
    """Of a few trips the statistic is mostly chance."""
    if result.trips - sum(result.discarded.values()) < _MIN_TRIPS_FOR_KS:
        return f"– (fewer than {_MIN_TRIPS_FOR_KS} trips were counted)"
    by_time, by_examples = result.execution_s.ks, result.examples.ks
    return f"K-S {by_time:.3f} by execution time, {by_examples:.3f} by examples"


def _reasons(title: str, counts: dict[str, int]) -> str:
    if not counts:
        return ""
    listed = ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
    return f" ({title}{listed})"
