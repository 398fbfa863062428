"""What experiments conclude, from made-up numbers: each verdict is the one that it should be."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from msgspec import structs
from scipy import stats

from papaya.cli.main import main
from papaya.sim.report import ks_statistic
from papaya.study.experiments import (
    charts,
    designs,
    goal_sweep,
    lstm_speedup,
    model_quality,
    sampling_bias,
    speedup,
)
from papaya.study.experiments.model_quality import TableRow
from papaya.study.experiments.result import Bound, PaperClaim, Ratios
from papaya.study.experiments.runs import QUICK, Reached, compared, met, rates
from papaya.study.experiments.speedup import Pair, SpeedupCase, claims
from papaya.study.fairness import weighted_ks
from papaya.study.replay import Curve, Point
from papaya.study.workloads.base import Quality


def took(hours: float) -> Reached:
    return Reached(hours, 1000 * hours, 10 * hours)


def ended(hours: float) -> Reached:
    """Before it reached its target."""
    return took(hours)._replace(is_there=False)


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


@pytest.mark.parametrize(
    ("values", "bound", "relation", "verdict"),
    [
        ((1.0, 1.1, 1.2), "at most", "about", "differs"),  # the paper's 5 is above the bound
        ((4.0, 4.1, 4.2), "at most", "about", "not comparable"),  # within a quarter
        ((6.5, 6.6, 6.7), "at most", "about", "not comparable"),  # it may be 5
        ((6.5, 6.6, 6.7), "at least", "about", "differs"),
        ((1.0, 1.1, 1.2), "at most", "above", "differs"),
        ((5.5, 5.6, 5.7), "at most", "above", "not comparable"),
        ((5.5, 5.6, 5.7), "at least", "above", "agrees"),
        ((1.0, 1.1, 1.2), "at most", "below", "agrees"),
    ],
)
def test_a_bound_decides_a_claim_only_where_it_excludes_the_other_side(
    values: tuple[float, ...], bound: Bound, relation: str, verdict: str
) -> None:
    found = structs.replace(claim(values, relation), bound=bound)
    assert found.verdict == verdict
    assert bool(found.why) == (verdict == "not comparable")
    assert str(found).startswith(f"{bound} ")


def test_a_run_that_ended_early_bounds_a_ratio_on_one_side() -> None:
    whole, early = [took(2.0)] * 3, [took(2.0), took(2.0), ended(4.0)]
    assert compared(whole, early) == Ratios((1.0, 1.0, 0.5), "at most")
    assert compared(early, whole) == Ratios((1.0, 1.0, 2.0), "at least")
    assert compared(early, whole, "trips").bound == "at least"
    assert all(map(math.isnan, compared(early, early).values))
    assert all(map(math.isnan, compared(whole, early).exact))
    growth = compared(whole, early).over(compared(whole, whole))
    assert growth == Ratios((1.0, 1.0, 0.5), "at most")
    assert compared(whole, whole).over(compared(whole, early)).bound == "at least"
    assert compared(whole, early).changes == Ratios((0.0, 0.0, -50.0), "at most")


def test_a_stated_reason_makes_a_claim_incomparable() -> None:
    found = structs.replace(claim((5.0, 5.0, 5.0)), incomparable="another text")
    assert (found.verdict, found.why) == ("not comparable", "another text")


def test_the_interval_is_students_over_the_sample_deviation() -> None:
    values = (1.0, 2.0, 4.0, 7.0, 11.0)
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert claim(values).interval == pytest.approx(expected, abs=2e-3)
    assert all(map(math.isnan, claim((1.0,)).interval))


@pytest.mark.parametrize(
    ("values", "expected", "no_effect", "bound", "share"),
    [
        ((1.5, 1.5, 1.5), 2.0, 1.0, "", "50 % (50 to 50)"),
        ((1.1, 1.1, 1.1), 0.8, 1.0, "", "-50 % (-50 to -50)"),  # the opposite effect
        ((-1.7, -1.7, -1.7), -3.4, 0.0, "", "50 % (50 to 50)"),  # changes in percent
        ((1.5, 1.5, 1.5), 2.0, 1.0, "at most", "at most 50 %"),
        ((0.9, 0.9, 0.9), 0.8, 1.0, "at most", "at least 50 %"),  # the paper's is a decrease
    ],
)
def test_the_share_of_the_papers_effect_is_told_beside_the_verdict(
    values: tuple[float, ...], expected: float, no_effect: float, bound: Bound, share: str
) -> None:
    found = structs.replace(claim(values, expected=expected), no_effect=no_effect, bound=bound)
    assert str(found.share_of_effect) == share
    assert found.verdict == structs.replace(found, no_effect=None).verdict


def test_no_share_of_an_effect_is_told_where_there_is_none_to_compare() -> None:
    ratio = structs.replace(claim((1.5, 1.5, 1.5)), no_effect=1.0)
    assert ratio.share_of_effect is not None
    assert claim((1.5, 1.5, 1.5)).share_of_effect is None
    for other in (
        structs.replace(ratio, relation="above"),
        structs.replace(ratio, incomparable="another text"),
        structs.replace(ratio, values=(1.5, math.nan, 1.5)),
    ):
        assert other.share_of_effect is None


def test_a_change_in_percent_is_drawn_as_a_ratio() -> None:
    change = structs.replace(
        claim((-50.0, 100.0), "above", expected=10.0), unit="%", no_effect=0.0, bound="at least"
    )
    assert change.as_ratio == Ratios((0.5, 2.0), "at least")
    assert change.papers_ratio == Ratios((1.1,), "at least")
    ratio = structs.replace(claim((1.5, 2.0)), no_effect=1.0)
    assert (ratio.as_ratio, ratio.papers_ratio) == (Ratios((1.5, 2.0)), Ratios((5.0,)))
    unknown = structs.replace(ratio, incomparable="too short").as_ratio
    assert unknown is not None
    assert all(map(math.isnan, unknown.values))
    assert claim((1.5, 2.0)).as_ratio is None


def test_the_gap_widens_or_it_does_not() -> None:
    case = SpeedupCase("weak", "made up", 0.5)
    widens = claims(case, [three(100, 2.0), three(200, 5.0)])
    assert [one.verdict for one in widens] == ["agrees", "agrees", "agrees", "differs", "agrees"]
    shrinks = claims(case, [three(100, 5.0), three(200, 2.0)])
    assert shrinks[-1].verdict == "differs"
    slow = claims(case, [three(100, 2.0), Pair(200, [took(1.0)] * 3, [ended(1.0)] * 3)])
    assert {one.verdict for one in slow[2:]} == {"differs"}
    open_ = claims(case, [three(100, 2.0), Pair(200, [took(9.0)] * 3, [ended(1.0)] * 3)])
    assert {one.verdict for one in open_[2:]} == {"not comparable"}


def three(concurrency: int, speedup: float) -> Pair:
    sync = [took(speedup * noise) for noise in (0.99, 1.0, 1.01)]
    return Pair(concurrency, sync, [took(1.0)] * 3)


def test_speedup_is_trips_gain_times_throughput() -> None:
    pair = Pair(100, [Reached(6.0, 900.0, 9.0)], [Reached(2.0, 100.0, 1.0)])
    [gain], [trips], [throughput] = pair.speedup.values, pair.trips_gain.values, pair.throughput
    assert gain == pytest.approx(trips * throughput)
    assert (gain, trips) == (3.0, 9.0)


def test_a_pair_that_never_met_its_target_has_only_a_bound() -> None:
    pair = Pair(100, [took(1.0)], [ended(1.0)])
    assert (pair.speedup.bound, pair.trips_gain.bound) == ("at most", "at most")
    case, reached = SpeedupCase("weak", "tuned", 0.1), Pair(50, [took(1.0)], [took(1.0)])
    assert "C = 100" in speedup.unmet({case: [reached, pair]})[0]
    assert speedup.unmet({case: [reached]}) == []


def test_notes_do_not_say_that_a_run_met_its_target_if_it_did_not() -> None:
    pair = Pair(130, [took(2.0), ended(2.0)], [ended(1.0), ended(1.0)])
    [rounds] = lstm_speedup.rounds([pair])
    assert "SyncFL needed 20, at least 20 rounds" in rounds
    assert "AsyncFL at least 10, at least 10 versions" in rounds
    [short] = speedup.transients({SpeedupCase("weak", "tuned", 0.1): [pair]})
    assert short.startswith("SyncFL met the target, or its run ended, in fewer than 50 rounds")


def test_a_share_of_a_speedup_says_why_it_is_unknown() -> None:
    def share(over: list[Reached], small: list[Reached]) -> PaperClaim:
        runs = {designs.OVER: over, designs.LARGE: [took(1.5)] * 3, designs.SMALL: small}
        return designs.claims("made up", runs)[1]

    faster, ones = [took(hours) for hours in (2.0, 3.0, 4.0)], [took(1.0)] * 3
    assert share(faster, ones).verdict == "agrees"
    one_is_slower = share([took(0.9), *faster[1:]], ones)
    assert one_is_slower.verdict == "not comparable"
    assert one_is_slower.why == "not every seed has a speedup to divide"
    assert share(faster, [ended(1.0)] * 3).why == "runs ended before they reached their targets"


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


def table_row(p99: float) -> TableRow:
    return TableRow({"all": [20.0] * 3, "p75": [20.0] * 3, "p99": [p99] * 3}, [20.0] * 3, [1.0] * 3)


def test_what_damping_explains_is_the_part_of_the_gap_that_disappears_without_it() -> None:
    rows = dict(zip(model_quality.METHODS, map(table_row, (30.0, 31.0, 34.0)), strict=True))
    found = list(model_quality.damping("made up", rows, {"same rates": table_row(33.0)}))
    at_99 = {f.name.partition(": ")[2]: f for f in found if "99th" in f.name}
    ratio, share = at_99.values()
    assert ratio.mean == pytest.approx(33 / 30)
    assert share.mean == pytest.approx(25.0)
    assert share.unit == "%"
    none = next(f for f in found if "share" in f.name and ", all" in f.name)
    assert math.isnan(none.mean)  # AsyncFL is as good as SyncFL: there is no gap


def test_without_damping_clients_have_the_influence_of_their_examples() -> None:
    def counted(damping: float) -> sampling_bias.Counted:
        """Only the last client, which has the most data, is stale."""
        examples = np.arange(1.0, 201.0)
        influence = examples.copy()
        influence[-2:] *= damping
        return sampling_bias.Counted(examples, examples, examples, influence)

    findings = sampling_bias.influences({"AsyncFL": [counted(0.5)]}, counted(1.0))
    top = {f.name.partition(":")[0]: f.mean for f in findings if "most data" in f.name}
    assert top["AsyncFL"] == pytest.approx(-50, abs=1)
    assert top["AsyncFL without damping"] == pytest.approx(0)


def test_the_papers_ratio_of_goals_is_drawn_where_ours_is_not_reached() -> None:
    by = {100: [ended(9.0)] * 3, 1000: [took(4.3**0.5)] * 3}
    [(goal, hours)] = goal_sweep.papers_hours(QUICK, {"made up": by})
    assert goal == 100
    assert hours == pytest.approx(1.0)


def test_the_weighted_distance_is_that_of_repeated_values() -> None:
    rng = np.random.default_rng(3)
    sample, reference = rng.integers(0, 9, 40).astype(float), rng.integers(2, 12, 30).astype(float)
    weights, others = rng.integers(1, 5, 40).astype(float), rng.integers(1, 5, 30).astype(float)
    repeated = ks_statistic(
        np.repeat(sample, weights.astype(int)), np.repeat(reference, others.astype(int))
    )
    assert weighted_ks(sample, weights, reference, others) == pytest.approx(repeated)


def test_a_target_between_two_judged_versions_is_met_between_them() -> None:
    curve = a_curve(4.0, 3.0, 2.9, 2.9)
    assert met(curve, 3.5) == pytest.approx(Reached(0.5, 100.0, 5.0))
    assert met(curve, 4.5).hours == 0.0
    assert met(curve, 1.0) == Reached(3.0, 600, 30, is_there=False)


def test_a_target_that_was_met_but_not_kept_before_is_met_where_it_is_kept() -> None:
    """The line between two versions that both meet the loss does not meet it."""
    noisy = a_curve(2.5, 1.9, 1.899, 2.3, 1.7, 1.6, 1.6)
    assert met(noisy, 2.0) == Reached(2.0, 400, 20)
    cut = a_curve(2.6, 2.5, 2.4, 2.3, 1.98, 1.97, 2.2, 1.8, 1.7, 1.6)
    assert met(cut, 2.0).hours >= 5.0


def test_a_target_that_is_met_at_the_very_end_may_be_kept() -> None:
    """Only three judged versions show that it is kept, so the lower bound is where it was met."""
    assert met(a_curve(4.0, 3.5, 3.0, 2.0), 2.5) == Reached(2.5, 500.0, 25.0, is_there=False)
    assert met(a_curve(4.0, 3.5, 2.5, 2.0), 3.0) == Reached(1.5, 300.0, 15.0, is_there=False)
    assert met(a_curve(4.0, 2.0, 3.6, 3.5), 3.0) == Reached(3.0, 600, 30, is_there=False)


def a_curve(*losses: float) -> Curve:
    """A version is judged every hour."""
    points = tuple(
        Point(10 * i, 1.0 * i, 100 * i, 200 * i, Quality(loss, loss, loss, loss))
        for i, loss in enumerate(losses)
    )
    return Curve("made up", rates(0.01), points, ())


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
                "--first-seed",
                "6",
                "--data",
                "none",
                "--output",
                str(tmp_path),
            ]
        )
        == 0
    )
    assert "bytes into the TSA per client" in capsys.readouterr().out
    assert "<td>seeds<td>6<" in (tmp_path / "quick" / "report.html").read_text("utf-8")


def test_a_chart_has_a_triangle_where_only_a_bound_is_known() -> None:
    exact = compared([took(2.0), took(3.0)], [took(1.0), took(2.0)])
    at_most = compared([took(2.0), took(3.0)], [ended(1.0), took(2.0)])
    unknown = compared([ended(2.0), took(3.0)], [ended(1.0), took(2.0)])
    panel = charts.ratio_panel("", "", {"made up": [(1, exact), (2, at_most), (3, unknown)]})
    (_, first), (_, second), (_, third) = panel.lines["made up"]
    assert tuple(first) == (2.0, 1.5)
    assert all(map(math.isnan, (*second, *third)))
    assert panel.bounds == {"made up": [(2, 1.75, "at most")]}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What would be saved."""
    figures: list[Figure] = []

    def keep(make: Callable[[], Figure], path: Path) -> Path:
        figures.append(make())
        return path

    monkeypatch.setattr(charts, "save", keep)
    return figures


def test_a_line_is_interrupted_where_a_value_is_unknown(drawn: list[Figure]) -> None:
    line = [(1.0, [2.0, 3.0]), (2.0, [math.nan, 3.0]), (3.0, [1.0, 1.0])]
    charts.lines(Path(), "made up", "x", [charts.Panel("", "", {"made up": line})])
    [means] = [found for found in drawn[0].axes[0].lines if found.get_label() == "made up"]
    assert np.array_equal(means.get_ydata(), [2.5, math.nan, 1.0], equal_nan=True)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        *((0.25, 4.4), (0.9, 1.1), (1.0, 1.0), (8.8e-4, 0.14), (0.51, 1.9), (3, 9000)),
        # The logarithm of the one that is no power of ten rounds to that of the power.
        *((0.09999999999999999, 0.5), (1e-4, 1000.0000000000001)),
    ],
)
def test_ticks_of_a_logarithm_enclose_all_values(low: float, high: float) -> None:
    ticks = charts.log_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert len(ticks) <= 9
    assert ticks == sorted(set(ticks))


def test_no_value_lies_above_the_last_tick(drawn: list[Figure]) -> None:
    values = {"made up": [(0.5, Ratios((4.4,), "at least")), (1.0, Ratios((0.45,)))]}
    charts.lines(Path(), "made up", "x", [charts.ratio_panel("", "", values, ((1.0, 4.3),))])
    axis = drawn[0].axes[0]
    low, *_, high = axis.get_yticks()
    assert low <= 0.45
    assert high >= 4.4
    assert axis.get_ylim()[0] <= low
    assert axis.get_ylim()[1] >= high


def test_a_spread_shows_bounds_as_triangles_and_unknown_ratios_at_the_edge(
    drawn: list[Figure],
) -> None:
    exact, most, unknown = Ratios((2.0,)), Ratios((0.5,), "at most"), Ratios((math.nan,))
    row = charts.SpreadRow("made up", Ratios((5.0,)), exact, {"rates": [exact, most, unknown]})
    charts.spreads(Path(), "made up", "ratio", [[charts.SpreadPanel("", [row])]], "")
    axis = drawn[0].axes[0]
    marks = {
        (str(line.get_marker()), float(np.asarray(line.get_xdata())[0]))
        for line in axis.lines
        if len(np.asarray(line.get_xdata())) == 1
    }
    assert {("*", 5.0), ("o", 2.0), ("<", 0.5), ("x", 0.985)} <= marks
    assert [label.get_text() for label in axis.get_yticklabels()] == ["made up"]
    assert min(axis.get_xlim()) < 0.5
    assert max(axis.get_xlim()) >= 5.0
