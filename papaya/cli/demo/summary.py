"""What `papaya demo` tells at its end, for people and as JSON. All of it was measured."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from papaya.cli.demo.privacy import SOFTWARE, MaskedSample
from papaya.cli.demo.progress import DemoSample, made_by_clients, utilization
from papaya.cli.task.watch import curve, mean_staleness, versions_per_minute
from papaya.messages.storage import PointRow
from papaya.server.admin.views import TaskDetail


class Summary(Struct, frozen=True, kw_only=True):
    """`perplexity`: of each evaluation, by version. `trips`: complete uploads, counted or not.

    `threshold`: the fewest clients whose sum the server could see; None when it saw every update.
    """

    regime: str
    devices: int
    concurrency: int
    aggregation_goal: int
    seconds: float
    version: int
    versions_per_minute: float
    perplexity: dict[int, float]
    evaluation_clients: int
    trips: int
    counted: int
    utilization: float
    mean_staleness: float
    threshold: int | None
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
    """Seconds, version and perplexity of every version that was evaluated."""
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
    counted = sum(point.members for point in made)
    model, plot, metrics = map(str, files)
    return Summary(
        regime=task.regime,
        devices=devices,
        concurrency=task.concurrency,
        aggregation_goal=task.aggregation_goal,
        seconds=task.ended - task.submitted,
        version=task.version,
        versions_per_minute=versions_per_minute(made, over_s=0.0) or 0.0,
        perplexity={version: found for _, version, found in perplexities(task.submitted, points)},
        evaluation_clients=0 if plan is None else plan.clients,
        # The last look at the aggregator is up to a moment older than the last version.
        trips=max([counted, *(sample.trips for sample in samples)]),
        counted=counted,
        utilization=utilization(samples, task.concurrency),
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
    clients = f"(noisy: on {summary.evaluation_clients} of the devices each time)"
    model = shlex.quote(summary.model)
    command = sys.argv[0] if Path(sys.argv[0]).name == "papaya" else "papaya"
    sync = " --sync" if summary.regime == "SyncFL" else ""
    clear = " --clear" if summary.threshold is None else ""
    lines = {
        "perplexity": f"{fall}  {clients}",
        "versions": f"{summary.version}, {summary.versions_per_minute:.0f} per minute",
        "trips": f"{summary.trips:,} uploads, {summary.counted:,} of them in a version",
        "utilization": f"{100 * summary.utilization:.0f} % of the slots, after the first version",
        "staleness": f"{summary.mean_staleness:.1f} versions, mean",
        "": "",
        "model": f"{model}, version {summary.version}",
        "plot": f"{shlex.quote(summary.plot)}; all versions: {shlex.quote(summary.metrics)}",
        "load it": f"safetensors.torch.load_file({summary.model!r})",
        "go on": f"{shlex.quote(command)} demo{sync}{clear} --checkpoint {model}",
    }
    head = f"{summary.title}: {summary.seconds:.0f} s of training"
    told = [f"  {name:12} {words}".rstrip() for name, words in lines.items()]
    warning = [] if summary.threshold is None else ["", SOFTWARE]
    return "\n".join([head, *told, *warning, f"The server saw {seen_by_server(summary)}"])


def seen_by_server(summary: Summary) -> str:
    """In one line, from what was counted, and from what lay on its disk."""
    if summary.threshold is None:
        return f"{summary.trips:,} updates in the clear, each by itself."
    sample, noise = summary.masked_sample, ""
    if sample is not None:
        what = "one of them" if sample.clients == 1 else f"a sum of {sample.clients}"
        noise = f" ({what}, from its disk: {sample.bits_per_byte:.3f} of 8 bits a byte)"
    return (
        f"{summary.trips:,} masked updates, which are noise{noise}, and {summary.version} sums of "
        f"{summary.threshold} or more."
    )
