"""The admin API over HTTP: whatever is sent, a JSON answer comes back and the server lives on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from papaya.messages.audit_trail import AuditRow, audit_key
from papaya.messages.storage import PointRow
from papaya.server.admin.routes import MAX_JSON_BYTES
from papaya.server.admin.views import NewTask, ProblemBody, Stored, TaskView
from tests.unit.cli.admin_server import TOKEN, AdminServer, admin_server
from tests.unit.server.admin.builders import MANIFEST, TASK, encoded


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    with admin_server(Path(tmp_path_factory.mktemp("admin"))) as found:
        found.call(found.system.submit())
        yield found


def ask(
    server: AdminServer, method: str, path: str, body: bytes = b"", token: str = TOKEN
) -> tuple[int, bytes]:
    parts = urlsplit(server.url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_task_comes_in_over_http_in_two_steps(server: AdminServer) -> None:
    config = structs.replace(TASK, task="second")
    path = "/admin/tasks/second/parameters?model_length=6"
    status, body = ask(server, "PUT", path, encoded(config))
    assert status == 200
    stored = msgspec.json.decode(body, type=Stored)
    new = NewTask(config, stored.parameters, MANIFEST)
    status, body = ask(server, "POST", "/admin/tasks", msgspec.json.encode(new))
    assert (status, msgspec.json.decode(body, type=TaskView).task) == (200, "second")
    status, body = ask(server, "GET", "/admin/tasks/second/versions/newest/parameters")
    assert (status, body) == (200, encoded(config))
    assert ask(server, "POST", "/admin/tasks", msgspec.json.encode(new))[0] == 409
    server.call(server.system.turn())
    status, body = ask(server, "GET", "/admin/tasks/second/points?after=-5")
    assert [p.version for p in msgspec.json.decode(body, type=tuple[PointRow, ...])] == [0]
    assert ask(server, "GET", "/admin/tasks/second/points?after=0") == (200, b"[]")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "problem"),
    [
        ("GET", "/admin/tasks/nothing", b"", 404, "there is no task"),
        ("GET", "/admin/tasks/next-word/versions/9/parameters", b"", 404, "version 9"),
        ("GET", "/admin/tasks/next-word/versions/x/parameters", b"", 400, "invalid version"),
        ("POST", "/admin/tasks", b"{", 400, "invalid NewTask"),
        ("POST", "/admin/tasks", b'{"config":{"task":"A"}}', 400, "invalid NewTask"),
        ("POST", "/admin/tasks", b"[" * 5000, 400, "invalid NewTask"),
        ("POST", "/admin/tasks", b'"\xff"', 400, "invalid NewTask"),
        ("POST", "/admin/tasks/next-word/rollback", b"{}", 400, "invalid RollBack"),
        ("POST", "/admin/tasks/next-word/rollback", b'{"version":-1}', 400, "invalid RollBack"),
        ("POST", "/admin/tasks/next-word/rollback", b'{"version":1e400}', 400, "invalid RollBack"),
        ("POST", "/admin/tasks/next-word/resume", b"", 409, "is already running"),
        ("PUT", "/admin/tasks/x/parameters", b"abc", 400, "model_length = 0"),
        ("PUT", "/admin/tasks/x/parameters?model_length=-3", b"abc", 400, "model_length = 0"),
        ("PUT", "/admin/tasks/x/parameters?model_length=1", b"a" * 70_000, 413, "70000 bytes"),
        ("PUT", "/admin/tasks/x/parameters?model_length=3", b"abc", 400, "expected 3:"),
        ("PUT", "/admin/tasks/UP/parameters?model_length=3", b"abc", 400, "invalid task id"),
    ],
)
def test_what_is_wrong_is_answered_with_an_error_and_a_hint(
    server: AdminServer, method: str, path: str, body: bytes, status: int, problem: str
) -> None:
    found, answer = ask(server, method, path, body)
    told = msgspec.json.decode(answer, type=ProblemBody)
    assert (found, problem in told.error) == (status, True), told
    assert told.hint


def test_a_token_that_is_sent_as_a_device_id_is_recorded_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    secret = "c9rk" * 10 + "c9r"
    token = f"papaya1.phone-1.1802811773.{secret}"
    with admin_server(tmp_path) as server:
        server.system.service.signs_device_tokens = True
        for number, (device, problem) in enumerate(
            (
                (token, "this is a token; the device is phone-1"),
                (token.removeprefix("papaya1."), "invalid device id"),
            ),
            start=1,
        ):
            body = msgspec.json.encode({"device": device})
            status, answer = ask(server, "POST", "/admin/revocations", body)
            told = msgspec.json.decode(answer, type=ProblemBody)
            assert (status, told.error) == (400, problem)
            row = server.system.store.read((audit_key(number),))[audit_key(number)]
            assert isinstance(row, AuditRow)
            assert (row.attempt.action, row.result) == ("revoke", f"refused: {problem}")
            assert secret not in repr(row) + answer.decode()
        assert ask(server, "GET", "/admin/revocations") == (200, b"[]")
    assert "refused: this is a token" in caplog.text
    assert secret not in caplog.text


def test_a_disk_that_takes_nothing_is_not_the_callers_fault(server: AdminServer) -> None:
    config = structs.replace(TASK, task="homeless")
    in_the_way = server.system.blobs.root / "homeless"
    in_the_way.write_bytes(b"")
    path = "/admin/tasks/homeless/parameters?model_length=6"
    status, answer = ask(server, "PUT", path, encoded(config))
    told = msgspec.json.decode(answer, type=ProblemBody)
    assert (status, "cannot write" in told.error) == (507, True), told
    assert "disk" in told.hint
    in_the_way.unlink()
    assert ask(server, "PUT", path, encoded(config))[0] == 200


def test_a_bad_configuration_is_told_with_its_remedy(server: AdminServer) -> None:
    new = msgspec.to_builtins(NewTask(TASK, "x"))
    new["config"]["concurrency"] = 0
    status, answer = ask(server, "POST", "/admin/tasks", json.dumps(new).encode())
    assert status == 400
    assert "concurrency = 0" in msgspec.json.decode(answer, type=ProblemBody).error


@pytest.mark.parametrize("place", ["config", "config.regime", "config.requirements"])
def test_a_misspelt_setting_is_refused(server: AdminServer, place: str) -> None:
    """Rows may have settings of a later version; what people submit may not."""
    new = msgspec.to_builtins(NewTask(TASK, "x"))
    inner = new
    for name in place.split("."):
        inner = inner[name]
    inner["agregation_goal"] = 3
    status, answer = ask(server, "POST", "/admin/tasks", json.dumps(new).encode())
    told = msgspec.json.decode(answer, type=ProblemBody)
    assert (status, told.error) == (400, f"unknown field `agregation_goal` - at `$.{place}`")
    assert ("did you mean aggregation_goal?" in told.hint) is (place == "config.regime")


def test_too_much_json_is_not_read(server: AdminServer) -> None:
    status, _ = ask(server, "POST", "/admin/tasks", b" " * (MAX_JSON_BYTES + 1))
    assert status == 413


@pytest.mark.parametrize("token", ["", "another-token-of-some-length"])
def test_nothing_happens_without_the_token(server: AdminServer, token: str) -> None:
    for method, path in (
        ("GET", "/admin/status"),
        ("POST", "/admin/tasks/next-word/cancel"),
        ("PUT", "/admin/tasks/x/parameters?model_length=1"),
    ):
        assert ask(server, method, path, b"" if method == "GET" else b"{}", token)[0] == 401
    assert server.call(server.system.service.task("next-word")).task.state == "running"


def test_an_error_of_ours_says_nothing_about_itself(
    server: AdminServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.system.live, "aggregators", lambda: 1 / 0)
    status, answer = ask(server, "GET", "/admin/status")
    assert status == 500
    assert b"division" not in answer


@given(
    action=st.sampled_from(["pause", "rollback", "mark", "evaluate", "../x", "%2e%2e"]),
    body=st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)),
)
@settings(max_examples=40, deadline=None)
def test_no_body_breaks_it(server: AdminServer, action: str, body: bytes) -> None:
    status, _ = ask(server, "POST", f"/admin/tasks/nothing/{action}", body)
    assert 400 <= status < 500
