"""The reference client keeps every rule of the page that the kit can exercise."""

from __future__ import annotations

import asyncio
from pathlib import Path

from papaya.conformance.kit import ConformanceReport, opened_kit
from papaya.conformance.scenarios import SCENARIOS
from tests.conformance.clients import reference_visit


def test_the_reference_client_keeps_every_rule(tmp_path: Path) -> None:
    async def scenario() -> ConformanceReport:
        # A heartbeat long enough for a loaded machine: three without a request end a session.
        async with opened_kit(tmp_path, heartbeat_s=2.0) as (kit, _):
            return ConformanceReport(
                tuple([await kit.play(kind, reference_visit) for kind in SCENARIOS])
            )

    report = asyncio.run(scenario())
    assert [(r.scenario, r.broken) for r in report.results if r.broken] == []
    assert report.not_exercised == []
    assert report.conforms
