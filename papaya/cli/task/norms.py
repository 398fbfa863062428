"""`papaya task norms`: a private histogram of the norms of updates, and the clip that it suggests.

The histogram is an evaluation of another kind: each of its devices trains, uploads the bin of the
norm of its update, and charges its own ledger for it (docs/privacy.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from papaya.cli.admin_client import (
    AdminClient,
    OneTaskOptions,
    add_connection,
    add_reason,
    client_for,
    task_path,
)
from papaya.cli.output import Commands, bind, note, positive, print_data, print_json, table, whole
from papaya.errors import OperatorError
from papaya.learning.private_evaluation import ProposedClip, proposed_clip
from papaya.messages.storage import PointRow
from papaya.server.admin.views import Evaluate, Started, TaskDetail

_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class TaskNormsOptions(OneTaskOptions):
    version: int | None = None
    clients: int | None = None
    timeout: float | None = None
    quantile: float = 0.5
    show: bool = False
    why: str = ""


class NormsFound(Struct, frozen=True):
    """A histogram of norms, and the clip that follows from it."""

    version: int
    quantile: float
    deviation: float
    clip: float
    counts: tuple[float, ...]


def add_to(actions: Commands) -> None:
    parser = actions.add_parser(
        "norms",
        help="measure the norms of updates privately, and propose a clip",
        description="Make a histogram of the norms of updates, with noise, and propose a clip. "
        "Each device trains once for it and charges one evaluation to its privacy budget. Sign the "
        "clip with `papaya task update`, or write it into the task's file.",
    )
    parser.add_argument("task", metavar="TASK", help="name of a private task")
    parser.add_argument(
        "--version",
        type=whole(0),
        metavar="V",
        help="version to train from (default: the newest)",
    )
    parser.add_argument(
        "--clients",
        type=whole(2),
        metavar="N",
        help="number of clients (default: from the task's evaluation plan, or its goal)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        metavar="S",
        help="give up after this many seconds (default: from the task's evaluation plan)",
    )
    parser.add_argument(
        "--quantile",
        type=positive,
        metavar="Q",
        help="share of updates that the clip leaves as they are",
    )
    parser.add_argument(
        "--show", action="store_true", help="show the newest histogram, and measure nothing"
    )
    add_reason(parser)
    add_connection(parser)
    bind(parser, TaskNormsOptions, run)


def run(options: TaskNormsOptions) -> int:
    if not 0 < options.quantile < 1:
        raise OperatorError(
            f"--quantile {options.quantile:g} is not a share of the updates",
            hint="use a number between 0 and 1, for example 0.5",
        )
    client = client_for(options)
    if options.show:
        point = _newest(client, options.task)
    else:
        request = Evaluate(
            options.version, options.clients, options.timeout, options.why, norms=True
        )
        started = client.post(task_path(options.task, "evaluate"), request, Started)
        note(f"{started.task}: waiting for devices to train from version {started.version}")
        point = wait_for(client, options.task, started)
    found = proposed_clip(point.norms, point.norms_deviation, options.quantile)
    if found is None:
        raise OperatorError(
            f"the noise of ±{point.norms_deviation:.3g} devices per bin hides the histogram",
            hint="measure again with more --clients, or raise privacy.evaluation.share",
        )
    _print(options, point, found)
    return 0


def wait_for(
    client: AdminClient,
    task: str,
    started: Started,
    sleep: Callable[[float], None] = time.sleep,
) -> PointRow:
    """The version with its histogram, once devices have made it."""
    while True:
        detail = client.get(task_path(started.task), TaskDetail)
        view = detail.task
        if view.state == "completed":
            break
        if view.state == "cancelled":
            raise OperatorError(f"there is no histogram: {view.why}", hint=_why_none(detail))
        sleep(_POLL_S)
    path = task_path(task, f"points?after={started.version - 1}")
    points = client.get(path, tuple[PointRow, ...])
    return next(point for point in points if point.version == started.version)


def _why_none(detail: TaskDetail) -> str:
    """Only a device knows its budget: a server sees that devices decline, or that none comes."""
    how = f"papaya task show {detail.task.task} says how participations ended"
    if detail.endings and not detail.endings.get("left_declined"):
        return how
    return (
        "devices may have spent what the task allows them, or their own privacy budgets: "
        f"papaya client budget shows it on a device; {how}"
    )


def _newest(client: AdminClient, task: str) -> PointRow:
    points = client.get(task_path(task, "points"), tuple[PointRow, ...])
    found = [point for point in points if point.norms]
    if not found:
        raise OperatorError(
            f"task {task} has no histogram of norms", hint=f"make one: papaya task norms {task}"
        )
    return found[-1]


def _print(options: TaskNormsOptions, point: PointRow, found: ProposedClip) -> None:
    if options.is_json:
        told = NormsFound(
            point.version, options.quantile, point.norms_deviation, found.clip, point.norms
        )
        print_json(told)
        return
    rows = [(f"{low:.3g}", f"{high:.3g}", f"{count:,.1f}") for low, high, count in found.bins]
    print_data(table(("from", "below", "devices"), rows))
    note(
        f"version {point.version}; noise of ±{point.norms_deviation:.3g} devices per bin, bins "
        "within twice that are left out"
    )
    share = f"{100 * options.quantile:g} % of the updates"
    print_data(f"clip = {found.clip:g} leaves about {share} as they are")
    note(f"to sign it: papaya task update {options.task} --set privacy.clip={found.clip:g}")
