"""systemd units, as systemd itself reads them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from papaya.cli.main import parser_for

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
FILES = sorted(UNITS.glob("*.service"))
_PAPAYA = "/opt/papaya/bin/papaya"


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in FILES:
        # It checks that the program exists, which is not installed here.
        text = unit.read_text().replace(_PAPAYA, sys.executable)
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        [analyze, "verify", "--man=no", *(str(tmp_path / unit.name) for unit in FILES)],
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    if "Failed to" in done.stderr and "manager" in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", FILES, ids=lambda unit: unit.name)
def test_the_command_of_a_unit_is_one_of_ours(unit: Path) -> None:
    [command] = [
        line.removeprefix("ExecStart=").replace("%i", "aggregator").split()
        for line in unit.read_text().splitlines()
        if line.startswith("ExecStart=")
    ]
    assert command[0] == _PAPAYA
    parser_for(("serve",)).parse_args(command[1:])
