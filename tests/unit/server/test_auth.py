"""Tokens: where they are kept, what they open, and that they show themselves to nobody."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from papaya.config.deployment import Deployment
from papaya.credentials.token_files import Secret, SecretName, read, read_or_make
from papaya.errors import OperatorError
from papaya.server import auth
from papaya.server.auth import (
    DAY_S,
    UNDECIDED,
    DeviceAuth,
    OpenDoor,
    SharedToken,
    SignedTokens,
    Verdict,
    admits,
    bearer,
    verifier_for,
)

TOKEN = "a-token-of-a-device-0123456789"
NAMES: tuple[SecretName, ...] = ("admin.token", "server.token", "device.token", "device.key")


def header(token: str) -> str:
    return f"Bearer {token}"


# -- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_is_made_once_private_and_long(name: SecretName, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    first = read_or_make(folder, name)
    assert read_or_make(folder, name).reveal() == first.reveal()
    assert len(first.reveal()) == 64
    assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert [entry.name for entry in folder.iterdir()] == [name]


def test_secrets_differ(tmp_path: Path) -> None:
    made = {read_or_make(tmp_path, name).reveal() for name in NAMES}
    made.add(read_or_make(tmp_path / "other", "admin.token").reveal())
    assert len(made) == len(NAMES) + 1


def test_processes_that_start_at_once_read_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda _: read_or_make(tmp_path, "server.token").reveal(), range(32))
        assert len(set(found)) == 1
    assert os.listdir(tmp_path) == ["server.token"]


def test_an_operator_may_bring_his_own(tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    path.write_text("abcdefghijklmnop\n", encoding="ascii")
    path.chmod(0o640)  # as an orchestrator mounts it for a group
    assert read_or_make(tmp_path, "admin.token").reveal() == "abcdefghijklmnop"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602, 0o601])
def test_a_secret_that_is_open_to_others_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    path.write_text(TOKEN, encoding="ascii")
    path.chmod(mode)
    with pytest.raises(OperatorError, match=f"mode {mode:04o}") as refused:
        read(path)
    assert f"chmod 600 {path}" in refused.value.hint
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"short", b"x" * 513, b"two words of a token", b"\xff" * 40, b"a" * 30 + b"\n\n"],
)
def test_a_secret_that_no_header_could_carry_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(OperatorError, match="expected one line") as refused:
        read(path)
    assert f"rm {path}" in refused.value.hint


def test_a_folder_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError, match="cannot use the folder"):
        read_or_make(tmp_path / "file", "admin.token")
    (tmp_path / "admin.token").mkdir()
    with pytest.raises(OperatorError, match="cannot read"):
        read_or_make(tmp_path, "admin.token")


# -- headers --------------------------------------------------------------------------------


def test_a_bearer_header_is_parsed() -> None:
    assert bearer(header(TOKEN)) == TOKEN
    assert bearer(f"bearer {TOKEN}") == TOKEN
    assert bearer(header("a" * 512)) == "a" * 512


def test_the_admin_and_server_tokens_open_their_own_door_only(tmp_path: Path) -> None:
    admin = read_or_make(tmp_path, "admin.token")
    server = read_or_make(tmp_path, "server.token")
    assert admits(admin, header(admin.reveal()))
    assert not admits(admin, header(server.reveal()))
    assert not admits(admin, None)
    assert not admits(admin, admin.reveal())


# -- devices --------------------------------------------------------------------------------


def test_a_shared_token_names_nobody() -> None:
    door = DeviceAuth(SharedToken(Secret(TOKEN)))
    assert door.verify_now(header(TOKEN)) == ""
    assert door.verify_now(header(TOKEN + "x")) is None
    assert door.verify_now(None) is None
    assert asyncio.run(door.verify(header(TOKEN))) == ""


def test_a_signed_token_names_its_device_until_it_expires() -> None:
    now = [1_000_000.0]
    signed = SignedTokens(Secret(TOKEN), lambda: now[0])
    token = signed.make("phone-7", days=2)
    door = DeviceAuth(signed)
    assert door.verify_now(header(token.reveal())) == "phone-7"
    now[0] += 2 * DAY_S - 1
    assert door.verify_now(header(token.reveal())) == "phone-7"
    now[0] += 1
    assert door.verify_now(header(token.reveal())) is None


def test_a_published_signed_token_stays_valid() -> None:
    """HMAC-SHA256 under the text of the key, by hand with openssl."""
    signed = SignedTokens(Secret("k" * 43), lambda: 0.0)
    assert signed.make("phone", days=1).reveal() == (
        "papaya1.phone.86400.-rjPz5am3JIK7BIOP_-SpaF3qASrMJOYsZbS2P2p_28"
    )


@pytest.mark.parametrize("device", ["", "a.b", "a b", "ü", "x" * 65, "a\n"])
def test_a_device_id_that_could_be_read_in_two_ways_is_refused(device: str) -> None:
    with pytest.raises(OperatorError, match="invalid device id"):
        SignedTokens(Secret(TOKEN)).make(device, days=1)


def test_a_token_cannot_be_made_for_eternity() -> None:
    with pytest.raises(OperatorError, match=r"--days 1e\+09 is too large") as refused:
        SignedTokens(Secret(TOKEN), lambda: 0.0).make("phone", days=1e9)
    assert refused.value.hint == "use at most 11574074, for example --days 365"
    SignedTokens(Secret(TOKEN), lambda: 0.0).make("phone", days=11574074)


def test_the_open_door_lets_everybody_in() -> None:
    door = DeviceAuth(OpenDoor())
    assert door.verify_now(None) == ""
    assert door.verify_now("Basic nonsense") == ""


# -- an operator's own verifier -------------------------------------------------------------


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "VERIFIER_TIMEOUT_S", 60.0)


class Directory:
    """A verifier that asks elsewhere, and counts how often."""

    asked = 0

    async def verify(self, token: str) -> Verdict:
        self.asked += 1
        await asyncio.sleep(0)
        return {TOKEN: "phone", "guest" * 4: ""}.get(token)


def test_an_own_verifier_is_awaited_and_then_remembered_for_a_while() -> None:
    now = [0.0]
    directory = Directory()
    door = DeviceAuth(directory, lambda: now[0])
    assert door.verify_now(header(TOKEN)) is UNDECIDED
    assert asyncio.run(door.verify(header(TOKEN))) == "phone"
    assert door.verify_now(header(TOKEN)) == "phone"
    assert asyncio.run(door.verify(header(TOKEN))) == "phone"
    assert directory.asked == 1
    now[0] = auth.REMEMBERED_S
    assert door.verify_now(header(TOKEN)) is UNDECIDED


def test_a_guest_of_an_own_verifier_is_let_in() -> None:
    door = DeviceAuth(Directory())
    assert asyncio.run(door.verify(header("guest" * 4))) == ""
    assert door.verify_now(header("guest" * 4)) == ""


def test_a_refusal_is_not_remembered() -> None:
    directory = Directory()
    door = DeviceAuth(directory)
    for _ in range(2):
        assert asyncio.run(door.verify(header("unknown" * 4))) is None
    assert directory.asked == 2
    assert asyncio.run(door.verify("Basic dXNlcg==")) is None
    assert directory.asked == 2, "what is no token at all is not asked about"


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Everybody:
        async def verify(self, token: str) -> Verdict:
            return token[:5]

    monkeypatch.setattr(auth, "MAX_REMEMBERED", 2)
    door = DeviceAuth(Everybody())
    tokens = [f"{name}-{'x' * 20}" for name in ("first", "other", "third")]

    async def all_of_them() -> None:
        for token in tokens:
            await door.verify(header(token))

    asyncio.run(all_of_them())
    assert [door.verify_now(header(token)) for token in tokens] == [UNDECIDED, "other", "third"]


def test_a_verifier_that_takes_too_long_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def verify(self, token: str) -> Verdict:
            never: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
            return await never

    monkeypatch.setattr(auth, "VERIFIER_TIMEOUT_S", 0.001)
    assert asyncio.run(DeviceAuth(Silent()).verify(header(TOKEN))) is None


# -- which one --------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    source = (
        "class Own:\n"
        "    async def verify(self, token):\n"
        "        return 'somebody'\n"
        "class Sync:\n"
        "    def verify(self, token):\n"
        "        return 'somebody'\n"
        "def make():\n"
        "    return Own()\n"
        "def needs(argument):\n"
        "    return Own()\n"
        "number = 7\n"
    )
    (tmp_path / "operators_verifier.py").write_text(source, encoding="utf-8")
    (tmp_path / "broken_verifier.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "operators_verifier", raising=False)
    return "operators_verifier"


def test_the_deployment_chooses(tmp_path: Path, module: str) -> None:
    def door(tokens: str) -> DeviceAuth:
        return verifier_for(Deployment(device_tokens=tokens), tmp_path / "data", lambda: 0.0)

    shared = door("shared")
    token = read(tmp_path / "data" / "device.token").reveal()
    assert shared.verify_now(header(token)) == ""
    signed = door("signed")
    key = read(tmp_path / "data" / "device.key")
    token = SignedTokens(key, lambda: 0.0).make("phone", 1).reveal()
    assert signed.verify_now(header(token)) == "phone"
    assert asyncio.run(door(f"{module}:Own").verify(header(TOKEN))) == "somebody"
    assert asyncio.run(door(f"{module}:make").verify(header(TOKEN))) == "somebody"


def test_no_tokens_are_insecure_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    door = verifier_for(Deployment(device_tokens="none"), tmp_path)
    assert door.verify_now(None) == ""
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("INSECURE")


def test_a_shared_token_cannot_tell_devices_apart_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verifier_for(Deployment(device_tokens="shared"), tmp_path)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "devices cannot be told apart" in record.getMessage()


def test_tokens_that_identify_devices_need_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verifier_for(Deployment(device_tokens="signed"), tmp_path)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no_such_module:Own", "No module named"),
        ("operators_verifier:Other", "no attribute 'Other'"),
        ("operators_verifier:number", "not callable"),
        ("operators_verifier:needs", "argument"),
        ("operators_verifier:Sync", "has no `async def verify`"),
        ("broken_verifier:Own", "ZeroDivisionError"),
        (".:Own", "cannot create the verifier"),
    ],
)
def test_a_verifier_that_cannot_be_used_is_explained(
    path: str, problem: str, tmp_path: Path, module: str
) -> None:
    with pytest.raises(OperatorError) as refused:
        verifier_for(Deployment(device_tokens=path), tmp_path / "data")
    assert path in str(refused.value)
    assert problem in str(refused.value)
    assert refused.value.hint


# -- nothing shows a token ------------------------------------------------------------------


def test_a_secret_shows_itself_only_when_asked() -> None:
    secret = Secret(TOKEN)
    for shown in (repr(secret), str(secret), f"{secret}", repr([secret]), repr({"t": secret})):
        assert TOKEN not in shown
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert secret.reveal() == TOKEN


def test_no_verifier_shows_what_it_keeps() -> None:
    secret = Secret(TOKEN)
    kept = [SharedToken(secret), SignedTokens(secret), DeviceAuth(SharedToken(secret))]
    assert all(TOKEN not in repr(one) + str(vars(one)) for one in kept)


class Chatty:
    """Fails, and its error quotes the token."""

    async def verify(self, token: str) -> Verdict:
        raise KeyError(token)


class ChattyNow:
    """The same at once."""

    def verify_now(self, token: str) -> Verdict:
        raise ValueError(f"bad token {token}")


class Yes:
    """Answers True, which is nobody's name."""

    def verify_now(self, token: str) -> Verdict:
        return True  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("verifier", "error"),
    [(Chatty(), "KeyError"), (ChattyNow(), "ValueError"), (Yes(), "TypeError")],
)
def test_a_verifier_that_raises_refuses_and_the_log_has_no_token(
    verifier: Chatty | ChattyNow | Yes, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert asyncio.run(DeviceAuth(verifier).verify(header(TOKEN))) is None
    [record] = [found for found in caplog.records if found.name == "papaya.auth"]
    assert error in record.getMessage()
    assert "auth.py:" in record.getMessage()
    assert record.exc_info is None
    assert TOKEN not in caplog.text + str(vars(record))
