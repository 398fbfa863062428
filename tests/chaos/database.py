"""PostgreSQL with a synchronous replica under Patroni and etcd, on hosts of their own.

From Debian's packages. Clients connect with verified TLS and a password.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg

from papaya.messages import wire
from papaya.messages.storage import OptimizerRow, optimizer_key
from tests.chaos.hosts import Host, Program, until
from tests.chaos.writers import strangers, watch_writers
from tests.system.tls import Authority

_AS_POSTGRES = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
_PASSWORD = "chaos"
_PATRONI_PORT = 8008
_ANSWER_S = 2.0
_PORT = 5432
_END_WAITING = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE wait_event = 'SyncRep' AND application_name LIKE 'papaya aggregator@%'
"""


class Database:
    """Two servers, of which Patroni makes one the primary."""

    def __init__(
        self, folder: Path, authority: Authority, etcds: list[Host], hosts: list[Host]
    ) -> None:
        self.hosts, self._etcds = hosts, etcds
        self._folder, self._authority = folder, authority
        for etcd in etcds:
            etcd.programs.append(self._etcd(etcd))
        for host in hosts:
            host.programs.append(self._patroni(host))

    @property
    def url(self) -> str:
        addresses = ",".join(f"{host.address}:{_PORT}" for host in self.hosts)
        return (
            f"postgresql://papaya@{addresses}/papaya?passfile={self._folder / 'password'}"
            f"&sslrootcert={self._authority.file}"
        )

    def start(self) -> None:
        """The first host becomes the primary, the second its synchronous replica."""
        lines = [f"{host.address}:{_PORT}:*:papaya:{_PASSWORD}\n" for host in self.hosts]
        file = self._folder / "password"
        file.touch(mode=0o600)
        file.write_text("".join(lines), encoding="ascii")
        first, second = self.hosts
        with ThreadPoolExecutor() as threads:  # a member answers when there is a majority
            list(threads.map(Host.boot, self._etcds))
        first.boot()
        until(lambda: self.primary() is first, "the database has a primary")
        first.run("psql", *self._as_owner(first), "-c", "CREATE USER papaya PASSWORD 'chaos'")
        first.run("psql", *self._as_owner(first), "-c", "CREATE DATABASE papaya OWNER papaya")
        second.boot()
        until(lambda: self.synchronous() is second, "the replica is synchronous")

    def primary(self) -> Host | None:
        return self._member("leader")

    def synchronous(self) -> Host | None:
        return self._member("sync_standby")

    def _member(self, role: str) -> Host | None:
        for host in self.hosts:
            found = self._ask(host, "GET", "/cluster") or {"members": []}
            for member in found["members"]:
                if member["role"] == role and member["state"] in ("running", "streaming"):
                    return next(each for each in self.hosts if each.name == member["name"])
        return None

    def switch_over(self) -> None:
        """Ask Patroni for a planned change of the primary."""
        primary, standby = self.primary(), self.synchronous()
        if primary is not None and standby is not None:
            body = {"leader": primary.name, "candidate": standby.name}
            self._ask(primary, "POST", "/switchover", body, 30.0)

    def kill_primary(self) -> None:
        """SIGKILL to the server; Patroni lives."""
        primary = self.primary()
        if primary is not None:
            file = self._data(primary) / "postmaster.pid"
            os.kill(int(file.read_text().split()[0]), 9)

    def stop_replication(self, primary: Host, standby: Host) -> None:
        """Nothing that the primary sends as a server of PostgreSQL arrives at the standby."""
        standby.ignore(primary, _PORT)

    def resume_replication(self, primary: Host, standby: Host) -> None:
        standby.hear(primary, _PORT)

    def end_unreplicated_commits(self) -> int:
        """Terminate the backends of aggregators whose commit waits for the standby. Then it is
        visible, although it is not replicated. How many there were.
        """
        with self._connected() as connection:
            return len(connection.execute(_END_WAITING).fetchall())

    def watch_writers(self) -> None:
        with self._connected() as connection:
            watch_writers(connection)

    def strangers(self) -> list[str]:
        with self._connected() as connection:
            return strangers(connection)

    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        """To the primary. Raises psycopg.Error."""
        return psycopg.connect(self.url, target_session_attrs="read-write", connect_timeout=2)

    def until_writable(self, seconds: float) -> float:
        """When a connection could write, in Unix time."""
        ends_at = time.monotonic() + seconds
        while True:
            try:
                with self._connected() as connection:
                    connection.execute("CREATE TEMPORARY TABLE probe (x int)")
                return time.time()
            except psycopg.Error as error:
                if time.monotonic() > ends_at:
                    raise AssertionError(f"no primary after {seconds:g} s") from error
                time.sleep(0.05)

    def versions(self, tasks: Sequence[str]) -> dict[str, int]:
        """The newest version of each task. Raises psycopg.Error."""
        with self._connected() as connection:
            return newest_versions(connection, tasks)

    def _etcd(self, host: Host) -> Program:
        """One of the members that decide which server is the primary."""
        clients, peers = f"http://{host.address}:2379", f"http://{host.address}:2380"
        members = ",".join(f"{each.name}=http://{each.address}:2380" for each in self._etcds)
        command = ["etcd", "--name", host.name, "--data-dir", str(self._folder / host.name)]
        command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", members, "--initial-cluster-token", "papaya-chaos"]
        return Program(
            host,
            host.name,
            command,
            self._folder,
            dict(os.environ),
            lambda: (self._ask(host, "GET", "/health", port=2379) or {}).get("health") == "true",
        )

    def _ask(
        self,
        host: Host,
        method: str,
        path: str,
        body: object = None,
        seconds: float = _ANSWER_S,
        port: int = _PATRONI_PORT,
    ) -> Any:
        """None without an answer."""
        connection = http.client.HTTPConnection(host.address, port, timeout=seconds)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse().read()
            return json.loads(answer) if answer.startswith(b"{") else {"members": []}
        except OSError:
            return None
        finally:
            connection.close()

    def _as_owner(self, host: Host) -> tuple[str, ...]:
        return (f"host={self._place(host)} user=postgres password={_PASSWORD} dbname=postgres",)

    def _place(self, host: Host) -> Path:
        return self._folder / host.name

    def _data(self, host: Host) -> Path:
        return self._place(host) / "data"

    def _patroni(self, host: Host) -> Program:
        place = self._place(host)
        place.mkdir()
        files = self._authority.issue(host.name, hosts=[host.address])
        for file in (files.certificate, files.key):
            shutil.copy(file, place)
            (place / file.name).chmod(0o600)
        config = place / "patroni.json"
        config.write_text(json.dumps(self._configuration(host, place)), encoding="utf-8")
        for path in (place, *place.iterdir()):
            shutil.chown(path, "postgres", "postgres")
        command = [*_AS_POSTGRES, "patroni", str(config)]
        return Program(
            host,
            f"patroni-{host.name}",
            command,
            self._folder,
            os.environ | {"HOME": str(place)},
            lambda: True,
        )

    def _configuration(self, host: Host, place: Path) -> dict[str, Any]:
        rest, address = f"{host.address}:{_PATRONI_PORT}", host.address
        known = {"username": "postgres", "password": _PASSWORD}
        return {
            "scope": "papaya",
            "name": host.name,
            "restapi": {"listen": rest, "connect_address": rest},
            "etcd3": {"hosts": [f"{each.address}:2379" for each in self._etcds]},
            "bootstrap": {
                "dcs": {
                    "ttl": 20,
                    "loop_wait": 1,
                    "retry_timeout": 3,
                    "synchronous_mode": True,
                    "master_start_timeout": 0,
                    "primary_start_timeout": 0,
                    "postgresql": {"use_pg_rewind": True},
                },
                "initdb": [{"encoding": "UTF8"}, "data-checksums"],
                "pg_hba": [
                    "local all all scram-sha-256",
                    "hostssl all all 10.77.0.0/24 scram-sha-256",
                    "hostssl replication replicator 10.77.0.0/24 scram-sha-256",
                ],
            },
            "postgresql": {
                "listen": f"{address}:{_PORT}",
                "connect_address": f"{address}:{_PORT}",
                "data_dir": str(place / "data"),
                "bin_dir": str(_programs()),
                "pgpass": str(place / "pgpass"),
                "basebackup": [{"checkpoint": "fast"}],
                "authentication": {
                    "superuser": known,
                    "replication": {"username": "replicator", "password": _PASSWORD},
                    "rewind": known,
                },
                "parameters": {
                    "unix_socket_directories": str(place),
                    "max_connections": 60,
                    "shared_buffers": "32MB",
                    "wal_keep_size": "256MB",
                    "ssl": "on",
                    "ssl_cert_file": str(place / f"{host.name}.pem"),
                    "ssl_key_file": str(place / f"{host.name}.key"),
                },
            },
        }


def newest_versions(
    connection: psycopg.Connection[tuple[Any, ...]], tasks: Sequence[str]
) -> dict[str, int]:
    """By the rows that servers write. 0 if a task has none yet."""
    found = dict.fromkeys(tasks, 0)
    for task in tasks:
        key = optimizer_key(task).encode()
        answer = connection.execute("SELECT row FROM papaya_rows WHERE key = %s", (key,))
        for (data,) in answer:
            row = wire.decode_row(bytes(data))
            assert isinstance(row, OptimizerRow)
            found[task] = row.version
    return found


def _programs() -> Path:
    """Of the newest PostgreSQL that Debian has installed."""
    return max(Path("/usr/lib/postgresql").glob("*/bin"))
