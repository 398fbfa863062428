"""`papaya task rollout`: give a revision to a share of the devices first, and take it back if it
does harm.

The owner signs two revisions: the new one, and one after it with the settings of now. A server can
roll back by itself only because it has the second: it cannot sign, and devices refuse a lower
number than the last one that they have accepted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import structs

from papaya.cli.admin_client import (
    AdminClient,
    OneTaskOptions,
    add_connection,
    add_reason,
    client_for,
    task_path,
)
from papaya.cli.output import (
    Commands,
    bind,
    not_negative,
    note,
    positive,
    print_data,
    print_json,
    whole,
)
from papaya.cli.task.signing import add_owner_key, default_key, own_manifest, signer
from papaya.cli.task.update import newest_of, next_revision, note_consequences
from papaya.config.metrics import PERPLEXITY
from papaya.errors import OperatorError
from papaya.messages.storage import RolloutPlan
from papaya.server.admin.views import BeginRollout, EndRollout, RolloutView, TaskDetail, TaskView

_DEFAULTS = RolloutPlan(shares=(0.1, 1.0), tolerance=0.0)


@dataclass(frozen=True, kw_only=True)
class TaskRolloutOptions(OneTaskOptions):
    set: Sequence[str] | None = None
    share: tuple[float, ...] = _DEFAULTS.shares
    metric: str = _DEFAULTS.metric
    lower_is_better: bool = False
    tolerance: float | None = None
    evaluations: int = _DEFAULTS.evaluations
    updates: int = _DEFAULTS.updates
    failures: float = _DEFAULTS.failures
    hours: float = _DEFAULTS.hours
    finish: bool = False
    roll_back: bool = False
    owner: Path | None = None
    why: str = ""


def add_to(actions: Commands) -> None:
    parser = actions.add_parser(
        "rollout",
        help="give new settings to a share of the devices first",
        description="Sign the next revision of a task and give it to a share of the devices. It "
        "goes on to all devices if the evaluations and participations of each step are good, and "
        "is rolled back, with the model, if not. Without --set, show the rollout.",
    )
    parser.add_argument("task", metavar="TASK", help="name of the task")
    parser.add_argument(
        "--set",
        action="append",
        metavar="FIELD=VALUE",
        help="change one setting, such as client.rate=0.05; may be repeated",
    )
    _add_plan(parser)
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--finish", action="store_true", help="give the revision to all devices now")
    ends.add_argument("--roll-back", action="store_true", help="roll the revision back now")
    add_owner_key(parser)
    add_reason(parser)
    add_connection(parser)
    bind(parser, TaskRolloutOptions, run)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--share",
        type=_shares,
        metavar="S[,S]",
        help="shares of the devices, step by step, such as 0.05,0.3 or 10%%; the last step is "
        "all devices (default: 0.1)",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="value to compare between evaluations: loss, perplexity or a metric of the task",
    )
    parser.add_argument(
        "--lower-is-better",
        action="store_true",
        help="treat smaller values of the metric as better, as always with loss and perplexity",
    )
    parser.add_argument(
        "--tolerance",
        type=not_negative,
        metavar="X",
        help="roll back if the metric is worse than before by more than this; "
        "required with --set, because evaluations of few devices are noisy",
    )
    parser.add_argument(
        "--evaluations",
        type=whole(1),
        metavar="N",
        help="good evaluations that a step needs",
    )
    parser.add_argument(
        "--updates",
        type=whole(1),
        metavar="N",
        help="counted updates under the new settings that a step needs, before evaluations count",
    )
    parser.add_argument(
        "--failures",
        type=not_negative,
        metavar="S",
        help="roll back if the share of participations that fail is higher than under the other "
        "settings by more than this",
    )
    parser.add_argument(
        "--hours",
        type=positive,
        metavar="H",
        help="roll back if a step takes longer",
    )


def _shares(text: str) -> tuple[float, ...]:
    try:
        found = [
            float(part.removesuffix("%")) / (100 if part.endswith("%") else 1)
            for part in text.split(",")
        ]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of shares") from None
    if any(not 0 < share <= 1 for share in found):
        raise argparse.ArgumentTypeError(f"{text}: a share is above 0 and at most 1, or 100%")
    return tuple(found) if found[-1] == 1 else (*found, 1.0)


def run(options: TaskRolloutOptions) -> int:
    client = client_for(options)
    if options.finish or options.roll_back:
        return _end(client, options)
    if not options.set:
        return _show(client, options)
    return _begin(client, options)


def _begin(client: AdminClient, options: TaskRolloutOptions) -> int:
    if options.tolerance is None:
        raise OperatorError(
            f"--tolerance is missing: how much worse may {options.metric} become?",
            hint="for example --tolerance 0.05",
        )
    found = signer(options.owner or default_key())
    head, detail = newest_of(client, options.task)
    manifest = own_manifest(found, head)
    config, following = next_revision(manifest, detail, options.set or ())
    note_consequences(client, found.owner, config, detail)
    is_lower = options.lower_is_better or options.metric in ("loss", PERPLEXITY)
    plan = RolloutPlan(
        shares=options.share,
        metric=options.metric,
        higher_is_better=not is_lower,
        tolerance=options.tolerance,
        evaluations=options.evaluations,
        updates=options.updates,
        failures=options.failures,
        hours=options.hours,
    )
    fallback = structs.replace(manifest, revision=following.revision + 1)
    request = BeginRollout(
        config,
        found.head(following, head.program, head.frozen_file),
        found.head(fallback, head.program, head.frozen_file),
        plan,
        options.why,
    )
    task = detail.task.task
    client.post(task_path(task, "rollout"), request, TaskView)
    return _print(options, client.get(task_path(task), TaskDetail))


def _end(client: AdminClient, options: TaskRolloutOptions) -> int:
    if options.set:
        raise OperatorError(
            "--set begins a rollout, --finish and --roll-back end one", hint="leave one of them out"
        )
    action: Literal["finish", "roll_back"] = "finish" if options.finish else "roll_back"
    detail = client.get(task_path(options.task), TaskDetail)
    path = task_path(detail.task.task, "rollout/end")
    client.post(path, EndRollout(action, options.why), TaskView)
    return _print(options, client.get(task_path(detail.task.task), TaskDetail))


def _show(client: AdminClient, options: TaskRolloutOptions) -> int:
    detail = client.get(task_path(options.task), TaskDetail)
    if detail.rollout is None and not options.is_json:
        note(f"{options.task} has no rollout; begin one: --set client.rate=0.05 --share 0.1")
        return 0
    return _print(options, detail)


def _print(options: TaskRolloutOptions, detail: TaskDetail) -> int:
    if options.is_json:
        print_json(detail.rollout)
    else:
        assert detail.rollout is not None
        print_data(in_words(detail.rollout))
    return 0


def in_words(rollout: RolloutView) -> str:
    """One line for `rollout` and `task show`."""
    words = {
        "running": f"is given to {100 * rollout.share:g} % of the devices",
        "finished": "is given to all devices",
        "rolled_back": "was rolled back",
        "ended": "was being rolled out",
    }
    parts = [f"revision {rollout.revision} {words[rollout.state]}"]
    if rollout.state == "running":
        plan, counts = rollout.plan, rollout.counts
        parts.append(f"{counts.counted:,} of {plan.updates:,} updates")
        parts.append(f"{counts.failed:,} failed")
        parts.append(f"then {rollout.good} of {plan.evaluations} evaluations")
        before = f"{rollout.baseline:.4g} at version {rollout.baseline_version}"
        parts.append(f"{plan.metric} was {before}")
        if rollout.values:
            version, value = rollout.values[-1]
            parts.append(f"is {value:.4g} at version {version}")
    elif rollout.why:
        parts.append(rollout.why)
    return f"{parts[0]}: {', '.join(parts[1:])}" if len(parts) > 1 else parts[0]
