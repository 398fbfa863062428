"""Reproduce figures and tables of the paper: record, learn, compare, write.

    results = reproduce(["speedup"], QUICK, seeds=[1, 2], folder=Path("runs/reproduce"))

Writes one JSON file and the plots of each experiment, and report.html, verdicts.md and numbers.md
for all of them. Every recorded run is kept in the folder: calling it again goes on from there.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Final, Protocol, cast

import msgspec
from msgspec import Struct, structs
from msgspec.structs import asdict

from papaya.config import TaskConfig
from papaya.sim.jobs import mapping, write_whole
from papaya.sim.population import DEFAULT, STRESS
from papaya.study.experiments import (
    designs,
    execution_times,
    goal_sweep,
    lstm_speedup,
    model_quality,
    privacy,
    sampling_bias,
    sensitivity,
    server_updates,
    speedup,
    stale_limit,
    sync_scaling,
    tee_transfer,
    training_curves,
    utilization,
)
from papaya.study.experiments.result import Check, Finding, PaperClaim, Result
from papaya.study.experiments.runs import (
    CLIENT,
    HEADLINE,
    LSTM_CLIENT,
    SUPPLY,
    Scale,
    corpora_of,
    workload_of,
)
from papaya.study.experiments.tables import (
    LEFT_OUT,
    SHARE,
    number_tables,
    verdict_tables,
    verdicts,
)
from papaya.study.identity import EXPERIMENTS as EXPERIMENT_CODE
from papaya.study.identity import digest
from papaya.study.lab import Lab, LabStep
from papaya.study.run import RecordingPlan
from papaya.study.workloads.paper import DIALECTS, keep_corpus, kept_corpus, text_data
from papaya.study.workloads.text import Corpus

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }
h1 { margin-bottom: 0; } h2 { margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #eee; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.input { color: #777; } .input td:first-child::after { content: " (calibrated input)"; }
.agrees::before { content: "= "; } .differs::before { content: "≠ "; }
.agrees { color: #176; } .differs { color: #a40; } .incomparable { color: #777; }
.fails { color: #c33; } img { max-width: 100%; } .paper, .notes { color: #555; }
"""


class Experiment(Protocol):
    """A module of this package; `EXPERIMENTS` has all of them, in the order of the report."""

    KEY: str

    def plans(self, scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
        """The runs of the machines that it needs."""

    def run(self, lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
        """What came of them."""


_MODULES: Final[tuple[ModuleType, ...]] = (
    execution_times,
    sync_scaling,
    utilization,
    server_updates,
    speedup,
    goal_sweep,
    sampling_bias,
    model_quality,
    training_curves,
    designs,
    tee_transfer,
    stale_limit,
    sensitivity,
    privacy,
    lstm_speedup,
)
EXPERIMENTS: Final[dict[str, Experiment]] = {
    module.KEY: cast(Experiment, module) for module in _MODULES
}


class _Inputs(Struct, frozen=True):
    scale: Scale
    seeds: tuple[int, ...]


def reproduce(
    keys: Sequence[str],
    scale: Scale,
    seeds: Sequence[int],
    folder: Path,
    *,
    jobs: int = 2,
    ray: str | None = None,
    corpus: Corpus | None = None,
    tell: Callable[[LabStep], None] = lambda step: None,
    ended: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """The chosen experiments, in the order of the report. `corpus` is the real text beside the
    synthetic language. `tell` hears of progress, `ended` of each result.
    """
    if corpus is not None:
        keep_corpus(corpus, folder)
        scale = structs.replace(scale, text=text_data(corpus))
    chosen = [one for key, one in EXPERIMENTS.items() if key in keys]
    made_of = digest(_Inputs(scale, tuple(seeds)), EXPERIMENT_CODE)
    results = []
    with mapping(jobs, ray) as mapped:
        lab = Lab(folder, mapped, workload_of, tell, corpora_of)
        lab.record(plan for one in chosen for plan in one.plans(scale, seeds))
        for one in chosen:
            result = structs.replace(one.run(lab, scale, seeds), made_of=made_of)
            encoded = msgspec.json.format(msgspec.json.encode(as_data(result)))
            write_whole(folder / f"{result.key}.json", partial(Path.write_bytes, data=encoded))
            results.append(result)
            ended(result)
    told, left_out = _with_earlier(results, made_of, folder)
    there = {*left_out, *(result.key for result in told)}
    missing = [key for key in EXPERIMENTS if key not in there]
    written = {
        "report.html": page(told, scale, seeds, folder, left_out),
        "verdicts.md": verdict_tables(told, scale, seeds, missing, left_out),
        "numbers.md": number_tables(told, scale, seeds, missing, left_out),
    }
    for name, text in written.items():
        write_whole(folder / name, partial(Path.write_text, data=text, encoding="utf-8"))
    return results


def as_data(result: Result) -> dict[str, object]:
    """For JSON: also what follows from the numbers of its claims."""
    return asdict(result) | {"claims": [_claim_data(claim) for claim in result.claims]}


def _claim_data(claim: PaperClaim) -> dict[str, object]:
    share = claim.share_of_effect
    return asdict(claim) | {
        "mean": claim.mean,
        "interval": claim.interval,
        "verdict": claim.verdict,
        "share_of_effect": share and {"mean": share.mean, "interval": share.interval},
    }


def _with_earlier(
    results: Sequence[Result], made_of: str, folder: Path
) -> tuple[list[Result], list[str]]:
    """Also those of earlier calls with the same inputs, in the order of the report; and the names
    of those with others.
    """
    found = {result.key: result for result in results}
    others = []
    for key in EXPERIMENTS:
        with suppress(FileNotFoundError, msgspec.MsgspecError):
            data = (folder / f"{key}.json").read_bytes()
            earlier = msgspec.json.decode(data, type=Result)
            if earlier.made_of == made_of:
                found.setdefault(key, earlier)
            else:
                others.append(key)
    return [found[key] for key in EXPERIMENTS if key in found], others


# --- The report: one HTML file that needs nothing else --------------------------------------------


def page(
    results: Sequence[Result],
    scale: Scale,
    seeds: Sequence[int],
    folder: Path,
    left_out: Sequence[str] = (),
) -> str:
    """All results; the plots are read from the folder. `left_out`: those made of other inputs."""
    claims = [claim for result in results for claim in result.claims]
    failed = [check for result in results for check in result.checks if not check.holds]
    seeds_text = ", ".join(f"number {seed}" for seed in seeds)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>Papaya: the paper's evaluation, {scale.name}</title><style>{_STYLE}</style>",
        "<h1>The paper's evaluation, reproduced</h1>",
        (
            f"<p class=paper>Scale: {escape(scale.name)}. Seeds: {seeds_text}. "
            f"Claims of the paper: {verdicts(claims)}. Checks of method that fail: "
            f"{len(failed)}.</p>"
        ),
        f"<p>{escape(LEFT_OUT + ', '.join(left_out))}.</p>" if left_out else "",
        f"<p>{escape(_RULE)} {escape(SHARE)}</p>",
        (
            "<p>The inputs are <a href=#inputs>at the end</a>. Grey rows were calibrated to the "
            "paper, so their agreement proves nothing. All other numbers are results of the "
            "simulation; brackets give the 95 % confidence interval over seeds, which also vary "
            "the language and everybody's data.</p>"
        ),
        _contents(results),
        *(_section(result, folder) for result in results),
        _inputs(scale, seeds, folder),
    ]
    return "\n".join(parts)


_RULE = (
    "A claim is a statement of the paper with its number. It agrees if the paper's number lies in "
    'our interval or our mean within a quarter of it; for "above" and "below", if the whole '
    "interval does. A run that ended before its target gives a bound, which can show that a claim "
    "differs, but not that a number is about the same. A claim is not comparable if neither the "
    "bound nor the seeds decide. This rule is the same for all claims and was fixed before the "
    "runs that it applies to."
)


def _contents(results: Sequence[Result]) -> str:
    """Every result with the verdicts on its claims."""
    rows = [
        f"<tr><td><a href=#{escape(result.key)}>{escape(result.title)}</a>"
        f"<td class=paper>{escape(result.paper.partition(':')[0])}<td>{_summary(result)}</tr>"
        for result in results
    ]
    return "\n".join(["<table>", *rows, "</table>"])


def _summary(result: Result) -> str:
    failed = sum(not check.holds for check in result.checks)
    parts = [verdicts(result.claims)] if result.claims else []
    if failed:
        parts.append(f"<span class=fails>{failed} of {len(result.checks)} checks fail</span>")
    return "; ".join(parts)


def _inputs(scale: Scale, seeds: Sequence[int], folder: Path) -> str:
    """Everything that was put in, from the objects that the runs were made of."""
    task = TaskConfig(task="experiment", concurrency=scale.concurrency, model_length=1)
    groups = {
        "size of the runs": asdict(scale)
        | {"seeds": ", ".join(map(str, seeds)), "common rate": scale.common_rate},
        "default population, calibrated to the paper": asdict(DEFAULT),
        "stress population": asdict(STRESS),
        f"language, dialect {HEADLINE}": asdict(DIALECTS[HEADLINE]),
        "real text": {"corpus": kept_corpus(folder, scale.text).about} if scale.text else {},
        "task": {"training_timeout_s": task.training_timeout_s, "max_examples": task.max_examples},
        "fleet": {"check-ins per expected completion": SUPPLY},
        "client SGD": asdict(CLIENT),
        "client SGD of the LSTM": asdict(LSTM_CLIENT),
    }
    rows = [
        f"<tr><td>{escape(group)}<td>{escape(_named(name))}<td>{escape(_words(value))}</tr>"
        for group, fields in groups.items()
        for name, value in fields.items()
    ]
    heading = "<h2 id=inputs>Inputs</h2><p class=paper>Chosen or calibrated.</p>"
    return "\n".join([heading, "<table>", *rows, "</table>"])


def _named(field: str) -> str:
    """`latency_mean_s` -> latency mean (s)"""
    words = field.replace("_", " ")
    return f"{words[:-2]} (s)" if words.endswith(" s") else words


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _section(result: Result, folder: Path) -> str:
    parts = [
        f"<h2 id={escape(result.key)}>{escape(result.title)}</h2>",
        f"<p class=paper>{escape(result.paper)}</p>",
    ]
    if result.claims:
        heading = "<table><tr><th>claim<th>paper<th>here<th><th>share of the paper's effect</tr>"
        parts += [heading, *map(_claim, result.claims)]
        parts.append("</table>")
    parts += [_image(folder / name) for name in result.plots]
    if result.findings:
        heading = "<h3>Other numbers</h3><table><tr><th><th>paper<th>here</tr>"
        parts += [heading, *map(_row, result.findings), "</table>"]
    if result.checks:
        parts += ["<h3>Checks of method</h3><ul>", *map(_check, result.checks), "</ul>"]
    notes = [f"<p>{escape(text)}</p>" for text in result.notes]
    return "\n".join([*parts, "<div class=notes>", *notes, "</div>"])


def _claim(claim: PaperClaim) -> str:
    kind = "incomparable" if claim.verdict == "not comparable" else claim.verdict
    verdict = f"{claim.verdict}: {claim.why}" if claim.why else claim.verdict
    return (
        f"<tr><td>{escape(claim.statement)}<td>{escape(claim.paper)}"
        f"<td class=number>{escape(str(claim))}<td class={kind}>{escape(verdict)}"
        f"<td class='number paper'>{escape(str(claim.share_of_effect or '–'))}</tr>"
    )


def _row(finding: Finding) -> str:
    return (
        f"<tr class={finding.kind}><td>{escape(finding.name)}<td>{escape(finding.paper)}"
        f"<td class=number>{escape(str(finding))}</tr>"
    )


def _check(check: Check) -> str:
    kind, verdict = ("holds", "holds") if check.holds else ("fails", "FAILS")
    return f"<li class={kind}>{verdict}: {escape(check.rule)}: {escape(check.detail)}</li>"


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<img alt='{escape(path.stem)}' src='data:image/png;base64,{data}'>"
