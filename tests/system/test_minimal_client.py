"""The protocol's page is enough to write a client: one that imports nothing of Papaya takes part.

A real server process, a real client process, the bytes between them as docs/spec/protocol.md says.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from papaya.learning import parameters

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "examples" / "minimal_client.py"
LENGTH = 600_000  # three chunks
_DEADLINE_S = 240.0
_POLL_S = 0.05


class Server:
    """A server process and its admin API."""

    def __init__(self, data: Path, addresses: dict[str, str]) -> None:
        self.device_token = data / "device.token"
        self.devices = f"http://{addresses['devices']}"
        self._admin = addresses["admin"]
        self._token = (data / "admin.token").read_text().strip()

    def admin(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = HTTPConnection(self._admin, timeout=_DEADLINE_S)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {self._token}"})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        assert response.status == 200, data
        return data

    def submit(self, task: str, initial: parameters.Vector) -> None:
        place = f"/admin/tasks/{task}/parameters?model_length={initial.size}"
        stored = json.loads(self.admin("PUT", place, parameters.encode(initial, {})))
        config = {
            "task": task,
            "concurrency": 1,
            "model_length": initial.size,
            "regime": {"type": "async", "aggregation_goal": 1},
        }
        new = {"config": config, "parameters": stored["parameters"]}
        self.admin("POST", "/admin/tasks", json.dumps(new).encode())

    def version(self, task: str) -> int:
        found: int = json.loads(self.admin("GET", f"/admin/tasks/{task}"))["task"]["version"]
        return found


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    config = folder / "papaya.toml"
    config.write_text(
        'devices = "127.0.0.1:0"\nadmin = "127.0.0.1:0"\ndata = "data"\n'
        "[server]\nheartbeat_s = 10.0\nmin_retry_s = 0.2\n"
    )
    command = [sys.executable, "-m", "papaya", "serve", "--format", "json"]
    with subprocess.Popen(
        [*command, "--config", str(config)], stdout=subprocess.PIPE, cwd=folder
    ) as process:
        try:
            assert process.stdout is not None
            where = json.loads(process.stdout.readline())
            yield Server(folder / "data", where["addresses"])
        finally:
            process.terminate()
            assert process.wait(_DEADLINE_S) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server")) as found:
        yield found


def take_part(server: Server, *options: str) -> tuple[int, Any]:
    """Isolated and without site-packages: there is no Papaya that it could import."""
    command = [sys.executable, "-I", "-S", str(CLIENT), "--server", server.devices, *options]
    done = subprocess.run(command, capture_output=True, timeout=_DEADLINE_S, check=False)
    assert done.stderr == b""
    return done.returncode, json.loads(done.stdout)


def test_a_client_written_from_the_page_is_counted_once(server: Server, tmp_path: Path) -> None:
    initial = np.linspace(-1, 1, LENGTH, dtype=np.float32)
    server.submit("tiny", initial)
    history = tmp_path / "history.json"
    own = ("--token-file", str(server.device_token), "--history", str(history))

    assert take_part(server, *own, "--patience", "120") == (
        0,
        {"type": "Completed", "discarded": None},
    )

    ends_at = time.monotonic() + _DEADLINE_S
    while server.version("tiny") == 0:
        assert time.monotonic() < ends_at, "its update did not become a version"
        time.sleep(_POLL_S)
    file = server.admin("GET", "/admin/tasks/tiny/versions/1/parameters")
    assert np.array_equal(parameters.decode(file, LENGTH), initial)  # it said: change nothing

    # Every metric that the operators' page names is there.
    page = (ROOT / "docs" / "run-the-servers.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(papaya_\w+)` \|", page, re.MULTILINE)
    shown = server.admin("GET", "/metrics").decode()
    assert len(named) > 20
    missing = [name for name in named if f"\n# TYPE {name} " not in shown]
    # Nobody has signed this task, and the server has no `upload_routes`.
    assert missing == ["papaya_task_lease_seconds", "papaya_passthrough_connections_total"]

    # Its own history keeps it from taking part again: it names the task, and is sent away.
    assert json.loads(history.read_text())["tiny"][0] == 1
    code, answer = take_part(server, *own)
    assert (code, answer["type"]) == (1, "Rejected")


def test_without_a_good_token_it_is_told_so(server: Server, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    code, answer = take_part(server, "--token-file", str(token))
    assert (code, answer["type"]) == (1, "Refused")
    assert "token" in answer["reason"]
