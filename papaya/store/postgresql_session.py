"""One connection to PostgreSQL that may write: how it is opened, what is checked, whom it excludes.

    connect      to a server that is read-write, over TLS that is verified unless it is on this
                 machine; the password comes from a file or the environment
    check        no pooler in between; fsync, full_page_writes and synchronous_commit are safe
    prepare      the table is Papaya's, of this version and of this cluster; create it if the
                 schema is empty
    take a name  a session lock on the name of the process. After a lost connection it is granted
                 only when the old backend has ended, so nothing that was sent before can be
                 committed after this.

All of it is repeated after every lost connection: the server may be another one now.
"""

from __future__ import annotations

import logging
import os
import stat
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path
from select import POLLIN, poll
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import InsufficientPrivilege, LockNotAvailable

from papaya.errors import LostHistory, OperatorError
from papaya.store.rows import AFTER_UTF8, CLUSTER_ID_KEY

logger = logging.getLogger("papaya.store")

Connection = psycopg.Connection[tuple[Any, ...]]

SCHEMA_VERSION = b"1"
TABLE = "papaya_rows"
START_PATIENCE_S = 25.0  # the server ends the backend of a machine that is gone after 20 s
RECONNECT_PATIENCE_S = 3.0

_VERSION_KEY = AFTER_UTF8 + b"version"
_HALTED_KEY = AFTER_UTF8 + b"halted"
_COMMITS_KEYS = AFTER_UTF8 + b"commits/"
_CREATION_LOCK = 0x50415059_00000001  # "PAPY"; a transaction lock, before the cluster is known

# Compression of rows costs more CPU than it saves. Free space in pages keeps updates cheap.
_CREATE = f"""
CREATE TABLE {TABLE} (key bytea PRIMARY KEY, row bytea NOT NULL) WITH (fillfactor = 50);
ALTER TABLE {TABLE} ALTER row SET STORAGE EXTERNAL
"""
_FIND = f"SELECT row FROM {TABLE} WHERE key = %b"
_PUT = f"""
INSERT INTO {TABLE} VALUES (%b, %b) ON CONFLICT (key) DO UPDATE SET row = excluded.row
"""
# What a role or a server may have set otherwise. Nothing may cancel a COMMIT, and its warnings must
# arrive. A process that stops in mid-transaction is thrown out, so that its locks do not last. The
# keepalives let the server notice a client machine that is gone.
_SETTINGS = {
    "statement_timeout": "0",
    "transaction_timeout": "0",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "5s",
    "idle_session_timeout": "0",
    "client_connection_check_interval": "0",
    "client_min_messages": "warning",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
# A machine that is gone must be noticed within seconds, not within the minutes of TCP.
_PATIENCE = {
    "connect_timeout": "2",
    "keepalives_idle": "2",
    "keepalives_interval": "1",
    "keepalives_count": "3",
    "tcp_user_timeout": "5000",
}
_SET_KNOWN = """
SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS given (name, value)
WHERE name IN (SELECT name FROM pg_settings)
"""
_CHECKED = ("fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names")
_DURABLE = ("on", "remote_apply")
_HOLDERS = """
SELECT pid, coalesce(host(client_addr), 'this machine'), backend_start::timestamptz(0)::text
FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND objsubid = 2 AND granted AND classid = %s AND objid = %s
AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_TERMINATE = f"SELECT pg_terminate_backend(pid) FROM ({_HOLDERS}) AS holders"
_OTHERS = """
SELECT count(DISTINCT pid) FROM pg_locks
WHERE locktype = 'advisory' AND objsubid = 2 AND granted AND classid = %s
AND pid <> pg_backend_pid()
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

# Part of what libpq or the server says -> a hint. The first match counts.
_PRIMARY = "connect to the primary, or list all servers: postgresql://one,two/database"
_CERTIFICATE = (
    "check the server's certificate: its name, its dates, and its authority in ?sslrootcert=/path"
)
_HINTS = {
    "password": "put host:port:database:user:password into a file that only you can read, and its "
    "path into the URL: ?passfile=/path (or set PGPASSFILE or PGPASSWORD)",
    "pg_hba.conf": "allow this machine, user and database in pg_hba.conf of the server",
    "read-only": _PRIMARY,
    "in recovery": _PRIMARY,
    "root certificate": "add ?sslrootcert=/path/of/the/authority.pem to the URL",
    "certificate": _CERTIFICATE,
    "signature failure": _CERTIFICATE,  # another authority of the same name
    "does not support SSL": "turn on ssl in postgresql.conf; only on a protected network add "
    "?sslmode=disable (INSECURE)",
    'database "': "create it: createdb --owner USER DATABASE",
    'role "': "create it: createuser USER",
    "translate host name": "check the name of the host in the URL",
}
_OTHER_HINT = "check that PostgreSQL runs and can be reached: psql URL -c 'select 1'"


def connection_string(url: str, name: str) -> str:
    """The parameters of libpq. TLS is verified unless every host is this machine, or the URL says
    otherwise. Raises OperatorError.
    """
    try:
        given = {key: str(value) for key, value in conninfo_to_dict(url).items() if value}
    except psycopg.ProgrammingError:
        raise OperatorError(
            "state is not a URL of PostgreSQL",
            hint="write postgresql://user@host:5432/database?passfile=/path",
        ) from None  # it quotes the URL, which may have a secret in it
    if "password" in given:  # written so that `check_state_url` did not see it
        raise OperatorError("state has a password in it", hint=_HINTS["password"])
    _check_password_file(given)
    if "sslmode" not in given:
        given["sslmode"] = "prefer" if _is_local(given) else "verify-full"
    elif given["sslmode"] != "verify-full" and not _is_local(given):
        logger.warning(
            "INSECURE: sslmode=%s does not verify that the state store is the right server",
            given["sslmode"],
        )
    fixed = {"target_session_attrs": "read-write", "application_name": f"papaya {name}"}
    return make_conninfo("", **{**_PATIENCE, **given, **fixed})


def _is_local(given: dict[str, str]) -> bool:
    hosts = given.get("hostaddr") or given.get("host") or os.environ.get("PGHOST", "")
    return "service" not in given and all(map(_is_this_machine, hosts.split(",")))


def _is_this_machine(host: str) -> bool:
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _check_password_file(given: dict[str, str]) -> None:
    """libpq ignores such a file, and what it says then does not name it."""
    path = given.get("passfile") or os.environ.get("PGPASSFILE")
    if path is None:
        return
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise OperatorError(
            f"cannot read the password file {path}: {error.strerror}",
            hint="write host:port:database:user:password into it, and chmod 600",
        ) from error
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise OperatorError(
            f"the password file {path} can be read by others", hint=f"chmod 600 {path}"
        )


def failed(error: psycopg.Error) -> OperatorError:
    """What libpq and the server say has no secrets in it."""
    problem = " ".join(str(error).split())
    hint = next((hint for part, hint in _HINTS.items() if part in problem), _OTHER_HINT)
    return OperatorError(f"PostgreSQL failed: {problem}", hint=hint)


class DatabaseSession:
    """A connection that may write for `name`, until an error. Calls run one at a time."""

    def __init__(
        self,
        conninfo: str,
        name: str,
        *,
        cluster: str | None = None,
        new_cluster: str | None = None,
        is_again: bool = False,
    ) -> None:
        """`cluster`: refuse any other; None takes the one that is there.

        `new_cluster`: the id that an empty database gets; None refuses an empty one.
        `is_again`: an earlier connection of this process was lost; end its backend if need be.
        Raises OperatorError.
        """
        self.name = name
        self.warnings: list[str] = []
        try:
            self.connection: Connection = psycopg.connect(conninfo, autocommit=True)
        except psycopg.OperationalError as error:
            raise failed(error) from error
        self.backend_pid = self.connection.info.backend_pid
        self.connection.add_notice_handler(self._on_notice)
        try:
            self._check_server(is_again)
            self.cluster = self._prepare(cluster, new_cluster)
            self._take_name(is_again)
            if (halted := self._find(_HALTED_KEY)) is not None:
                raise LostHistory(halted.decode())
            self.commits = int(self._find(self.commits_key) or b"0")
        except psycopg.Error as error:
            self.close()
            raise failed(error) from error
        except BaseException:
            self.close()
            raise

    @property
    def commits_key(self) -> bytes:
        return _COMMITS_KEYS + self.name.encode()

    def close(self) -> None:
        self.connection.close()

    def is_lost(self) -> bool:
        """Whether the server has hung up; found before anything is sent that it may not get.

        While nothing is asked, the server says nothing else, except that its settings were changed.
        A new connection is right then too: the settings are checked again.
        """
        waiting = poll()  # select knows no more than 1024 sockets
        waiting.register(self.connection.pgconn.socket, POLLIN)
        return bool(waiting.poll(0))

    def others(self) -> int:
        """How many other processes of the cluster are connected."""
        [[count]] = self.connection.execute(_OTHERS, (_hash31(self.cluster),)).fetchall()
        return int(count)

    def halt(self, why: str) -> None:
        """No process of the cluster goes on, also after a restart."""
        self.connection.execute(_PUT, (_HALTED_KEY, why.encode()))

    def _on_notice(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "WARNING":
            self.warnings.append(diagnostic.message_primary or "")

    # -- the server -------------------------------------------------------------------------------

    def _check_server(self, is_again: bool) -> None:
        [[pid]] = self.connection.execute("SELECT pg_backend_pid()").fetchall()
        if pid != self.backend_pid:
            raise OperatorError(
                "a connection pooler is in front of PostgreSQL: session locks do not work",
                hint="connect to the server itself; each process needs one connection only",
            )
        self.connection.execute(_SET_KNOWN, (list(_SETTINGS), list(_SETTINGS.values())))
        names = list(_CHECKED)
        question = "SELECT name, setting FROM pg_settings WHERE name = ANY (%s)"
        found: dict[str, str] = dict(self.connection.execute(question, (names,)).fetchall())
        for setting in ("fsync", "full_page_writes"):
            if found[setting] != "on":
                raise OperatorError(
                    f"{setting} = {found[setting]}: the database can be lost in a power failure",
                    hint=f"set {setting} = on in postgresql.conf and reload it",
                )
        if found["synchronous_commit"] not in _DURABLE:
            self.connection.execute("SET synchronous_commit = on")
        if not found["synchronous_standby_names"] and not is_again:
            logger.warning(
                "PostgreSQL has no synchronous standby: if its disk is lost, so are commits "
                "(hint: set synchronous_standby_names)"
            )

    # -- the table --------------------------------------------------------------------------------

    def _prepare(self, cluster: str | None, new_cluster: str | None) -> str:
        """Check the table, or create it in an empty database. Returns the cluster's id."""
        with self.connection.transaction():
            self.connection.execute("SELECT pg_advisory_xact_lock(%s)", (_CREATION_LOCK,))
            if not self._exists():
                self._create(cluster, new_cluster)
            self._check_version()
            found = self._find(CLUSTER_ID_KEY)
        assert found is not None
        if cluster is not None and found.decode() != cluster:
            raise OperatorError(
                f"the database holds the cluster {found.decode()}, but this process belongs to "
                f"the cluster {cluster}",
                hint="use a database of its own for each cluster; if the data folder was copied "
                "from another cluster, use an empty one",
            )
        return found.decode()

    def _exists(self) -> bool:
        question = """
        SELECT relname::text FROM pg_class
        WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'f')
        """
        tables = [name for (name,) in self.connection.execute(question).fetchall()]
        if TABLE in tables:
            return True
        if tables:
            raise OperatorError(
                f"the database {self.connection.info.dbname} belongs to another program: it has "
                f"the table {min(tables)}",
                hint="create a database for Papaya alone: createdb --owner USER papaya",
            )
        return False

    def _create(self, cluster: str | None, new_cluster: str | None) -> None:
        if new_cluster is None:
            whose = "" if cluster is None else f", but this process belongs to cluster {cluster}"
            raise OperatorError(
                f"the database {self.connection.info.dbname} has no rows of Papaya{whose}",
                hint="check the name of the database; to copy state from a data folder: "
                "papaya store migrate FOLDER URL",
            )
        try:
            self.connection.execute(_CREATE)
        except InsufficientPrivilege as error:
            raise OperatorError(
                f"the user {self.connection.info.user} may not create tables in the database "
                f"{self.connection.info.dbname}",
                hint=f"ALTER DATABASE {self.connection.info.dbname} OWNER TO "
                f"{self.connection.info.user}",
            ) from error
        for key, row in ((_VERSION_KEY, SCHEMA_VERSION), (CLUSTER_ID_KEY, new_cluster.encode())):
            self.connection.execute(_PUT, (key, row))

    def _check_version(self) -> None:
        try:
            version = self._find(_VERSION_KEY)
        except InsufficientPrivilege:
            raise
        except psycopg.ProgrammingError:  # other columns, or other types
            version = None
        if version is None:
            raise OperatorError(
                f"the table {TABLE} was made by another program",
                hint="create a database for Papaya alone: createdb --owner USER papaya",
            )
        if version != SCHEMA_VERSION:
            raise OperatorError(
                f"the database has schema version {version.decode()}, this Papaya supports "
                f"{SCHEMA_VERSION.decode()}",
                hint="run the version of Papaya that wrote it, or use another database",
            )

    def _find(self, key: bytes) -> bytes | None:
        found = self.connection.execute(_FIND, (key,), binary=True).fetchone()
        return None if found is None else found[0]

    # -- the name ---------------------------------------------------------------------------------

    def _take_name(self, is_again: bool) -> None:
        lock = (_hash31(self.cluster), _hash31(self.name))
        if self._got(lock, RECONNECT_PATIENCE_S):
            return
        if is_again:
            logger.warning("ending the lost connection of %s at PostgreSQL", self.name)
            self.connection.execute(_TERMINATE, lock)
        else:
            logger.warning("waiting for an earlier connection of %s to end", self.name)
        if self._got(lock, RECONNECT_PATIENCE_S if is_again else START_PATIENCE_S):
            return
        holders = self.connection.execute(_HOLDERS, lock).fetchall()
        where = ", ".join(f"backend {pid} of {host} since {at}" for pid, host, at in holders)
        raise OperatorError(
            f"another process is connected to PostgreSQL as {self.name} ({where})",
            hint="stop it, or give this one an address of its own; each cluster needs a database "
            "of its own",
        )

    def _got(self, lock: tuple[int, int], patience_s: float) -> bool:
        with self.connection.transaction():
            wait = f"SET LOCAL lock_timeout = {round(patience_s * 1000)}"
            self.connection.execute(wait)
            try:
                with self.connection.transaction():
                    self.connection.execute("SELECT pg_advisory_lock(%s, %s)", lock)
            except LockNotAvailable:
                return False
        return True


def _hash31(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
