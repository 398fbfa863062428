"""`papaya maintenance` against the real admin API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from papaya.cli.admin_client import TOKEN_VARIABLE
from papaya.errors import OperatorError
from papaya.messages.storage import FenceRow, Transaction, fence_key
from tests.unit.cli.admin_server import TOKEN, AdminServer, admin_server, papaya


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdminServer]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with admin_server(tmp_path) as found:
        found.call(found.system.submit())
        yield found


def test_stop_refuses_a_placement_that_is_on_its_way(server: AdminServer) -> None:
    """The leader read that nobody holds the task before training was stopped."""
    key = fence_key("next-word")
    before = server.system.store.read((key,))[key]
    assert before == FenceRow(0, "", 0)
    assert run(server, "maintenance", "stop") == 0
    placed = Transaction(require=((key, before),), put=((key, FenceRow(1, "aggregator", 1)),))
    assert server.system.store.transact(placed) == "refused"


def run(server: AdminServer, *arguments: str) -> int:
    return papaya(*arguments, "--admin", server.url)


def test_begin_stop_and_end(server: AdminServer, capsys: pytest.CaptureFixture[str]) -> None:
    key = fence_key("next-word")
    server.system.change(Transaction(put=((key, FenceRow(4, "aggregator", 1)),)))
    assert run(server, "maintenance", "begin", "--minutes", "30", "--reason", "a new disk") == 0
    out = capsys.readouterr().out
    assert "no client is assigned since 1970-01-01 00:16:40 UTC, until about" in out
    assert "by admin: a new disk; to resume: papaya maintenance end" in out
    assert server.system.store.read((key,))[key] == FenceRow(4, "aggregator", 1)
    assert run(server, "maintenance", "stop", "--reason", "a wrong model") == 0
    assert "all training is stopped since 1970-01-01 00:16:40" in capsys.readouterr().out
    assert server.system.store.read((key,))[key] == FenceRow(5, "", 0)
    run(server, "status")
    assert "maintenance  all training is stopped" in capsys.readouterr().out
    assert run(server, "maintenance", "end") == 0
    assert capsys.readouterr().out == "training resumes\n"
    with pytest.raises(OperatorError, match="there is no maintenance to end"):
        run(server, "maintenance", "end")
    run(server, "audit-trail", "show")
    trail = capsys.readouterr().out
    assert trail.count("begin-maintenance") == 2
    assert trail.count("end-maintenance") == 2
