"""Servers that share no folder, set up as docs/run-on-many-machines.md says.

State is on PostgreSQL, blobs are in a bucket, and roles show certificates to each other. Each
process has an address and a data folder of its own. The configuration and the commands are those of
the page; only names of hosts, folders and the bucket are replaced by those of the test.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from papaya.cli import doctor
from papaya.cli.doctor import DoctorOptions, examine
from papaya.credentials.s3_keys import s3_keys
from papaya.credentials.token_files import read_or_make
from papaya.store.blob_cache import BlobCache
from papaya.store.folders import make_folder
from papaya.store.s3_blobs import S3Blobs
from tests.postgresql import Postgres, postgres
from tests.s3.server import BUCKET, key_file, s3_server
from tests.system.fleet import briefly, fleet
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess, Toml
from tests.system.test_operations_page import DOCS
from tests.system.test_postgresql import migrate
from tests.system.test_roles_anywhere import CLEAR, Anywhere, start
from tests.system.test_secure import GOAL, SERVER, STEP_S, counted, url
from tests.system.tls import Authority

_PAGE = (DOCS / "run-on-many-machines.md").read_text(encoding="utf-8")
_PREFIX = f"s3://{BUCKET}/papaya"
_SECOND_COORDINATOR = "127.0.0.7"
_COMMAND_S = 300.0


def _block(kind: str, heading: str) -> str:
    """The first block of this kind under a heading of the page."""
    found = re.search(rf"^## {heading}\n.*?^```{kind}\n(.*?)^```$", _PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[1]


class Machines(Anywhere):
    """Each server has the configuration of the page, and a data folder with copies of the same
    tokens, and of nothing else.
    """

    def __init__(
        self, installation: Installation, authority: Authority, database: Postgres, endpoint: str
    ) -> None:
        self._database, self._endpoint = database, endpoint
        self._second = installation.reserve(_SECOND_COORDINATOR)
        super().__init__(installation, authority)
        self.add("coordinator", _SECOND_COORDINATOR, servers=self._second)

    def add(self, role: str, host: str, **own: Toml) -> ServerProcess:
        machine = self.installation.folder / host
        etc, data = machine / "etc", machine / "data"
        etc.mkdir(parents=True)
        shutil.copytree(self.installation.data, data)
        files = self.authority.issue(f"{role}-{host}", [role], [host])
        copies = {files.certificate: "role.pem", files.key: "role.key"}
        for file, name in {**copies, files.authority: "authority.pem"}.items():
            (etc / name).symlink_to(file)
        shutil.copy(key_file(self.installation.folder), etc / "bucket.keys")
        password = etc / "password"
        password.write_text("*:*:papaya:papaya:secret\n", encoding="ascii")
        password.chmod(0o600)
        here = str(own.get("servers", "")) or self.installation.reserve(host)
        coordinators = self._shared["coordinators"]
        assert isinstance(coordinators, list)
        [leader] = coordinators
        text = _block("toml", "Roles")
        for printed, real in (
            ("/var/lib/papaya", str(data)),
            ("/etc/papaya", str(etc)),
            ("db.example", quote(str(self._database.folder), safe="")),
            # On a busy machine a backend needs longer to start than the default of two seconds.
            ("?passfile", "?connect_timeout=300&passfile"),
            ("s3://my-bucket/papaya", _PREFIX),
            ("0.0.0.0:8752", here),
            ("aggregator-1.example:8752", here),
            ("coordinator-1.example:8752", leader),
            ("coordinator-2.example:8752", self._second),
        ):
            assert printed in text, f"the page does not name {printed}"
            text = text.replace(printed, real)
        deployment: dict[str, Toml] = tomllib.loads(text)
        return self.installation.add(
            f"{role}-{host}",
            role,
            deployment=deployment | {"blobs_endpoint": self._endpoint},
            server=SERVER,
        )


@contextmanager
def _database(folder: Path) -> Iterator[Postgres]:
    """The user and the database that the page creates."""
    server = postgres()
    environment = os.environ | {"PGHOST": str(server.folder), "PGUSER": "postgres"}
    for line in _block("console", "State on PostgreSQL").splitlines():
        name, *arguments = shlex.split(line)
        done = subprocess.run(
            [server.program(name), *arguments],
            input="secret\nsecret\n",
            env=environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            start_new_session=True,  # without a terminal, it reads the password from stdin
            check=False,
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
    try:
        yield server
    finally:
        server.execute("DROP DATABASE papaya WITH (FORCE)")
        server.execute("DROP ROLE papaya")


def test_machines_that_share_no_folder_train_over_the_loss_of_one(tmp_path: Path) -> None:
    with (
        _database(tmp_path) as database,
        s3_server() as s3,
        Installation(tmp_path) as installation,
    ):
        make_folder(installation.data)
        for name in ("admin.token", "server.token", "device.token"):
            read_or_make(installation.data, name)
        machines = Machines(installation, Authority(tmp_path / "tls"), database, s3.endpoint)
        start(machines)
        machines.admin.submit(CLEAR)
        acknowledged = asyncio.run(_over_a_renewal_and_a_loss(machines))
        machines.stop()
        migrate(database.url("papaya", "papaya"), installation.data)
        cache, keys = BlobCache(tmp_path / "cache"), s3_keys(key_file(tmp_path))
        bucket = S3Blobs.open(_PREFIX, cache, endpoint=s3.endpoint, credentials=keys)
        books = Books(installation.data, CLEAR.task, bucket)
        books.check(acknowledged)
        assert books.newest >= 3


async def _over_a_renewal_and_a_loss(machines: Machines) -> dict[str, int]:
    installation = machines.installation
    folder, token = installation.folder / "devices", installation.secret("device.token")
    async with fleet(folder, [url(machines.selector)], token, 10, briefly) as flying:
        book = flying.book
        await counted(book, GOAL)
        await asyncio.to_thread(_renew, machines)
        await counted(book, len(book.acknowledged) + GOAL)
        lost = await asyncio.to_thread(_holder, machines)
        lost.kill()
        shutil.rmtree(lost.data)
        book.next_era()
        await asyncio.to_thread(_until_moved, machines, lost)
        await counted(book, len(book.acknowledged) + GOAL)
        [left] = [each for each in machines.aggregators if each is not lost]
        await asyncio.to_thread(_examine, left, installation.folder)
        await flying.go_home(STEP_S)
        await asyncio.to_thread(
            machines.admin.until_task, CLEAR.task, lambda line: line["version"] >= 3, STEP_S
        )
    return dict(book.acknowledged)


def _holder(machines: Machines) -> ServerProcess:
    found = machines.admin.until_task(CLEAR.task, lambda line: line["holder"], STEP_S)["holder"]
    [server] = [a for a in machines.aggregators if found == _node(a)]
    return server


def _until_moved(machines: Machines, lost: ServerProcess) -> None:
    """Answers that were on their way when the holder was killed may arrive before."""
    node = _node(lost)
    machines.admin.until_task(CLEAR.task, lambda line: line["holder"] not in ("", node), STEP_S)


def _node(aggregator: ServerProcess) -> str:
    return f"aggregator@{aggregator.addresses['servers']}"


def _renew(machines: Machines) -> None:
    """The coordinator's certificate, which everybody needs, for one with another key."""
    machines.authority.issue("coordinator-127.0.0.3", ["coordinator"], ["127.0.0.3"])
    machines.coordinator.until_logged("certificates_read", STEP_S)


def _examine(aggregator: ServerProcess, folder: Path) -> None:
    """`papaya doctor`, as the page says it, with the configuration of this process."""
    assert "`papaya doctor aggregator --config papaya.toml`" in _PAGE
    options = DoctorOptions(role="aggregator", config=folder / f"{aggregator.name}.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "_ANSWER_S", STEP_S)  # for busy machines
        found = {each.subject: each.grade for each in examine(options)}
    assert {found["state"], found["blobs"], found["certificate"]} == {"good"}
