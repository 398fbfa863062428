"""Each client that breaks one rule is caught, with the id of that rule."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from papaya.conformance.kit import ClientSetup, ScenarioResult, chosen, opened_kit
from papaya.conformance.rules import RULES
from papaya.conformance.scenarios import RejectedFirst
from papaya.device import selectors
from papaya.device.trust import Trust
from papaya.messages.base import Message
from papaya.messages.participation import Complete, Report
from tests.conformance.broken import BREAKS, minimal_visit
from tests.conformance.clients import (
    Credulous,
    InTheClear,
    SkipsMeasurement,
    SkipsReportData,
    reference_visit,
)

Broken = Callable[[ClientSetup], Awaitable[None]]


async def _altering(
    kind: type[Message], alter: Callable[[Any], Message], setup: ClientSetup
) -> None:
    """The reference device, with one type of request changed on its way out."""
    honest = selectors._http

    def other(message: Message) -> Any:
        return honest(alter(message) if isinstance(message, kind) else message)

    selectors._http = other
    try:
        await reference_visit(setup)
    finally:
        selectors._http = honest


def _resealing() -> Callable[[Any], Message]:
    drawn = iter(range(100))
    return lambda message: structs.replace(message, sealed=bytes([next(drawn)]) * 64)


async def _in_the_clear(setup: ClientSetup) -> None:
    """Its owner's copy says secure, and it does what the server says."""
    await reference_visit(structs.replace(setup, task={**setup.task, "secure": False}))


SECURE: dict[str, tuple[str, Broken]] = {
    "evidence": ("forged-quote", partial(reference_visit, trust=Credulous)),
    "sealed": ("secure-faults", partial(_altering, Complete, _resealing())),
    "examples": (
        "secure",
        partial(_altering, Report, lambda message: structs.replace(message, examples=7)),
    ),
    "decides": ("clear-instead", _in_the_clear),
}
CLIENTS: dict[str, tuple[str, Broken]] = {
    **{
        rule: (name, partial(minimal_visit, change=change))
        for rule, (name, change) in BREAKS.items()
    },
    **SECURE,
}


class RejectedForLong(RejectedFirst):
    """On a busy machine, a client that does not wait may take more than a second to come back."""

    retry_from_s = 60.0


def test_there_is_a_broken_client_for_every_rule() -> None:
    assert sorted(CLIENTS) == sorted(rule.id for rule in RULES)


def test_each_client_that_breaks_a_rule_is_caught(tmp_path: Path) -> None:
    """One kit and one test for all of them: they wait more than they compute, and a server takes
    longer to start than most of them to fail.
    """

    async def play() -> dict[str, ScenarioResult]:
        async with opened_kit(tmp_path, heartbeat_s=2.0) as (kit, _):
            found = {}
            for rule, (name, visit) in CLIENTS.items():
                [scenario] = chosen([name])
                if scenario is RejectedFirst:
                    scenario = RejectedForLong
                found[rule] = await kit.play(scenario, visit)
            return found

    results = asyncio.run(play())
    missed = {
        rule: result
        for rule, result in results.items()
        if rule not in [finding.rule for finding in result.broken]
    }
    assert missed == {}


SKIPPED_CHECKS: dict[str, Callable[..., Trust]] = {
    "forged-record": SkipsMeasurement,
    "forged-identity": partial(SkipsReportData, skips="identity"),
    "forged-parameters": partial(SkipsReportData, skips="parameters"),
}


def test_a_client_that_skips_one_check_of_the_evidence_is_caught(tmp_path: Path) -> None:
    """The client does all other checks, including those of the agreed terms and the signature."""

    async def play() -> dict[str, ScenarioResult]:
        async with opened_kit(tmp_path, heartbeat_s=5.0) as (kit, _):
            found = {}
            for name, trust in SKIPPED_CHECKS.items():
                [scenario] = chosen([name])
                found[name] = await kit.play(scenario, partial(reference_visit, trust=trust))
            return found

    for name, result in asyncio.run(play()).items():
        assert "evidence" in [finding.rule for finding in result.broken], name


async def _words_of_32_bits(setup: ClientSetup) -> None:
    """It has no idea of shorter words, although it offers them."""
    await reference_visit(structs.replace(setup, task={**setup.task, "upload_bits": 32}))


OTHERS: tuple[tuple[str, Broken, str], ...] = (
    ("secure", partial(reference_visit, trust=InTheClear), "counted"),
    ("secure-16-bit", _words_of_32_bits, "sealed"),
    (
        "evaluation",
        partial(_altering, Report, lambda message: structs.replace(message, examples=7)),
        "evaluation",
    ),
)


def test_other_ways_to_break_a_rule(tmp_path: Path) -> None:
    async def play() -> list[list[str]]:
        async with opened_kit(tmp_path, heartbeat_s=5.0) as (kit, _):
            found = []
            for name, visit, _rule in OTHERS:
                [scenario] = chosen([name])
                result = await kit.play(scenario, visit)
                found.append([finding.rule for finding in result.broken])
            return found

    broken = asyncio.run(play())
    assert [rule in found for (_, _, rule), found in zip(OTHERS, broken, strict=True)] == [True] * 3
