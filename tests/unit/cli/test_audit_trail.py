"""`papaya audit-trail` against the real admin API: who did what, and every way of tampering."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from papaya.cli.admin_client import TOKEN_VARIABLE
from papaya.errors import OperatorError
from papaya.messages.audit_trail import AuditError, AuditRow, audit_key
from papaya.messages.storage import Transaction
from tests.unit.cli.admin_server import TOKEN, AdminServer, admin_server, papaya


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdminServer]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with admin_server(tmp_path) as found:
        found.call(found.system.submit())
        yield found


def run(server: AdminServer, *arguments: str) -> int:
    return papaya(*arguments, "--admin", server.url)


def shown(server: AdminServer, capsys: pytest.CaptureFixture[str]) -> list[AuditRow]:
    capsys.readouterr()
    assert run(server, "audit-trail", "show", "--format", "json") == 0
    found: list[AuditRow] = json.loads(capsys.readouterr().out)["rows"]
    return found


def test_every_change_is_in_the_trail_with_its_reason(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: tuple[tuple[str, ...], ...] = (
        ("task", "pause", "next-word", "--reason", "a heat wave"),
        ("task", "resume", "next-word", "--why", "it rains"),
        ("task", "rollback", "next-word", "0", "--reason", "it diverged"),
        ("task", "mark", "next-word", "1", "--reason", "a good one"),
        ("task", "evaluate", "next-word", "--clients", "3", "--reason", "to see"),
        ("task", "cancel", "next-word-eval-1", "--reason", "seen"),
        ("task", "cancel", "next-word", "--reason", "enough"),
        ("token", "revoke", "phone-17", "--reason", "stolen"),
        ("token", "revoke", "phone-17", "--undo", "--reason", "found"),
        ("task", "delete", "next-word", "--reason", "not needed"),
    )
    for change in changes:
        assert run(server, *change) == 0, change
    assert run(server, "audit-trail", "show") == 0
    lines = capsys.readouterr().out.splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("number"))
    found = [" ".join(line.split()) for line in lines[table + 3 :]]  # without the submission
    assert len(found) == len(changes)
    for line, change in zip(found, changes, strict=True):
        action = f"undo-{change[1]}" if "--undo" in change else change[1]
        assert f"admin done {change[-1]} {action} {change[2]}" in line
    assert '{"version":0}' in found[2]


def test_refused_attempts_are_in_the_trail(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OperatorError, match="already running"):
        run(server, "task", "resume", "next-word", "--reason", "impatient")
    with pytest.raises(OperatorError, match="there is no task"):
        run(server, "task", "cancel", "nothing")
    rows = [row["result"] for row in shown(server, capsys)]  # type: ignore[index]
    assert rows[1:] == [
        "refused: task next-word is already running",
        "refused: there is no task 'nothing'",
    ]


def test_export_check_and_prune(
    server: AdminServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(tmp_path / "first.json"), str(tmp_path / "second.json")
    run(server, "task", "pause", "next-word")
    assert run(server, "audit-trail", "export", first) == 0
    head = capsys.readouterr().out.split()[-1]
    assert head.startswith("2:")
    assert run(server, "audit-trail", "prune", first, "--reason", "monthly") == 0
    assert "continues after row 2" in capsys.readouterr().out
    run(server, "task", "resume", "next-word")
    assert run(server, "audit-trail", "export", second) == 0
    assert papaya("audit-trail", "check", first, second, "--head", head) == 0
    assert "4 rows, all intact; head 4:" in capsys.readouterr().out
    with pytest.raises(AuditError, match="does not continue the file before it"):
        papaya("audit-trail", "check", second, first)
    with pytest.raises(AuditError, match="no row of these files is 2:00"):
        papaya("audit-trail", "check", first, "--head", "2:00")
    with pytest.raises(AuditError, match="is not an exported audit trail"):
        papaya("audit-trail", "check", str(tmp_path / "admin.token"))
    with pytest.raises(OperatorError, match="the audit trail has no row 2"):
        run(server, "audit-trail", "prune", first)


def test_edits_of_the_state_store_are_found(server: AdminServer) -> None:
    for action in ("pause", "resume", "pause"):
        run(server, "task", action, "next-word")
    store = server.system.store
    row = store.read((audit_key(2),))[audit_key(2)]
    assert isinstance(row, AuditRow)
    innocent = structs.replace(row, attempt=structs.replace(row.attempt, actor="bob"))
    last = audit_key(4)
    for edit, problem in (
        (Transaction(put=((audit_key(2), innocent),)), "changed at row 2"),
        (Transaction(delete=(audit_key(2),)), "row 2 of the audit trail is missing"),
        (Transaction(delete=(last,)), "row 3, does not match its head, row 4"),
    ):
        before = store.read(("audit/",))
        assert store.transact(edit) == "committed"
        with pytest.raises(AuditError, match=problem):
            run(server, "audit-trail", "show")
        assert store.transact(Transaction(put=tuple(before.items()))) == "committed"
    assert run(server, "audit-trail", "show") == 0


def test_an_edited_export_is_found(server: AdminServer, tmp_path: Path) -> None:
    file = tmp_path / "trail.json"
    run(server, "task", "pause", "next-word", "--reason", "mine")
    run(server, "audit-trail", "export", str(file))
    file.write_text(file.read_text().replace("mine", "ours"))
    with pytest.raises(AuditError, match="does not match its head"):
        papaya("audit-trail", "check", str(file))
