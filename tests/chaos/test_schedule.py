"""A seed decides the faults; those that are in progress at the same time touch different hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from papaya.errors import OperatorError
from tests.chaos import schedule
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault, NotRecovered, Versions, together
from tests.chaos.hosts import Host
from tests.chaos.planted import BUGS
from tests.chaos.schedule import KINDS, Schedule

_LIMIT_S = 60.0


def a_cluster() -> Any:
    """Hosts that do nothing: a schedule only names them until a fault begins."""

    def hosts(name: str, count: int) -> list[Host]:
        return [Host(f"{name}-{n}", "") for n in range(1, count + 1)]

    made = SimpleNamespace(
        coordinators=hosts("coordinator", 2),
        selectors=hosts("selector", 3),
        aggregators=hosts("aggregator", 3),
        tsas=hosts("tsa", 2),
        etcds=hosts("etcd", 3),
        balancer=Host("balancer", ""),
        bucket=Host("s3", ""),
        database=SimpleNamespace(hosts=hosts("db", 2), switch_over=None, kill_primary=None),
        disk=lambda host: Path(host.name),
    )
    for tsa in made.tsas:
        tsa.programs = [SimpleNamespace(name=tsa.name), SimpleNamespace(name=f"{tsa.name}-gate")]
        for gate in tsa.programs:
            gate.kill = gate.start = None
    made.roles = [*made.coordinators, *made.selectors, *made.aggregators]
    made.all = [*made.roles, made.balancer, *made.tsas, *made.database.hosts, *made.etcds]
    made.holder = lambda: made.aggregators[0]
    return made


def drawn(seed: int, count: int) -> list[Fault]:
    found = Schedule(cast(Cluster, a_cluster()), seed, is_long=True)
    return [found.next() for _ in range(count)]


def test_a_seed_decides_the_faults() -> None:
    first, again, other = ([f.name for f in drawn(seed, 60)] for seed in (1, 1, 2))
    assert first == again != other


def test_without_libfaketime_clocks_are_left_out_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, missing = tmp_path / "there.so", tmp_path / "missing.so"
    there.touch()
    monkeypatch.setattr(schedule, "FAKETIME", there)
    assert schedule.left_out(()) == schedule.left_out(("clock",)) == ""
    assert any("clock" in fault.name for fault in drawn(1, 60))
    monkeypatch.setattr(schedule, "FAKETIME", missing)
    told = f"clock faults are left out: there is no {missing} (hint: apt-get install libfaketime)"
    assert schedule.left_out(()) == told
    assert not any("clock" in fault.name for fault in drawn(1, 60))
    assert schedule.left_out(("power",)) == "", "nothing is left out"
    with pytest.raises(OperatorError, match="--fault clock needs libfaketime") as refused:
        schedule.left_out(("power", "clock"))
    assert refused.value.hint == "apt-get install libfaketime"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_can_be_drawn_alone(kind: str) -> None:
    found = Schedule(cast(Cluster, a_cluster()), 1, is_long=False, only=(kind,))
    assert found.next().touches


def test_the_faults_of_planted_bugs_exist() -> None:
    assert {kind for bug in BUGS.values() for kind in bug.shown_by} <= set(KINDS)


def test_about_a_third_of_the_faults_are_two_at_once() -> None:
    """`together` refuses a pair that touches the same host, or both servers of the database."""
    found = drawn(3, 600)
    pairs = [fault for fault in found if fault.name.startswith("two: ")]
    assert 150 < len(pairs) < 250
    assert all(len(pair.touches) >= 2 for pair in pairs)
    for fault in found:
        servers = {name for name in ("db-1", "db-2") if name in fault.name}
        if servers or "database: " in fault.name:
            assert "database" in fault.touches
    assert any("database" in pair.touches for pair in pairs)
    assert any({"etcd-1", "etcd-2", "etcd-3"} & pair.touches for pair in pairs)


def a_fault(name: str, begin: Callable[[], None], end: Callable[[], None]) -> Fault:
    return Fault(name, 0.0, begin, end, frozenset({name}))


def test_both_faults_are_in_progress_at_the_same_time() -> None:
    begun, ended = [Event(), Event()], []

    def wait_for(other: int) -> None:
        begun[1 - other].set()
        assert begun[other].wait(_LIMIT_S), "the other fault is over, or has not begun"

    both = together(
        a_fault("a", lambda: wait_for(1), lambda: ended.append("a")),
        a_fault("b", lambda: wait_for(0), lambda: ended.append("b")),
        0.0,
    )
    both.carry_out()
    assert sorted(ended) == ["a", "b"]
    assert both.touches == {"a", "b"}


def test_an_error_of_one_fault_is_raised_when_both_have_ended() -> None:
    ended: list[str] = []

    def fail() -> None:
        raise ValueError("it cannot begin")

    both = together(
        a_fault("a", fail, lambda: ended.append("a")),
        a_fault("b", lambda: None, lambda: ended.append("b")),
        0.0,
    )
    with pytest.raises(ValueError, match="cannot begin"):
        both.carry_out()
    assert sorted(ended) == ["a", "b"]


def test_faults_of_the_same_host_are_no_pair() -> None:
    fault = a_fault("a", lambda: None, lambda: None)
    with pytest.raises(AssertionError):
        together(fault, fault, 0.0)


def test_a_task_that_makes_no_version_has_not_recovered() -> None:
    newest = {"early": 3, "late": 5}
    versions = Versions(lambda: newest)
    versions.until_newer({"early": 2, "late": 4}, _LIMIT_S, "a fault")
    with pytest.raises(NotRecovered, match="late: updates are counted, but no version was made"):
        versions.until_newer({"early": 2, "late": 5}, 0.0, "a fault")
