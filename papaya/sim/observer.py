"""Observers: what an auditor, a report or a recorder sees of a simulation.

A `Cluster` takes a list of observers and calls them in that order. An observer overrides the hooks
that it needs; hooks without an override cost nothing. An observer never changes a run: what
devices upload and how messages travel is a `Behaviour` (behaviour.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from papaya.client.work import Finish, Seal, Sealed, Train
from papaya.machine import Reply
from papaya.messages.base import BlobKey, Message, NodeId
from papaya.messages.events import ServerEvent
from papaya.messages.storage import Row, Transaction
from papaya.sim.storage import Writer

if TYPE_CHECKING:
    from papaya.sim.cluster import Cluster
    from papaya.sim.devices import SimulatedDevice
    from papaya.sim.hosts import SimulatedHost


class Observer:
    """Every hook does nothing unless it is overridden. A hook that raises ends the run."""

    cluster: Cluster

    def attach(self, cluster: Cluster) -> None:
        """Called once, when the cluster is built: its tasks are submitted, nothing has run."""
        self.cluster = cluster

    # -- servers ----------------------------------------------------------------------------

    def on_sent(self, source: NodeId, target: NodeId, message: Message) -> None:
        """A server or a device sends a message. A forwarded request is not sent again."""

    def on_transaction(
        self, writer: Writer, transaction: Transaction, before: dict[str, Row]
    ) -> None:
        """The state store applied a transaction. `before` has the rows it replaced or deleted."""

    def on_blob_lost(self, blob: BlobKey) -> None:
        """A blob was deleted, or damaged by a power loss."""

    def on_logged(self, host: SimulatedHost, event: ServerEvent) -> None:
        """A server logs an event."""

    def after_event(self, host: SimulatedHost) -> None:
        """A server has handled a message or a timer, effects included."""

    # -- devices ----------------------------------------------------------------------------

    def on_request(self, device: SimulatedDevice, message: Message) -> None:
        """A device sends a request."""

    def on_reply(self, host: SimulatedHost, reply: Reply) -> None:
        """A server answers a device."""

    def on_assigned(self, device: SimulatedDevice) -> None:
        """A device has joined a task and begins to download: its participation starts."""

    def on_missing_download(self, device: SimulatedDevice, parameters: BlobKey) -> None:
        """A device finds that the parameters named by its ticket are gone."""

    def on_trained(self, device: SimulatedDevice, work: Train) -> None:
        """A device has trained."""

    def on_sealed(self, device: SimulatedDevice, work: Seal, sealed: Sealed) -> None:
        """A device has masked its update and sealed its seed."""

    def on_departed(self, device: SimulatedDevice, finish: Finish | None) -> None:
        """A device is gone. `finish` is None when it dropped out without telling anyone."""

    # -- samples ----------------------------------------------------------------------------

    def next_sample_s(self) -> float:
        """When `sample` is due. Samples are taken between events and do not count as events."""
        return math.inf

    def sample(self, now: float) -> None:
        """Look at the cluster at the time that `next_sample_s` gave."""


class Hooks:
    """The overridden hooks of a list of observers, in its order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        def overridden(hook: Callable[..., None]) -> tuple[Callable[..., None], ...]:
            name = hook.__name__
            found = [each for each in observers if getattr(type(each), name) is not hook]
            return tuple(getattr(each, name) for each in found)

        self.sent = overridden(Observer.on_sent)
        self.transaction = overridden(Observer.on_transaction)
        self.blob_lost = overridden(Observer.on_blob_lost)
        self.logged = overridden(Observer.on_logged)
        self.after_event = overridden(Observer.after_event)
        self.request = overridden(Observer.on_request)
        self.reply = overridden(Observer.on_reply)
        self.assigned = overridden(Observer.on_assigned)
        self.missing_download = overridden(Observer.on_missing_download)
        self.trained = overridden(Observer.on_trained)
        self.sealed = overridden(Observer.on_sealed)
        self.departed = overridden(Observer.on_departed)
        self.sees_messages = bool(self.sent or self.request or self.reply or self.after_event)
