"""Shared by all roles of one process: state, blobs, clock, ticket keys, tokens, connections.

They are opened from the data folder in this order and closed in reverse. Refused: a folder that
another process already serves under the same name, because two running instances of one node would
each declare the other dead.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TextIO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.clock import Clock
from papaya.config import Deployment
from papaya.config.deployment import ROLES
from papaya.credentials.token_files import Secret, read_or_make
from papaya.errors import OperatorError
from papaya.http.pool import ConnectionPool
from papaya.messages.storage import Outcome
from papaya.server.certificates import Certificates
from papaya.server.peers import Peers
from papaya.server.replies import retry_after_s
from papaya.server.state_thread import StateThread
from papaya.server.ticket_keys import TicketKeys, load_or_create
from papaya.server.tsa import load_cluster_key
from papaya.store.blobs import FolderBlobs
from papaya.store.folders import make_folder
from papaya.store.state import SqliteState


class Resources:
    """Open until `close`. Use `Resources.open`."""

    state: StateThread
    blobs: FolderBlobs
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
    ) -> Resources:
        """`name` is unique among the processes of one data folder.

        `observe` is called with the duration and the outcome of each transaction.
        """
        resources = cls(deployment, certificates, clock)
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
        self.state = StateThread(SqliteState(self.data / "state.db"), observe=observe)
        self._exits.push_async_callback(self.state.close)
        heartbeat_s = self.deployment.server.heartbeat_s
        publish_s = 3 * heartbeat_s
        self.keys = await load_or_create(self.state, self.clock.now(), os.urandom, publish_s)
        self.cluster_key = await load_cluster_key(self.state, os.urandom)
        calls = self.certificates.calls
        pools: dict[str, ConnectionPool] = {role: ConnectionPool(tls=calls(role)) for role in ROLES}
        token, retry_s = self.server_token.reveal(), retry_after_s(heartbeat_s)
        self.peers = Peers(pools, ConnectionPool(tls=calls("aggregator")), token, retry_s)
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
