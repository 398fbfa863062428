"""`papaya keys rotate`: old keys are refused, sessions that are known may go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from secrets import token_bytes

import pytest

from papaya.cli.admin_client import TOKEN_VARIABLE
from papaya.credentials.token_files import Secret, read, read_or_make
from papaya.errors import OperatorError, TicketError
from papaya.messages.storage import TICKET_KEYS, BootRow, Transaction, boot_key
from papaya.messages.tickets import AssignmentTicket
from papaya.server.ticket_keys import load_or_create
from tests.unit.cli.admin_server import TOKEN, AdminServer, admin_server, papaya

TICKET = AssignmentTicket("words", "s1", 1, 2_000_000_000.0, 0)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdminServer]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with admin_server(tmp_path) as found:
        yield found


def test_tickets_under_the_old_keys_are_refused(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    system = server.system

    keys = server.call(load_or_create(system.state, system.time, token_bytes, 30.0))
    sealed = keys.keyring.seal(TICKET)
    assert keys.keyring.open(sealed, AssignmentTicket) == TICKET
    arguments = ("keys", "rotate", "tickets", "--reason", "a leak", "--admin", server.url)
    assert papaya(*arguments) == 0
    assert list(system.store.read((TICKET_KEYS,))) == [f"{TICKET_KEYS}{2:012d}"]
    server.call(keys.refresh(system.time))
    with pytest.raises(TicketError):
        keys.keyring.open(sealed, AssignmentTicket)
    renewed = keys.keyring.seal(TICKET)
    assert keys.keyring.open(renewed, AssignmentTicket) == TICKET
    papaya("audit-trail", "show", "--admin", server.url)
    out = capsys.readouterr().out
    assert "rotate-ticket-keys" in out
    assert "a leak" in out


def test_a_token_file_is_replaced(tmp_path: Path) -> None:
    old = read_or_make(tmp_path, "admin.token")
    assert papaya("keys", "rotate", "admin", "--data", str(tmp_path)) == 0
    new = read(tmp_path / "admin.token")
    assert not new.matches(old.reveal())
    assert list(tmp_path.iterdir()) == [tmp_path / "admin.token"]
    used = Secret(old.reveal())
    assert used.replace(new)
    assert not used.replace(new)
    assert used.matches(new.reveal())
    with pytest.raises(OperatorError, match="cannot read"):
        papaya("keys", "rotate", "servers", "--data", str(tmp_path))


def test_status_shows_servers_of_different_versions(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("aggregator", BootRow(1, 1, "0.5.0")), ("selector", BootRow(1, 1, "0.4.0"))]
    put = tuple((boot_key(node), row) for node, row in rows)
    server.system.change(Transaction(put=put))
    papaya("status", "--admin", server.url)
    assert "versions     0.4.0: selector; 0.5.0: aggregator\n" in capsys.readouterr().out
    server.system.change(Transaction(put=((boot_key("selector"), rows[0][1]),)))
    papaya("status", "--admin", server.url)
    assert "versions" not in capsys.readouterr().out
