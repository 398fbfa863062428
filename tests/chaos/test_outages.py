"""A part is away for a minute and comes back: nothing is lost, no task moves, work resumes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from tests.chaos.faults import Acknowledgements, Fault, Stalls, play, say
from tests.chaos.loopback import CLEAR, HEARTBEAT_S, LIMITS, MASKED, RECOVER_S, Loopback, loopback
from tests.chaos.oracle import judge, read_outcomes

pytestmark = pytest.mark.soak
_MINUTE_S = 60.0
_RESUME_S = 2.0
_DEVICES = 40
_END_S = 120.0
# Uploads wait for the part that is away, and their rows are kept to the end.
_TASKS = tuple(
    structs.replace(config, training_timeout_s=600.0, upload_timeout_s=300.0)
    for config in (CLEAR, MASKED)
)


def _over(folder: Path, outage: Callable[[Loopback], Fault], training_s: float = 0.5) -> float:
    """Play one outage. Returns the seconds to the next acknowledgement, 0 if the run is invalid."""
    file = folder / "outcomes"
    acknowledged = Acknowledgements(file, [config.task for config in _TASKS])
    with loopback(folder) as cluster:
        for config in _TASKS:
            cluster.submit(config)
        with cluster.load(file, _TASKS, _DEVICES, training_s) as load:
            acknowledged.until(10, 0.0, RECOVER_S, "the start")
            before = cluster.fences()
            with Stalls(HEARTBEAT_S, cluster.pids) as stalls:
                [recovery] = play([outage(cluster)], acknowledged, cluster.versions(_TASKS), LIMITS)
            acknowledged.until(10, time.time(), RECOVER_S, "the outage")
            assert cluster.fences() == before, "a task has moved"
            load.send_signal(signal.SIGTERM)
            assert load.wait(_END_S) == 0
        for server in cluster.installation.servers:
            assert server.stop() == 0
        stored, outcomes = cluster.stored(), read_outcomes(file)
        for config in _TASKS:
            verdict = judge(stored.model(config.task), outcomes)
            assert verdict.problems == []
            assert verdict.lost == 0, "a buffer was dropped"
    say(f"{recovery}, a process waited {stalls.longest_s:.2f} s for a core")
    return 0.0 if stalls.is_long else recovery.first_s


def test_the_database_is_away_for_a_minute(tmp_path: Path) -> None:
    def outage(cluster: Loopback) -> Fault:
        return Fault("database", _MINUTE_S, cluster.database.kill, cluster.start_database)

    assert _over(tmp_path, outage) < _RESUME_S


@pytest.mark.parametrize("fault", ["code:503:SlowDown", "hang"])
def test_the_bucket_is_away_for_a_minute(tmp_path: Path, fault: str) -> None:
    def outage(cluster: Loopback) -> Fault:
        begin, end = (lambda: cluster.s3.fail(fault)), (lambda: cluster.s3.fail(""))
        return Fault("bucket", _MINUTE_S, begin, end)

    _over(tmp_path, outage)


def test_training_goes_on_while_all_coordinators_are_away(tmp_path: Path) -> None:
    acknowledged: list[int] = []

    def outage(cluster: Loopback) -> Fault:
        file = cluster.installation.folder / "outcomes"
        began_at: list[float] = []

        def begin() -> None:
            for server in cluster.coordinators:
                server.kill()
            began_at.append(time.time())

        def end() -> None:
            counted = [o for o in read_outcomes(file) if o.ending == "counted"]
            acknowledged.append(sum(o.at > began_at[0] + HEARTBEAT_S for o in counted))
            for server in cluster.coordinators:
                server.start()

        return Fault("coordinators", 2 * _MINUTE_S, begin, end)

    _over(tmp_path, outage, training_s=20.0)
    assert acknowledged[0] >= _DEVICES // 4, "clients that train are counted meanwhile"
