"""Every learning claim with one input changed at a time, beside the paper and the experiment.

Each run differs from one of the experiments' own in one input: the dialect, the factor of all
server rates (those of both sides of a comparison), the target (for losses at a fixed point: how
early it is) or the seed of the language and everybody's data. All are along the recordings of the
first seed, with the rates that were chosen for the unchanged inputs. Real text has no dialect; its
other "languages" are other assignments of the text to devices.

Left out is `lstm-speedup`, which takes too long. The share of small K in a speedup is not a ratio,
and is only in the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, get_args

from papaya.study.experiments import (
    charts,
    designs,
    goal_sweep,
    model_quality,
    speedup,
    sync_scaling,
    training_curves,
)
from papaya.study.experiments.result import PaperClaim, number
from papaya.study.experiments.runs import (
    AS_CHOSEN,
    HEADLINE,
    PLANS,
    Scale,
    Variation,
    async_plan,
    name_of,
)
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan, Run
from papaya.study.workloads.paper import Dialect, Model, is_text

DIALECTS: Final[tuple[Dialect, ...]] = get_args(Dialect)
FACTORS: Final = (0.5, 1.0, 2.0)
SHARES: Final = (0.7, 0.5, 0.3, 0.2, 0.1)
_PARTS: Final = (0.2, 0.4, 0.6, 0.8, 1.0)
_EXPERIMENTS: Final = (
    sync_scaling,
    speedup,
    goal_sweep,
    designs,
    model_quality,
    training_curves,
)


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    """Those of the experiments: their own results are shown beside the variations."""
    return [plan for one in _EXPERIMENTS for plan in one.plans(scale, seeds)]


class Chosen(NamedTuple):
    """What was tuned for one text, and stays when an input changes."""

    one_rate: speedup.Protocol
    tuned: speedup.Protocol
    table: dict[str, Rates]


class LearningClaims(NamedTuple):
    """Of one text, always in the same order: hours and trips, losses and perplexities."""

    time: list[PaperClaim]
    quality: list[PaperClaim]


class ClaimSpread(NamedTuple):
    """`claim` is that of the experiment; `varied`: input -> the claim for each value, in order."""

    label: str
    claim: PaperClaim
    varied: dict[str, list[PaperClaim]]


class TextSpread(NamedTuple):
    """All claims of one text."""

    data: str
    time: list[ClaimSpread]
    quality: list[ClaimSpread]


def choose(lab: Lab, scale: Scale, data: str = HEADLINE) -> Chosen:
    methods = model_quality.METHODS
    table = {name: model_quality.tune(lab, scale, name, data).rates for name in methods}
    return Chosen(*speedup.protocols(lab, scale, data), table)


def spread(lab: Lab, scale: Scale, seeds: Sequence[int], data: str, chosen: Chosen) -> TextSpread:
    inputs = _inputs(scale, seeds, data)
    # All at once, so that no processor waits.
    every = dict.fromkeys(varied for values in inputs.values() for varied in values)
    lab.learn(run for varied in every for run in runs_of(scale, seeds[0], data, chosen, varied))
    own = claims_of(lab, scale, seeds, data, chosen, scale.curve_model)
    varied = {each: claims_of(lab, scale, seeds[:1], data, chosen, varied=each) for each in every}

    def spreads(group: int) -> list[ClaimSpread]:
        return [
            ClaimSpread(
                claim.statement.removeprefix(name_of(data)).lstrip(",: "),
                claim,
                {name: [varied[v][group][at] for v in values] for name, values in inputs.items()},
            )
            for at, claim in enumerate(own[group])
        ]

    return TextSpread(data, spreads(0), spreads(1))


def _inputs(scale: Scale, seeds: Sequence[int], data: str) -> dict[str, list[Variation]]:
    """Input -> its values. Except for the target, one of them is that of the experiments."""
    languages = [None, *seeds[1 : scale.languages]]
    targets = f"target: {', '.join(f'{100 * share:g}' for share in SHARES)} % left"
    found = {
        "server rates of both sides: half, as chosen, twice": [
            Variation(factor=each) for each in FACTORS
        ],
        targets: [
            Variation(share=share, part=part) for share, part in zip(SHARES, _PARTS, strict=True)
        ],
        "language and data: as in the experiment, then others": [
            Variation(language=each) for each in languages
        ],
    }
    if is_text(data):
        return found
    dialects = [Variation(dialect=None if each == HEADLINE else each) for each in DIALECTS]
    return {"dialect: none, weak, strong": dialects, **found}


def runs_of(scale: Scale, seed: int, data: str, chosen: Chosen, varied: Variation) -> list[Run]:
    """All that `claims_of` learns for a variation."""
    at, goals = scale.concurrency, {scale.goals[0], scale.goals[-1], scale.large_goal, scale.goal}
    ends = (scale.concurrencies[0], scale.concurrencies[-1])
    wanted = [
        *(
            (make(scale, c, seed), protocol.rates[regime, c])
            for protocol in (chosen.one_rate, chosen.tuned)
            for regime, make in PLANS.items()
            for c in ends
        ),
        *(
            (PLANS["SyncFL"](scale, c, seed), chosen.one_rate.rates["SyncFL", c])
            for c in (scale.concurrencies[-2], at)
        ),
        *(
            (async_plan(scale, at, seed, goal), chosen.one_rate.rates["AsyncFL", at])
            for goal in sorted(goals)
        ),
        *(
            (model_quality.method_plan(scale, name, seed), rates)
            for name, rates in chosen.table.items()
        ),
    ]
    return [varied.run(plan, rates, data) for plan, rates in wanted]


def claims_of(
    lab: Lab,
    scale: Scale,
    seeds: Sequence[int],
    data: str,
    chosen: Chosen,
    model: Model = "embedding",
    varied: Variation = AS_CHOSEN,
) -> LearningClaims:
    """`model`: of the training curves."""
    name, what = name_of(data), (lab, scale, seeds, data)
    share, at = chosen.one_rate.share, scale.concurrency
    rates = {regime: chosen.one_rate.rates[regime, at] for regime in PLANS}
    sync, asynchronous = rates["SyncFL"], rates["AsyncFL"]
    growing, compared = scale.concurrencies[-2:], designs.COMPARED
    goals = (scale.goals[0], scale.goals[-1])
    ends = (scale.concurrencies[0], scale.concurrencies[-1])
    time = sync_scaling.claims(
        scale, name, sync_scaling.measured(*what, sync, share, growing, varied)
    )
    for protocol in (chosen.one_rate, chosen.tuned):
        pairs = [speedup.pair_at(*what, protocol, c, varied) for c in ends]
        time += speedup.claims(protocol.case(data), pairs)
    by_goal = goal_sweep.measured(*what, asynchronous, share, goals, varied)
    time.append(goal_sweep.claim(name, by_goal))
    time += designs.claims(name, designs.measured(*what, rates, share, compared, varied))
    table = model_quality.measured(*what, chosen.table, varied)
    curves = training_curves.measured(*what, rates, compared, model, varied)
    quality = [
        *model_quality.claims(name, table),
        *training_curves.claims(scale, name, curves, varied.part),
    ]
    return LearningClaims(time, quality)


# -- how they are shown -------------------------------------------------------------------------


def draw(lab: Lab, key: str, found: Sequence[TextSpread]) -> str:
    """Hours and trips above, losses and perplexities below; a text beside the other."""
    names = [name_of(each.data).capitalize() for each in found]
    grid = [
        [
            _panel(f"{name}: hours and trips", each.time)
            for name, each in zip(names, found, strict=True)
        ],
        [
            _panel(f"{name}: perplexity and loss", each.quality)
            for name, each in zip(names, found, strict=True)
        ],
    ]
    caption = (
        "Marks grow from the first value of an input to the last. Changes in percent are drawn as "
        f"ratios.\n{_LOSSES}"
    )
    return charts.spreads(lab.folder, key, "ratio", grid, caption)


def _panel(title: str, spreads: Sequence[ClaimSpread]) -> charts.SpreadPanel:
    rows = []
    for each in spreads:
        own = each.claim.as_ratio
        if own is not None:
            varied = {
                name: [ratio for claim in claims if (ratio := claim.as_ratio) is not None]
                for name, claims in each.varied.items()
            }
            rows.append(charts.SpreadRow(each.label, each.claim.papers_ratio, own, varied))
    return charts.SpreadPanel(title, rows)


_LOSSES: Final = (
    "Losses and perplexities at a fixed hour or number of updates have no target: they are read "
    "after one to five fifths of it."
)


def table(scale: Scale, found: Sequence[TextSpread]) -> str:
    """The numbers of the figure, and of the claims that are no ratios, in Markdown."""
    lines = [
        f"# Sensitivity of the learning claims at scale {scale.name}",
        "",
        (
            "Every learning claim with one input changed at a time. The column *here* has the "
            "number of the experiment itself, with the 95 % confidence interval over seeds. The "
            "others have one number for each value of the input, along the recordings of one seed. "
            "≤ and ≥ mark bounds. – marks a number that is unknown, mostly because runs ended too "
            f"early. A target is the share of the reducible loss that is left. {_LOSSES}"
        ),
        "",
    ]
    for text in found:
        spreads = [*text.time, *text.quality]
        inputs = list(spreads[0].varied)
        lines += [f"## {name_of(text.data).capitalize()}", ""]
        lines += [
            f"| claim | paper | here | {' | '.join(inputs)} |",
            "|---" * (3 + len(inputs)) + "|",
        ]
        for each in spreads:
            cells = [", ".join(map(_cell, each.varied[name])) for name in inputs]
            own = f"{each.label} | {each.claim.paper} | {each.claim}"
            lines.append(f"| {own} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(claim: PaperClaim) -> str:
    mean = math.nan if claim.incomparable else claim.mean
    signs = {"": "", "at most": "≤ ", "at least": "≥ "}
    return signs[claim.bound] + number(mean) if math.isfinite(mean) else number(mean)
