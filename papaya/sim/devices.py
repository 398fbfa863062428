"""Simulated devices: one Client machine per visit, created when it starts, deleted when it ends.

Nothing is kept of an absent device, except its participation history when a task needs it. All
latency besides execution is spent before training, as if it were the download.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from papaya.client.client import Client, NoBundles
from papaya.client.work import (
    Answered,
    DirectUploadFailed,
    Download,
    Downloaded,
    Finish,
    Remember,
    RememberDeclined,
    Seal,
    SendRequest,
    Train,
    Trained,
    WorkFailed,
)
from papaya.config.upload_bits import UploadBits, encoded_bytes
from papaya.learning.compression import encode_update, session_seed
from papaya.learning.parameters import FLOAT32, Vector, is_finite
from papaya.machine import Effects
from papaya.messages.base import BlobKey, Message, NodeId, SessionId
from papaya.messages.participation import Join, Retry
from papaya.messages.selection import CheckIn, IdentifiedCheckIn, JoinDecided
from papaya.secagg.errors import SecureAggregationError
from papaya.sim.hosts import SimulatedHost
from papaya.sim.population import Visit

if TYPE_CHECKING:
    from papaya.sim.cluster import Cluster

_SEAL_S = 0.05
_NEVER = float("inf")
NOBODY: NodeId = "nobody"
"""A client that sends requests without running the device machine."""


class Path(Struct, eq=False):
    """Where the answer to one request goes: back through the server that took it, a selector or,
    for an upload, the aggregator itself. `boot` is the server's boot when the request was sent.

    `device` is None for forged requests: no device waits for the answer.
    """

    device: SimulatedDevice | None
    attempt: int
    server: SimulatedHost
    boot: int
    request: Message

    @property
    def device_name(self) -> NodeId:
        return NOBODY if self.device is None else self.device.name

    @property
    def identity(self) -> str:
        return "" if self.device is None else self.device.identity

    def answer(self, host: SimulatedHost, message: Message) -> None:
        server = self.server
        hops = 1 if host is server else 2
        host.carry(host.node, server.node, hops, self._arrive, Answered(self.attempt, message))

    def _arrive(self, answered: Answered) -> None:
        server, device = self.server, self.device
        if server.is_alive and server.boots == self.boot and device is not None:
            request = self.request
            if type(request) is Join and device.identity and type(answered.answer) is not Retry:
                server.deliver(JoinDecided(request.ticket))
            device.deliver(answered)


class SimulatedBundles(NoBundles):
    """Has every bundle, and keeps the signed settings of the task of this visit."""

    __slots__ = ("manifest",)

    def __init__(self) -> None:
        # Simulated owners put the digest into the key of the bundle (revisions.py).
        self.manifest = ""

    def lacks(self, bundle: BlobKey) -> bool:
        self.manifest = bundle.rpartition("-")[2]
        return False


class SimulatedDevice:
    """One visit of one device."""

    __slots__ = (
        "_armed_for",
        "_engine",
        "assigned_s",
        "bundles",
        "cluster",
        "identity",
        "is_present",
        "machine",
        "name",
        "visit",
    )

    def __init__(
        self, cluster: Cluster, visit: Visit, machine: Client, bundles: SimulatedBundles
    ) -> None:
        self.bundles = bundles
        self.cluster = cluster
        self.visit = visit
        self.name: NodeId = f"device-{visit.device}"
        self.identity = cluster.identity_of(visit.device)
        self.machine = machine
        self.is_present = True
        self.assigned_s: float | None = None  # when it began to download
        self._engine = cluster.engine
        self._armed_for = _NEVER

    def start(self) -> None:
        self.perform(self.machine.start(self._engine.now))

    def vanish(self) -> None:
        """Drop out without telling anyone."""
        if self.is_present:
            self.is_present = False
            self.cluster.departed(self, None)

    def deliver(self, message: Message) -> None:
        if self.is_present:
            self.perform(self.machine.receive(self._engine.now, message))

    def perform(self, effects: Effects) -> None:
        for effect in effects:
            _CARRY_OUT[type(effect)](self, effect)
        if self.is_present:
            self._arm()

    def _arm(self) -> None:
        """Arm only for an earlier time: a later one is armed when the current timer fires."""
        due = self.machine.next_wake()
        if due < self._armed_for:
            self._armed_for = due
            self.cluster.wheel.at(due, self._on_timer)

    def _on_timer(self, now: float) -> None:
        if not self.is_present or now < self._armed_for:
            return
        self._armed_for = _NEVER
        machine = self.machine
        if (heartbeat := machine.beat(now)) is not None:
            self._request(heartbeat)
        elif machine.next_wake() <= now:
            self.perform(machine.wake(now))
            return
        self._arm()

    # -- effects ----------------------------------------------------------------------------

    def _request(self, effect: SendRequest) -> None:
        cluster = self.cluster
        server, message = cluster.hosts[effect.to], effect.message
        if not cluster.may_shorten:
            message = cluster.wire(self.name, effect.to, message)
            for observe in cluster.hooks.request:
                observe(self, message)
        path = Path(self, effect.attempt, server, server.boots, message)
        if type(message) is CheckIn and self.identity:
            message = IdentifiedCheckIn(self.identity, message)
        server.carry("device", effect.to, 1, server.take, message, path)
        if effect.attempt == 2 and type(message) is Join:
            self._schedule_dropout()

    def _schedule_dropout(self) -> None:
        needed_s = self.visit.latency_s + self.visit.execution_s
        stays_s = self.cluster.population.remaining_s(self.visit.device, self._engine.now)
        if self.visit.drops_at is not None:
            stays_s = min(stays_s, self.visit.drops_at * needed_s)
        if stays_s < needed_s:
            self._engine.after(stays_s, self.vanish)

    def _download(self, effect: Download) -> None:
        self.assigned_s = self._engine.now
        for observe in self.cluster.hooks.assigned:
            observe(self)
        self._engine.after(self.visit.latency_s, self._downloaded, effect.parameters)

    def _downloaded(self, parameters: str) -> None:
        if parameters in self.cluster.blobs.blobs:
            self.deliver(Downloaded())
        else:
            for observe in self.cluster.hooks.missing_download:
                observe(self, parameters)
            self.deliver(WorkFailed("no_parameters"))

    def _train(self, effect: Train) -> None:
        self._engine.after(self.visit.execution_s, self._trained, effect)

    def _trained(self, effect: Train) -> None:
        if self.is_present and self.machine.joined is not None:
            update = self.cluster.behaviour.train(self, effect)
            joined = self.machine.joined
            if (bits := joined.upload_bits) != 32 and not joined.secure:
                update = _in_fewer_bits(np.frombuffer(update, FLOAT32), bits, effect.session)
            for observe in self.cluster.hooks.trained:
                observe(self, effect)
            self.deliver(Trained(update, self.visit.examples))

    def _seal(self, effect: Seal) -> None:
        try:
            done: Message = self.cluster.seal(self, effect)
        except SecureAggregationError:
            done = WorkFailed("untrusted")
        self._engine.after(_SEAL_S, self.deliver, done)

    def _remember(self, effect: Remember | RememberDeclined) -> None:
        """Durable: the device keeps its history across visits."""
        self.cluster.keep_history(self.visit.device, self.machine.history)

    def _direct_upload_failed(self, effect: DirectUploadFailed) -> None:
        """No-op: the simulator has no owner to tell."""

    def _finish(self, effect: Finish) -> None:
        self.is_present = False
        self.cluster.departed(self, effect)


_CARRY_OUT: dict[type, Callable[[SimulatedDevice, Any], None]] = {
    SendRequest: SimulatedDevice._request,
    Download: SimulatedDevice._download,
    Train: SimulatedDevice._train,
    Seal: SimulatedDevice._seal,
    Remember: SimulatedDevice._remember,
    RememberDeclined: SimulatedDevice._remember,
    DirectUploadFailed: SimulatedDevice._direct_upload_failed,
    Finish: SimulatedDevice._finish,
}


def _in_fewer_bits(update: Vector, bits: UploadBits, session: SessionId) -> bytes:
    if not is_finite(update):
        # A real device would give up. This one tries the server: all scales are NaN.
        return b"\xff" * encoded_bytes(update.size, bits)
    return encode_update(update, bits, session_seed(session))
