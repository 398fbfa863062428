"""What a process does again and again beside its machines.

It watches the cluster, clocks and files, reads keys and revocations, and looks after a bucket. Each
method runs until it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from papaya.aggregator.sessions import longest_ticket_life_s
from papaya.config import Deployment
from papaya.config.deployment import Role
from papaya.coordinator.coordinator import Coordinator
from papaya.errors import LostHistory, OperatorError, PapayaError
from papaya.messages.base import NodeId
from papaya.messages.events import ClockDiffers, TokenReplaced
from papaya.messages.storage import REVOKED, TASKS, Revoked, TaskRow, revoked_devices
from papaya.server import public_log
from papaya.server.admin.live import CoordinatorLive
from papaya.server.boots import Boots
from papaya.server.crew import NoThread, on_thread
from papaya.server.formats import Formats
from papaya.server.host import Host
from papaya.server.logs import log
from papaya.server.node_names import NodeNames
from papaya.server.resources import Resources
from papaya.verifiable_log.errors import LogError

if TYPE_CHECKING:
    from papaya.store.s3_blobs import S3Blobs

logger = logging.getLogger("papaya.server")

_KEY_LIFE_S = 7 * 86400.0
_REMOVE_EVERY_S = 3600.0
_PUBLISH_EVERY_S = 30.0
_LOOK_AT_FILES_S = 10.0
_BEATS_UNTIL_ALL_REPORTED = 3


class Upkeep:
    """The recurring work of one process."""

    def __init__(
        self,
        deployment: Deployment,
        names: NodeNames,
        resources: Resources,
        hosts: Mapping[Role, Host],
    ) -> None:
        self._deployment = deployment
        self._names = names
        self._resources = resources
        self._hosts = hosts
        # The devices that the machines were told of.
        self._revoked: tuple[str, ...] = ()

    async def watch_cluster(self, boots: Boots, formats: Formats) -> None:
        """Raise if another process has started as one of the nodes of this one, or if the others
        write a format that this version does not know.
        """
        state, beats = self._resources.state, 0
        while True:
            await asyncio.sleep(self._deployment.server.heartbeat_s)
            rows = await state.read(Formats.prefixes)
            boots.check(rows)
            formats.check(rows)
            nodes = self._nodes_if_leader()
            beats = 0 if nodes is None else beats + 1
            # A new leader waits until every live process has reported to it.
            if nodes is not None and beats > _BEATS_UNTIL_ALL_REPORTED:
                raised = formats.raised(rows, nodes)
                if raised is not None and await state.transact(raised) == "committed":
                    logger.info("all servers know the next format: they may write it now")

    def _nodes_if_leader(self) -> tuple[NodeId, ...] | None:
        """All nodes of the cluster, if this process leads."""
        host, now = self._hosts.get("coordinator"), self._resources.clock.now()
        if host is None or not isinstance(coordinator := host.machine, Coordinator):
            return None
        if not coordinator.leadership.leads(now):
            return None
        fleet = coordinator.fleet
        return (*self._names.coordinators(), *fleet.live_aggregators(now), *fleet.selectors)

    async def remove_deleted(self, bucket: S3Blobs) -> None:
        """Remove blobs that were deleted long enough ago."""
        keep_s = self._deployment.keep_deleted_s
        while True:
            try:
                if removed := await on_thread(bucket.remove_expired, keep_s):
                    logger.info("removed %d blobs that were deleted %g s ago", removed, keep_s)
            except PapayaError as error:
                logger.warning("%s; deleted blobs stay (hint: %s)", error, error.hint)
            except NoThread as error:
                logger.warning("%s; deleted blobs stay", error)
            await asyncio.sleep(min(_REMOVE_EVERY_S, keep_s))

    async def publish_log(self, bucket: S3Blobs, log_folder: Path) -> None:
        """Keep the copy of the public log in the bucket up to date, if this machine has it."""
        published: set[str] = set()
        while True:
            try:
                await on_thread(public_log.publish, log_folder, bucket, published)
            except (PapayaError, LogError, OSError) as error:
                logger.warning("cannot publish the log: %s", error)
            await asyncio.sleep(_PUBLISH_EVERY_S)

    async def watch_certificates(self) -> None:
        while True:
            await asyncio.sleep(min(self._deployment.server.heartbeat_s, _LOOK_AT_FILES_S))
            self._resources.certificates.refresh()
            try:
                for name in self._resources.refresh_tokens():
                    log(TokenReplaced(name))
            except OperatorError as error:
                logger.error("using the old tokens: %s (hint: %s)", error, error.hint)

    async def watch_clocks(self, live: CoordinatorLive) -> None:
        """Log each clock that differs from the leader's, once."""
        told: dict[NodeId, bool] = {}
        while True:
            await asyncio.sleep(self._deployment.server.heartbeat_s)
            found = {clock.node: clock for clock in live.clocks()}
            for node, clock in found.items():
                if told.get(node) is not clock.is_refused:
                    log(ClockDiffers(node, round(clock.ahead_s, 1), clock.is_refused))
            told = {node: clock.is_refused for node, clock in found.items()}

    async def refresh(self) -> None:
        """Every heartbeat: read revocations, and the keys, so that all servers know a key before
        it seals.
        """
        shared = self._resources
        while True:
            await asyncio.sleep(self._deployment.server.heartbeat_s)
            try:
                await self.tell_revoked()
                await self._refresh_keys(shared.clock.now())
            except LostHistory:
                raise
            except PapayaError:
                logger.exception("cannot read ticket keys or revocations; using the old ones")

    async def tell_revoked(self) -> None:
        """Tell selectors and aggregators which devices are revoked, if that has changed."""
        devices = revoked_devices((await self._resources.state.read((REVOKED,))).items())
        if devices != self._revoked:
            self._revoked = devices
            for role, host in self._hosts.items():
                if role != "coordinator":
                    host.deliver(Revoked(devices))

    async def _refresh_keys(self, now: float) -> None:
        keys = self._resources.keys
        await keys.refresh(now)
        if "coordinator" in self._hosts and keys.newest_age_s(now) > _KEY_LIFE_S:
            rows = await self._resources.state.read((TASKS,))
            lives = (
                longest_ticket_life_s(row, self._deployment.server)
                for row in rows.values()
                if isinstance(row, TaskRow)
            )
            await keys.rotate(now, os.urandom, max(lives, default=0.0))
