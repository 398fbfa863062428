"""The names of a process and its nodes, and where other servers call them.

A node id contains the address at which the node is called (docs/adr/0013). A process that is alone
needs none.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping

from papaya.config import Deployment
from papaya.config.deployment import ROLES, Role, address
from papaya.errors import OperatorError
from papaya.messages.base import NodeId

logger = logging.getLogger("papaya.server")

_ANY_ADDRESS = ("0.0.0.0", "::")


def is_alone(roles: tuple[Role, ...], deployment: Deployment) -> bool:
    """Whether a process with these roles is a whole system, which no other server calls."""
    return roles == ROLES and not deployment.coordinators


class NodeNames:
    """The names of one process, and those of the coordinators."""

    def __init__(
        self, deployment: Deployment, roles: tuple[Role, ...], addresses: Mapping[str, str]
    ) -> None:
        """`addresses`: where the process listens, by listener; they are known after the start."""
        self._deployment = deployment
        self._roles = roles
        self._addresses = addresses
        self.is_alone = is_alone(roles, deployment)

    @property
    def process(self) -> str:
        """A name that is unique among the processes of one cluster."""
        if self.is_alone:
            return "server"
        name = f"{'-'.join(self._roles)}@{self._deployment.announce or self._deployment.servers}"
        return f"{name}-{os.getpid()}" if name.endswith(":0") else name

    def node(self, role: Role) -> NodeId:
        where = self._deployment.announce or self._addresses.get("servers")
        return role if self.is_alone else f"{role}@{where}"

    async def called_host(self) -> str:
        """The host at which others call this server. They must be able to reach it, and it them."""
        names = self._deployment.coordinators
        own = self._deployment.announce or self._deployment.servers
        host, _ = address("servers", own)
        if host in _ANY_ADDRESS:
            raise OperatorError(
                f"servers = {own!r} is not an address that other servers can call",
                hint='set announce to the name or address of this machine: announce = "host:8752"',
            )
        is_known = own in names or own.endswith(":0") or "coordinator" not in self._roles
        if names and not is_known:
            raise OperatorError(
                f"no other server knows this coordinator: it is at {own}, and coordinators has "
                f"{', '.join(names)}",
                hint="list its servers address, or its announce address, in coordinators",
            )
        await self._check_names(names)
        return host

    async def _check_names(self, names: tuple[str, ...]) -> None:
        """Refuse to start if no coordinator's name has an address; one of several may be away."""
        loop, missing = asyncio.get_running_loop(), []
        for name in names:
            try:
                await loop.getaddrinfo(*address("coordinators", name))
            except OSError as error:
                missing.append(name)
                logger.warning("coordinators: cannot resolve %s: %s", name, error)
        if missing and len(missing) == len(names):
            raise OperatorError(
                f"coordinators: cannot resolve {', '.join(missing)}",
                hint=f"check the name and the DNS: getent hosts {missing[0].rpartition(':')[0]}",
            )

    def coordinators(self) -> tuple[NodeId, ...]:
        if self._deployment.coordinators:
            return tuple(f"coordinator@{where}" for where in self._deployment.coordinators)
        if "coordinator" in self._roles:
            return (self.node("coordinator"),)
        raise OperatorError(
            f"{' and '.join(self._roles)} cannot run without a coordinator",
            hint="set coordinators in the configuration file to the `servers` address "
            'of each coordinator: coordinators = ["host:8752"]',
        )
