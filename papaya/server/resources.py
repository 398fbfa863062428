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
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TextIO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.clock import Clock
from papaya.config import Deployment
from papaya.credentials.tls import between_servers
from papaya.credentials.token_files import Secret, read_or_make
from papaya.errors import OperatorError
from papaya.http.pool import ConnectionPool
from papaya.messages.storage import Outcome
from papaya.server.peers import Peers
from papaya.server.replies import retry_after_s
from papaya.server.state_thread import StateThread
from papaya.server.ticket_keys import TicketKeys, load_or_create
from papaya.server.tsa import load_cluster_key
from papaya.store.blobs import FolderBlobs
from papaya.store.clusters import open_state
from papaya.store.folders import make_folder


class Resources:
    """Open until `close`. Use `Resources.open`."""

    state: StateThread
    cluster: str
    blobs: FolderBlobs
    keys: TicketKeys
    cluster_key: Ed25519PrivateKey
    peers: Peers
    admin_token: Secret
    server_token: Secret

    def __init__(self, deployment: Deployment, clock: Clock) -> None:
        self.deployment = deployment
        self.clock = clock
        self.data = Path(deployment.data)
        self._exits = AsyncExitStack()

    @classmethod
    async def open(
        cls,
        deployment: Deployment,
        name: str,
        clock: Clock,
        observe: Callable[[float, Outcome], None],
    ) -> Resources:
        """`name` is unique among the processes of one cluster.

        `observe` is called with the duration and the outcome of each transaction.
        """
        resources = cls(deployment, clock)
        try:
            await resources._open(name, observe)
        except BaseException:
            await resources.close()
            raise
        return resources

    async def _open(self, name: str, observe: Callable[[float, Outcome], None]) -> None:
        make_folder(self.data)
        self._exits.enter_context(_locked(self.data / f"{name}.lock"))
        self.admin_token = read_or_make(self.data, "admin.token")
        self.server_token = read_or_make(self.data, "server.token")
        self.blobs = FolderBlobs(self.data / "blobs")
        store = await asyncio.to_thread(open_state, self.deployment.state, self.data, name)
        self.state = StateThread(store, observe=observe)
        self._exits.push_async_callback(self.state.close)
        self.cluster = store.cluster
        heartbeat_s = self.deployment.server.heartbeat_s
        publish_s = 3 * heartbeat_s
        self.keys = await load_or_create(self.state, self.clock.now(), os.urandom, publish_s)
        self.cluster_key = await load_cluster_key(self.state, os.urandom)
        tls = between_servers(self.deployment)
        token, retry_s = self.server_token.reveal(), retry_after_s(heartbeat_s)
        self.peers = Peers(ConnectionPool(ssl=tls), ConnectionPool(ssl=tls), token, retry_s)
        self._exits.push_async_callback(self.peers.close)

    async def close(self) -> None:
        await self._exits.aclose()


def _locked(path: Path) -> TextIO:
    """A lock that ends with the process, however it ends."""
    file = path.open("w", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise OperatorError(
            f"another server already runs on {path.parent}",
            hint="stop it, or give this one a data folder of its own: papaya serve --data DIR",
        ) from error
    return file
