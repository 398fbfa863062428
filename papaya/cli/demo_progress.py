"""What `papaya demo` sees while it runs, and how it shows it: live, or as lines in a log.

Active clients and trips are the aggregator's own counts, read from its metrics; versions, staleness
and perplexity are rows of the task's history. Warm-up, the time until the first version, is left
out of utilization.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TextIO

from papaya.cli.admin_client import AdminClient
from papaya.cli.watch import Show, curve, mean_staleness
from papaya.errors import PapayaError
from papaya.messages.storage import PointRow
from papaya.net.admin.views import TaskDetail

_METRICS_BYTES = 4 << 20
_LINE_EVERY_S = 10.0
_BAR = 52
_SHOWN = 32


class Sample(NamedTuple):
    """`seconds` since the task was submitted."""

    seconds: float
    active: int
    trips: int
    version: int


class Recorder(Show):
    """Keeps what is seen at each look; raises when the run takes longer than it may."""

    def __init__(self, client: AdminClient, show: View, patience_s: float) -> None:
        self.samples: list[Sample] = []
        self._client = client
        self._show = show
        self._deadline = time.monotonic() + patience_s

    def update(self, detail: TaskDetail) -> None:
        task = detail.task
        if time.monotonic() > self._deadline:
            raise PapayaError(
                f"{task.task} is {task.state} at version {task.version} and did not end in time",
                hint="is this machine very busy? try again with --minutes 3",
            )
        if task.state == "running":
            text = self._client.download("/metrics", _METRICS_BYTES)[0].decode()
            active = reading(text, "papaya_task_active_clients", task.task)
            trips = reading(text, "papaya_task_trips_total", task.task)
            seconds = time.time() - task.submitted
            self.samples.append(Sample(seconds, active, trips, task.version))
        self._show.update(self.samples, detail)


def reading(metrics: str, name: str, task: str) -> int:
    """One series of one task; 0 when the aggregator does not hold it, or has not counted yet."""
    found = re.search(rf'^{name}\{{task="{re.escape(task)}"\}} (\S+)$', metrics, re.MULTILINE)
    return int(float(found[1])) if found else 0


def after_warm_up(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.version > 0]


def utilization(samples: list[Sample], concurrency: int) -> float:
    """Mean share of the slots that were active, after warm-up."""
    warm = after_warm_up(samples)
    return sum(sample.active for sample in warm) / concurrency / max(1, len(warm))


def versions_per_minute(points: list[PointRow]) -> float:
    """Between the first version that clients made and the last."""
    made = [point for point in points if point.members]
    if len(made) < 2:
        return 0.0
    return 60 * (len(made) - 1) / (made[-1].created - made[0].created)


class View(AbstractContextManager["View"]):
    """Where progress goes."""

    def update(self, samples: list[Sample], detail: TaskDetail) -> None:
        raise NotImplementedError

    def __exit__(self, *exception: Any) -> None:
        return None


def view_for(budget: Callable[[TaskDetail], float], stream: TextIO | None = None) -> View:
    """`budget` says which part of the run is over."""
    stream = sys.stderr if stream is None else stream
    return LiveView(budget, stream) if stream.isatty() else LineView(stream)


class LineView(View):
    """A line for each evaluation, and now and then one in between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: float | None = None
        self._next_s = 0.0

    def update(self, samples: list[Sample], detail: TaskDetail) -> None:
        seconds = time.time() - detail.task.submitted
        if detail.task.perplexity == self._last and seconds < self._next_s:
            return
        self._last, self._next_s = detail.task.perplexity, seconds + _LINE_EVERY_S
        line = ", ".join(f"{name} {value}" for name, value in _numbers(samples, detail).items())
        print(f"{seconds:4.0f} s  {line}", file=self._stream, flush=True)


class LiveView(View):
    """A few lines that are redrawn, and gone at the end: the summary says it all again."""

    def __init__(self, budget: Callable[[TaskDetail], float], stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._budget = budget
        self._live = Live(console=Console(file=stream), auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._live.__exit__(*exception)

    def update(self, samples: list[Sample], detail: TaskDetail) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        done = self._budget(detail)
        state = "training" if done < 1 else "evaluating the last version"
        bar, numbers = Table.grid(), Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=1.0, completed=min(1.0, done), width=_BAR))
        curves = _curves(samples, detail)
        for name, value in _numbers(samples, detail).items():
            numbers.add_row(f"[dim]{name}[/]", f"[bold]{value}[/]", f"[cyan]{curves.get(name, '')}")
        head = f"[bold]{detail.task.regime}[/], {state}"
        self._live.update(Group(head, bar, numbers), refresh=True)


def _numbers(samples: list[Sample], detail: TaskDetail) -> dict[str, str]:
    task, points = detail.task, list(detail.points)
    found = {"version": f"{task.version}"}
    if task.perplexity is not None:
        found["perplexity"] = f"{task.perplexity:,.0f}"
    if after_warm_up(samples):
        found["utilization"] = f"{100 * utilization(samples, task.concurrency):.0f} %"
        found["mean staleness"] = f"{mean_staleness(points):.1f}"
        found["versions per minute"] = f"{versions_per_minute(points):.0f}"
    return found


def _curves(samples: list[Sample], detail: TaskDetail) -> dict[str, str]:
    losses = [point.loss for point in detail.points if point.loss is not None]
    active = [float(sample.active) for sample in after_warm_up(samples)[-_SHOWN:]]
    scale = [0.0, float(detail.task.concurrency)]
    return {
        "perplexity": curve(losses) if len(losses) > 1 else "",
        "utilization": curve(scale + active)[len(scale) :],
    }
