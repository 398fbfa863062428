"""What experiments conclude, from made-up numbers: each verdict is the one that it should be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from scipy import stats

from papaya.cli.main import main
from papaya.sim.report import ks_statistic
from papaya.study.experiments import model_quality, speedup
from papaya.study.experiments.model_quality import TableRow
from papaya.study.experiments.result import PaperClaim
from papaya.study.experiments.runs import Reached, met, rates
from papaya.study.experiments.speedup import Pair, SpeedupCase, claims
from papaya.study.fairness import weighted_ks
from papaya.study.replay import Curve, Point
from papaya.study.workloads.base import Quality

NEVER = Reached(math.inf, math.inf, math.inf)


def took(hours: float) -> Reached:
    return Reached(hours, 1000 * hours, 10 * hours)


def claim(values: tuple[float, ...], relation: str = "about", expected: float = 5.0) -> PaperClaim:
    return PaperClaim(
        statement="made up",
        paper="5x",
        expected=expected,
        relation=relation,  # type: ignore[arg-type]
        values=values,
    )


@pytest.mark.parametrize(
    ("values", "relation", "verdict"),
    [
        ((4.9, 5.0, 5.1), "about", "agrees"),
        ((4.0, 4.0, 4.0), "about", "agrees"),  # within a quarter
        ((3.7, 3.7, 3.7), "about", "differs"),
        ((6.3, 6.3, 6.3), "about", "differs"),
        ((1.0, 8.0, 12.0), "about", "agrees"),  # an interval that contains the paper's number
        ((5.1, 5.2, 5.3, 5.2), "above", "agrees"),
        ((4.7, 4.8, 4.9, 4.8), "above", "differs"),
        ((4.0, 5.0, 6.0), "above", "not comparable"),
        ((4.7, 4.8, 4.9, 4.8), "below", "agrees"),
        ((5.1, 5.2, 5.3, 5.2), "below", "differs"),
        ((5.0, 5.0), "about", "not comparable"),  # too few seeds
        ((5.0, math.nan, 5.0), "about", "not comparable"),
    ],
)
def test_one_rule_decides_what_became_of_a_claim(
    values: tuple[float, ...], relation: str, verdict: str
) -> None:
    found = claim(values, relation)
    assert found.verdict == verdict
    assert bool(found.why) == (verdict == "not comparable")


def test_a_stated_reason_makes_a_claim_incomparable() -> None:
    found = structs.replace(claim((5.0, 5.0, 5.0)), incomparable="another text")
    assert (found.verdict, found.why) == ("not comparable", "another text")


def test_the_interval_is_students_over_the_sample_deviation() -> None:
    values = (1.0, 2.0, 4.0, 7.0, 11.0)
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert claim(values).interval == pytest.approx(expected, abs=2e-3)
    assert all(map(math.isnan, claim((1.0,)).interval))


def test_the_gap_widens_or_it_does_not() -> None:
    case = SpeedupCase("weak", "made up", 0.5)
    widens = claims(case, [three(100, 2.0), three(200, 5.0)])
    assert [one.verdict for one in widens] == ["agrees", "agrees", "agrees", "differs", "agrees"]
    shrinks = claims(case, [three(100, 5.0), three(200, 2.0)])
    assert shrinks[-1].verdict == "differs"
    never = claims(case, [three(100, 2.0), Pair(200, [NEVER] * 3, [took(1.0)] * 3)])
    assert {one.verdict for one in never[2:]} == {"not comparable"}


def three(concurrency: int, speedup: float) -> Pair:
    sync = [took(speedup * noise) for noise in (0.99, 1.0, 1.01)]
    return Pair(concurrency, sync, [took(1.0)] * 3)


def test_speedup_is_trips_gain_times_throughput() -> None:
    pair = Pair(100, [Reached(6.0, 900.0, 9.0)], [Reached(2.0, 100.0, 1.0)])
    [gain], [trips], [throughput] = pair.speedup, pair.trips_gain, pair.throughput
    assert gain == pytest.approx(trips * throughput)
    assert (gain, trips) == (3.0, 9.0)


def test_a_pair_that_never_met_its_target_has_no_speedup() -> None:
    pair = Pair(100, [took(1.0)], [NEVER])
    assert all(math.isnan(found[0]) for found in (pair.speedup, pair.trips_gain, pair.throughput))
    case, reached = SpeedupCase("weak", "tuned", 0.1), Pair(50, [took(1.0)], [took(1.0)])
    assert "C = 100" in speedup.unmet({case: [reached, pair]})[0]
    assert speedup.unmet({case: [reached]}) == []


def table(plain: float, over: float, asynchronous: float) -> dict[str, PaperClaim]:
    def row(p99: float, hours: float) -> TableRow:
        levels = {"all": [20.0] * 3, "p75": [20.0] * 3, "p99": [p99] * 3}
        return TableRow(levels, [20.0] * 3, [hours] * 3)

    found = zip(
        model_quality.METHODS, ((plain, 7.0), (over, 1.0), (asynchronous, 1.0)), strict=True
    )
    rows = {name: row(*values) for name, values in found}
    every = [*model_quality.claims("made up", rows), *model_quality.hours(rows)]
    return {claim.statement: claim for claim in every}


def test_table_1_compares_ratios_at_every_percentile() -> None:
    papers = table(47.82, 73.24, 38.51)
    at_99 = [claim for statement, claim in papers.items() if "99th" in statement]
    assert [claim.verdict for claim in at_99] == ["agrees", "agrees"]
    assert [claim.mean for claim in at_99] == pytest.approx([1.532, 0.805], abs=1e-3)
    ours = table(30.0, 31.0, 33.0)
    assert [c.verdict for s, c in ours.items() if "99th" in s] == ["differs", "differs"]
    assert [c.verdict for s, c in papers.items() if s.startswith("hours")] == ["agrees", "agrees"]


def test_the_weighted_distance_is_that_of_repeated_values() -> None:
    rng = np.random.default_rng(3)
    sample, reference = rng.integers(0, 9, 40).astype(float), rng.integers(2, 12, 30).astype(float)
    weights, others = rng.integers(1, 5, 40).astype(float), rng.integers(1, 5, 30).astype(float)
    repeated = ks_statistic(
        np.repeat(sample, weights.astype(int)), np.repeat(reference, others.astype(int))
    )
    assert weighted_ks(sample, weights, reference, others) == pytest.approx(repeated)


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
    assert (
        main(
            [
                "reproduce",
                "tee-transfer",
                "--seeds",
                "1",
                "--data",
                "none",
                "--output",
                str(tmp_path),
            ]
        )
        == 0
    )
    assert "bytes into the TSA per client" in capsys.readouterr().out
    assert (tmp_path / "quick" / "report.html").exists()
