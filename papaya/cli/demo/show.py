"""What `papaya demo` measures and shows: progress, a summary for people and as JSON, a plot.

Active clients, trips and updates are the aggregator's counts, read from its metrics; versions,
staleness and perplexity come from the task's history. Utilization leaves out the warm-up, which is
the time until the first version. Progress is printed at least every three seconds, live on a
terminal and as lines elsewhere.

Under secure aggregation (paper, "Asynchronous Secure Aggregation") the server holds masked sums
until the TSA unmasks a complete one. The demo reads the smallest masked sum from the server's disk,
often that of a single client, and measures whether its bytes are uniformly distributed. This proves
nothing: the TSA of the demo runs in software, whose evidence is INSECURE.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeAlias

import numpy as np
from msgspec import Struct

from papaya.aggregator.masked_sum import MaskedSum
from papaya.cli.admin_client import AdminClient
from papaya.cli.output import note, plural
from papaya.cli.task.watch import Show, curve, mean_staleness, versions_per_minute
from papaya.errors import PapayaError
from papaya.messages.storage import PointRow
from papaya.progress import told_regularly
from papaya.secagg.words import Words
from papaya.server.admin.views import TaskDetail

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SOFTWARE = (
    "INSECURE: the TSA runs in software on this machine, and its evidence proves nothing. "
    "This only shows how it works."
)
_INK, _FAINT, _MODEL, _CLIENTS = "#222222", "#dddddd", "#e4572e", "#2e6f95"
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": _INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
_METRICS_BYTES = 4 << 20
_LINE_EVERY_S = 2.0  # the task is polled every half second
_STILL_EVERY_S = 2.5
_SLOW_START_S = 10.0  # above this, the result says how long the first version took
_BAR = 52
_SHOWN = 32


@contextmanager
def telling(what: str, every_s: float = _STILL_EVERY_S) -> Iterator[None]:
    """Say what is being done, and from time to time how long it has taken so far."""
    note(what)
    with told_regularly(lambda seconds: note(f"  {seconds:.0f} s so far"), every_s, every_s):
        yield


class DemoSample(NamedTuple):
    """`seconds` since the task was submitted; `updates` counted towards the next version."""

    seconds: float
    active: int
    trips: int
    updates: int
    version: int


Budget: TypeAlias = Callable[[list[DemoSample], TaskDetail], float]
"""Returns the share of the run that is done."""


class DemoRecorder(Show):
    """Records a sample at each poll; raises if the first version takes longer than `patience_s`,
    or all others together do.
    """

    def __init__(
        self,
        client: AdminClient,
        show: View,
        patience_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.samples: list[DemoSample] = []
        self._client = client
        self._show = show
        self._patience_s = patience_s
        self._now = now
        self._deadline = now() + patience_s

    def update(self, detail: TaskDetail) -> None:
        task = detail.task
        if self._now() > self._deadline:
            raise PapayaError(
                f"{task.task} is {task.state} at version {task.version} and did not end in time",
                hint="this machine may be too busy; try: papaya demo --minutes 3",
            )
        if task.state == "running":
            text = self._client.download("/metrics", _METRICS_BYTES)[0].decode()
            active = reading(text, "papaya_task_active_clients", task.task)
            trips = reading(text, "papaya_task_trips_total", task.task)
            updates = reading(text, "papaya_task_buffer_updates", task.task)
            seconds = time.time() - task.submitted
            if task.version > 0 and not after_warm_up(self.samples):
                self._deadline = self._now() + self._patience_s
            self.samples.append(DemoSample(seconds, active, trips, updates, task.version))
        self._show.update(self.samples, detail)


def reading(metrics: str, name: str, task: str) -> int:
    """The value of one metric of one task; 0 if the aggregator does not have it yet."""
    found = re.search(rf'^{name}\{{task="{re.escape(task)}"\}} (\S+)$', metrics, re.MULTILINE)
    return int(float(found[1])) if found else 0


def after_warm_up(samples: list[DemoSample]) -> list[DemoSample]:
    return [sample for sample in samples if sample.version > 0]


def utilization(samples: list[DemoSample], concurrency: int) -> float:
    """The mean share of slots that were active, after the warm-up."""
    warm = after_warm_up(samples)
    return sum(sample.active for sample in warm) / concurrency / max(1, len(warm))


def made_by_clients(points: Sequence[PointRow]) -> list[PointRow]:
    return [point for point in points if point.members]


def happening(samples: list[DemoSample], detail: TaskDetail) -> str:
    """What the task is doing, in a few words."""
    task = detail.task
    if task.state != "running":
        return "evaluating the last version"
    if not samples or not (samples[-1].active or after_warm_up(samples)):
        imports = detail.config.requirements.engine == "torch"
        return "devices are starting" + (" (each process imports PyTorch)" if imports else "")
    last = samples[-1]
    updates = f"{last.updates} of {task.aggregation_goal} updates for the next version"
    return f"{plural(last.active, 'device')} active, {updates}"


class View(AbstractContextManager["View"]):
    """Shows progress."""

    def update(self, samples: list[DemoSample], detail: TaskDetail) -> None:
        raise NotImplementedError

    def __exit__(self, *exception: Any) -> None:
        return None


def view_for(budget: Budget, stream: TextIO | None = None) -> View:
    stream = sys.stderr if stream is None else stream
    return LiveView(budget, stream) if stream.isatty() else LineView(stream)


class LineView(View):
    """Prints a line with all numbers for each evaluation, and a short one every two seconds.

    Its seconds count from its own start, like those of `telling`.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._start = now()
        self._last: int | None = None
        self._next_s = 0.0

    def __enter__(self) -> LineView:
        print("training", file=self._stream, flush=True)
        return self

    def update(self, samples: list[DemoSample], detail: TaskDetail) -> None:
        seconds = self._now() - self._start
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
    """Redraws a few lines in place and removes them at the end, before the summary."""

    def __init__(self, budget: Budget, stream: TextIO) -> None:
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

        done = self._budget(samples, detail)
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


class MaskedSample(Struct, frozen=True):
    """The smallest masked sum that was seen: its clients, its size and its entropy."""

    clients: int
    size_bytes: int
    bits_per_byte: float


class Onlooker:
    """Reads masked sums of one task from the server's data folder while it trains."""

    def __init__(self, blobs: Path, task: str) -> None:
        self._folder = blobs / task
        self._smallest: tuple[int, bytes] | None = None

    def look(self) -> None:
        for clients, path in self._sums():
            if self._smallest is None or clients < self._smallest[0]:
                try:
                    self._smallest = clients, path.read_bytes()
                except OSError:
                    continue  # it became a version, and its file was deleted

    def _sums(self) -> Iterator[tuple[int, Path]]:
        for path in self._folder.glob("*/sum-*"):
            _, _, clients, _ = path.name.split("-")
            yield int(clients), path

    def sample(self, words: int) -> MaskedSample | None:
        """None if no sum was seen."""
        if self._smallest is None:
            return None
        clients, data = self._smallest
        masked = MaskedSum.decode(data, words).vector
        return MaskedSample(clients, masked.nbytes, bits_per_byte(masked))


def bits_per_byte(words: Words) -> float:
    """The Shannon entropy of the bytes: 8 if all byte values are equally likely, as masked."""
    counts = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


class Summary(Struct, frozen=True, kw_only=True):
    """The result of a demo, which is also its JSON output."""

    engine: str
    regime: str
    devices: int
    concurrency: int
    aggregation_goal: int
    start_s: float  # from the submission to the first version
    seconds: float  # from the first version to the end
    version: int
    versions_per_minute: float
    perplexity: dict[int, float]  # of each evaluated version
    evaluation_clients: int
    trips: int  # complete uploads, whether they were counted or not
    counted: int
    utilization: float  # share of the slots, after the warm-up
    looks: int  # number of samples in `utilization`
    mean_staleness: float
    threshold: int | None  # fewest clients in a sum that the server saw; None: every update
    masked_sample: MaskedSample | None
    model: str
    plot: str
    metrics: str

    @property
    def title(self) -> str:
        return (
            f"{self.regime}, {self.devices} devices, {self.concurrency} at a time, "
            f"K = {self.aggregation_goal}"
        )

    @property
    def has_learned(self) -> bool:
        found = list(self.perplexity.values())
        return len(found) > 1 and found[-1] < found[0]


def perplexities(submitted: float, points: Sequence[PointRow]) -> list[tuple[float, int, float]]:
    """Seconds, version and perplexity of each evaluated version."""
    return [
        (max(0.0, point.created - submitted), point.version, point.perplexity)
        for point in points
        if point.perplexity is not None
    ]


def summarize(
    detail: TaskDetail,
    points: list[PointRow],
    samples: list[DemoSample],
    devices: int,
    files: tuple[Path, Path, Path],
    masked_sample: MaskedSample | None,
) -> Summary:
    task, plan = detail.task, detail.config.evaluation
    made = made_by_clients(points)
    first = made[0].created if made else task.ended
    counted = sum(point.members for point in made)
    model, plot, metrics = map(str, files)
    return Summary(
        engine=detail.config.requirements.engine or "",
        regime=task.regime,
        devices=devices,
        concurrency=task.concurrency,
        aggregation_goal=task.aggregation_goal,
        start_s=first - task.submitted,
        seconds=task.ended - first,
        version=task.version,
        versions_per_minute=versions_per_minute(made, over_s=0.0) or 0.0,
        perplexity={version: found for _, version, found in perplexities(task.submitted, points)},
        evaluation_clients=0 if plan is None else plan.clients,
        # The last sample may be older than the last version.
        trips=max([counted, *(sample.trips for sample in samples)]),
        counted=counted,
        utilization=utilization(samples, task.concurrency),
        looks=len(after_warm_up(samples)),
        mean_staleness=mean_staleness(made),
        threshold=detail.config.threshold,
        masked_sample=masked_sample,
        model=model,
        plot=plot,
        metrics=metrics,
    )


def text_of(summary: Summary) -> str:
    found = list(summary.perplexity.values())
    fall = (
        f"{found[0]:,.0f} → {found[-1]:,.0f}  {curve([*map(math.log, found)])}"
        if found
        else "never evaluated"
    )
    clients = f"(noisy: each value is from {summary.evaluation_clients} devices)"
    model = shlex.quote(summary.model)
    command = sys.argv[0] if Path(sys.argv[0]).name == "papaya" else "papaya"
    sync = " --sync" if summary.regime == "SyncFL" else ""
    clear = " --clear" if summary.threshold is None else ""
    torch = " --engine torch" if summary.engine == "torch" else ""
    lines = {
        "perplexity": f"{fall}  {clients}",
        "versions": f"{summary.version}{_rate(summary.versions_per_minute)}",
        "trips": f"{summary.trips:,} uploads, {summary.counted:,} of them counted",
        "utilization": f"{100 * summary.utilization:.0f} % of the slots, after the first version",
        "staleness": f"{summary.mean_staleness:.1f} versions, mean",
        "": "",
        "model": f"{model}, version {summary.version}",
        "plot": f"{shlex.quote(summary.plot)}; all versions: {shlex.quote(summary.metrics)}",
        "load it": f"safetensors.torch.load_file({summary.model!r})",
        "continue": f"{shlex.quote(command)} demo{torch}{sync}{clear} --checkpoint {model}",
    }
    head = f"{summary.title}: {summary.seconds:.0f} s of training{_start(summary)}"
    told = [f"  {name:12} {words}".rstrip() for name, words in lines.items()]
    warning = [] if summary.threshold is None else ["", SOFTWARE]
    return "\n".join([head, *told, *warning, f"The server saw {seen_by_server(summary)}"])


def _start(summary: Summary) -> str:
    """How long a slow start took, which is not part of the time of training."""
    if summary.start_s <= _SLOW_START_S:
        return ""
    return f", after {summary.start_s:.0f} s to the first version"


def _rate(versions_per_minute: float) -> str:
    """Nothing if there were too few versions for a rate."""
    digits = 0 if versions_per_minute >= 10 else 1
    return f", {versions_per_minute:.{digits}f} per minute" if versions_per_minute else ""


def seen_by_server(summary: Summary) -> str:
    """What the server could see, from its counters and its disk, in one line."""
    if summary.threshold is None:
        return f"{summary.trips:,} single updates in the clear."
    sample, noise = summary.masked_sample, ""
    if sample is not None:
        what = "one of them" if sample.clients == 1 else f"a sum of {sample.clients}"
        noise = (
            f" (entropy of {what}, read from the server's disk: {sample.bits_per_byte:.3f} "
            "of 8 bits per byte)"
        )
    return (
        f"{summary.trips:,} masked updates, which look like random bytes{noise}, "
        f"and {plural(summary.version, 'sum')} of {summary.threshold} or more updates."
    )


def draw(
    path: Path,
    title: str,
    curve: Sequence[tuple[float, int, float]],
    samples: Sequence[DemoSample],
    concurrency: int,
    utilization: float,
    evaluation_clients: int,
) -> None:
    """Plot perplexity and active clients over time.

    `curve`: seconds, version and perplexity of each evaluation. The lower panel corresponds to the
    paper's figure on client utilization.
    """
    import matplotlib as mpl  # here: it takes a second to import
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 6), layout="constrained", facecolor="white")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
        _draw_perplexity(upper, curve, evaluation_clients)
        _draw_active(lower, samples, concurrency)
        lower.set_title(f"Active clients: {100 * utilization:.0f} % of the slots")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        figure.savefig(path, dpi=150)


def _draw_perplexity(axes: Axes, curve: Sequence[tuple[float, int, float]], clients: int) -> None:
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    title = f"Perplexity on held-out examples (noisy: each point is from {clients} devices)"
    _prepare(axes, title, "perplexity")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", which="minor", color=_FAINT, lw=0.4)
    seconds, perplexities = [point[0] for point in curve], [point[2] for point in curve]
    axes.plot(seconds, perplexities, color=_MODEL, lw=1.8, marker="o", ms=4.5, clip_on=False)
    axes.set_yticks([50, 100, 200, 500, 1000, 2000])
    axes.set_ylim(min([80.0, *perplexities]) * 0.8, max([2000.0, *perplexities]) * 1.3)
    for place, (at, version, perplexity) in enumerate(curve):
        if place in (0, len(curve) - 1):
            axes.annotate(
                f"{perplexity:,.0f} at version {version}",
                (at, perplexity),
                xytext=(8, 6) if place == 0 else (0, -14),
                textcoords="offset points",
                ha="left" if place == 0 else "right",
                color=_INK,
            )


def _draw_active(axes: Axes, samples: Sequence[DemoSample], concurrency: int) -> None:
    from matplotlib.ticker import MaxNLocator

    _prepare(axes, "", "active clients")
    axes.set_xlabel("seconds since the task was submitted")
    seconds, active = [s.seconds for s in samples], [s.active for s in samples]
    axes.plot(seconds, active, color=_CLIENTS, lw=1.5)
    axes.fill_between(seconds, active, color=_CLIENTS, alpha=0.12, lw=0)
    axes.axhline(concurrency, color=_INK, lw=0.8, ls=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"C = {concurrency}",
        (1, concurrency),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
    )
    axes.set_ylim(0, 1.2 * concurrency)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _prepare(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(label)
    axes.grid(axis="y", color=_FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
