"""Pictures of a sweep: what is drawn where."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from papaya.study import learning_plots
from papaya.study.sweep import ResultRow, SweptValue


def a_row(loss: float, *, diverged: int = 0, **setting: SweptValue) -> ResultRow:
    return ResultRow(
        label="",
        setting={"regime": "async", **setting},
        outcomes=(),
        diverged=diverged,
        loss=loss,
        loss_spread=None,
        p75=loss,
        p99=loss,
        hours=1.0,
        trips=10.0,
        target_hours=None,
        target_hours_spread=None,
        target_trips=None,
        utilization=None,
        ks=None,
    )


def test_a_variable_with_texts_has_a_place_for_each_and_a_line_through_the_best() -> None:
    axes = Figure().add_subplot()
    rows = [
        a_row(2.0, kind="median"),
        a_row(3.0, kind="mean"),
        a_row(1.0, kind="mean"),
        a_row(0.1, kind="krum", diverged=1),
    ]
    learning_plots._draw_variable(axes, rows, "kind")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["krum", "mean", "median"]
    [line] = [line for line in axes.get_lines() if line.get_label() == "async"]
    assert np.asarray(line.get_xydata()).tolist() == [[1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize(("values", "scale"), [((1.0, 100.0), "log"), ((1.0, 2.0), "linear")])
def test_a_variable_with_numbers_has_ticks_where_something_was_tried(
    values: tuple[float, ...], scale: str
) -> None:
    axes = Figure().add_subplot()
    learning_plots._draw_variable(axes, [a_row(1.0, K=value) for value in values], "K")
    assert axes.get_xscale() == scale
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [f"{v:g}" for v in values]
