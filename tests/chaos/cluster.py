"""A whole installation on hosts of its own: every role, database, bucket and load balancer.

    coordinator-1, -2    selector-1, -2, -3 behind haproxy with TLS    aggregator-1, -2, -3
    tsa-1, -2 (each with its gate)    db-1, db-2 (Patroni), etcd-1, -2, -3    s3 (moto)    devices

Roles talk with certificates, PostgreSQL with TLS and a password. No host shares a folder with
another. Each server's data is on a small disk of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

from papaya.config import TaskConfig
from papaya.credentials.s3_keys import s3_keys
from papaya.credentials.token_files import read_or_make
from papaya.messages.storage import FenceRow, fence_key
from papaya.server.public_log import own_record
from papaya.store.blob_cache import BlobCache
from papaya.store.folders import make_folder
from papaya.store.postgresql import PostgresState
from papaya.store.s3_blobs import S3Blobs
from papaya.tsa.measurement import measure
from tests.chaos.database import Database
from tests.chaos.hosts import Host, Network, Program, move_into, sh, until
from tests.chaos.oracle import Stored
from tests.s3 import server as s3
from tests.system.admin import Admin
from tests.system.processes import PAPAYA, Toml, environment, toml
from tests.system.tls import Authority

ROOT = Path(__file__).parents[2]
HEARTBEAT_S = 1.5
_DISK_MB = 64
_BLOBS = f"s3://{s3.BUCKET}/chaos"
_SERVER: dict[str, Toml] = {
    "heartbeat_s": HEARTBEAT_S,
    "chunk_bytes": 64 << 10,
    "max_retry_s": 2.0,
    "min_retry_s": 0.1,
}


class Cluster:
    def __init__(
        self, network: Network, folder: Path, program: Sequence[str] = PAPAYA, **variables: str
    ) -> None:
        """`program`, `variables`: the command of the roles, and its environment."""
        self.folder = folder
        self._program = program
        self.authority = Authority(folder / "tls")
        console = network.add("console", 1)
        self.coordinators = [network.add(f"coordinator-{n}", 10 + n) for n in (1, 2)]
        self.selectors = [network.add(f"selector-{n}", 20 + n) for n in (1, 2, 3)]
        self.balancer = network.add("balancer", 30)
        self.aggregators = [network.add(f"aggregator-{n}", 40 + n) for n in (1, 2, 3)]
        self.tsas = [network.add(f"tsa-{n}", 50 + n) for n in (1, 2)]
        databases = [network.add(f"db-{n}", 60 + n) for n in (1, 2)]
        self.etcds = [network.add(f"etcd-{n}", 70 + n) for n in (1, 2, 3)]
        self.bucket = network.add("s3", 80)
        self.devices = network.add("devices", 90)
        move_into(console)
        self.database = Database(folder, self.authority, self.etcds, databases)
        self._secrets = folder / "secrets"
        self._keys = s3.key_file(folder)
        self._disks: list[Path] = []
        paths = os.pathsep.join((str(self._without_numba()), str(ROOT)))
        self._environment = environment() | {"PYTHONPATH": paths, **variables}

    @property
    def roles(self) -> list[Host]:
        return [*self.coordinators, *self.selectors, *self.aggregators]

    @property
    def all(self) -> list[Host]:
        databases = self.database.hosts
        return [*self.roles, self.balancer, *self.tsas, *databases, *self.etcds, self.bucket]

    def start(self) -> None:
        make_folder(self._secrets)
        for name in ("admin.token", "server.token", "device.token"):
            read_or_make(self._secrets, name)
        own_record(self._secrets, measure())
        self._add_bucket()
        for host in self.tsas:
            self._add_tsa(host)
        for host in self.roles:
            self._add_role(host)
        self._add_balancer()
        with ThreadPoolExecutor() as threads:
            begun = [threads.submit(self.database.start)]
            begun += [threads.submit(host.boot) for host in (self.bucket, *self.tsas)]
            for each in begun:
                each.result()
            # One coordinator first: it makes the table and the id of the cluster.
            first, *others = self.roles
            first.boot()
            self.database.watch_writers()
            list(threads.map(Host.boot, others))
        self.balancer.boot()

    def close(self) -> None:
        for disk in self._disks:
            with suppress(AssertionError):
                sh("umount", "--lazy", str(disk))

    # -- the hosts --------------------------------------------------------------------------------

    def _add_role(self, host: Host) -> None:
        role, address = host.name.rsplit("-", 1)[0], host.address
        data = self.disk(host)
        data.mkdir()
        sh("mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m,mode=0700", "papaya-chaos", str(data))
        self._disks.append(data)
        shutil.copytree(self._secrets, data, dirs_exist_ok=True)
        deployment: dict[str, Toml] = {
            "data": str(data),
            "devices": f"{address}:8750",
            "admin": f"{address}:8751",
            "servers": f"{address}:8752",
            "coordinators": [f"{each.address}:8752" for each in self.coordinators],
            "state": self.database.url,
            "blobs": _BLOBS,
            "blobs_endpoint": f"http://{self.bucket.address}:9000",
            "blobs_credentials": str(self._keys),
            "tsa": [f"tls:{each.address}:8760" for each in self.tsas],
            "proxies": [self.balancer.address],
            **self.authority.issue(host.name, [role], [address]).servers(),
        }
        file = self.folder / f"{host.name}.toml"
        file.write_text(toml(deployment, _SERVER), encoding="utf-8")
        self._add(
            host,
            host.name,
            *("serve", role, "--config", str(file), "--format", "json"),
            program=self._program,
        )

    def _add_tsa(self, host: Host) -> None:
        place = f"unix:{self.folder / host.name}.sock"
        self._add(host, host.name, "serve", "tsa", "--listen", place)
        file = self.folder / f"{host.name}.toml"
        files = self.authority.issue(host.name, ["tsa"], [host.address])
        file.write_text(toml({**files.servers()}, {}), encoding="utf-8")
        gate = ("--tsa", place, "--listen", f"tls:{host.address}:8760")
        self._add(host, f"{host.name}-gate", "serve", "tsa-gate", "--config", str(file), *gate)

    def _add(self, host: Host, name: str, *arguments: str, program: Sequence[str] = PAPAYA) -> None:
        command = [*program, *arguments]
        host.programs.append(Program(host, name, command, self.folder, self._environment))

    def _add_bucket(self) -> None:
        place = self.folder / "s3"
        place.mkdir()
        (place / "fault").touch()
        command = [sys.executable, s3.__file__, str(place), f"{self.bucket.address}:9000"]
        self.bucket.programs.append(
            Program(self.bucket, "s3", command, self.folder, dict(os.environ))
        )

    def _add_balancer(self) -> None:
        files = self.authority.issue("balancer", hosts=[self.balancer.address])
        both = self.folder / "tls" / "balancer-both.pem"
        both.write_bytes(files.certificate.read_bytes() + files.key.read_bytes())
        how = "send-proxy-v2 check check-send-proxy inter 1s"
        servers = "\n".join(
            f"  server {each.name} {each.address}:8750 {how}" for each in self.selectors
        )
        config = self.folder / "haproxy.cfg"
        config.write_text(
            "defaults\n  mode http\n  timeout connect 2s\n  timeout client 60s\n"
            "  timeout server 60s\n  option redispatch\n  retries 2\n"
            f"frontend devices\n  bind {self.balancer.address}:443 ssl crt {both}\n"
            f"  default_backend selectors\nbackend selectors\n  balance roundrobin\n{servers}\n",
            encoding="ascii",
        )
        command = ["haproxy", "-db", "-f", str(config)]
        program = Program(
            self.balancer, "haproxy", command, self.folder, dict(os.environ), self._is_balanced
        )
        self.balancer.programs.append(program)

    def _is_balanced(self) -> bool:
        return ":443" in self.balancer.run("ss", "-ltn")

    def _without_numba(self) -> Path:
        """Importing it costs more than all the rest of a start."""
        hiding = self.folder / "without-numba"
        hiding.mkdir()
        (hiding / "numba.py").write_text("raise ImportError\n", encoding="ascii")
        return hiding

    # -- what it holds ----------------------------------------------------------------------------

    def disk(self, host: Host) -> Path:
        return self.folder / f"{host.name}-data"

    def submit(self, config: TaskConfig) -> None:
        self._tell_leader(lambda admin: admin.submit(config))

    def cancel(self, config: TaskConfig) -> None:
        self._tell_leader(lambda admin: admin.post(f"/admin/tasks/{config.task}/cancel"))

    def _tell_leader(self, tell: Callable[[Admin], None]) -> None:
        token = (self._secrets / "admin.token").read_text(encoding="ascii").strip()

        def is_told() -> bool:
            for host in self.coordinators:
                admin = Admin(f"{host.address}:8751", token)
                if admin.get("/admin/status")["leads"]:
                    tell(admin)
                    return True
            return False

        until(is_told, "a coordinator leads")

    def add_load(
        self, tasks: list[TaskConfig], devices: int, training_s: float, outcomes: Path
    ) -> Program:
        """`papaya load` through the balancer; it ends when it is told to."""
        trust = self.folder / "trust.toml"
        url = f"https://{self.balancer.address}"
        key = (self._secrets / "log.key.pub").read_text(encoding="ascii").strip()
        trust.write_text(
            f'log_key = "{key}"\nlog_url = "{url}/v1/log"\nplatforms = ["software"]\n'
            "allow_insecure_software = true\nallow_smt = true\nminimum_threshold = 4\n",
            encoding="utf-8",
        )
        command = [*PAPAYA, "load", "--server", url, "--ca", str(self.authority.file)]
        command += ["--admin", f"http://{self.coordinators[0].address}:8751"]
        command += ["--token-file", str(self._secrets / "admin.token"), "--format", "json"]
        command += ["--device-token-file", str(self._secrets / "device.token")]
        command += ["--trust", str(trust), "--update", "digit", "--outcomes", str(outcomes)]
        command += ["--devices", str(devices), "--training", str(training_s)]
        command += ["--seconds", str(24 * 3600), "--request-timeout", "3", "--drain", "60"]
        command += [part for config in tasks for part in ("--task", config.task)]
        program = Program(
            self.devices, outcomes.name, command, self.folder, self._environment, outcomes.exists
        )
        self.devices.programs.append(program)
        return program

    def holder(self) -> Host:
        """An aggregator that holds a task, by the rows that decide it."""
        with closing(PostgresState(self.database.url, "the run")) as state:
            fences = state.read((fence_key(""),)).values()
        holders = [fence.aggregator for fence in fences if isinstance(fence, FenceRow)]
        return next(a for a in self.aggregators if any(f"@{a.address}:" in h for h in holders))

    def stored(self) -> Stored:
        with closing(PostgresState(self.database.url, "the oracle")) as state:
            rows = state.read(("",))
        cache = BlobCache(self.folder / "oracle-cache")
        endpoint = f"http://{self.bucket.address}:9000"
        keys = s3_keys(self._keys)
        return Stored(rows, S3Blobs.open(_BLOBS, cache, endpoint=endpoint, credentials=keys))

    def pids(self) -> list[int]:
        """Of the roles that run."""
        programs = [program for host in self.roles for program in host.programs]
        return [pid for program in programs if (pid := program.pid) is not None]

    def stop_servers(self) -> dict[str, int]:
        """SIGTERM to every role; the exit codes."""
        programs = [program for host in self.roles for program in host.programs]
        stop: Callable[[Program], int] = Program.stop
        with ThreadPoolExecutor() as threads:
            codes = threads.map(stop, programs)
            return dict(zip([program.name for program in programs], codes, strict=True))
