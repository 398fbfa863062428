"""What `papaya doctor` counts, and says about a child TSA and open files.

tests/system/test_doctor.py runs it.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from papaya.cli import doctor
from papaya.cli.doctor import DoctorOptions, _evidence, _open_files, running_tasks
from papaya.config import Deployment
from papaya.config.deployment import ROLES
from papaya.messages.storage import TaskState
from papaya.server.admin.views import SystemStatus, TaskView
from papaya.server.open_files import connections_within, least_files
from papaya.server.server import Server


def a_view(task: str, state: TaskState, evaluates: str = "") -> TaskView:
    return TaskView(
        task=task,
        state=state,
        why="",
        regime="AsyncFL",
        concurrency=1,
        aggregation_goal=1,
        version=0,
        submitted=0.0,
        ended=0.0,
        evaluates=evaluates,
    )


def test_evaluations_are_not_counted_as_tasks() -> None:
    status = SystemStatus(
        roles=(),
        leads=True,
        recovers=False,
        just_started=False,
        leader="server",
        epoch=1,
        aggregators=(),
        selectors=(),
        tasks=(
            a_view("words", "running"),
            a_view("words-eval-5", "running", "words@5"),
            a_view("old", "completed"),
        ),
    )
    assert running_tasks(status) == 1


def test_a_child_tsa_that_does_not_run_is_no_problem(tmp_path: Path) -> None:
    """The server starts it when it is needed. A killed child leaves its socket."""
    deployment = Deployment(data=str(tmp_path))
    before = list(_evidence(DoctorOptions(), deployment))
    assert [(each.grade, each.hint) for each in before] == [("good", "")]
    assert "the server starts a child TSA when a secure task runs" in before[0].text
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ended:
        ended.bind(str(tmp_path / "tsa.sock"))
    assert list(_evidence(DoctorOptions(), deployment)) == before
    assert list(_evidence(DoctorOptions(role="selector"), deployment)) == []


def test_a_limit_on_open_files_that_a_role_cannot_start_with_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "raise_limit", lambda: 570)
    [found] = _open_files("selector", Deployment())
    assert found.grade == "problem"
    assert f"this server needs {least_files(4)}" in found.text
    [found] = _open_files("coordinator", Deployment())
    assert found.grade == "warning"


def test_the_limit_on_open_files_is_shared_by_all_listeners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As at the start of a server."""
    monkeypatch.setattr(doctor, "raise_limit", lambda: 20_000)
    passing: dict[str, Any] = {
        "upload_routes": {"up.example": "10.0.0.1:8750"},
        "tls_certificate": "selector.pem",
        "tls_key": "selector.key",
    }
    for role, settings, listeners in (
        ("selector", {}, 4),  # a connection whose chunks are passed on is two files
        ("selector", passing, 4),
        ("coordinator", {}, 2),
        ("coordinator", passing, 2),
        ("aggregator", {}, 2),
        ("aggregator", {"upload_url": "https://up.example"}, 3),
        (None, {}, 2),
        (None, passing, 3),
        (None, {"coordinators": ("127.0.0.1:8752",)}, 4),
        (None, {"coordinators": ("127.0.0.1:8752",), **passing}, 4),
    ):
        deployment = Deployment(**settings)
        wanted = deployment.max_connections
        given = connections_within(20_000, wanted, listeners)
        [found] = _open_files(role, deployment)  # type: ignore[arg-type]
        assert found.grade == ("good" if given == wanted else "warning")
        assert given == wanted or f"each listener takes {given:,}" in found.text
        roles = ROLES if role is None else (role,)
        server = Server(deployment, roles, open_files=20_000)  # type: ignore[arg-type]
        assert server._limits.max_connections == given
