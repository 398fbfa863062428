"""Six faults on a small cluster with real services: the model agrees with what devices were told,
and fixed questions about the run are answered from the dashboard and from the logs alone.

Then the same with bugs in the servers, which the oracle must find.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import cast

import pytest
from msgspec import structs

from papaya.config import AsyncFL, TaskConfig
from papaya.messages.storage import FenceRow
from tests.chaos import questions
from tests.chaos.faults import (
    Acknowledgements,
    Fault,
    Limits,
    NotRecovered,
    Stalls,
    in_words,
    play,
    say,
)
from tests.chaos.loopback import (
    CLEAR,
    HEARTBEAT_S,
    LIMITS,
    MASKED,
    RECOVER_S,
    Loopback,
    loopback,
    overlapping,
)
from tests.chaos.oracle import Verdict, judge, read_outcomes
from tests.chaos.planted import PLANTED, VARIABLE
from tests.system.processes import PAPAYA
from tests.system.test_secure import until

_DEVICES = 40
_SEED = int(os.environ.get("PAPAYA_CHAOS_SEED", "1"))
_END_S = 600.0
_NOTICED_S = 30.0
_ROOT = Path(__file__).parents[2]


def _judged(
    cluster: Loopback,
    tasks: Sequence[TaskConfig],
    faults: Sequence[Fault],
    *,
    asks_since: Mapping[str, float] | None = None,
    limits: Limits = LIMITS,
) -> dict[str, Verdict]:
    """Submit the tasks, play the faults, and judge what is stored at the end.

    `asks_since`: when each fault began; then also ask the fixed questions.
    """
    file = cluster.installation.folder / "outcomes"
    acknowledged = Acknowledgements(file, [config.task for config in tasks])
    for config in tasks:
        cluster.submit(config)
    with Stalls(HEARTBEAT_S, cluster.pids) as stalls, cluster.load(file, tasks, _DEVICES) as load:
        acknowledged.until(10, 0.0, RECOVER_S, "the start")
        recoveries = play(faults, acknowledged, cluster.versions(tasks), limits)
        acknowledged.until(10, time.time(), RECOVER_S, "the last fault")
        load.send_signal(signal.SIGTERM)
        assert load.wait(_END_S) == 0
    if asks_since is not None:
        _ask_questions(cluster, asks_since)
    for server in cluster.installation.servers:
        assert server.stop() == 0
    say(in_words(recoveries, stalls.longest_s, HEARTBEAT_S))
    stored, outcomes = cluster.stored(), read_outcomes(file)
    found = {}
    for config in tasks:
        model = stored.model(config.task)
        found[config.task] = verdict = judge(model, outcomes)
        say(f"{config.task}: version {model.version}, counted by what was told: {verdict.told}")
    return found


def _timed(faults: Sequence[Fault], times: dict[str, float]) -> list[Fault]:
    """The same faults; each writes down when it begins."""

    def timed(fault: Fault) -> Fault:
        def begin() -> None:
            times[fault.name] = time.time()
            fault.begin()

        return fault._replace(begin=begin)

    return [timed(fault) for fault in faults]


def _ask_questions(cluster: Loopback, began: Mapping[str, float]) -> None:
    """Each answer is compared with the rows, or with what this test has done."""
    admin = cluster.admin(cluster.coordinators[0])

    def time_line() -> list[questions.Told]:
        return questions.from_dashboard(admin.get("/admin/events"))

    def logs() -> list[questions.Told]:
        servers = cluster.installation.servers
        return questions.from_logs([server.text().splitlines() for server in servers])

    def rows() -> tuple[dict[str, tuple[int, str]], tuple[int, str]]:
        """Who holds each task since which move, and who leads since which epoch."""
        found = {key.removeprefix("fence/"): row for key, row in cluster.fences().items()}
        fences = {t: (r.seq, r.aggregator) for t, r in found.items() if isinstance(r, FenceRow)}
        status = admin.get("/admin/status")
        return fences, (status["epoch"], status["leader"])

    def is_right(source: Callable[[], list[questions.Told]]) -> bool:
        """Events are written as rows every two seconds, and tasks may move on a busy machine."""
        story = source()
        answers = questions.holders(story), questions.leader(story)
        return answers == rows() and questions.restarted(story) == cluster.killed

    for name, source in (("dashboard", time_line), ("logs", logs)):
        until(
            partial(is_right, source), f"{name}: who was restarted, who holds each task, who leads"
        )
        story = source()
        assert questions.dropped_buffers(story) == 0, f"no TSA was killed; {name}"
        away = questions.database_away(story)
        assert any(0 < at - began["database"] < RECOVER_S for at in away), (name, away, began)


def test_six_faults_lose_and_double_nothing(tmp_path: Path) -> None:
    say(f"seed: PAPAYA_CHAOS_SEED={_SEED}")
    with loopback(tmp_path) as cluster:
        rng, began = Random(_SEED), dict[str, float]()
        faults = overlapping(_timed(cluster.faults(rng), began), rng)
        assert len(faults) < 6, "some are in progress at the same time"
        verdicts = _judged(cluster, (CLEAR, MASKED), faults, asks_since=began)
    for task, verdict in verdicts.items():
        assert verdict.problems == [], f"{task}, seed {_SEED}"
        assert verdict.lost == 0, "no TSA was killed"
        assert verdict.told["counted"].total() >= 20


# -- bugs of the servers that must be noticed --------------------------------------------------


@contextmanager
def _with_bug(folder: Path, bug: str | None) -> Iterator[Loopback]:
    program, variables = PAPAYA, {}
    if bug is not None:
        program, variables = PLANTED, {VARIABLE: bug, "PYTHONPATH": str(_ROOT)}
    with loopback(folder, program, **variables) as cluster:
        yield cluster


# Buffers are filled slowly, so that each fault finds records.
_SLOWLY = structs.replace(CLEAR, regime=AsyncFL(aggregation_goal=32), commit_interval_s=0.02)


@pytest.mark.soak
@pytest.mark.parametrize("bug", [None, "acknowledged-before-commit"])
def test_the_oracle_finds_updates_that_were_acknowledged_too_early(
    tmp_path: Path, bug: str | None
) -> None:
    with _with_bug(tmp_path, bug) as cluster:
        faults = [cluster.kill_holder(HEARTBEAT_S) for _ in range(4)]
        verdict = _judged(cluster, (_SLOWLY,), faults)[CLEAR.task]
    assert _is_lost(verdict) == (bug is not None), verdict.problems


@pytest.mark.soak
@pytest.mark.parametrize("bug", [None, "unknown-transaction-repeated"])
def test_the_oracle_finds_a_transaction_that_was_repeated(tmp_path: Path, bug: str | None) -> None:
    with _with_bug(tmp_path, bug) as cluster:
        faults = [cluster.kill_database(HEARTBEAT_S) for _ in range(8)]
        verdict = _judged(cluster, (_SLOWLY,), faults)[CLEAR.task]
    assert _is_lost(verdict) == (bug is not None), verdict.problems


def _is_lost(verdict: Verdict) -> bool:
    return any("told 'counted': counted 0 times" in each for each in verdict.problems)


@pytest.mark.soak
@pytest.mark.parametrize("bug", [None, "versions-delayed"])
def test_versions_that_are_late_after_a_fault_are_noticed(tmp_path: Path, bug: str | None) -> None:
    limits, noticed = LIMITS, cast(AbstractContextManager[object], nullcontext())
    if bug is not None:
        limits = Limits(acknowledge_s=_NOTICED_S, version_s=_NOTICED_S)
        noticed = pytest.raises(NotRecovered, match=r"not 1 updates were|no version was made")
    with _with_bug(tmp_path, bug) as cluster, noticed:
        _judged(cluster, (_SLOWLY,), [cluster.kill_holder(HEARTBEAT_S)], limits=limits)
