"""`make chaos`: runs a whole installation under seeded faults, then checks its model.

    python -m tests.chaos.run [--minutes M] [--seed S] [--devices N] [--fault KIND] [--planted BUG]

Needs root, and packages of Debian, which it installs. Prints the seed, every fault, the
distribution of recovery times and the oracle's verdict; exits with 1 if an update was lost or
doubled, if an aggregator wrote to a task that it did not hold, or if acknowledgements or versions
did not resume. With --planted the servers have a bug (tests/chaos/planted.py), the faults are those
that show it, and it exits with 0 if that is noticed. If it cannot run here, it says why and exits
with 0.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from papaya.config import AsyncFL, OptimizerConfig, SecureAggregation, TaskConfig
from papaya.errors import OperatorError
from tests.chaos.cluster import HEARTBEAT_S, Cluster
from tests.chaos.faults import (
    Acknowledgements,
    Limits,
    NotRecovered,
    Recovery,
    Stalls,
    Versions,
    in_words,
    play,
    say,
)
from tests.chaos.hosts import Network, sh
from tests.chaos.oracle import DAMPING, judge, read_outcomes
from tests.chaos.planted import BUGS, PLANTED, VARIABLE
from tests.chaos.schedule import FAKETIME, KINDS, Schedule, left_out
from tests.system.processes import PAPAYA

_PACKAGES = {
    "patroni": "patroni",
    "etcd": "etcd-server python3-etcd",
    "haproxy": "haproxy",
    "ip": "iproute2",
    "iptables": "iptables",
    "setpriv": "util-linux",
    "psql": "postgresql",
}
_PROBE = "papaya-probe"
_EPISODE_S = 300.0  # each has tasks of its own, because a task has a coordinate per participation
_LENGTH = 40_000
_GOAL = 8
_SLOW_GOAL = 64  # so that each of the chosen faults finds the record of an open buffer
_TRAINING_S = 2.0
_LONG_MINUTES = 10.0
_RECOVER_S = 90.0
_LIMITS = Limits(acknowledge_s=_RECOVER_S, version_s=30.0)
_DRAIN_S = 150.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="time with faults (default: 3)")
    parser.add_argument("--seed", type=int, help="default: a random one")
    parser.add_argument("--devices", type=int, default=200, help="number of devices (default: 200)")
    parser.add_argument("--keep", action="store_true", help="keep the logs of a good run too")
    parser.add_argument(
        "--fault",
        action="append",
        choices=KINDS,
        default=[],
        help="draw only faults of this kind (may be repeated; default: all)",
    )
    parser.add_argument("--planted", choices=BUGS, help="a bug of the servers to be found")
    options = parser.parse_args()
    if why := _why_not():
        say(f"skipped: {why}")
        return 0
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    only = tuple(options.fault)
    chosen = "".join(f" --fault {kind}" for kind in only)
    if options.planted is not None:
        only = only or BUGS[options.planted].shown_by
        chosen += f" --planted {options.planted}"
    try:
        if missing := left_out(only):
            say(missing)
    except OperatorError as error:
        parser.error(f"{error}\nhint: {error.hint}")
    how = f"--minutes {options.minutes:g} --seed {seed} --devices {options.devices}{chosen}"
    say(f"seed {seed}: python -m tests.chaos.run {how}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # remove everything, as after Ctrl-C
    folder = Path(tempfile.mkdtemp(prefix="papaya-chaos-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user
    try:
        plan = _Plan(seed, 60 * options.minutes, options.devices, only, options.planted)
        problems = _run(folder, plan)
    except BaseException:
        say(f"logs are in {folder}")
        raise
    for problem in problems:
        say(f"problem: {problem}")
    if (problems and options.planted is None) or options.keep:
        say(f"logs are in {folder}")
    else:
        shutil.rmtree(folder)
    if options.planted is not None:
        found = [each for each in problems if re.search(BUGS[options.planted].problem, each)]
        say(f"{options.planted}: {'noticed' if found else 'NOT NOTICED'}")
        return 0 if found else 1
    if problems:
        return 1
    say("in what was judged, every acknowledged update was counted once, and no other one twice")
    return 0


class _Plan(NamedTuple):
    """`only`: the kinds of faults, empty for all. `planted`: the bug of the servers."""

    seed: int
    seconds: float
    devices: int
    only: tuple[str, ...]
    planted: str | None

    @property
    def is_long(self) -> bool:
        return self.seconds >= 60 * _LONG_MINUTES

    @property
    def goal(self) -> int:
        return _SLOW_GOAL if self.only else _GOAL


def _why_not() -> str:
    """Install what is missing. The reason why this machine cannot run it, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [names for program, names in _PACKAGES.items() if shutil.which(program) is None]
    if problem := _install(" ".join(missing)):
        return problem
    if not FAKETIME.exists():
        _install("libfaketime")  # without it, only the faults of clocks are left out
    try:
        sh("ip", "netns", "add", _PROBE)
        sh("ip", "netns", "del", _PROBE)
    except AssertionError as error:
        return f"network namespaces do not work here: {error}"
    return ""


def _install(packages: str) -> str:
    """Why these Debian packages cannot be installed, or nothing."""
    if not packages:
        return ""
    say(f"installing {packages}")
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *packages.split()]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], install):
        try:
            subprocess.run(command, check=True, env=environment, capture_output=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            return f"cannot install {packages}: {error}"
    return ""


def _run(folder: Path, plan: _Plan) -> list[str]:
    problems: list[str] = []
    recoveries: list[Recovery] = []
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        program, variables = PAPAYA, dict[str, str]()
        if plan.planted is not None:
            program, variables = PLANTED, {VARIABLE: plan.planted}
        cluster = stack.enter_context(closing(Cluster(network, folder, program, **variables)))
        cluster.start()
        say(f"{len(cluster.all)} hosts are up")
        schedule = Schedule(cluster, plan.seed, is_long=plan.is_long, only=plan.only)
        stalls = stack.enter_context(Stalls(HEARTBEAT_S, cluster.pids))
        ends_at = time.monotonic() + plan.seconds
        number = 0
        try:
            while time.monotonic() < ends_at:
                number += 1
                episode_s = min(ends_at - time.monotonic(), _EPISODE_S)
                _episode(cluster, schedule, number, plan, episode_s, recoveries, problems)
        except NotRecovered as error:
            if stalls.is_long:
                say(f"{error}; this is not a failure, because the run is invalid")
            else:
                problems.append(str(error))
        else:
            codes = cluster.stop_servers()
            problems += [f"{name} stopped with {code}" for name, code in codes.items() if code]
        cluster.database.until_writable(_RECOVER_S)
        problems += cluster.database.strangers()
        stall_s = stalls.longest_s
    say(in_words(recoveries, stall_s, HEARTBEAT_S))
    return problems


def _episode(
    cluster: Cluster,
    schedule: Schedule,
    number: int,
    plan: _Plan,
    seconds: float,
    recoveries: list[Recovery],
    problems: list[str],
) -> None:
    """Faults for so long, on tasks of their own; adds the problems that the oracle finds.

    If a task does not go on, what is stored is judged all the same before NotRecovered is raised.
    """
    clear = _task(f"clear-{number}", 100, False, plan.goal)
    tasks = [clear, _task(f"masked-{number}", 40, True, _GOAL)]
    for config in tasks:
        cluster.submit(config)
    outcomes = cluster.folder / f"outcomes-{number}"
    load = cluster.add_load(tasks, plan.devices, _TRAINING_S, outcomes).start()
    acknowledged = Acknowledgements(outcomes, [config.task for config in tasks])
    versions = Versions(lambda: cluster.database.versions([config.task for config in tasks]))
    acknowledged.until(_GOAL, 0.0, _RECOVER_S, "the start")
    ends_at = time.monotonic() + seconds
    has_lost_tsa = False
    late: NotRecovered | None = None
    while time.monotonic() < ends_at and late is None:
        fault = schedule.next()
        has_lost_tsa = has_lost_tsa or "tsa:" in fault.name
        try:
            recoveries += play([fault], acknowledged, versions, _LIMITS)
        except NotRecovered as error:
            late = error
    load.signal(signal.SIGTERM)
    assert load.wait(_DRAIN_S) == 0, load.tail()
    for config in tasks:
        cluster.cancel(config)
    problems += _judge(cluster, tasks, outcomes, has_lost_tsa)
    if late is not None:
        raise late


def _task(name: str, concurrency: int, is_secure: bool, goal: int) -> TaskConfig:
    """Rows of masked buffers are kept: they tell which updates were lost with a TSA."""
    return TaskConfig(
        task=name,
        concurrency=concurrency,
        model_length=_LENGTH,
        regime=AsyncFL(aggregation_goal=goal),
        optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
        staleness=DAMPING,
        secure_aggregation=SecureAggregation() if is_secure else None,
        clip=64.0 if is_secure else None,
        max_examples=1,
        participation_gap_s=0.0,
        keep_versions=100_000 if is_secure else 3,
        training_timeout_s=3600.0 if is_secure else 60.0,
        upload_timeout_s=60.0,
    )


def _judge(cluster: Cluster, tasks: list[TaskConfig], file: Path, has_lost_tsa: bool) -> list[str]:
    stored, outcomes = cluster.stored(), read_outcomes(file)
    problems = []
    for config in tasks:
        model = stored.model(config.task)
        verdict = judge(model, outcomes)
        told = {ending: dict(times) for ending, times in verdict.told.items()}
        say(f"{config.task}: version {model.version}; lost with a TSA {verdict.lost}; {told}")
        problems += verdict.problems
        if verdict.lost and not has_lost_tsa:
            problems.append(f"{config.task}: {verdict.lost} updates were lost, but no TSA")
    return problems


if __name__ == "__main__":
    sys.exit(main())
