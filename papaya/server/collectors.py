"""What the metrics say: the machines read at scrape time, and the names that the driver counts by.

    papaya_task_…          a task at its holder (paper: demand, utilization, staleness, versions)
    papaya_selector_…      held check-ins, answers
    papaya_coordinator_…   who leads, who is heard, leases
    papaya_http_… papaya_upload_… papaya_worker_… papaya_store_…   the driver's own

Counters of a task start again at 0 when it moves to another holder, as Prometheus expects of a
process that starts anew. It only reads, on the loop's thread, where the machines live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.held_task import HeldTask
from papaya.aggregator.phase import TaskPhase
from papaya.coordinator.coordinator import Coordinator
from papaya.messages.participation import AbortReason, DiscardReason
from papaya.messages.storage import Outcome
from papaya.selector.selector import Selector
from papaya.server.metrics import (
    Collector,
    Family,
    LabelValues,
    MetricKind,
    MetricSample,
    Registry,
    histogram_of,
)
from papaya.server.workers import Workers

STALENESS = (0, 1, 2, 5, 10, 20, 50, 100)

Now = Callable[[], float]

_TASK_GAUGES = {
    "demand": "Client demand as reported to the coordinator.",
    "active_clients": "Clients that participate now.",
    "concurrency": "Max concurrency C.",
    "utilization_ratio": "Active clients by max concurrency.",
    "version": "The newest server model.",
    "aggregation_goal": "Aggregation goal K.",
    "buffer_updates": "Updates folded into the next version so far.",
    "serving": "1 while the task serves clients, 0 while it loads or is halted.",
}
_REASONED = {
    "discarded": (
        "updates_discarded",
        "Complete uploads that were not counted.",
        get_args(DiscardReason),
    ),
    "aborted": ("sessions_aborted", "Sessions that the server ended.", get_args(AbortReason)),
}


_WORK = {
    "updates": "Complete uploads looked at.",
    "refused": "Of those, refused: wrong size, not finite, over norm.",
    "folded_bytes": "Bytes of updates added to sums.",
    "snapshots": "Sums made durable.",
    "steps": "Steps of server optimizers.",
    "written_bytes": "Bytes of blobs written.",
    "storage_errors": "Writes of blobs that failed and were tried again.",
    "lost": "Work that was lost because a blob was missing or by a bug.",
}


class DriverMetrics:
    """What no machine knows. A route is a template: `/v1/uploads/{upload}/chunks/{index}`."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        counter, gauge, histogram = registry.counter, registry.gauge, registry.histogram
        self.requests = counter(
            "papaya_http_requests_total", "Requests answered.", "listener", "route", "status"
        )
        self.request_seconds = histogram(
            "papaya_http_request_seconds",
            "From the head of a request to its answer.",
            "listener",
            "route",
        )
        self.connections = gauge("papaya_http_open_connections", "Open connections.", "listener")
        self.check_ins = counter("papaya_selector_check_ins_total", "Check-ins received.")
        self.answers = counter(
            "papaya_selector_answers_total", "Answers to devices, by message.", "answer"
        )
        self.upload_bytes = counter(
            "papaya_upload_bytes_total", "Bytes of chunks, taken in or passed on.", "way"
        )
        self.free_buffers = gauge(
            "papaya_upload_free_buffers", "Pooled buffers that no chunk occupies."
        )
        self.queue = gauge("papaya_worker_queue_length", "Complete uploads that wait for a thread.")
        self.work_seconds = histogram(
            "papaya_worker_seconds", "Heavy work: fold, snapshot, step, restore.", "work"
        )
        self.lost_messages = gauge(
            "papaya_peer_lost_messages", "Messages to other servers that did not arrive."
        )
        self.commits = counter("papaya_store_commits_total", "Transactions, by outcome.", "outcome")
        self.commit_seconds = histogram(
            "papaya_store_commit_seconds", "From asking for a transaction to its outcome."
        )

    def observe_commit(self, seconds: float, outcome: Outcome) -> None:
        self.commits.add(1, outcome)
        self.commit_seconds.observe(seconds)


def workers_collector(workers: Workers) -> Collector:
    def collect() -> Iterator[Family]:
        families = _Families()
        for name, help_ in _WORK.items():
            value = getattr(workers.counters, name)
            families.add(f"papaya_worker_{name}_total", "counter", help_, (), value)
        return iter(families)

    return collect


def aggregator_collector(aggregator: Aggregator, now: Now) -> Collector:
    def collect() -> Iterator[Family]:
        families = _Families()
        for held in aggregator.tasks.values():
            _read_task(families, held, now())
        return iter(families)

    return collect


def _read_task(families: _Families, held: HeldTask, now: float) -> None:
    labels = (("task", held.task),)
    active = len(held.sessions.active)
    gauges: dict[str, float] = {
        "serving": held.phase is TaskPhase.SERVING,
        "active_clients": active,
        "demand": held.demand(now),
    }
    if held.phase is TaskPhase.SERVING:  # before its rows were read a task has no pipeline
        config = held.pipeline.config
        gauges |= {
            "concurrency": config.concurrency,
            "utilization_ratio": active / config.concurrency,
            "version": held.ledger.version,
            "aggregation_goal": config.aggregation_goal,
            "buffer_updates": len(held.pipeline.current.folded),
        }
    for name, value in gauges.items():
        families.add(f"papaya_task_{name}", "gauge", _TASK_GAUGES[name], labels, value)
    for kind, (name, help_, reasons) in _REASONED.items():
        for reason in reasons:  # from the start, so that a first one is a rise
            times = held.counters[f"{kind}_{reason}"]
            reasoned = (*labels, ("reason", reason))
            families.add(f"papaya_task_{name}_total", "counter", help_, reasoned, times)
    for counter, times in held.counters.items():
        if not counter.startswith(tuple(f"{kind}_" for kind in _REASONED)):
            help_ = f"How often at this holder: {counter}."
            families.add(f"papaya_task_{counter}_total", "counter", help_, labels, times)
    families.extend(
        "papaya_task_staleness_versions",
        "histogram",
        "Staleness of counted updates.",
        histogram_of(labels, STALENESS, held.staleness),
    )


def selector_collector(selector: Selector) -> Collector:
    def collect() -> Iterator[Family]:
        families = _Families()
        families.add(
            "papaya_selector_held_check_ins",
            "gauge",
            "Devices that wait for a task.",
            (),
            selector.held_count,
        )
        return iter(families)

    return collect


def coordinator_collector(coordinator: Coordinator, now: Now) -> Collector:
    def collect() -> Iterator[Family]:
        at, families = now(), _Families()
        leadership, fleet = coordinator.leadership, coordinator.fleet

        def gauge(name: str, help_: str, value: float, labels: LabelValues = ()) -> None:
            families.add(f"papaya_coordinator_{name}", "gauge", help_, labels, value)

        leads = leadership.leads(at)
        gauge("leader", "1 on the candidate that leads.", leads)
        gauge("epoch", "The epoch that it leads in, 0 when it does not.", leadership.epoch)
        gauge("recovering", "1 in a leader's recovery period.", leads and leadership.recovers(at))
        gauge("aggregators", "Aggregators heard lately.", len(fleet.live_aggregators(at)))
        gauge("selectors", "Selectors heard lately.", len(fleet.selectors))
        gauge("tasks", "Tasks that are not over.", len(coordinator.tasks))
        for task in coordinator.tasks:
            labels = (("task", task),)
            leases = coordinator.leases.count(task)
            gauge("leases", "Clients assigned, not yet confirmed.", leases, labels)
            gauge("demand", "Client demand less leases.", coordinator.demand(task), labels)
        return iter(families)

    return collect


class _Families:
    """Samples by name, in the order in which the names came."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[MetricKind, str, list[MetricSample]]] = {}

    def add(
        self, name: str, kind: MetricKind, help_: str, labels: LabelValues, value: float
    ) -> None:
        self.extend(name, kind, help_, iter((MetricSample(labels, value),)))

    def extend(
        self, name: str, kind: MetricKind, help_: str, samples: Iterator[MetricSample]
    ) -> None:
        self._found.setdefault(name, (kind, help_, []))[2].extend(samples)

    def __iter__(self) -> Iterator[Family]:
        for name, (kind, help_, samples) in self._found.items():
            yield Family(name, kind, help_, samples)
