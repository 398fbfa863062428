"""A small cluster on loopback, without root: one process per role, a proxy in front of each.

Two coordinators, two selectors, two aggregators and a TSA; state on PostgreSQL, blobs in a bucket
(moto). The faults are drawn from a seed, one of each kind, in an order that the seed decides too.
Some of them are in progress at the same time.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psycopg

from papaya.config import AsyncFL, OptimizerConfig, SecureAggregation, TaskConfig
from papaya.credentials.s3_keys import s3_keys
from papaya.errors import OperatorError
from papaya.messages.storage import FenceRow, Row, fence_key
from papaya.store.blob_cache import BlobCache
from papaya.store.postgresql import PostgresState
from papaya.store.s3_blobs import S3Blobs
from tests.chaos.database import newest_versions
from tests.chaos.faults import Fault, Limits, Versions, together
from tests.chaos.oracle import DAMPING, Stored
from tests.chaos.proxy import Direction, Proxy
from tests.postgresql import Postgres, running
from tests.s3.server import BUCKET, S3Server, key_file, s3_server
from tests.system.admin import Admin
from tests.system.processes import PAPAYA, Installation, ServerProcess, Toml, environment
from tests.system.test_secure import trusted_process, until

HEARTBEAT_S = 0.8
RECOVER_S = 240.0
LIMITS = Limits(acknowledge_s=RECOVER_S, version_s=RECOVER_S)
_STEP_S = 240.0
_RESTART_S = 0.2
_BLOBS = f"s3://{BUCKET}/chaos"
_LENGTH = 8_000
_GOAL = 4

CLEAR = TaskConfig(
    task="clear",
    concurrency=24,
    model_length=_LENGTH,
    regime=AsyncFL(aggregation_goal=_GOAL),
    optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
    staleness=DAMPING,
    participation_gap_s=0.0,
    commit_interval_s=0.05,
    keep_versions=3,
    training_timeout_s=20.0,
    upload_timeout_s=20.0,
)
# Rows of its buffers are kept: they tell which updates were lost with a TSA.
MASKED = TaskConfig(
    task="masked",
    concurrency=8,
    model_length=_LENGTH,
    regime=AsyncFL(aggregation_goal=_GOAL),
    optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
    staleness=DAMPING,
    secure_aggregation=SecureAggregation(),
    clip=64.0,
    max_examples=1,
    participation_gap_s=0.0,
    commit_interval_s=0.05,
    keep_versions=100_000,
    training_timeout_s=3600.0,
)
_SERVER: dict[str, Toml] = {
    "heartbeat_s": HEARTBEAT_S,
    "chunk_bytes": 16 << 10,
    "max_retry_s": 0.5,
}


class Loopback:
    """Use `loopback()`."""

    def __init__(
        self, installation: Installation, database: Postgres, s3: S3Server, keys: Path, tsa: str
    ) -> None:
        self.installation = installation
        self.database, self.s3 = database, s3
        self._keys = keys
        self.proxies: dict[str, Proxy] = {}
        self.state = database.url()
        announced = [installation.reserve() for _ in range(2)]
        self._shared: dict[str, Toml] = {
            "coordinators": announced,
            "state": self.state,
            "blobs": _BLOBS,
            "blobs_endpoint": s3.endpoint,
            "blobs_credentials": str(keys),
            "tsa": tsa,
            "log_format": "json",
        }
        # The nodes of processes that were killed and started again.
        self.killed: set[str] = set()
        self.coordinators = [
            self._add("coordinator", number, where) for number, where in enumerate(announced)
        ]
        self.selectors = [self._add("selector", number) for number in range(2)]
        self.aggregators = [self._add("aggregator", number) for number in range(2)]

    def _add(self, role: str, number: int, announce: str | None = None) -> ServerProcess:
        where, announced = self.installation.reserve(), announce or self.installation.reserve()
        name = f"{role}-{number}"
        self.proxies[name] = Proxy(announced, where)
        own: dict[str, Toml] = {"servers": where, "announce": announced}
        return self.installation.add(name, role, deployment=self._shared | own, server=_SERVER)

    def start(self) -> None:
        # One coordinator first: it makes the table, the tokens and the id of the cluster.
        first, *others = self.installation.servers
        first.start()
        with ThreadPoolExecutor() as threads:
            list(threads.map(ServerProcess.start, others))

    def submit(self, config: TaskConfig) -> None:
        def is_submitted() -> bool:
            for server in self.coordinators:
                status, _ = self.admin(server).ask("GET", "/admin/status")
                if status == 200 and self.admin(server).get("/admin/status")["leads"]:
                    self.admin(server).submit(config)
                    return True
            return False

        until(is_submitted, "a coordinator leads")

    def admin(self, server: ServerProcess) -> Admin:
        return Admin(server.addresses["admin"], self.installation.secret("admin.token"))

    def pids(self) -> list[int]:
        """Of the servers that run."""
        return [s.process.pid for s in self.installation.servers if s.is_running]

    def trust_file(self) -> Path:
        """The policy of devices that believe the cluster's software TSA."""
        key = self.installation.data / "log.key.pub"
        until(key.exists, "the TSA is in the log")
        file = self.installation.folder / "trust.toml"
        log = f"http://{self.selectors[0].addresses['devices']}/v1/log"
        file.write_text(
            f'log_key = "{key.read_text().strip()}"\nlog_url = "{log}"\n'
            'platforms = ["software"]\nallow_insecure_software = true\nallow_smt = true\n'
            f"minimum_threshold = {_GOAL}\n",
            encoding="utf-8",
        )
        return file

    @contextmanager
    def load(
        self, outcomes: Path, tasks: Sequence[TaskConfig], devices: int, training_s: float = 0.5
    ) -> Iterator[subprocess.Popen[str]]:
        """`papaya load`, which ends when it is told to."""
        installation = self.installation
        urls = [f"http://{server.addresses['devices']}" for server in self.selectors]
        data = installation.data
        command = [*PAPAYA, "load", "--server", ",".join(urls), "--outcomes", str(outcomes)]
        command += ["--admin", f"http://{self.coordinators[0].addresses['admin']}"]
        command += ["--token-file", str(data / "admin.token"), "--update", "digit"]
        command += ["--device-token-file", str(data / "device.token"), "--format", "json"]
        command += [part for config in tasks for part in ("--task", config.task)]
        if any(config.is_secure for config in tasks):
            command += ["--trust", str(self.trust_file())]
        command += ["--devices", str(devices), "--training", str(training_s), "--seconds", "3600"]
        command += ["--request-timeout", "2", "--drain", str(_STEP_S)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment()
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def faults(self, rng: Random) -> list[Fault]:
        """One of each kind."""
        found = [
            self.kill_holder(_seconds(rng)),
            self._kill(rng.choice(self.coordinators), rng),
            self._freeze(rng.choice(self.installation.servers), rng),
            self._cut(rng.choice(sorted(self.proxies)), rng.choice(("to", "from")), rng),
            self.kill_database(_seconds(rng)),
            self._bucket(rng.choice(("code:503:SlowDown", "hang")), rng),
        ]
        rng.shuffle(found)
        return found

    def fences(self) -> dict[str, Row]:
        """Who holds which task, by the rows that decide it."""
        with closing(PostgresState(self.state, "the test")) as state:
            return state.read((fence_key(""),))

    def holder(self) -> ServerProcess:
        """The aggregator of the clear task."""
        fence = self.fences()[fence_key(CLEAR.task)]
        assert isinstance(fence, FenceRow)
        [found] = [server for server in self.aggregators if fence.aggregator == self.node(server)]
        return found

    def kill_holder(self, seconds: float) -> Fault:
        killed: list[ServerProcess] = []

        def begin() -> None:
            try:
                killed.append(self.holder())
            except OperatorError:  # the database is away because of another fault
                killed.append(self.aggregators[0])
            self._kill_now(killed[0])

        def end() -> None:
            while killed:
                self._start_again(killed.pop())

        return Fault("kill: the holder", seconds, begin, end, self._holders())

    def kill_database(self, seconds: float) -> Fault:
        touches = frozenset({"database"})
        return Fault("database", seconds, self.database.kill, self.start_database, touches)

    def _holders(self) -> frozenset[str]:
        """Who may hold a task when a fault begins."""
        return frozenset(server.name for server in self.aggregators)

    def _kill(self, server: ServerProcess, rng: Random) -> Fault:
        return Fault(
            f"kill: {server.name}",
            _seconds(rng),
            lambda: self._kill_now(server),
            lambda: self._start_again(server),
            frozenset({server.name}),
        )

    def _start_again(self, server: ServerProcess) -> None:
        """Until it runs, as systemd does: what it needs may be away because of another fault."""
        ends_at = time.monotonic() + _STEP_S
        while True:
            try:
                server.start()
            except AssertionError:
                if time.monotonic() > ends_at:
                    raise
                time.sleep(_RESTART_S)
            else:
                return

    def _kill_now(self, server: ServerProcess) -> None:
        self.killed.add(self.node(server))
        server.kill()

    def node(self, server: ServerProcess) -> str:
        return f"{server.name.partition('-')[0]}@{self.proxies[server.name].listen}"

    def _freeze(self, server: ServerProcess, rng: Random) -> Fault:
        return Fault(
            f"freeze: {server.name}",
            _seconds(rng),
            lambda: server.send(signal.SIGSTOP),
            lambda: server.send(signal.SIGCONT),
            frozenset({server.name}),
        )

    def _cut(self, name: str, direction: Direction, rng: Random) -> Fault:
        proxy = self.proxies[name]
        return Fault(
            f"cut: {direction} {name}",
            _seconds(rng),
            lambda: proxy.cut(direction),
            lambda: proxy.mend(direction),
            frozenset({name}),
        )

    def _bucket(self, fault: str, rng: Random) -> Fault:
        return Fault(
            f"bucket: {fault}",
            _seconds(rng),
            lambda: self.s3.fail(fault),
            lambda: self.s3.fail(""),
            frozenset({"bucket"}),
        )

    def versions(self, tasks: Sequence[TaskConfig]) -> Versions:
        def read() -> dict[str, int]:
            with psycopg.connect(self.state) as connection:
                return newest_versions(connection, [config.task for config in tasks])

        return Versions(read)

    def start_database(self) -> None:
        self.database.begin_to_start()
        self.database.until_ready()

    def stored(self) -> Stored:
        with closing(PostgresState(self.state, "the oracle")) as state:
            rows = state.read(("",))
        cache = BlobCache(self.installation.folder / "oracle-cache")
        endpoint, keys = self.s3.endpoint, s3_keys(self._keys)
        return Stored(rows, S3Blobs.open(_BLOBS, cache, endpoint=endpoint, credentials=keys))


def overlapping(faults: Sequence[Fault], rng: Random) -> list[Fault]:
    """The same faults: as many as possible two at once, in pairs that touch different things."""
    waiting, found = list(faults), []
    while waiting:
        first = waiting.pop()
        other = next((f for f in waiting if not f.touches & first.touches), None)
        if other is None:
            found.append(first)
        else:
            waiting.remove(other)
            found.append(together(first, other, rng.uniform(0, first.seconds)))
    return found


def _seconds(rng: Random) -> float:
    """From less than a heartbeat to more than it takes to be taken for dead."""
    return rng.uniform(0.5, 4.5) * HEARTBEAT_S


@contextmanager
def loopback(folder: Path, program: Sequence[str] = PAPAYA, **variables: Any) -> Iterator[Loopback]:
    with ExitStack() as stack:
        database = stack.enter_context(running())
        s3 = stack.enter_context(s3_server())
        tsa = stack.enter_context(trusted_process(folder))
        installation = stack.enter_context(Installation(folder, program=program, **variables))
        made = Loopback(installation, database, s3, key_file(folder), tsa)
        for proxy in made.proxies.values():
            stack.enter_context(proxy)
        made.start()
        yield made
