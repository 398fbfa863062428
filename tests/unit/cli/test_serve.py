"""`papaya serve` in this process, as far as it can be seen without another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from papaya.cli.main import main
from papaya.server.upkeep import Upkeep


def test_a_server_of_which_a_part_fails_stops_with_the_code_of_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(upkeep: Upkeep) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Upkeep, "refresh", fails)
    anywhere = ["--devices", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    assert main(["serve", "--data", str(tmp_path / "data"), *anywhere]) == 70
    assert "error: a part of the server failed" in capsys.readouterr().err
