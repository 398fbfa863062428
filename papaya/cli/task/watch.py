"""`papaya task watch`: show the progress of a task, in a terminal or in a log.

On a terminal, one display is redrawn; elsewhere there is a line for each change. With --format json
each line is the whole view of the task. While a server restarts, the command waits for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from papaya.cli.admin_client import (
    AdminClient,
    OneTaskOptions,
    ServerUnreachable,
    add_connection,
    client_for,
    task_path,
)
from papaya.cli.output import Commands, bind, note, positive, print_data, print_json, printable
from papaya.config.metrics import PERPLEXITY
from papaya.errors import OperatorError
from papaya.messages.storage import PointRow
from papaya.server.admin.views import TaskDetail, TaskView

_PATIENCE_S = 60.0
_EVALUATION_STARTS_S = 15.0  # the last evaluation starts when an earlier one has ended
_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 40
_RATE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TaskWatchOptions(OneTaskOptions):
    until: Literal["completed", "evaluated"] = "evaluated"
    interval: float = 1.0


def add_to(actions: Commands) -> None:
    parser = actions.add_parser(
        "watch",
        help="show the progress of a task until it ends",
        description="Show the progress of a task until it ends. Exits with 1 if it was cancelled.",
    )
    parser.add_argument("task", metavar="TASK", help="name of the task")
    parser.add_argument(
        "--until",
        choices=("completed", "evaluated"),
        help="when to stop watching: when the task is completed, or when its last version is also "
        "evaluated, if the task has a plan for evaluations",
    )
    parser.add_argument(
        "--interval", type=positive, metavar="S", help="polling interval, in seconds"
    )
    add_connection(parser)
    bind(parser, TaskWatchOptions, run)


def run(options: TaskWatchOptions) -> int:
    client = client_for(options)
    client.get(task_path(options.task), TaskDetail)  # fail now if the name or the token is wrong
    show: Show
    if options.is_json:
        show = LineShow(print_json)
    elif sys.stdout.isatty():
        show = Display()
    else:
        show = LineShow(lambda detail: print_data(line(detail)))
    with show:
        detail = follow(client, options.task, options.until, options.interval, show)
    if detail.task.state == "cancelled":
        note(f"{options.task} was cancelled" + (f": {detail.task.why}" if detail.task.why else ""))
        return 1
    return 0


class Show(AbstractContextManager["Show"]):
    """Shows the views of a task that `follow` gets."""

    def update(self, detail: TaskDetail) -> None:
        raise NotImplementedError

    def __exit__(self, *exception: Any) -> None:
        return None


class LineShow(Show):
    """Prints a line for each change of version, state or loss."""

    def __init__(self, show: Callable[[TaskDetail], None]) -> None:
        self._show = show
        self._last: object = None

    def update(self, detail: TaskDetail) -> None:
        task = detail.task
        now = (task.version, task.state, task.loss, task.halted)
        if now != self._last:
            self._last = now
            self._show(detail)


class Display(Show):
    """A display that is redrawn in place, for a terminal."""

    def __init__(self) -> None:
        try:
            from rich.live import Live
        except ImportError as error:
            raise OperatorError(
                "the live display needs rich, which is not installed",
                hint="pip install rich (or pipe the output: papaya task watch TASK | cat)",
            ) from error
        self._live = Live(auto_refresh=False)

    def __enter__(self) -> Display:
        self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._live.__exit__(*exception)

    def update(self, detail: TaskDetail) -> None:
        from rich.text import Text

        self._live.update(Text(printable(picture(detail), keep="\n")), refresh=True)


def follow(
    client: AdminClient,
    task: str,
    until: str,
    interval_s: float,
    show: Show,
    sleep: Callable[[float], None] = time.sleep,
) -> TaskDetail:
    """Poll the task until it is over; returns the last view."""
    silent_s = over_s = 0.0
    while True:
        try:
            detail = client.get(task_path(task), TaskDetail)
            is_over = detail.task.state in ("completed", "cancelled")
            if is_over and until == "evaluated":
                over_s += interval_s
                is_over = _has_last_evaluation(client, detail, over_s)
        except ServerUnreachable as error:
            if silent_s >= _PATIENCE_S:
                raise
            if silent_s == 0.0:
                note(f"{error}; waiting for it to come back")
            silent_s += interval_s
        else:
            silent_s = 0.0
            show.update(detail)
            if is_over:
                return detail
        sleep(interval_s)


def _has_last_evaluation(client: AdminClient, detail: TaskDetail, over_s: float) -> bool:
    """Whether the last version is evaluated, or will not be."""
    task = detail.task
    if task.state != "completed" or detail.config.evaluation is None:
        return True
    if detail.points and detail.points[-1].evaluated:
        return True
    own = f"{task.task}@{task.version}"
    found = [v for v in client.get("/admin/tasks", tuple[TaskView, ...]) if v.evaluates == own]
    if any(view.state == "running" for view in found):
        return False
    return bool(found) or over_s > _EVALUATION_STARTS_S


def line(detail: TaskDetail) -> str:
    task = detail.task
    parts = [f"{task.task} {task.state}", f"version {task.version}", *numbers(detail)]
    parts += [f"HALTED: {task.halted}"] if task.halted else []
    return ", ".join(parts) + (f" ({task.why})" if task.why and task.state != "running" else "")


def picture(detail: TaskDetail) -> str:
    task = detail.task
    lines = [f"{task.task}  {task.regime}  {task.state}" + (f": {task.why}" if task.why else "")]
    lines.append(f"version {task.version}   " + "   ".join(numbers(detail)))
    losses = [point.loss for point in detail.points if point.loss is not None]
    series = {"loss": losses}
    for metric in detail.config.metrics:
        found = (point.metrics.get(metric.name) for point in detail.points)
        series[metric.name] = [value for value in found if value is not None]
    width = max(map(len, series))
    for name, values in series.items():
        if len(values) > 1:
            lines.append(f"{name:<{width}} {values[0]:.3f} {curve(values)} {values[-1]:.3f}")
    if task.halted:
        lines.append(f"HALTED: {task.halted}")
    return "\n".join(lines)


def numbers(detail: TaskDetail) -> list[str]:
    """Loss, metrics, utilization, staleness, versions per minute; a dash for unknown values.

    An evaluation ends some versions after the one it evaluates, so that version is named.
    """
    task = detail.task
    found = ["loss -"]
    if task.loss is not None:
        noise = {name: f" ± {value:.2g}" for name, value in task.deviations.items()}
        found = [f"loss {task.loss:.3f}{noise.get('loss', '')} at version {task.evaluated}"]
        if task.perplexity is not None:
            found.append(f"perplexity {task.perplexity:.1f}{noise.get(PERPLEXITY, '')}")
        found += [
            f"{name} {value:.4g}{noise.get(name, '')}" for name, value in task.metrics.items()
        ]
    made = [point for point in detail.points if point.members]
    if task.state == "running":
        has_begun = made or task.active  # before that, utilization says nothing
        known = task.utilization if has_begun else None
        found.append("utilization -" if known is None else f"utilization {100 * known:.0f} %")
    found.append(f"staleness {mean_staleness(made):.1f}" if made else "staleness -")
    rate = versions_per_minute(made)
    return [*found, "- versions/min" if rate is None else f"{rate:.1f} versions/min"]


def versions_per_minute(made: Sequence[PointRow], over_s: float = _RATE_S) -> float | None:
    """From the first of these versions to the last, without the wait for the first devices.

    None if that time is too short for a rate.
    """
    seconds = made[-1].created - made[0].created if made else 0.0
    return 60 * (len(made) - 1) / seconds if seconds > over_s else None


def mean_staleness(points: Sequence[PointRow]) -> float:
    """The mean over the updates in these points."""
    members = sum(point.members for point in points)
    return sum(point.staleness * point.members for point in points) / max(1, members)


def curve(values: Sequence[float]) -> str:
    """The last values as bars."""
    shown = values[-_CURVE:]
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)
