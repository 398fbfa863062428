"""Servers that cannot start say why and what to do; one whose disk is full says so and lives on."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from papaya.config import AsyncFL, OptimizerConfig, TaskConfig
from tests.system.admin import Admin
from tests.system.fleet import Book, briefly, fleet
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess, run_to_the_end

_STEP_S = 240.0
_FILE_SIZE = resource.RLIMIT_FSIZE
_ANYWHERE = ("--devices", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--servers", "127.0.0.1:0")


def assert_refused(*arguments: str, error: str, hint: str) -> None:
    ended = run_to_the_end("serve", *arguments)
    assert ended.returncode == 2, ended
    assert ended.stdout == ""
    *_, first, blank, last = ended.stderr.rstrip("\n").split("\n")
    assert first.startswith("error: "), ended.stderr
    assert error in first
    assert blank == ""
    assert last.startswith("hint: "), ended.stderr
    assert hint in last


@pytest.fixture
def port_in_use() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("listener", ["devices", "admin"])
def test_a_port_in_use(listener: str, port_in_use: str, tmp_path: Path) -> None:
    arguments = (*_ANYWHERE, "--data", str(tmp_path / "data"), f"--{listener}", port_in_use)
    assert_refused(*arguments, error=f"{port_in_use} is in use", hint="ss -ltnp")


def test_a_data_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a folder", encoding="ascii")
    assert_refused(
        *_ANYWHERE, "--data", str(tmp_path / "data"), error="not a folder", hint="mkdir -p"
    )


def test_a_second_server_on_the_same_data(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add().start()
        data = str(installation.data)
        assert_refused(*_ANYWHERE, "--data", data, error="already runs", hint="--data DIR")
        assert server.is_running
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[server]\nheartbeat_s = 'fast'\n", "heartbeat_s"),
        ("[server]\nheartbeat = 10\n", "heartbeat"),
        ("[server\n", "is not TOML"),
        ("devices = '127.0.0.1'\n", "devices"),
        ("tls_certificate = 'server.pem'\n", "TLS needs a certificate and its key"),
        ("tls_certificate = 'server.pem'\ntls_key = 'no.key'\n", "server.pem"),
    ],
)
def test_a_file_of_settings_with_an_error(text: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "papaya.toml"
    file.write_text(text, encoding="utf-8")
    assert_refused("--config", str(file), error=error, hint="")


def test_a_missing_file_of_settings(tmp_path: Path) -> None:
    assert_refused(
        "--config", str(tmp_path / "no.toml"), error="cannot read", hint="without a file"
    )


def test_an_unknown_role() -> None:
    assert_refused("selectors", error="'selectors'", hint="papaya serve --help")


def test_a_role_that_knows_no_coordinator(tmp_path: Path) -> None:
    arguments = ("aggregator", *_ANYWHERE, "--data", str(tmp_path / "data"))
    assert_refused(*arguments, error="without a coordinator", hint="coordinators = [")


def test_garbage_in_the_state_file(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "state.db").write_bytes(b"this is no database\n" * 1000)
    assert_refused(*_ANYWHERE, "--data", str(data), error="state.db", hint="move it away")
    assert (data / "state.db").read_bytes().startswith(b"this is no database")


CONFIG = TaskConfig(
    task="crowded",
    concurrency=6,
    model_length=48,
    regime=AsyncFL(aggregation_goal=4),
    optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
    participation_gap_s=0.0,
    commit_interval_s=0.02,
    keep_versions=1000,
)


def test_a_full_disk_delays_and_loses_nothing(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add().start()
        Admin(server.addresses["admin"], installation.secret("admin.token")).submit(CONFIG)
        book = asyncio.run(_fill_the_disk(installation, server))
        assert server.stop() == 0
        books = Books(installation.data, CONFIG.task)
        books.check(book.acknowledged)
        assert books.newest >= 2


async def _fill_the_disk(installation: Installation, server: ServerProcess) -> Book:
    url, token = f"http://{server.addresses['devices']}", installation.secret("device.token")
    folder = installation.folder / "devices"
    async with fleet(folder, [url], token, 8, briefly) as flying:
        book = flying.book
        await book.until(
            lambda: len(book.acknowledged) >= CONFIG.aggregation_goal and bool(book.in_mid_upload),
            _STEP_S,
            "the first version",
        )
        # No file of the server may grow any more: for a program that is what a full disk is.
        pid, unlimited = server.process.pid, resource.prlimit(server.process.pid, _FILE_SIZE)
        resource.prlimit(pid, _FILE_SIZE, (0, unlimited[1]))
        await asyncio.to_thread(_see_it_live_on, installation, server)
        counted = Books(installation.data, CONFIG.task)
        counted.check(book.acknowledged)
        resource.prlimit(pid, _FILE_SIZE, unlimited)

        wanted = len(book.acknowledged) + 2 * CONFIG.aggregation_goal
        await book.until(lambda: len(book.acknowledged) >= wanted, _STEP_S, "it goes on")
        await flying.go_home(_STEP_S)
    return book


def _see_it_live_on(installation: Installation, server: ServerProcess) -> None:
    """It logs what to do, answers requests, and steps down as leader, which `papaya status` shows.

    The leader's renewals always write rows. Whether a blob is written meanwhile is chance: that is
    in tests/unit/server/test_workers_in_trouble.py.
    """
    told = server.until_logged("the state store", _STEP_S)
    assert "hint: " in told
    assert "disk" in told, told
    admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
    led = admin.until("/admin/status", lambda status: not status["is_led"], _STEP_S)
    token = ("--token-file", str(installation.data / "admin.token"))
    asked = run_to_the_end("status", "--admin", f"http://{server.addresses['admin']}", *token)
    assert asked.returncode == 1, asked
    nobody = f"leader       none; the last leader was {led['leader']}"
    assert nobody in asked.stdout.splitlines()
    assert f"problem: no leader: {led['leader']} has not renewed its lease" in asked.stderr
    assert "its disk is not full" in asked.stderr
    assert server.is_running
