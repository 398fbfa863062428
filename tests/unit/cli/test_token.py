"""`papaya token`: a device's token on stdout, and secrets that stay where they are."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from papaya.cli import token
from papaya.credentials.token_files import SecretName, read, read_or_make
from papaya.errors import OperatorError
from papaya.messages.storage import REVOKED, RevokedRow, Transaction, revoked_key
from papaya.server.auth import SignedTokens
from tests.unit.cli.admin_server import admin_server, papaya

SECRETS: tuple[SecretName, ...] = ("admin.token", "server.token", "device.token", "device.key")


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    token.add_to(parser.add_subparsers())
    options = parser.parse_args(["token", *arguments])
    return int(options.run(options))


def test_a_made_token_is_one_that_the_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("make", "--device", "phone-7", "--days", "2", "--data", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    [made] = out.splitlines()
    assert SignedTokens(read(tmp_path / "device.key")).verify_now(made) == "phone-7"
    assert "signed" in err
    assert made not in err


def test_a_made_token_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("make", "--device", "phone-7", "--data", str(tmp_path), "--format", "json")
    made = msgspec.json.decode(capsys.readouterr().out)
    assert made["device"] == "phone-7"
    assert SignedTokens(read(tmp_path / "device.key")).verify_now(made["token"]) == "phone-7"


def test_tokens_of_many_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("make", "--device", "phone", "--count", "1000", "--data", str(tmp_path))
    made = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [device for device, _ in made] == [f"phone-{number}" for number in range(1, 1001)]
    signed = SignedTokens(read(tmp_path / "device.key"))
    assert all(signed.verify_now(token) == device for device, token in made)
    run("make", "--device", "p", "--count", "1", "--data", str(tmp_path), "--format", "json")
    [only] = msgspec.json.decode(capsys.readouterr().out)
    assert signed.verify_now(only["token"]) == "p-1"


@pytest.mark.parametrize("action", [["make", "--device", "phone"], ["show"]])
def test_a_folder_that_is_not_there_is_not_made(action: list[str], tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="there is no data folder") as refused:
        run(*action, "--data", str(tmp_path / "typo"))
    assert "papaya serve" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_show_says_where_secrets_are_and_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = [read_or_make(tmp_path, name).reveal() for name in SECRETS[:3]]
    assert run("show", "--data", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    lines = {name: line for name in SECRETS for line in out.splitlines() if f"/{name} " in line}
    assert ["not created yet" in lines[name] for name in SECRETS] == [False, False, False, True]
    assert [secret for secret in secrets if secret in out + err] == []
    assert not (tmp_path / "device.key").exists()


def test_show_reveals_tokens_when_told_but_never_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = {name: read_or_make(tmp_path, name).reveal() for name in SECRETS}
    run("show", "--reveal", "--data", str(tmp_path), "--format", "json")
    out = capsys.readouterr().out
    found = {Path(entry["file"]).name: entry for entry in msgspec.json.decode(out)}
    for name in SECRETS[:3]:
        assert found[name]["token"] == secrets[name]
    assert "token" not in found["device.key"]
    assert secrets["device.key"] not in out


def test_a_token_or_an_id_of_no_token_cannot_be_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("make", "--device", "phone-1", "--data", str(tmp_path))
    made = capsys.readouterr().out.strip()
    with admin_server(tmp_path) as server:
        connection = ("--admin", server.url, "--token-file", str(tmp_path / "admin.token"))
        server.system.service.signs_device_tokens = True
        for wrong in (made, made[:-9], f"Bearer {made}"):
            with pytest.raises(OperatorError) as refused:
                papaya("token", "revoke", wrong, *connection)
            assert str(refused.value) == "this is a token; the device is phone-1"
            assert refused.value.hint.startswith("papaya token revoke ")
            assert refused.value.hint.endswith(" phone-1")
        for wrong in ("phone 1", made.removeprefix("papaya1.")):
            with pytest.raises(OperatorError) as refused:
                papaya("token", "revoke", wrong, *connection)
            assert str(refused.value) == "invalid device id"
        assert papaya("audit-trail", "show", *connection, "--format", "json") == 0
        assert msgspec.json.decode(capsys.readouterr().out)["rows"] == [], "nothing was sent"
    with pytest.raises(OperatorError, match="this is a token") as refused:
        run("make", "--device", made, "--data", str(tmp_path))
    assert refused.value.hint == "papaya token make --device phone-1"


def test_a_token_that_an_earlier_version_revoked_can_be_undone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("make", "--device", "phone-1", "--data", str(tmp_path))
    made = capsys.readouterr().out.strip()
    with admin_server(tmp_path) as server:
        connection = ("--admin", server.url, "--token-file", str(tmp_path / "admin.token"))
        undo = ("token", "revoke", made, "--undo", *connection)
        server.system.service.signs_device_tokens = True
        server.system.change(Transaction(put=((revoked_key(made), RevokedRow(1.0)),)))
        assert papaya(*undo) == 0
        assert server.system.store.read((REVOKED,)) == {}
        with pytest.raises(
            OperatorError, match="this is a token; the device is phone-1"
        ) as refused:
            papaya(*undo)
        assert made not in str(refused.value) + refused.value.hint


def test_a_device_is_revoked_listed_and_forgiven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with admin_server(tmp_path) as server:
        connection = ("--admin", server.url, "--token-file", str(tmp_path / "admin.token"))

        def revocations(*action: str) -> list[str]:
            assert papaya("token", *action, *connection, "--format", "json") == 0
            return [each["device"] for each in msgspec.json.decode(capsys.readouterr().out)]

        assert revocations("revoked") == []
        assert revocations("revoke", "phone-7") == ["phone-7"]
        assert revocations("revoke", "phone-7") == ["phone-7"], "repeating it changes nothing"
        assert revocations("revoke", "a/b c") == ["a/b c", "phone-7"]
        assert papaya("token", "revoke", "phone-7", "--undo", *connection) == 0
        out, err = capsys.readouterr()
        assert "a/b c" in out
        assert "phone-7" not in out
        assert "phone-7 may take part again" in err
        with pytest.raises(OperatorError, match="never-revoked is not revoked") as refused:
            papaya("token", "revoke", "never-revoked", "--undo", *connection)
        assert "papaya token revoked" in refused.value.hint
        assert revocations("revoked") == ["a/b c"]
        server.system.service._has_seen = lambda device: device == "known"
        for device, is_warned in (("known", False), ("unknown", True)):
            assert papaya("token", "revoke", device, *connection) == 0
            assert ("no device 'unknown' has checked in" in capsys.readouterr().err) is is_warned
        server.system.service.identifies_devices = False
        assert papaya("token", "revoke", "known", *connection) == 0
        assert "this has no effect" in capsys.readouterr().err
        with pytest.raises(OperatorError, match="invalid Revoke"):
            papaya("token", "revoke", "", *connection)
