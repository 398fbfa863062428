"""`papaya conformance` as an author of a client runs it: with a command, and by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from papaya.attestation.policy import DevicePolicy
from papaya.cli.conformance import _summary, _toml
from papaya.cli.main import main
from papaya.conformance.judge import RuleFinding
from papaya.conformance.kit import ConformanceReport, ScenarioResult, chosen
from papaya.conformance.rules import PAGE, RULES
from papaya.conformance.scenarios import SCENARIOS
from papaya.conformance.vectors.vectors import all_vectors
from papaya.device.trust import read_policy
from papaya.verifiable_log.note import LOG_SIGNATURE, SignerKey
from tests.unit.test_docs import ROOT, anchors_of, text_of

KIT = [sys.executable, "-m", "papaya", "conformance"]
CLIENT = ROOT / "examples" / "minimal_client.py"
GUIDE = ROOT / "docs" / "write-a-client.md"
RUN = (
    f'exec {sys.executable} -I -S {CLIENT} --server "$PAPAYA_SERVER" '
    '--token-file "$PAPAYA_TOKEN_FILE" --history "$PAPAYA_STATE/history.json" --floor 0'
)
# Long enough for a machine with thirty times the load that it can handle.
HEARTBEAT = ("--heartbeat", "15")
_VISIT_S = 300
_DEADLINE_S = 1200.0


def played(*options: str, command: Sequence[str] = ()) -> tuple[int, str, str]:
    words = [*KIT, *options, *(["--", *command] if command else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=_DEADLINE_S, check=False, env=environment
    )
    return done.returncode, done.stdout, done.stderr


CLEAR = [kind.name for kind in SCENARIOS if not kind.is_secure]


@pytest.mark.parametrize(
    ("names", "rejected_s"),
    [
        pytest.param(["lost-answers", "broken-download", "incomplete"], _VISIT_S, id="some"),
        pytest.param(CLEAR, 15, id="all", marks=pytest.mark.soak),
    ],
)
def test_a_client_written_from_the_page_keeps_the_rules_of_clear_tasks(
    names: list[str], rejected_s: int
) -> None:
    """`examples/minimal_client.py` imports nothing of Papaya. It has no secure aggregation, and
    leaves evaluations.

    `rejected_s`: for how long the client comes back after a rejection. In the scenario `history` it
    is always rejected.
    """
    chosen = [word for name in names for word in ("--scenario", name)]
    options = ("--format", "json", *HEARTBEAT, "--patience", str(_VISIT_S), *chosen)
    code, out, err = played(*options, command=["sh", "-c", f"{RUN} --patience {rejected_s}"])
    report: dict[str, Any] = json.loads(out)
    assert report["broken"] == [], err
    assert (code, report["conforms"]) == (0, True)
    assert [found["scenario"] for found in report["scenarios"]] == names
    left_out = {"examples", "decides", "evidence", "sealed", "evaluation"}
    assert left_out <= set(report["not_exercised"])
    assert names != CLEAR or left_out == set(report["not_exercised"])


def test_a_broken_client_fails_and_is_told_which_rule_it_broke() -> None:
    """It ends while its session is open."""
    python = (
        "import json, os, time, urllib.error, urllib.request as r\n"
        "def ask(path, **message):\n"
        "    url = os.environ['PAPAYA_SERVER'] + '/v1/' + path\n"
        "    token = {'Authorization': 'Bearer ' + os.environ['PAPAYA_TOKEN']}\n"
        "    request = r.Request(url, json.dumps(message).encode(), token)\n"
        "    while True:\n"
        "        try:\n"
        "            return json.load(r.urlopen(request))\n"
        "        except urllib.error.HTTPError as error:\n"
        "            time.sleep(json.load(error)['after_s'])\n"
        "found = {'type': ''}\n"
        "while found['type'] != 'Accepted':\n"
        "    time.sleep(found.get('retry_from_s', 0))\n"
        "    found = ask('check-in', type='CheckIn', protocol=1, capabilities={})\n"
        "ask('join', type='Join', ticket=found['ticket'])\n"
    )
    options = ("--scenario", "plain", *HEARTBEAT, "--patience", str(_VISIT_S))
    code, out, _ = played(*options, command=[sys.executable, "-c", python])
    assert code == 1
    assert "broken: leave: A joined client completes the visit or sends Leave." in out
    assert f"({PAGE}#joined)" in out
    assert "not exercised: " in out


def test_without_a_client_nothing_conforms() -> None:
    code, out, err = played("--scenario", "plain", "--patience", "0.5")
    assert code == 1
    assert "no request arrived" in out
    assert "PAPAYA_SERVER=http://127.0.0.1:" in err


def test_a_command_that_cannot_be_started_is_an_error_with_a_hint() -> None:
    code, _, err = played("--scenario", "plain", command=["/no/such/client"])
    assert code == 2
    assert "error: cannot start /no/such/client" in err
    assert "hint: " in err


def test_the_written_policy_is_the_policy_of_the_kit(tmp_path: Path) -> None:
    policy = DevicePolicy(
        log_key=str(SignerKey("example.org/log", bytes(32), LOG_SIGNATURE).verifier),
        platforms=("software",),
        allow_insecure_software=True,
        minimum_threshold=2,
    )
    path = tmp_path / "policy.toml"
    path.write_text(_toml(policy))
    assert read_policy(path) == policy


def test_a_scenario_that_the_client_left_before_its_fault_is_not_exercised() -> None:
    message = RuleFinding("message", kept=True, detail="")
    checked = RuleFinding("evidence", kept=True, detail="")
    left = ScenarioResult("forged-quote", "", 3, (message,), ("evidence",))
    caught = ScenarioResult("forged-leaf", "", 3, (message, checked), ("evidence",))
    plain = ScenarioResult("plain", "", 3, (message,))
    report = ConformanceReport((left, caught, plain))
    states = [line.split()[1:] for line in _summary(report).splitlines()[:3]]
    assert states == [["not", "exercised"], ["kept"], ["kept"]]
    told = report.as_json()["scenarios"]
    assert [scenario["exercised"] for scenario in told] == [False, True, True]


def test_scenarios_with_secure_aggregation_can_be_left_out() -> None:
    assert [kind.name for kind in chosen((), only_clear=True)] == CLEAR
    assert len(CLEAR) < len(chosen(()))


def test_an_unknown_scenario_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--scenario", "nonsense"]) == 2
    assert "slow-commit" in capsys.readouterr().err


def test_the_vectors_are_written_as_files(tmp_path: Path) -> None:
    assert main(["conformance", "--vectors", str(tmp_path / "vectors")]) == 0
    for name, cases in all_vectors().items():
        written = json.loads((tmp_path / "vectors" / f"{name}.json").read_text())
        assert [case["name"] for case in written] == [case["name"] for case in cases]


# -- the pages ------------------------------------------------------------------------------


def test_every_rule_leads_to_a_heading_of_the_page() -> None:
    headings = anchors_of(ROOT / PAGE)
    assert [rule.id for rule in RULES if rule.anchor not in headings] == []
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_the_guide_lists_every_rule_scenario_and_vector() -> None:
    page = text_of(GUIDE)
    rules = re.findall(r"^\| `([\w-]+)` \| \[.*\]\(spec/protocol\.md#([\w-]+)\) \|", page, re.M)
    assert rules == [(rule.id, rule.anchor) for rule in RULES]
    played_ones = page.partition("## Scenarios")[2].partition("##")[0]
    scenarios = re.findall(r"^\| `([\w-]+)` \|", played_ones, re.M)
    assert scenarios == [kind.name for kind in SCENARIOS]
    files = re.findall(r"^\| `(\w+)\.json` \|", page, re.M)
    assert files == list(all_vectors())
