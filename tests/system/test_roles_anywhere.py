"""Roles on addresses of their own, with certificates between them, and TSAs behind gates.

Loopback has more addresses than 127.0.0.1, so each process here has one that no other has. The disk
is still shared.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec import structs

from papaya.messages.storage import TSAS, TsaRow
from papaya.store.state import SqliteState
from tests.system.admin import Admin
from tests.system.processes import (
    PAPAYA,
    Installation,
    ServerProcess,
    Toml,
    environment,
    run_to_the_end,
    toml,
)
from tests.system.test_secure import (
    CONFIG,
    SERVER,
    STEP_S,
    SecureBooks,
    admin_of,
    holder,
    over_a_failure,
    trusted_process,
    until,
)
from tests.system.tls import Authority

CLEAR = structs.replace(
    CONFIG, task="anywhere", secure_aggregation=None, clip=None, max_examples=10_000
)
_AGGREGATORS = ("127.0.0.5", "127.0.0.6")


class Anywhere:
    """One coordinator, one selector and two aggregators, each at an address of its own."""

    def __init__(self, installation: Installation, authority: Authority, **shared: Toml) -> None:
        self.installation = installation
        self.authority = authority
        leader = installation.reserve("127.0.0.3")
        self._shared: dict[str, Toml] = {"coordinators": [leader], **shared}
        self.coordinator = self.add("coordinator", "127.0.0.3", servers=leader)
        self.selector = self.add("selector", "127.0.0.4")
        self.aggregators = [self.add("aggregator", host) for host in _AGGREGATORS]

    def add(self, role: str, host: str, **own: Toml) -> ServerProcess:
        files = self.authority.issue(f"{role}-{host}", [role], [host])
        where: dict[str, Toml] = {"servers": self.installation.reserve(host)}
        deployment = {**where, **self._shared, **files.servers(), **own}
        name = f"{role}-{host}"
        return self.installation.add(name, role, deployment=deployment, server=SERVER)

    @property
    def admin(self) -> Admin:
        return admin_of(self.installation, self.coordinator)

    def stop(self) -> None:
        for server in self.installation.servers:
            assert not server.is_running or server.stop() == 0


def start(anywhere: Anywhere) -> None:
    for server in anywhere.installation.servers:
        server.start()


# -- in the clear -------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_silent_aggregator_is_dropped_and_registers_again(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        anywhere = Anywhere(installation, Authority(tmp_path / "tls"))
        start(anywhere)

        def reported() -> int:
            _, metrics = anywhere.admin.ask("GET", "/metrics")
            [line] = [
                line
                for line in metrics.decode().splitlines()
                if line.startswith("papaya_coordinator_aggregators ")
            ]
            return int(float(line.split()[1]))

        until(lambda: reported() == 2, "both have registered")
        anywhere.aggregators[0].send(signal.SIGSTOP)
        until(lambda: reported() == 1, "the silent one is dropped")
        anywhere.aggregators[0].send(signal.SIGCONT)
        until(lambda: reported() == 2, "it is back")
        anywhere.stop()


def test_a_server_whose_certificate_is_not_for_it_does_not_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    cases = {
        "expired at": authority.issue("old", ["aggregator"], age=timedelta(days=200)),
        "does not name the role aggregator": authority.issue("selector", ["selector"]),
    }
    for number, (problem, files) in enumerate(cases.items()):
        deployment: dict[str, Toml] = {
            "data": str(tmp_path / f"data-{number}"),
            "servers": "127.0.0.5:0",
            "admin": "127.0.0.5:0",
            "coordinators": ["127.0.0.3:1"],
            **files.servers(),
        }
        file = tmp_path / f"{number}.toml"
        file.write_text(toml(deployment, {}), encoding="utf-8")
        done = run_to_the_end("serve", "aggregator", "--config", str(file))
        assert done.returncode == 2
        assert problem in done.stderr
        assert "hint:" in done.stderr
        assert not Path(str(deployment["data"])).exists(), "nothing is changed"


def test_a_name_without_an_address_is_explained(tmp_path: Path) -> None:
    deployment: dict[str, Toml] = {
        "data": str(tmp_path / "data"),
        "servers": "127.0.0.5:0",
        "admin": "127.0.0.5:0",
        "coordinators": ["coordinator.invalid:8752"],
    }
    file = tmp_path / "papaya.toml"
    file.write_text(toml(deployment, {}), encoding="utf-8")
    done = run_to_the_end("serve", "aggregator", "--config", str(file))
    assert done.returncode == 2
    assert "cannot resolve coordinator.invalid:8752" in done.stderr
    assert "getent hosts coordinator.invalid" in done.stderr
    assert not (tmp_path / "data").exists(), "nothing is changed"


def test_a_server_that_nobody_could_call_does_not_start(tmp_path: Path) -> None:
    cases = {
        "aggregator": ("0.0.0.0:8752", "is not an address that other servers can call"),
        "coordinator": ("127.0.0.5:8752", "no other server knows this coordinator"),
    }
    for role, (servers, problem) in cases.items():
        file = tmp_path / f"{role}.toml"
        deployment: dict[str, Toml] = {
            "data": str(tmp_path / "data"),
            "servers": servers,
            "admin": "127.0.0.5:0",
            "coordinators": ["127.0.0.3:8752"],
        }
        file.write_text(toml(deployment, {}), encoding="utf-8")
        done = run_to_the_end("serve", role, "--config", str(file))
        assert done.returncode == 2
        assert problem in done.stderr
        assert not (tmp_path / "data").exists(), "nothing is changed"


# -- TSAs on other machines ---------------------------------------------------------------------


@contextmanager
def gate(folder: Path, authority: Authority, tsa: str, host: str) -> Iterator[str]:
    """`papaya serve tsa-gate`; the address that aggregators call."""
    files = authority.issue(f"tsa-{host}", ["tsa"], [host])
    file = folder / f"gate-{host}.toml"
    file.write_text(toml({**files.servers()}, {}), encoding="utf-8")
    command = [*PAPAYA, "serve", "tsa-gate", "--config", str(file), "--tsa", tsa]
    with subprocess.Popen(
        [*command, "--listen", f"tls:{host}:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            assert process.wait(STEP_S) == 0


def test_a_successor_reaches_the_same_tsa_and_tasks_are_spread(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    with ExitStack() as stack:
        tsas = []
        for host in ("127.0.0.7", "127.0.0.8"):
            folder = tmp_path / host
            folder.mkdir()
            tsa = stack.enter_context(trusted_process(folder))
            tsas.append(stack.enter_context(gate(tmp_path, authority, tsa, host)))
        installation = stack.enter_context(Installation(tmp_path))
        anywhere = Anywhere(installation, authority, tsa=tsas)
        start(anywhere)
        # One after the other: aggregators that choose at the same time may choose the same TSA.
        anywhere.admin.submit(CONFIG)
        until(lambda: len(_tsa_rows(installation)) == 1, "the task has a TSA")
        anywhere.admin.submit(structs.replace(CONFIG, task="other"))
        until(lambda: len(_tsa_rows(installation)) == 2, "both tasks have a TSA")
        before = _tsa_rows(installation)
        assert sorted(row.address for row in before.values()) == sorted(tsas)

        def fail() -> None:
            holder(anywhere.admin, anywhere.aggregators).kill()

        book = asyncio.run(over_a_failure(installation, anywhere.selector, anywhere.admin, fail))
        anywhere.stop()
        assert _tsa_rows(installation) == before
        books = SecureBooks(installation.data, CONFIG.task)
        books.check(book.of(CONFIG.task))
        assert books.newest >= 4
        assert books.dropped == []


def _tsa_rows(installation: Installation) -> dict[str, TsaRow]:
    state = SqliteState(installation.data / "state.db")
    try:
        rows = state.read((TSAS,))
        return {key: row for key, row in rows.items() if isinstance(row, TsaRow)}
    finally:
        state.close()
