"""Servers that share no folder: state on PostgreSQL, blobs in a bucket, certificates between roles.

Each process has an address and a data folder of its own. What they have in common is a database, a
bucket, an authority and the tokens.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from papaya.cli.doctor import DoctorOptions, examine
from papaya.credentials.s3_keys import s3_keys
from papaya.credentials.token_files import read_or_make
from papaya.store.blob_cache import BlobCache
from papaya.store.folders import make_folder
from papaya.store.s3_blobs import S3Blobs
from tests.postgresql import postgres
from tests.s3.server import BUCKET, key_file, s3_server
from tests.system.fleet import briefly, fleet
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess, Toml
from tests.system.test_postgresql import migrate
from tests.system.test_roles_anywhere import CLEAR, Anywhere, start
from tests.system.test_secure import GOAL, STEP_S, counted, url
from tests.system.tls import Authority

_BLOBS = f"s3://{BUCKET}/many"


class Machines(Anywhere):
    """Each server has a data folder with copies of the same tokens, and of nothing else."""

    def add(self, role: str, host: str, **own: Toml) -> ServerProcess:
        data = self.installation.folder / host
        shutil.copytree(self.installation.data, data)
        return super().add(role, host, data=str(data), **own)


def test_machines_that_share_no_folder_train_over_the_loss_of_one(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    with postgres().schema() as state, s3_server() as s3, Installation(tmp_path) as installation:
        make_folder(installation.data)
        for name in ("admin.token", "server.token", "device.token"):
            read_or_make(installation.data, name)
        machines = Machines(
            installation,
            Authority(tmp_path / "tls"),
            state=state,
            blobs=_BLOBS,
            blobs_endpoint=s3.endpoint,
            blobs_credentials=str(keys),
        )
        start(machines)
        machines.admin.submit(CLEAR)
        acknowledged = asyncio.run(_over_a_renewal_and_a_loss(machines))
        machines.stop()
        migrate(state, installation.data)
        cache = BlobCache(tmp_path / "cache")
        bucket = S3Blobs.open(_BLOBS, cache, endpoint=s3.endpoint, credentials=s3_keys(keys))
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
        await counted(book, len(book.acknowledged) + GOAL)
        assert await asyncio.to_thread(_holder, machines) is not lost
        await asyncio.to_thread(_examine, machines.selector, installation.folder)
        await flying.go_home(STEP_S)
    return dict(book.acknowledged)


def _holder(machines: Machines) -> ServerProcess:
    found = machines.admin.until_task(CLEAR.task, lambda line: line["holder"], STEP_S)["holder"]
    [server] = [a for a in machines.aggregators if found == f"aggregator@{a.addresses['servers']}"]
    return server


def _renew(machines: Machines) -> None:
    """The coordinator's certificate, which everybody needs, for one with another key."""
    machines.authority.issue("coordinator-127.0.0.3", ["coordinator"], ["127.0.0.3"])
    machines.coordinator.until_logged("certificates_read", STEP_S)


def _examine(selector: ServerProcess, folder: Path) -> None:
    options = DoctorOptions(role="selector", config=folder / f"{selector.name}.toml")
    found = {each.subject: each.grade for each in examine(options)}
    assert {found["state"], found["blobs"], found["certificate"]} == {"good"}
