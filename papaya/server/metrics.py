"""Metrics in the Prometheus text format, version 0.0.4: counters, gauges and histograms.

Written here rather than taken from the client library: that is a registry for a whole process, with
multi-process files, its own HTTP server and default collectors, none of which is wanted, while the
format is a page. To count is a dictionary entry under a lock; all other work is done at the scrape.

Every series lives as long as the process, so labels take few values: the template of a route, never
a path; a task, never a session or a device.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Literal, NamedTuple, TypeVar

from papaya.errors import InvariantError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

MetricKind = Literal["counter", "gauge", "histogram"]
LabelValues = tuple[tuple[str, str], ...]

_NAME = re.compile(r"papaya_[a-z0-9_]*[a-z0-9]")
_LABEL = re.compile(r"[a-z][a-z0-9_]*")
_IN_LABEL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


class MetricSample(NamedTuple):
    """One line. `suffix` is what a histogram appends to its name."""

    labels: LabelValues
    value: float
    suffix: str = ""


class Family(NamedTuple):
    """All series of one name."""

    name: str
    kind: MetricKind
    help: str
    samples: Sequence[MetricSample]


Collector = Callable[[], Iterable[Family]]


class Metric:
    """One name with its labels. What is counted may be counted on any thread."""

    kind: MetricKind

    def __init__(self, name: str, help_: str, labels: tuple[str, ...]) -> None:
        is_counter = name.endswith("_total")
        if _NAME.fullmatch(name) is None or is_counter != (self.kind == "counter"):
            raise InvariantError(f"{name} is no name for a {self.kind}")
        if any(_LABEL.fullmatch(label) is None or label == "le" for label in labels):
            raise InvariantError(f"{name} cannot have the labels {labels}")
        self.name = name
        self._help = help_
        self._labels = labels
        self._lock = Lock()

    def family(self) -> Family:
        with self._lock:
            samples = tuple(self._samples())
        return Family(self.name, self.kind, self._help, samples)

    def _samples(self) -> Iterator[MetricSample]:
        raise NotImplementedError

    def _named(self, values: tuple[str, ...]) -> LabelValues:
        return tuple(zip(self._labels, values, strict=True))


M = TypeVar("M", bound=Metric)


class Counter(Metric):
    """Only grows."""

    kind: MetricKind = "counter"

    def __init__(self, name: str, help_: str, labels: tuple[str, ...]) -> None:
        super().__init__(name, help_, labels)
        # Without labels there is one series, and it is there from the start.
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, amount: float = 1, *labels: str) -> None:
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + amount

    def _samples(self) -> Iterator[MetricSample]:
        for values, value in self._values.items():
            yield MetricSample(self._named(values), value)


class Gauge(Counter):
    """Goes up and down, or is set."""

    kind: MetricKind = "gauge"

    def set(self, value: float, *labels: str) -> None:
        with self._lock:
            self._values[labels] = value


class Histogram(Metric):
    """Counts values by upper bound."""

    kind: MetricKind = "histogram"

    def __init__(
        self, name: str, help_: str, labels: tuple[str, ...], bounds: Sequence[float]
    ) -> None:
        super().__init__(name, help_, labels)
        self._bounds = tuple(bounds)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *labels: str) -> None:
        with self._lock:
            counts = self._counts.get(labels)
            if counts is None:
                counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
                self._sums[labels] = 0.0
            counts[bisect_left(self._bounds, value)] += 1
            self._sums[labels] += value

    def _samples(self) -> Iterator[MetricSample]:
        for values, counts in self._counts.items():
            yield from bucketed(self._named(values), self._bounds, counts, self._sums[values])


def bucketed(
    labels: LabelValues, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Iterator[MetricSample]:
    """The series of one histogram; `counts` has one more than `bounds`, for what is above all."""
    below = 0
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        below += count
        yield MetricSample((*labels, ("le", number(bound))), below, "_bucket")
    yield MetricSample(labels, total, "_sum")
    yield MetricSample(labels, below, "_count")


def histogram_of(
    labels: LabelValues, bounds: Sequence[float], values: Mapping[int, int]
) -> Iterator[MetricSample]:
    """The same from how often each value came."""
    counts = [0] * (len(bounds) + 1)
    for value, times in values.items():
        counts[bisect_left(bounds, value)] += times
    total = sum(value * times for value, times in values.items())
    yield from bucketed(labels, bounds, counts, total)


class Registry:
    """The metrics of one process. Refuses two of one name."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._collectors: list[Collector] = []

    def counter(self, name: str, help_: str, *labels: str) -> Counter:
        return self._add(Counter(name, help_, labels))

    def gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return self._add(Gauge(name, help_, labels))

    def histogram(
        self, name: str, help_: str, *labels: str, bounds: Sequence[float] = SECONDS
    ) -> Histogram:
        return self._add(Histogram(name, help_, labels, bounds))

    def collect(self, collector: Collector) -> None:
        """Called at every scrape, on the thread that scrapes."""
        self._collectors.append(collector)

    def text(self) -> str:
        families = [metric.family() for metric in self._metrics.values()]
        for collector in self._collectors:
            families += collector()
        return exposition(families)

    def _add(self, metric: M) -> M:
        if metric.name in self._metrics:
            raise InvariantError(f"two metrics are called {metric.name}")
        self._metrics[metric.name] = metric
        return metric


def exposition(families: Iterable[Family]) -> str:
    """The text that Prometheus reads. Families of one name are put together, as it demands."""
    merged: dict[str, Family] = {}
    for family in families:
        found = merged.get(family.name)
        samples = family.samples if found is None else (*found.samples, *family.samples)
        merged[family.name] = family._replace(samples=samples)
    lines: list[str] = []
    for name, kind, help_, samples in merged.values():
        if samples:
            lines.append(f"# HELP {name} {help_.translate(_IN_HELP)}")
            lines.append(f"# TYPE {name} {kind}")
            lines += [
                f"{name}{suffix}{_written(labels)} {number(value)}"
                for labels, value, suffix in samples
            ]
    return "\n".join(lines) + "\n"


def _written(labels: LabelValues) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{value.translate(_IN_LABEL)}"' for name, value in labels)
    return "{" + ",".join(pairs) + "}"


def number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
