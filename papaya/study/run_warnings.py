"""What a simulated run leaves undone, as texts for commands and notebooks.

Before it starts: settings that it ignores. At the end: why it trained less than was asked for, or
that it started below its target. Commands print these as warnings, `papaya.simulate` and
`papaya.sweep` as Python warnings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import structs

from papaya.config import TaskConfig
from papaya.progress import plural
from papaya.study.replay import STAYS
from papaya.study.run import Run, RunResult
from papaya.study.trace import UNBOUNDED


def ignored_settings(task: TaskConfig) -> list[str]:
    """`task`: as it was given, not as it is recorded."""
    rules = structs.asdict(task.stop).items()
    named = ", ".join(f"stop.{field}" for field, value in rules if value is not None)
    return [f"a simulation ignores {named}: it ends by updates or hours"] if named else []


def before_sweep(task: TaskConfig, varied: Collection[str]) -> list[str]:
    found = ignored_settings(task)
    if "client.epochs" in varied:
        found.append(
            "the sweep varies client.epochs, but simulated devices take as long with any number of "
            "epochs: compare losses and trips, not hours"
        )
    return found


def before_run(task: TaskConfig, run: Run) -> list[str]:
    found = ignored_settings(task)
    if (goal := run.recording_plan.task.aggregation_goal) > run.updates:
        found.append(
            f"the run continues until {goal:,} client updates, because one server update needs "
            "that many"
        )
    return found


def ended_early(result: RunResult) -> str | None:
    """Why the run ended before its updates or its target; None if it did not, or if hours were
    all that was asked for.
    """
    run, hours = result.run, f"{result.run.recording_plan.hours:g} virtual hours"
    if result.curve.diverged is not None:
        version = f"version {result.versions}, the last one evaluated"
        return f"the model diverged after {version}: {result.curve.diverged}"
    if not result.versions:
        return f"the model was not trained: no server update in {hours}; raise hours"
    is_asked = run.updates == UNBOUNDED
    if is_asked or result.target_hours is not None or result.updates >= run.updates:
        return None
    made = f"{result.updates:,} of {plural(run.updates, 'client update')}"
    return f"the run ended after {hours}, with {made}; raise hours"


def after_sweep(outcomes: Sequence[RunResult]) -> list[str]:
    """One text for all runs that ended for the same reason, or that started below their target.

    Tables have those that diverged, and those that did not reach their target; but a run with too
    few server updates cannot show that it kept its target.
    """
    running = [outcome for outcome in outcomes if outcome.curve.diverged is None]
    idle = sum(not outcome.versions for outcome in running)
    short = sum(
        bool(outcome.versions) and outcome.run.target is None and ended_early(outcome) is not None
        for outcome in running
    )
    of = f"of {plural(len(outcomes), 'run')}"
    found = []
    if idle:
        found.append(f"{idle} {of} made no server update and did not train; raise hours")
    if short:
        found.append(f"{short} {of} ended by hours, before all client updates; raise hours")
    if few := sum(
        outcome.run.target is not None
        and outcome.target_hours is None
        and 0 < outcome.versions < STAYS
        for outcome in running
    ):
        found.append(
            f"{few} {of} made fewer than {STAYS} server updates, too few to show whether the "
            "target is kept; raise updates or hours, or lower K"
        )
    if losses := [
        outcome.start.all
        for outcome in running
        if outcome.run.target is not None and outcome.start.all <= outcome.run.target
    ]:
        found.append(
            f"the initial model meets the target in {len(losses)} {of}, with a loss of "
            f"{min(losses):.3g}; choose a lower target"
        )
    return found
