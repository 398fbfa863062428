"""Shared by all roles of one process: state, blobs, clock, ticket keys, tokens, connections.

They are opened from the data folder in this order and closed in reverse. The state is in the data
folder, or in PostgreSQL. Refused: a folder that another process already serves under the same name,
because two running instances of one node would each declare the other dead; and state of another
cluster than the folder's.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.clock import Clock
from papaya.config import Deployment
from papaya.config.deployment import ROLES
from papaya.credentials.s3_keys import s3_keys
from papaya.credentials.token_files import Secret, SecretName, read, read_or_make
from papaya.errors import OperatorError
from papaya.http.limits import PeerLimits
from papaya.http.pool import ConnectionPool
from papaya.messages.base import BlobKey
from papaya.messages.storage import Outcome
from papaya.server.certificates import Certificates
from papaya.server.peers import Peers
from papaya.server.replies import retry_after_s
from papaya.server.state_thread import StateThread
from papaya.server.ticket_keys import TicketKeys, load_or_create
from papaya.server.tsa import load_cluster_key
from papaya.store.blob_cache import BlobCache
from papaya.store.blobs import Blobs, FolderBlobs
from papaya.store.clusters import open_state
from papaya.store.folders import make_folder

if TYPE_CHECKING:
    from papaya.store.s3_blobs import S3Blobs

_URL_VALID_S = 3600.0


class Resources:
    """Open until `close`. Use `Resources.open`."""

    state: StateThread
    cluster: str  # the id that the state store has made
    blobs: Blobs
    bucket: S3Blobs | None  # `blobs`, if they are in a bucket
    keys: TicketKeys
    cluster_key: Ed25519PrivateKey
    peers: Peers
    admin_token: Secret
    server_token: Secret

    def __init__(self, deployment: Deployment, certificates: Certificates, clock: Clock) -> None:
        self.deployment = deployment
        self.certificates = certificates
        self.clock = clock
        self.data = Path(deployment.data)
        self._exits = AsyncExitStack()

    @classmethod
    async def open(
        cls,
        deployment: Deployment,
        certificates: Certificates,
        name: str,
        clock: Clock,
        observe: Callable[[float, Outcome], None],
        max_relays: int,
    ) -> Resources:
        """`name` is unique among the processes of one cluster.

        `observe` is called with the duration and the outcome of each transaction. `max_relays`: how
        many bodies of devices can be relayed to other servers at the same time.
        """
        resources = cls(deployment, certificates, clock)
        try:
            await resources._open(name, observe, max_relays)
        except BaseException:
            await resources.close()
            raise
        return resources

    async def _open(
        self, name: str, observe: Callable[[float, Outcome], None], max_relays: int
    ) -> None:
        self.bucket = None
        if self.deployment.blobs:  # before anything is created
            self.bucket = await asyncio.to_thread(open_bucket, self.deployment, name)
        make_folder(self.data)
        self._exits.enter_context(_locked(self.data / f"{name}.lock"))
        self.admin_token = read_or_make(self.data, "admin.token")
        self.server_token = read_or_make(self.data, "server.token")
        store = await asyncio.to_thread(open_state, self.deployment.state, self.data, name)
        self.state = StateThread(store, observe=observe)
        self._exits.push_async_callback(self.state.close)
        self.cluster = store.cluster
        heartbeat_s = self.deployment.server.heartbeat_s
        publish_s = 3 * heartbeat_s
        self.keys = await load_or_create(self.state, self.clock.now(), os.urandom, publish_s)
        self.cluster_key = await load_cluster_key(self.state, os.urandom)
        if self.bucket is None:
            self.blobs = FolderBlobs(self.data / "blobs")
        else:
            self.blobs = self.bucket
            await asyncio.to_thread(self.bucket.claim, self.cluster)
        calls = self.certificates.calls
        pools: dict[str, ConnectionPool] = {role: ConnectionPool(tls=calls(role)) for role in ROLES}
        limits = PeerLimits(max_connections=max_relays)
        relays = ConnectionPool(limits=limits, tls=calls("aggregator"))
        token, retry_s = self.server_token.reveal(), retry_after_s(heartbeat_s)
        self.peers = Peers(pools, relays, token, retry_s)
        self._exits.push_async_callback(self.peers.close)

    def refresh_tokens(self) -> list[SecretName]:
        """Read the tokens of operators and servers again; returns which have changed."""
        changed: list[SecretName] = []
        tokens: tuple[tuple[SecretName, Secret], ...] = (
            ("admin.token", self.admin_token),
            ("server.token", self.server_token),
        )
        for name, token in tokens:
            if token.replace(read(self.data / name)):
                changed.append(name)
        self.peers.use_token(self.server_token.reveal())
        return changed

    async def close(self) -> None:
        await self._exits.aclose()

    def locator(self) -> Callable[[BlobKey], str] | None:
        """Returns the URL of a blob that devices may download. None if there are no URLs."""
        bucket, urls = self.bucket, self.deployment.blobs_urls
        if bucket is None or urls == "none":
            return None
        if urls == "signed":
            return partial(bucket.signed_url, valid_s=_URL_VALID_S)
        return lambda key: f"{urls}/{key}"


def open_bucket(deployment: Deployment, name: str) -> S3Blobs:
    """The bucket in `blobs`, after a check that it can be used. `name`: of this process."""
    from papaya.store.s3_blobs import S3Blobs  # only if it is used: it needs obstore

    keys = deployment.blobs_credentials
    return S3Blobs.open(
        deployment.blobs,
        BlobCache(Path(deployment.data) / f"{name}.cache"),
        endpoint=deployment.blobs_endpoint,
        region=deployment.blobs_region,
        credentials=None if keys is None else s3_keys(Path(keys)),
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock that ends with the process, however it ends. It is given back before the file is
    closed: a child process that has just been forked still has the file open.
    """
    with path.open("w", encoding="ascii") as file:
        _lock(file, path)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: TextIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if "@" in path.stem:
            raise OperatorError(
                f"{path.stem} already runs on {path.parent}",
                hint="stop it, or give this one an address of its own: papaya serve ROLE "
                "--servers HOST:PORT --admin HOST:PORT",
            ) from error
        raise OperatorError(
            f"another server already runs on {path.parent}",
            hint="stop it, or give this one a data folder of its own: papaya serve --data DIR",
        ) from error
