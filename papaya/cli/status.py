"""`papaya status`: the leader, the servers it heard from, and how busy the tasks are.

Every role answers, with what it knows. Exits with 1 if someone should act: nobody leads, no
selector or aggregator reports, a task has halted, blobs of a task cannot be read or written, no
thread can start for it, or a server is refused because of its clock.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from papaya.cli.admin_client import ConnectionOptions, add_connection, client_for
from papaya.cli.output import Commands, bind, note, plural, print_data, print_json, table
from papaya.server.admin.views import SystemStatus, TaskView


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "status",
        description="Show the servers, tasks and problems of a running system. Exits with 1 if "
        "there is a problem.",
    )
    add_connection(parser)
    bind(parser, ConnectionOptions, run)


def run(options: ConnectionOptions) -> int:
    status = client_for(options).get("/admin/status", SystemStatus)
    problems = trouble(status)
    if options.is_json:
        print_json(msgspec.to_builtins(status) | {"problems": problems})
    else:
        print_data(options.repeated(describe(status)))
    for problem in problems:
        note(f"problem: {problem}")
    return 1 if problems else 0


def trouble(status: SystemStatus) -> list[str]:
    """Problems that someone should look at."""
    found = [f"task {view.task} halted: {view.halted}" for view in status.tasks if view.halted]
    if not status.leader:
        return ["no coordinator leads yet", *found]
    if not status.is_led and "coordinator" not in status.roles:
        problem = f"no leader sends orders to this server; the last leader was {status.leader}"
        return [f"{problem}; check that it runs and can be reached from here", *found]
    if not status.is_led:
        problem = f"no leader: {status.leader} has not renewed its lease"
        return [f"{problem}; check that it runs and that its disk is not full", *found]
    if "coordinator" not in status.roles:
        return found  # other servers report to coordinators only
    found += [str(clock) for clock in status.clocks if clock.is_refused]
    if status.recovers or status.just_started:
        return found
    if not status.aggregators:
        found.append("no aggregator has reported, so no task can train")
    if not status.selectors:
        found.append("no selector has reported, so no device can check in")
    return found


def describe(status: SystemStatus) -> str:
    leader = status.leader or "none yet"
    if status.leader and not status.is_led:
        leader = f"none; the last leader was {leader}"
    elif status.leads:
        leader += ", this server" + (", recovering" if status.recovers else "")
    elif status.leader:
        leader += "; ask its admin API for live numbers"
        leader += f": papaya status --admin {status.leader_admin}" if status.leader_admin else ""
    lines = [f"roles here   {', '.join(status.roles)}", f"leader       {leader}"]
    if under := about_maintenance(status):
        lines.append(f"maintenance  {under}")
    lines += [
        f"aggregator   {server.node}, heard {server.heard_s_ago:.0f} s ago, "
        f"{plural(server.tasks, 'task')}{', OVERLOADED' if server.is_overloaded else ''}"
        for server in status.aggregators
    ]
    lines += [
        f"selector     {server.node}, heard {server.heard_s_ago:.0f} s ago, "
        f"{plural(server.held, 'check-in')} held"
        for server in status.selectors
    ]
    if skew := version_skew(status):
        lines.append(f"versions     {skew}")
    lines += [f"clock        {clock}" for clock in status.clocks if not clock.is_refused]
    tasks = [view for view in status.tasks if view.state in ("running", "paused")]
    over = sum(
        view.state not in ("running", "paused") and not view.evaluates for view in status.tasks
    )
    if tasks:
        header = ("task", "state", "version", "active", "of", "demand", "held", "holder")
        lines += ["", table(header, [_line(view) for view in tasks])]
    if over:
        noun, verb = "more task" if tasks else "task", "has" if over == 1 else "have"
        lines += ["", f"{plural(over, noun)} {verb} ended; list them with: papaya task list"]
    return "\n".join(lines)


def version_skew(status: SystemStatus) -> str:
    """Which server runs which version of Papaya; empty if all run the same."""
    nodes: dict[str, list[str]] = {}
    for node, version in status.versions.items():
        nodes.setdefault(version or "unknown", []).append(node)
    if len(nodes) < 2:
        return ""
    return "; ".join(f"{version}: {', '.join(found)}" for version, found in sorted(nodes.items()))


def about_maintenance(status: SystemStatus) -> str:
    """Empty if training is not stopped."""
    found = status.maintenance
    if found is None:
        return ""
    what = "all training is stopped" if found.is_stopped else "no client is assigned"
    until = f", until about {_clock(found.until)}" if found.until else ""
    why = f": {found.why}" if found.why else ""
    return (
        f"{what} since {_clock(found.since)}{until}, by {found.actor}{why}; "
        "to resume: papaya maintenance end"
    )


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%F %T} UTC"


def _line(view: TaskView) -> tuple[str, ...]:
    numbers = ["-" if n is None else f"{n:,}" for n in (view.active, view.demand, view.held)]
    active, demand, held = numbers
    state = view.state + (" HALTED" if view.halted else "")
    holder = view.holder or "-"
    return (
        view.task,
        state,
        "-" if view.evaluates else f"{view.version:,}",
        active,
        f"{view.concurrency:,}",
        demand,
        held,
        holder,
    )
