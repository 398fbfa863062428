"""A task with updates in 8 bits in a whole simulated system, and the devices that it needs."""

from __future__ import annotations

import pytest

from papaya.client.work import Train
from papaya.config import AsyncFL, Requirements, SecureAggregation, TaskConfig
from papaya.errors import ConfigError
from papaya.messages.selection import Capabilities
from papaya.sim.checkers import Auditor
from papaya.sim.cluster import Cluster, ClusterConfig, DeviceKind
from papaya.sim.devices import SimulatedDevice
from papaya.sim.observer import Observer

BITS = Requirements(upload_bits=8)
TASK = TaskConfig(
    task="bits", concurrency=12, model_length=300, regime=AsyncFL(3), requirements=BITS
)
KINDS = (
    DeviceKind(0.5, Capabilities()),
    DeviceKind(0.25, Capabilities(upload_bits=16)),
    DeviceKind(0.25, Capabilities(upload_bits=8)),
)


class Trained(Observer):
    def __init__(self) -> None:
        self.bits: list[int] = []

    def on_trained(self, device: SimulatedDevice, work: Train) -> None:
        self.bits.append(device.machine._capabilities.upload_bits)


def test_only_devices_that_can_encode_it_take_part_and_every_update_counts() -> None:
    """The auditor computes each sum again from what the devices uploaded."""
    trained, auditor = Trained(), Auditor()
    cluster = Cluster(ClusterConfig(tasks=(TASK,), kinds=KINDS), 1, observers=[trained, auditor])
    cluster.run(600.0)
    assert len(trained.bits) > 10
    assert set(trained.bits) == {8}
    assert auditor.books["bits"].steps > 2


def test_secure_aggregation_needs_whole_words() -> None:
    with pytest.raises(ConfigError, match="upload_bits"):
        TaskConfig(
            task="bits",
            concurrency=12,
            model_length=300,
            requirements=BITS,
            clip=1.0,
            secure_aggregation=SecureAggregation(),
        )
