"""`papaya serve` in this process, as far as it can be seen without another one."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

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


def test_a_server_ends_in_order_when_no_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The event loop starts a thread when it is closed."""

    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def fails(upkeep: Upkeep) -> None:
        monkeypatch.setattr(Thread, "start", refuse)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Upkeep, "refresh", fails)
    anywhere = ["--devices", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    assert main(["serve", "--data", str(tmp_path / "data"), *anywhere]) == 70
    assert "error: a part of the server failed" in capsys.readouterr().err
