"""How long client updates are, the clip that follows from it, and what fixed point makes of them.

Three lines for people, of one learning run; `papaya/study/precision.py` has the numbers.
"""

from __future__ import annotations

from papaya.sim.report import percent
from papaya.study.precision import LEAST_UPDATES
from papaya.study.run import RunResult


def scale_rows(learnt: RunResult) -> list[tuple[str, str]]:
    """(what, words)"""
    return [
        ("update norms", _norms(learnt)),
        ("clip", _clip(learnt)),
        ("fixed point", _fixed_point(learnt)),
    ]


def lines(rows: list[tuple[str, str]]) -> list[str]:
    return [f"  {name:<13} {text}" for name, text in rows]


def _norms(learnt: RunResult) -> str:
    norms = learnt.norms
    if norms is None:
        return "–"
    return (
        f"median {norms.p50:.3g}, 90 % {norms.p90:.3g}, 99 % {norms.p99:.3g}, "
        f"longest {norms.largest:.3g} (of the first {norms.updates:,})"
    )


def _clip(learnt: RunResult) -> str:
    found, own = learnt.precision, learnt.run.rates.clip
    if found is None:
        return _why_none(learnt)
    now = "the task has none" if own is None else f"the task has {own:g}"
    return f"suggested {found.clip:g}: {percent(found.clipped)} of updates are longer; {now}"


def _why_none(learnt: RunResult) -> str:
    if learnt.curve.diverged is not None:
        return "– (the run diverged: its updates say nothing)"
    if learnt.norms is None or learnt.norms.updates < LEAST_UPDATES:
        return f"– (too few to tell: it needs {LEAST_UPDATES} client updates)"
    return "–"


def _fixed_point(learnt: RunResult) -> str:
    found = learnt.precision
    if found is None:
        return "–"
    if not found.is_enough:
        return f"K leaves {found.levels:,} levels, {found.needed:,} are needed: lower K"
    return (
        f"at this clip and K a step is {found.step:.2g}; a coordinate of the mean misses by "
        f"{found.error:.2g} (at most {found.error_bound:.2g}), of a median update it is "
        f"{found.coordinate:.2g}"
    )
