"""The results of a reproduction as Markdown: the verdicts on all claims, and all other numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, get_args

from papaya.study.experiments.result import ClaimVerdict, Finding, PaperClaim, Result
from papaya.study.experiments.runs import Scale

LEFT_OUT: Final = "Made with other seeds, another scale or other code, and left out here: "
SHARE: Final = (
    "The share of the paper's effect decides no verdict: 100 % is the paper's number, 0 % no "
    "effect, and a negative share an effect in the other direction."
)
_CALIBRATED: Final = " (calibrated input)"


def verdicts(claims: Sequence[PaperClaim]) -> str:
    """How many claims agree, differ, and cannot be compared."""
    if not claims:
        return "no claims"
    counts = dict.fromkeys(get_args(ClaimVerdict), 0)
    for claim in claims:
        counts[claim.verdict] += 1
    agrees, differs, others = counts.values()
    return f"{agrees} agree, {differs} differ, {others} not comparable"


def verdict_tables(
    results: Sequence[Result],
    scale: Scale,
    seeds: Sequence[int],
    missing: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> str:
    """All claims and failed checks, including those of experiments that run only by name if the
    folder has their results. `missing`: experiments without a result. `left_out`: results of other
    inputs.
    """
    every = [claim for result in results for claim in result.claims]
    lines = [
        f"# Verdicts at scale {scale.name}, seeds {seeds[0]} to {seeds[-1]}",
        "",
        f"{len(every)} claims: {verdicts(every)}. Brackets: 95 % confidence intervals over seeds.",
        SHARE,
        *_absent(missing, left_out),
    ]
    for result in results:
        if not result.claims and all(check.holds for check in result.checks):
            continue
        lines += _heading(result)
        if result.claims:
            lines += ["| claim | paper | here | verdict | share of the paper's effect |"]
            lines += ["|---|---|---|---|---|"]
            lines += map(_verdict_row, result.claims)
        failed = [check for check in result.checks if not check.holds]
        lines += [f"\nCheck of method fails: {one.rule} ({one.detail})." for one in failed]
    return "\n".join(lines) + "\n"


def number_tables(
    results: Sequence[Result],
    scale: Scale,
    seeds: Sequence[int],
    missing: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> str:
    """All numbers that are not claims, all checks of method with their details, and all notes."""
    lines = [
        f"# Other numbers at scale {scale.name}, seeds {seeds[0]} to {seeds[-1]}",
        "",
        (
            "All numbers, checks and notes of the report that are not claims. Brackets: 95 % "
            "confidence intervals over seeds."
        ),
        *_absent(missing, left_out),
    ]
    for result in results:
        lines += _heading(result)
        if result.findings:
            lines += ["| number | paper | here |", "|---|---|---|"]
            lines += [*map(_number_row, result.findings), ""]
        for check in result.checks:
            verdict = "holds" if check.holds else "fails"
            lines.append(f"- Check of method {verdict}: {check.rule} ({check.detail}).")
        lines += [f"- {note}" for note in result.notes]
    return "\n".join(lines) + "\n"


def _absent(missing: Sequence[str], left_out: Sequence[str]) -> Iterator[str]:
    if missing:
        yield from ("", f"Not run: {', '.join(missing)}.")
    if left_out:
        yield from ("", f"{LEFT_OUT}{', '.join(left_out)}.")


def _heading(result: Result) -> list[str]:
    return ["", f"## {result.title}", "", f"{result.paper}.", ""]


def _verdict_row(claim: PaperClaim) -> str:
    verdict = f"{claim.verdict} ({claim.why})" if claim.why else claim.verdict
    share = claim.share_of_effect or "–"
    return _row(claim.statement, claim.paper, claim, verdict, share)


def _number_row(finding: Finding) -> str:
    calibrated = _CALIBRATED if finding.kind == "input" else ""
    return _row(finding.name + calibrated, finding.paper, finding)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
