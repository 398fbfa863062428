"""`papaya login`, `logout` and `whoami`, `papaya account`: with a real server, as a new user."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from papaya.cli.main import main
from papaya.cli.profiles import Profile, Profiles, profiles_file
from papaya.errors import OperatorError
from tests.unit.cli.admin_server import TOKEN, AdminServer, admin_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    with admin_server(Path(tmp_path_factory.mktemp("login"))) as found:
        found.call(found.system.submit())
        yield found


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "admin.token").write_text(TOKEN, encoding="ascii")


def login(server: AdminServer, *more: str) -> None:
    assert main(["login", server.url, "--token-file", "admin.token", *more]) == 0


def test_after_a_login_no_command_needs_options(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["task", "list"]) == 2
    assert "papaya login URL" in capsys.readouterr().err
    login(server)
    found = capsys.readouterr()
    assert "operator: everything" in found.out
    assert TOKEN not in found.out + found.err
    assert main(["task", "list"]) == 0
    assert "next-word" in capsys.readouterr().out
    # A hint can be pasted as it is.
    assert main(["task", "show", "next-wird"]) == 2
    assert "papaya task list" in capsys.readouterr().err
    assert main(["whoami", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "admin"
    assert main(["logout"]) == 0
    assert main(["task", "list"]) == 2


def test_only_the_user_can_read_the_file(server: AdminServer) -> None:
    login(server)
    path = profiles_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    assert main(["whoami"]) == 2


def test_a_wrong_token_is_not_stored(server: AdminServer) -> None:
    Path("wrong").write_text("0123456789abcdef-wrong", encoding="ascii")
    assert main(["login", server.url, "--token-file", "wrong"]) == 2
    assert not profiles_file().exists()


def test_a_token_on_stdin(server: AdminServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TOKEN + "\n"))
    assert main(["login", server.url]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["login", server.url]) == 2


def test_the_token_of_a_server_in_this_folder_is_used_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder of a server; whoever pipes another token in has to say so."""
    Path("papaya-data").mkdir()
    Path("papaya-data", "admin.token").write_text(TOKEN, encoding="ascii")
    Path("papaya-data", "admin.token").chmod(0o600)
    monkeypatch.setattr("sys.stdin", io.StringIO("too short\n"))
    monkeypatch.setattr("papaya.cli.login.DEFAULT_URL", "http://127.0.0.1:1")
    assert main(["login", "http://127.0.0.1:1"]) == 2
    told = capsys.readouterr().err
    assert "using the token in papaya-data/admin.token" in told
    assert main(["login", "http://127.0.0.1:1", "--token-file", "-"]) == 2
    told = capsys.readouterr().err
    assert "using the token" not in told
    assert "stdin" in told


def test_options_and_environment_win_over_the_profile(
    server: AdminServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    login(server)
    monkeypatch.setenv("PAPAYA_ADMIN_TOKEN", "0123456789abcdef-wrong")
    assert main(["whoami"]) == 2
    assert "does not accept this token" in capsys.readouterr().err
    assert main(["whoami", "--token-file", "admin.token"]) == 0
    monkeypatch.delenv("PAPAYA_ADMIN_TOKEN")
    assert main(["whoami", "--admin", "http://127.0.0.1:1"]) == 2
    assert "no token" in capsys.readouterr().err, "a stored token is for its own address only"


def test_several_profiles(
    server: AdminServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    login(server)
    login(server, "--profile", "test")
    assert main(["whoami", "--profile", "defolt"]) == 2
    assert "did you mean default?" in capsys.readouterr().err
    monkeypatch.setenv("PAPAYA_PROFILE", "test")
    assert main(["whoami"]) == 0
    assert main(["whoami", "--admin", "http://127.0.0.1:1"]) == 2
    assert f"profile test is for {server.url}" in capsys.readouterr().err
    monkeypatch.delenv("PAPAYA_PROFILE")
    assert main(["logout"]) == 0
    assert "deleted test; now using default" in capsys.readouterr().err
    assert main(["logout", "--all"]) == 0
    assert main(["logout"]) == 0
    assert "not logged in" in capsys.readouterr().err


def test_the_profile_of_an_address_is_found_by_the_address() -> None:
    one, two = Profile("http://one", "1"), Profile("http://two", "2")
    profiles = Profiles("one", {"one": one, "two": two})
    assert profiles.chosen(None, None) == one
    assert profiles.chosen(None, "http://two") == two
    assert profiles.chosen(None, "http://three") is None
    assert profiles.chosen("two", None) == two
    with pytest.raises(OperatorError, match="there is no profile three"):
        profiles.chosen("three", None)


def test_an_account_from_its_creation_to_its_revocation(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    login(server)
    add = ["account", "add", "anna", "--role", "owner", "--tasks", "2", "--reason", "new colleague"]
    assert main([*add, "--prefix", "vision/"]) == 2
    assert "use vision-" in capsys.readouterr().err
    assert main([*add, "--prefix", "vision-"]) == 0
    token = capsys.readouterr().out.strip()
    Path("anna.token").write_text(token, encoding="ascii")
    assert main(["login", server.url, "--token-file", "anna.token", "--profile", "anna"]) == 0
    assert "tasks        0 of 2" in capsys.readouterr().out
    assert main(["task", "pause", "next-word"]) == 2
    assert "may not change 'next-word', only vision-…" in capsys.readouterr().err
    assert main(["account", "list"]) == 2
    assert "anna is an owner; this needs an operator" in capsys.readouterr().err
    admin = ("--profile", "default")
    assert main(["account", "quota", "anna", "--concurrency", "50", *admin]) == 0
    assert "0 of 50" in capsys.readouterr().out
    assert main(["account", "revoke", "anna", *admin]) == 0
    assert "revoked" in capsys.readouterr().out
    assert main(["whoami"]) == 2
    assert "papaya login" in capsys.readouterr().err
    # Each change is in the audit trail, and so is the refused one.
    assert main(["audit-trail", "show", "--format", "json", *admin]) == 0
    trail = capsys.readouterr().out
    for found in ("add-account", "new colleague", "set-quota", "revoke-account", "may not change"):
        assert found in trail
    assert token.rpartition(".")[2] not in trail
