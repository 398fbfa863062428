"""What a simulated run does beside the protocol: first model, training, sums, sealing, wire format.

By default devices train nothing and upload what protocol_updates.py makes of their session.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np

from papaya.aggregator.masked_sum import Tsa
from papaya.aggregator.shards import Shards
from papaya.client.work import Seal, Sealed, Train
from papaya.config import TaskConfig
from papaya.learning.parameters import FLOAT32, Vector
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.control import (
    AggregatorOrders,
    AggregatorReport,
    SelectorOrders,
    SelectorReport,
)
from papaya.secagg.words import Entropy
from papaya.sim.protocol_updates import protocol_evaluation, protocol_update
from papaya.sim.tsa_twin import sealed

if TYPE_CHECKING:
    from papaya.sim.devices import SimulatedDevice

_CONTROL = (AggregatorOrders, AggregatorReport, SelectorOrders, SelectorReport)


class Behaviour:
    """Override what a run should do differently."""

    def initial(self, task: TaskConfig, seed: int) -> Vector:
        """Version 0 of a task."""
        return np.zeros(task.model_length, FLOAT32)

    def train(self, device: SimulatedDevice, work: Train) -> bytes:
        """The update that a device has when its training is over."""
        joined = device.machine.joined
        assert joined is not None
        if work.evaluates:
            return protocol_evaluation(work.session, joined.update_length).tobytes()
        return protocol_update(work.session, joined.update_length)

    def seal(self, device: SimulatedDevice, work: Seal, rng: Random) -> Sealed:
        """The masked update and the sealed seed; SecureAggregationError if the device refuses."""
        now, number = device.cluster.engine.now, device.visit.device
        return sealed(work, now, rng, device.bundles.manifest, number)

    def shards(self, tsa: Tsa, entropy: Entropy) -> Shards:
        """The arithmetic of an aggregator that starts."""
        return Shards(tsa=tsa, entropy=entropy)

    def carry(self, message: Message) -> Message:
        """What the receiver of a message gets: here, the same object."""
        return message


class EncodedMessages(Behaviour):
    """Every message is encoded and parsed, as it is between processes."""

    def carry(self, message: Message) -> Message:
        encoded = wire.encode(message)
        if isinstance(message, _CONTROL):
            return wire.between_servers.parse(encoded)
        if isinstance(message, wire.FROM_DEVICE_TYPES):
            return wire.from_device.parse(encoded)
        return wire.to_device.parse(encoded)
