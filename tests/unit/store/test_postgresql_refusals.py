"""Bad input to the state store in PostgreSQL: an error with a hint, no secret, and no change."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import psycopg
import pytest

from papaya.config import Deployment
from papaya.errors import ConfigError, OperatorError
from papaya.messages.storage import EpochRow, Transaction
from papaya.store.clusters import open_state, read_cluster
from papaya.store.postgresql import PostgresState
from papaya.store.postgresql_session import connection_string
from papaya.store.state import SqliteState
from tests.postgresql import Postgres, postgres
from tests.system.tls import Authority, Certificates

SECRET = "correct-horse-battery"


@pytest.fixture
def url() -> Iterator[str]:
    with postgres().schema() as made:
        yield made


def refused(url: str, match: str, hint: str, cluster: str | None = None) -> None:
    with pytest.raises(OperatorError, match=match) as caught:
        PostgresState(url, "node", cluster=cluster)
    assert hint in caught.value.hint
    assert SECRET not in f"{caught.value} {caught.value.hint}"


def tables(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        question = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        return [str(name) for (name,) in connection.execute(question).fetchall()]


# -- credentials ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """A database of a user who needs a password."""
    server = postgres()
    server.execute(f"CREATE ROLE guarded LOGIN PASSWORD '{SECRET}'")
    with server.database() as name:
        server.execute(f"ALTER DATABASE {name} OWNER TO guarded")
        yield name
    server.execute("DROP ROLE guarded")


def test_the_password_comes_from_a_file_or_the_environment(
    guarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text(f"*:*:*:guarded:{SECRET}\n", encoding="ascii")
    file.chmod(0o600)
    PostgresState(postgres().url(guarded, "guarded", passfile=str(file)), "node").close()
    monkeypatch.setenv("PGPASSWORD", SECRET)
    PostgresState(postgres().url(guarded, "guarded"), "node").close()


def test_wrong_credentials(guarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = postgres().url(guarded, "guarded")
    refused(url, "no password supplied", "passfile")
    monkeypatch.setenv("PGPASSWORD", f"not-{SECRET}")
    refused(url, "password authentication failed", "passfile")
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "missing"))
    refused(url, "cannot read the password file .*missing: No such file", "chmod 600")
    (tmp_path / "missing").touch(mode=0o644)
    refused(url, "can be read by others", "chmod 600")
    monkeypatch.delenv("PGPASSFILE")
    refused(postgres().url(user="nobody-knows"), "does not exist", "createuser")
    refused(postgres().url("nothing"), "does not exist", "createdb")


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://papaya:{SECRET}@db.example/papaya",
        f"postgres://papaya@db.example/papaya?sslmode=disable&password={SECRET}",
        f"mysql://papaya:{SECRET}@db.example/papaya",
    ],
)
def test_a_password_in_the_configuration_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(ConfigError, match=r"password in it|not a URL of PostgreSQL") as caught:
        Deployment(state=url)
    assert SECRET not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("key", ["pass%zzword", "p%61ssword"])
def test_a_secret_that_only_libpq_finds_is_refused_and_not_quoted(key: str) -> None:
    with pytest.raises(OperatorError, match=r"state (is not a URL|has a password)") as caught:
        connection_string(f"postgresql://u@h/d?{key}={SECRET}", "node")
    assert SECRET not in f"{caught.value} {caught.value.hint}"
    assert caught.value.__cause__ is None


# -- TLS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "mode"),
    [
        ("db.example", "verify-full"),
        ("10.0.0.7", "verify-full"),
        ("localhost,db.example", "verify-full"),
        ("localhost", "prefer"),
        ("127.0.0.1,[::1]", "prefer"),
        ("", "prefer"),
        ("%2Frun%2Fpostgresql", "prefer"),
    ],
)
def test_tls_is_verified_except_on_this_machine(where: str, mode: str) -> None:
    assert f"sslmode={mode}" in connection_string(f"postgresql://u@{where}/d", "node")


def test_tls_is_verified_if_the_host_comes_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sslmode=verify-full" in connection_string("postgresql:///d?service=main", "node")
    monkeypatch.setenv("PGHOST", "db.example")
    assert "sslmode=verify-full" in connection_string("postgresql://u@/d", "node")


def test_less_than_verified_tls_is_called_insecure(caplog: pytest.LogCaptureFixture) -> None:
    info = connection_string("postgresql://u@db.example/d?sslmode=require", "node")
    assert "sslmode=require" in info
    assert "INSECURE: sslmode=require" in caplog.text


@contextmanager
def a_server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Says yes or no to the first message of a client, the request for TLS."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(8)
            answer(connection)

    thread = Thread(target=serve)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        thread.join(300)
        listening.close()


def test_a_server_without_tls_is_refused() -> None:
    with a_server(lambda connection: connection.sendall(b"N")) as port:
        url = f"postgresql://u@127.0.0.1:{port}/d?sslmode=verify-full&sslrootcert=system"
        refused(url, "does not support SSL", "turn on ssl")


@pytest.mark.parametrize(
    ("name", "said"), [("authority", "signature failure"), ("another", "certificate verify")]
)
def test_a_server_with_the_certificate_of_another_authority_is_refused(
    tmp_path: Path, name: str, said: str
) -> None:
    """Also if both authorities have the same name."""
    ours = Authority(tmp_path / "ours", "authority").issue("server")
    theirs = Authority(tmp_path / "theirs", name).issue("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(theirs.certificate, theirs.key)

    def answer(connection: socket.socket) -> None:
        connection.sendall(b"S")
        with pytest.raises((ssl.SSLError, OSError)):
            context.wrap_socket(connection, server_side=True).recv(1)

    with a_server(answer) as port:
        query = f"sslmode=verify-full&sslrootcert={ours.authority}"
        refused(f"postgresql://u@127.0.0.1:{port}/d?{query}", said, "sslrootcert")


@contextmanager
def tls_before(server: Postgres, shown: Certificates) -> Iterator[int]:
    """A port where the server speaks TLS. The one from PyPI is built without it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(shown.certificate, shown.key)
    listening = socket.create_server(("127.0.0.1", 0))
    threads: list[Thread] = []

    def begin(work: Callable[..., None], *given: socket.socket) -> None:
        threads.append(Thread(target=work, args=given))
        threads[-1].start()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def serve(plain: socket.socket) -> None:
        with plain, suppress(OSError):  # the client may refuse our certificate
            assert plain.recv(8)[4:] == bytes.fromhex("04d2162f")  # the request for TLS
            plain.sendall(b"S")
            with (
                context.wrap_socket(plain, server_side=True) as front,
                socket.socket(socket.AF_UNIX) as back,
            ):
                back.connect(str(server.folder / ".s.PGSQL.5432"))
                pumping = Thread(target=pump, args=(back, front))
                pumping.start()
                pump(front, back)
                pumping.join()

    def accept() -> None:
        with suppress(OSError):
            while True:
                begin(serve, listening.accept()[0])

    begin(accept)
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for thread in threads:
            thread.join(300)


def test_state_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = postgres()
    with server.database() as name, tls_before(server, authority.issue("server")) as port:
        query = f"sslmode=verify-full&sslrootcert={authority.file}"
        url = f"postgresql://postgres@127.0.0.1:{port}/{name}?{query}"
        with closing(PostgresState(url, "node")) as store:
            assert store.transact(Transaction(put=(("a", EpochRow(1)),))) == "committed"
            assert store.read(("a",)) == {"a": EpochRow(1)}


@pytest.mark.parametrize(
    ("hosts", "age", "said"),
    [
        (("db.example",), timedelta(0), 'does not match host name "127.0.0.1"'),
        (("127.0.0.1",), timedelta(days=200), "certificate verify failed"),
    ],
)
def test_a_certificate_of_another_host_or_an_expired_one_is_refused(
    tmp_path: Path, hosts: tuple[str, ...], age: timedelta, said: str
) -> None:
    authority = Authority(tmp_path)
    server = postgres()
    shown = authority.issue("server", hosts=hosts, age=age)
    with server.database() as name, tls_before(server, shown) as port:
        query = f"sslmode=verify-full&sslrootcert={authority.file}"
        url = f"postgresql://postgres@127.0.0.1:{port}/{name}?{query}"
        refused(url, said, "its name, its dates")
        assert (
            server.execute("SELECT tablename FROM pg_tables WHERE schemaname='public'", name) == []
        )


# -- the server -----------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
def test_unsafe_settings(url: str, setting: str) -> None:
    with postgres().setting(setting, "off"):
        refused(url, f"{setting} = off", f"set {setting} = on")
    assert tables(url) == []


def test_a_read_only_server() -> None:
    server = postgres()
    with server.database() as name:
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        refused(server.url(name), "read-only", "connect to the primary")


def test_a_pooler_is_recognized_by_the_key_that_it_invents(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives its clients a number of its own instead of the one of the backend."""
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", property(lambda self: 7))
    refused(url, "a connection pooler", "connect to the server itself")
    assert tables(url) == []


@pytest.mark.skipif(shutil.which("pgbouncer") is None, reason="pgbouncer is not installed")
@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_pgbouncer(mode: str) -> None:
    server = postgres()
    is_root = os.geteuid() == 0  # which pgbouncer refuses
    with server.database() as name, TemporaryDirectory() as folder, reserved_port() as port:
        settings = Path(folder) / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n{name} = host={server.folder} user=postgres\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = {mode}\nignore_startup_parameters = options\n",
            encoding="ascii",
        )
        if is_root:
            Path(folder).chmod(0o755)
        command = ["pgbouncer", "-q", str(settings)]
        with subprocess.Popen(command, user="nobody" if is_root else None) as pooler:
            try:
                until_open(port)
                url = f"postgresql://postgres@127.0.0.1:{port}/{name}?sslmode=disable"
                refused(url, "a connection pooler", "connect to the server itself")
            finally:
                pooler.terminate()
        question = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        assert server.execute(question, name) == []


@contextmanager
def reserved_port() -> Iterator[int]:
    """Nobody listens there, except a process that is told of it and uses SO_REUSEADDR."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield int(reserved.getsockname()[1])


def until_open(port: int) -> None:
    ends_at = time.monotonic() + 300
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < ends_at
            time.sleep(0.02)
        else:
            return


def test_a_connection_that_moves_to_another_backend_is_given_up(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(PostgresState(url, "node")) as store:
        assert store._session is not None
        store._session.backend_pid += 1  # as after a pooler gave us another one
        change = Transaction(put=(("a", EpochRow(1)),))
        assert store.transact(change) == "unknown"
        assert "a connection pooler has changed the connection" in caplog.text
        assert store.read(("",)) == {}


def test_a_name_that_resolves_to_nothing_and_a_port_where_nobody_listens() -> None:
    refused("postgresql://u@nothing.invalid/d?sslmode=disable", "resolve|translate", "")
    with reserved_port() as port:
        refused(f"postgresql://u@127.0.0.1:{port}/d", "refused", "psql URL")


# -- the database ---------------------------------------------------------------------------------


def test_the_database_of_another_program(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE songs (title text)")
    refused(url, "another program: it has the table songs", "createdb")
    assert tables(url) == ["songs"]


def test_a_table_of_this_name_that_another_program_made(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE papaya_rows (taste text)")
    refused(url, "papaya_rows was made by another program", "createdb")


def test_a_database_of_another_version(url: str) -> None:
    PostgresState(url, "node").close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE papaya_rows SET row = '9' WHERE key = '\\xff'::bytea || 'version'"
        )
    refused(url, "schema version 9, this Papaya supports 1", "version of Papaya that wrote it")


def test_a_user_who_may_not_create_tables() -> None:
    server = postgres()
    server.execute("CREATE ROLE visitor LOGIN")
    with server.database() as name:
        refused(server.url(name, "visitor"), "may not create tables", "OWNER TO visitor")
    server.execute("DROP ROLE visitor")


# -- clusters -------------------------------------------------------------------------------------


def test_a_data_folder_joins_the_cluster_of_its_database_for_good(url: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        open_state(url, folder, "node").close()
    assert read_cluster(one) == read_cluster(two) is not None
    with postgres().schema() as other:
        with pytest.raises(OperatorError, match="no rows of Papaya, but this process") as caught:
            open_state(other, one, "node")
        assert "papaya store migrate" in caught.value.hint
        assert tables(other) == []
        PostgresState(other, "node").close()
        with pytest.raises(OperatorError, match=r"holds the cluster .* belongs to") as caught:
            open_state(other, one, "node")
        assert "a database of its own" in caught.value.hint


@pytest.mark.parametrize("is_of_this_cluster", [False, True])
def test_state_that_is_still_in_the_folder_is_refused(
    url: str, tmp_path: Path, is_of_this_cluster: bool
) -> None:
    """It is not in the database yet, or a backup of the folder would copy it."""
    if is_of_this_cluster:
        open_state(None, tmp_path, "node").close()
    else:
        SqliteState(tmp_path / "state.db").close()
    with pytest.raises(OperatorError, match=r"state\.db exists, but state names") as caught:
        open_state(url, tmp_path, "node")
    assert "papaya store migrate" in caught.value.hint
    assert "move it away" in caught.value.hint
    assert tables(url) == []


def test_the_state_of_another_cluster_in_the_folder_is_refused(tmp_path: Path) -> None:
    open_state(None, tmp_path, "node").close()
    (tmp_path / "state.db").unlink()
    with pytest.raises(OperatorError, match="belongs to the cluster") as caught:
        open_state(None, tmp_path, "node")
    assert "a data folder of its own" in caught.value.hint
