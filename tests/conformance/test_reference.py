"""The reference client keeps every rule of the page that the kit can exercise."""

from __future__ import annotations

import asyncio
from pathlib import Path

from papaya.conformance.kit import ConformanceReport, ScenarioResult, opened_kit
from papaya.conformance.scenarios import SCENARIOS, Scenario
from tests.conformance.clients import reference_visit

_KITS = 3


async def _play(folder: Path, kinds: list[type[Scenario]]) -> list[ScenarioResult]:
    folder.mkdir()
    # Three heartbeats without a request end a session, and while a server restarts, the client in
    # this process cannot send requests: for ten seconds and more on a very busy machine.
    async with opened_kit(folder, heartbeat_s=15.0) as (kit, _):
        return [await kit.play(kind, reference_visit) for kind in kinds]


def test_the_reference_client_keeps_every_rule(tmp_path: Path) -> None:
    """Several kits at once: a scenario waits more than it computes."""

    async def scenario() -> ConformanceReport:
        parts = [
            _play(tmp_path / str(number), list(SCENARIOS[number::_KITS])) for number in range(_KITS)
        ]
        found = await asyncio.gather(*parts)
        return ConformanceReport(tuple(result for results in found for result in results))

    report = asyncio.run(scenario())
    assert len(report.results) == len(SCENARIOS)
    assert [(r.scenario, r.broken) for r in report.results if r.broken] == []
    assert report.not_exercised == []
    assert report.conforms
