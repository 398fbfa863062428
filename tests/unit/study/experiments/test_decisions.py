"""What experiments conclude, from made-up numbers: each claim fails when it should."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from papaya.cli.main import main
from papaya.study.experiments import model_quality, sampling_bias, speedup, stale_limit
from papaya.study.experiments.model_quality import TableRow
from papaya.study.experiments.result import Check
from papaya.study.experiments.runs import Reached, met, rates
from papaya.study.experiments.speedup import Pair
from papaya.study.fairness import Distance
from papaya.study.replay import Curve, Point
from papaya.study.workloads.base import Quality

NEVER = Reached(math.inf, math.inf, math.inf)


def took(hours: float) -> Reached:
    return Reached(hours, 1000 * hours, 10 * hours)


def pairs(*speedups: float) -> list[Pair]:
    return [Pair(c, [took(s)], [took(1.0)]) for c, s in enumerate(speedups, start=100)]


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (pairs(1.5, 3.0, 6.0), True),
        (pairs(1.5, 3.0, 4.9), False),
        (pairs(1.5, 7.0, 6.0), False),
        ([*pairs(1.5, 3.0), Pair(200, [NEVER], [took(1.0)])], False),
        ([*pairs(1.5, 3.0), Pair(200, [took(6.0)], [NEVER])], False),
    ],
)
def test_the_speedup_grows_or_it_does_not(found: list[Pair], holds: bool) -> None:
    assert speedup.grows(found).holds is holds


def test_speedup_is_trips_gain_times_throughput() -> None:
    pair = Pair(100, [Reached(6.0, 900.0, 9.0)], [Reached(2.0, 100.0, 1.0)])
    [gain], [trips], [throughput] = pair.speedup, pair.trips_gain, pair.throughput
    assert gain == pytest.approx(trips * throughput)
    assert (gain, trips) == (3.0, 9.0)


def test_a_pair_that_never_met_its_target_has_no_speedup() -> None:
    pair = Pair(100, [took(1.0)], [NEVER])
    assert all(math.isnan(found[0]) for found in (pair.speedup, pair.trips_gain, pair.throughput))
    assert "C = 100" in speedup.unmet({"tuned": [Pair(50, [took(1.0)], [took(1.0)]), pair]})[0]
    assert speedup.unmet({"tuned": [Pair(50, [took(1.0)], [took(1.0)])]}) == []


def bias(async_p: float, time_p: float, over_d: float) -> list[bool]:
    by_examples = {
        "AsyncFL": [Distance(0.01, 1.0, 0.02), Distance(0.01, async_p, 0.02)],
        "SyncFL with over-selection": [Distance(over_d, 0.0, 0.02)],
    }
    by_time = {"AsyncFL": [Distance(0.01, time_p, 0.02)]}
    return [check.holds for check in sampling_bias.decide(by_examples, by_time)]


def test_one_small_p_value_among_several_is_seen() -> None:
    assert bias(0.5, 0.5, 0.1) == [True, True]
    assert bias(0.003, 0.5, 0.1) == [False, True]
    assert bias(0.5, 1e-12, 0.1) == [False, True]
    assert bias(0.5, 0.5, 0.04) == [True, False]


def table(plain: float, over: float, asynchronous: float, hours: float = 1.0) -> list[Check]:
    def row(p99: float, took_hours: float) -> TableRow:
        return TableRow({"all": [20.0], "p75": [20.0], "p99": [p99]}, [20.0], [took_hours])

    names = ("SyncFL without over-selection", "SyncFL with over-selection", "AsyncFL")
    values = ((plain, 9.0), (over, 1.0), (asynchronous, hours))
    rows = {name: row(*found) for name, found in zip(names, values, strict=True)}
    return list(model_quality.decide(rows))


def test_table_1_needs_a_gap_and_a_way_back() -> None:
    assert [check.holds for check in table(30.0, 40.0, 34.0)] == [True, True, True]
    assert [check.holds for check in table(30.0, 33.0, 31.0)] == [False, True, True]
    assert [check.holds for check in table(30.0, 40.0, 36.0)] == [True, False, True]
    assert [check.holds for check in table(30.0, 40.0, 34.0, hours=1.1)] == [True, True, False]
    assert [check.holds for check in table(40.0, 30.0, 50.0)][:2] == [False, False]


def test_a_limit_that_keeps_nobody_or_loses_nobody_fails() -> None:
    assert stale_limit.decide("default", {10: (0.1,), 50: (0.8,), 200: (0.97,)}).holds
    assert not stale_limit.decide("default", {10: (0.6,), 50: (0.8,), 200: (0.97,)}).holds
    assert not stale_limit.decide("default", {10: (0.1,), 50: (0.5,), 200: (0.8,)}).holds


def test_a_target_between_two_judged_versions_is_met_between_them() -> None:
    losses = (4.0, 3.0, 2.9, 2.9)
    points = tuple(
        Point(10 * i, 1.0 * i, 100 * i, 200 * i, Quality(loss, loss, loss, loss))
        for i, loss in enumerate(losses)
    )
    curve = Curve("made up", rates(0.01), points, ())
    assert met(curve, 3.5) == pytest.approx(Reached(0.5, 100.0, 5.0))
    assert met(curve, 4.5).hours == 0.0
    assert met(curve, 1.0) == NEVER


def test_the_command_tells_by_its_exit_code_and_names_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "figure-7", "--output", str(tmp_path)]) != 0
    assert "speedup" in capsys.readouterr().err
    assert main(["reproduce", "tee-transfer", "--seeds", "1", "--output", str(tmp_path)]) == 0
    assert "bytes into the TSA per client" in capsys.readouterr().out
    assert (tmp_path / "quick" / "report.html").exists()
