"""What `papaya demo` sees while it runs, and how it shows it: live, or as lines in a log.

Active clients, trips and updates are the aggregator's own counts, read from its metrics; versions,
staleness and perplexity are rows of the task's history. Warm-up, the time until the first version,
is left out of utilization. Not three seconds pass without a word on what happens.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread
from typing import Any, NamedTuple, TextIO

from papaya.cli.admin_client import AdminClient
from papaya.cli.output import note, plural
from papaya.cli.task.watch import Show, curve, mean_staleness, versions_per_minute
from papaya.errors import PapayaError
from papaya.messages.storage import PointRow
from papaya.server.admin.views import TaskDetail

_METRICS_BYTES = 4 << 20
_LINE_EVERY_S = 2.0  # and looks are half a second apart
_STILL_EVERY_S = 2.5
_BAR = 52
_SHOWN = 32


@contextmanager
def telling(what: str, every_s: float = _STILL_EVERY_S) -> Iterator[None]:
    """Around something that takes a while: says what it is, and now and then that it goes on."""
    over, started = Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(every_s):
            note(f"  {time.monotonic() - started:.0f} s so far")

    note(what)
    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class DemoSample(NamedTuple):
    """`seconds` since the task was submitted; `updates` that wait to become the next version."""

    seconds: float
    active: int
    trips: int
    updates: int
    version: int


class Recorder(Show):
    """Keeps what is seen at each look; raises when the run takes longer than it may."""

    def __init__(self, client: AdminClient, show: View, patience_s: float) -> None:
        self.samples: list[DemoSample] = []
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
            updates = reading(text, "papaya_task_buffer_updates", task.task)
            seconds = time.time() - task.submitted
            self.samples.append(DemoSample(seconds, active, trips, updates, task.version))
        self._show.update(self.samples, detail)


def reading(metrics: str, name: str, task: str) -> int:
    """One series of one task; 0 when the aggregator does not hold it, or has not counted yet."""
    found = re.search(rf'^{name}\{{task="{re.escape(task)}"\}} (\S+)$', metrics, re.MULTILINE)
    return int(float(found[1])) if found else 0


def after_warm_up(samples: list[DemoSample]) -> list[DemoSample]:
    return [sample for sample in samples if sample.version > 0]


def utilization(samples: list[DemoSample], concurrency: int) -> float:
    """Mean share of the slots that were active, after warm-up."""
    warm = after_warm_up(samples)
    return sum(sample.active for sample in warm) / concurrency / max(1, len(warm))


def made_by_clients(points: Sequence[PointRow]) -> list[PointRow]:
    return [point for point in points if point.members]


def happening(samples: list[DemoSample], detail: TaskDetail) -> str:
    """In a few words."""
    task = detail.task
    if task.state != "running":
        return "the last version is evaluated"
    if not samples or not (samples[-1].active or after_warm_up(samples)):
        return "devices start: each process imports PyTorch"
    last = samples[-1]
    updates = f"{last.updates} of {task.aggregation_goal} updates for the next version"
    return f"{plural(last.active, 'device')} active, {updates}"


class View(AbstractContextManager["View"]):
    """Where progress goes."""

    def update(self, samples: list[DemoSample], detail: TaskDetail) -> None:
        raise NotImplementedError

    def __exit__(self, *exception: Any) -> None:
        return None


def view_for(budget: Callable[[TaskDetail], float], stream: TextIO | None = None) -> View:
    """`budget` says which part of the run is over."""
    stream = sys.stderr if stream is None else stream
    return LiveView(budget, stream) if stream.isatty() else LineView(stream)


class LineView(View):
    """A line with all numbers for each evaluation, and a short one every other second."""

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.time) -> None:
        self._stream = stream
        self._now = now
        self._last: int | None = None
        self._next_s = 0.0

    def update(self, samples: list[DemoSample], detail: TaskDetail) -> None:
        seconds = self._now() - detail.task.submitted
        is_new = detail.task.evaluated != self._last
        if not is_new and seconds < self._next_s:
            return
        self._last, self._next_s = detail.task.evaluated, seconds + _LINE_EVERY_S
        line = f"version {detail.task.version}: {happening(samples, detail)}"
        if is_new:
            parts = [f"{name} {value}" for name, value in _numbers(samples, detail).items()]
            line = ", ".join(parts)
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

    def update(self, samples: list[DemoSample], detail: TaskDetail) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        done = self._budget(detail)
        bar, numbers = Table.grid(), Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=1.0, completed=min(1.0, done), width=_BAR))
        curves = _curves(samples, detail)
        for name, value in _numbers(samples, detail).items():
            numbers.add_row(f"[dim]{name}[/]", f"[bold]{value}[/]", f"[cyan]{curves.get(name, '')}")
        head = f"[bold]{detail.task.regime}[/], {happening(samples, detail)}"
        self._live.update(Group(head, bar, numbers), refresh=True)


def _numbers(samples: list[DemoSample], detail: TaskDetail) -> dict[str, str]:
    task, points = detail.task, list(detail.points)
    found = {"version": f"{task.version}"}
    if task.perplexity is not None:
        found["perplexity"] = f"{task.perplexity:,.0f} at version {task.evaluated}"
    if after_warm_up(samples):
        found["utilization"] = f"{100 * utilization(samples, task.concurrency):.0f} %"
        found["mean staleness"] = f"{mean_staleness(points):.1f}"
    rate = versions_per_minute(made_by_clients(points))
    if rate is not None:
        found["versions per minute"] = f"{rate:.0f}"
    return found


def _curves(samples: list[DemoSample], detail: TaskDetail) -> dict[str, str]:
    losses = [point.loss for point in detail.points if point.loss is not None]
    active = [float(sample.active) for sample in after_warm_up(samples)[-_SHOWN:]]
    scale = [0.0, float(detail.task.concurrency)]
    return {
        "perplexity": curve(losses) if len(losses) > 1 else "",
        "utilization": curve(scale + active)[len(scale) :],
    }
