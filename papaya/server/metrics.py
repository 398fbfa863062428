"""Metrics of one process, for Prometheus: what the driver counts, and collectors of the machines.

    papaya_task_…          a task at its holder (paper: demand, utilization, staleness, versions)
    papaya_selector_…      held check-ins, answers
    papaya_coordinator_…   leadership, live servers, leases
    papaya_http_… papaya_upload_… papaya_worker_… papaya_peer_… papaya_store_…   the driver
    papaya_tsa_…           whether the TSA answers
    papaya_task_loss, papaya_task_metric   the newest evaluation, at coordinators
    papaya_task_metric_noise               the standard deviation of its noise
    papaya_build_info, process_…   this process

Collectors read the machines at scrape time, on the loop's thread, where the machines live. The
counters of a task start at 0 again when it moves to another holder, like those of a process that
restarts.

A series lives as long as the process, so labels have few values: the template of a route, never a
path; a task, never a session or a device.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from papaya import __version__
from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.held_task import HeldTask, TaskPhase
from papaya.coordinator.coordinator import Coordinator
from papaya.http.passthrough import Passthrough
from papaya.messages.participation import AbortReason, DiscardReason, LeaveReason
from papaya.messages.reasons import in_words
from papaya.messages.storage import Outcome
from papaya.selector.selector import Selector
from papaya.server.admin.evaluations import metrics_of
from papaya.server.admin.history import TaskHistory
from papaya.server.certificates import Certificates
from papaya.server.tsa_fleet import TsaFleet
from papaya.server.workers import Workers

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STALENESS = (0, 1, 2, 5, 10, 20, 50, 100)

Now = Callable[[], float]

_TASK_GAUGES = {
    "demand": "Client demand as reported to the coordinator.",
    "active_clients": "Clients that participate now.",
    "concurrency": "Max concurrency C.",
    "utilization_ratio": "Active clients divided by max concurrency.",
    "version": "The newest server model.",
    "aggregation_goal": "Aggregation goal K.",
    "buffer_updates": "Updates folded into the next version so far.",
    "serving": "1 while the task serves clients, 0 while it loads or is halted.",
}
_REASONED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "discarded": (
        "updates_discarded",
        "Complete uploads that were not counted.",
        get_args(DiscardReason),
    ),
    "aborted": ("sessions_aborted", "Sessions that the server ended.", get_args(AbortReason)),
    "left": ("sessions_left", "Sessions that the device gave up.", get_args(LeaveReason)),
}
_WORK = {
    "updates": "Complete uploads checked.",
    "refused": "Complete uploads refused: wrong size, not finite, over norm.",
    "folded_bytes": "Bytes of updates added to sums.",
    "snapshots": "Sums made durable.",
    "steps": "Steps of server optimizers.",
    "written_bytes": "Bytes of blobs written.",
    "storage_errors": "Failed reads, writes and deletions of blobs.",
    "lost": "Work lost because of a missing blob or a bug.",
}


class SecondsHistogram(Histogram):
    """A histogram that writes a whole bound as `le="1"`; the library writes `le="1.0"`.

    Existing queries and dashboards use the former.
    """

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            for sample in family.samples:
                if "le" in sample.labels:
                    sample.labels["le"] = sample.labels["le"].removesuffix(".0")
            yield family


class DriverMetrics:
    """What the driver counts itself. `registry` is this process's own, not the library's global.

    A route is a template: `/v1/uploads/{upload}/chunks/{index}`.
    """

    def __init__(self) -> None:
        # Without this, every counter and histogram has a second series `…_created`.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        seconds = partial(SecondsHistogram, registry=self.registry, buckets=SECONDS)
        self.requests = counter(
            "papaya_http_requests", "Requests answered.", ("listener", "route", "status")
        )
        self.request_seconds = seconds(
            "papaya_http_request_seconds",
            "From the head of a request to its answer.",
            ("listener", "route"),
        )
        self.connections = gauge("papaya_http_open_connections", "Open connections.", ("listener",))
        self.check_ins = counter("papaya_selector_check_ins", "Check-ins received.")
        self.answers = counter(
            "papaya_selector_answers", "Answers to devices, by message.", ("answer",)
        )
        self.upload_bytes = counter(
            "papaya_upload_bytes", "Bytes of chunks, taken in or passed on.", ("way",)
        )
        self.free_buffers = gauge("papaya_upload_free_buffers", "Pooled buffers that are free.")
        self.queue = gauge("papaya_worker_queue_length", "Complete uploads that wait for a thread.")
        self.work_seconds = seconds(
            "papaya_worker_seconds", "Heavy work: fold, snapshot, step, restore.", ("work",)
        )
        self.lost_messages = gauge(
            "papaya_peer_lost_messages", "Messages to other servers that did not arrive."
        )
        self.commits = counter("papaya_store_commits", "Transactions, by outcome.", ("outcome",))
        self.commit_seconds = seconds(
            "papaya_store_commit_seconds", "From asking for a transaction to its outcome."
        )
        self._of_requests: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def text(self) -> bytes:
        """All series, in the Prometheus text format 0.0.4."""
        return generate_latest(self.registry)

    def observe_request(self, listener: str, route: str, status: int, seconds: float) -> None:
        # Keeping the series saves looking them up by their labels for every request.
        found = self._of_requests.get((listener, route, status))
        if found is None:
            found = self._of_requests[listener, route, status] = (
                self.requests.labels(listener, route, str(status)),
                self.request_seconds.labels(listener, route),
            )
        found[0].inc()
        found[1].observe(seconds)

    def observe_work(self, seconds: float, work: str) -> None:
        self.work_seconds.labels(work).observe(seconds)

    def observe_commit(self, seconds: float, outcome: Outcome) -> None:
        self.commits.labels(outcome).inc()
        self.commit_seconds.observe(seconds)


class WorkersCollector(Collector):
    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        for name, help_ in _WORK.items():
            value = getattr(self._workers.counters, name)
            yield CounterMetricFamily(f"papaya_worker_{name}", help_, value)


class PassthroughCollector(Collector):
    def __init__(self, passthrough: Passthrough) -> None:
        self._passthrough = passthrough

    def collect(self) -> Iterator[Metric]:
        name = "papaya_passthrough_connections"
        help_ = "TLS connections that ask for an aggregator, by outcome."
        family = CounterMetricFamily(name, help_, labels=("outcome",))
        family.add_metric(("passed",), self._passthrough.passed)
        family.add_metric(("unreachable",), self._passthrough.unreachable)
        yield family


class BuildCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        labels = {"version": __version__, "python": platform.python_version()}
        family = GaugeMetricFamily("papaya_build_info", "Always 1.", labels=tuple(labels))
        family.add_metric(tuple(labels.values()), 1.0)
        yield family


def watch_process(registry: CollectorRegistry) -> None:
    """Add the version, and CPU time, memory, open files and start of this process."""
    registry.register(BuildCollector())
    ProcessCollector(registry=registry)


class EvaluationCollector(Collector):
    """The newest result of each task, from the history that the supervisor keeps up to date."""

    def __init__(self, history: TaskHistory) -> None:
        self._history = history

    def collect(self) -> Iterator[Metric]:
        loss = GaugeMetricFamily(
            "papaya_task_loss", "Mean loss in the newest evaluation.", labels=("task",)
        )
        evaluated = GaugeMetricFamily(
            "papaya_task_evaluated_version", "Version in the newest evaluation.", labels=("task",)
        )
        metric = GaugeMetricFamily(
            "papaya_task_metric",
            "Mean of a metric of the task in the newest evaluation.",
            labels=("task", "metric"),
        )
        noise = GaugeMetricFamily(
            "papaya_task_metric_noise",
            "Standard deviation of the noise in a metric of the newest evaluation, or in the loss.",
            labels=("task", "metric"),
        )
        for task, point in self._history.newest_evaluated().items():
            assert point.loss is not None
            for name, value in point.deviations.items():
                noise.add_metric((task, name), value)
            loss.add_metric((task,), point.loss)
            evaluated.add_metric((task,), point.version)
            for name, value in metrics_of(point).items():
                metric.add_metric((task, name), value)
        yield from (loss, evaluated, metric, noise)


class TsaCollector(Collector):
    def __init__(self, tsas: TsaFleet) -> None:
        self._tsas = tsas

    def collect(self) -> Iterator[Metric]:
        breakers = [link.breaker for link in self._tsas.links]
        help_ = "Seconds since a TSA stopped answering, the longest of several; 0 while all answer."
        longest_s = max(breaker.open_s for breaker in breakers)
        yield GaugeMetricFamily("papaya_tsa_unreachable_seconds", help_, longest_s)
        help_ = "How often a TSA became unreachable."
        outages = sum(breaker.outages for breaker in breakers)
        yield CounterMetricFamily("papaya_tsa_outages", help_, outages)


class CertificateCollector(Collector):
    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates

    def collect(self) -> Iterator[Metric]:
        help_ = "Unix time at which a certificate in use expires, by its setting."
        name = "papaya_certificate_expiry_timestamp_seconds"
        family = GaugeMetricFamily(name, help_, labels=("certificate",))
        for setting, at in self._certificates.expiry.items():
            family.add_metric((setting,), at)
        yield family


class SelectorCollector(Collector):
    def __init__(self, selector: Selector) -> None:
        self._selector = selector

    def collect(self) -> Iterator[Metric]:
        help_ = "Devices that wait for a task."
        held = len(self._selector.held)
        yield GaugeMetricFamily("papaya_selector_held_check_ins", help_, held)


class CoordinatorCollector(Collector):
    def __init__(self, coordinator: Coordinator, now: Now) -> None:
        self._coordinator = coordinator
        self._now = now

    def collect(self) -> Iterator[Metric]:
        at, coordinator = self._now(), self._coordinator
        leadership, fleet = coordinator.leadership, coordinator.fleet
        leads = leadership.leads(at)
        for name, help_, value in (
            ("leader", "1 on the candidate that leads.", leads),
            ("epoch", "The epoch that it leads in, 0 if it does not lead.", leadership.epoch),
            (
                "recovering",
                "1 on a new leader while it waits for the aggregator of some task to report.",
                leads and coordinator.recovers(at),
            ),
            ("aggregators", "Aggregators that reported lately.", len(fleet.live_aggregators(at))),
            ("selectors", "Selectors that reported lately.", len(fleet.selectors)),
            ("tasks", "Tasks that are not over.", len(coordinator.rows.tasks)),
        ):
            yield GaugeMetricFamily(f"papaya_coordinator_{name}", help_, value)
        families = _TaskFamilies()
        for task, row in coordinator.rows.tasks.items():
            leases = coordinator.leases.count(task)
            families.gauge(
                "papaya_coordinator_leases", "Clients assigned, not yet confirmed.", task, leases
            )
            families.gauge(
                "papaya_coordinator_demand",
                "Client demand less leases.",
                task,
                coordinator.demand.of(task),
            )
            if row.lease_until:
                help_ = "Seconds until a signed task's lease ends; then no device starts it."
                families.gauge("papaya_task_lease_seconds", help_, task, row.lease_until - at)
        yield from families.by_name.values()


class AggregatorCollector(Collector):
    def __init__(self, aggregator: Aggregator, now: Now) -> None:
        self._aggregator = aggregator
        self._now = now

    def collect(self) -> Iterator[Metric]:
        families = _TaskFamilies()
        for held in self._aggregator.tasks.values():
            _read_task(families, held, self._now())
        yield from families.by_name.values()


def _read_task(families: _TaskFamilies, held: HeldTask, now: float) -> None:
    task, active = held.task, len(held.sessions.active)
    gauges: dict[str, float] = {
        "serving": held.phase is TaskPhase.SERVING,
        "active_clients": active,
        "demand": held.demand(now),
    }
    if held.phase is TaskPhase.SERVING:  # a task has no pipeline until its rows are read
        config = held.pipeline.config
        gauges |= {
            "concurrency": config.concurrency,
            "utilization_ratio": active / config.concurrency,
            "version": held.ledger.version,
            "aggregation_goal": config.aggregation_goal,
            "buffer_updates": len(held.pipeline.current.folded),
        }
    for name, value in gauges.items():
        families.gauge(f"papaya_task_{name}", _TASK_GAUGES[name], task, value)
    for kind, (name, what, reasons) in _REASONED.items():
        words = (f"{reason}: {in_words(f'{kind}_{reason}')}" for reason in reasons)
        help_ = f"{what} {'; '.join(words)}."
        for reason in reasons:  # also those at 0, so that the first one is seen as an increase
            times = held.counters[f"{kind}_{reason}"]
            families.counter(f"papaya_task_{name}", help_, task, times, reason)
    for counter, times in held.counters.items():
        if not counter.startswith(tuple(f"{kind}_" for kind in _REASONED)):
            help_ = f"Times at this holder: {counter}."
            families.counter(f"papaya_task_{counter}", help_, task, times)
    families.staleness(task, held.endings.staleness)


class _TaskFamilies:
    """Series of tasks by name: the format wants all series of a name together."""

    def __init__(self) -> None:
        self.by_name: dict[str, Metric] = {}

    def gauge(self, name: str, help_: str, task: str, value: float) -> None:
        family = self.by_name.setdefault(name, GaugeMetricFamily(name, help_, labels=("task",)))
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric((task,), value)

    def counter(self, name: str, help_: str, task: str, value: float, *reason: str) -> None:
        labels = ("task", "reason")[: 1 + len(reason)]
        family = self.by_name.setdefault(name, CounterMetricFamily(name, help_, labels=labels))
        assert isinstance(family, CounterMetricFamily)
        family.add_metric((task, *reason), value)

    def staleness(self, task: str, counted: Mapping[int, int]) -> None:
        name, help_ = "papaya_task_staleness_versions", "Staleness of counted updates."
        family = self.by_name.setdefault(name, HistogramMetricFamily(name, help_, labels=("task",)))
        assert isinstance(family, HistogramMetricFamily)
        total = sum(value * times for value, times in counted.items())
        family.add_metric((task,), buckets(STALENESS, counted), total)


def buckets(bounds: Sequence[int], counted: Mapping[int, int]) -> list[tuple[str, float]]:
    """Cumulative counts by bound, from how often each value occurred."""
    counts = [0] * (len(bounds) + 1)
    for value, times in counted.items():
        counts[bisect_left(bounds, value)] += times
    names = (*map(str, bounds), "+Inf")
    return [(name, float(sum(counts[: i + 1]))) for i, name in enumerate(names)]
