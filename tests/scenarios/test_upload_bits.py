"""Tasks with updates in fewer bits in a whole simulated system, and the devices they need."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from papaya.client.work import Train
from papaya.config import (
    AsyncFL,
    Privacy,
    Requirements,
    SecureAggregation,
    TaskConfig,
    Weighting,
)
from papaya.config.upload_bits import UploadBits
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


def a_secure_task(bits: UploadBits, **changes: Any) -> TaskConfig:
    fields: dict[str, Any] = {
        "task": "bits",
        "concurrency": 12,
        "model_length": 30,
        "regime": AsyncFL(3),
        "requirements": Requirements(upload_bits=bits),
        "clip": 64.0,
        "secure_aggregation": SecureAggregation(),
    }
    return TaskConfig(**(fields | changes))


def test_masked_words_of_16_bits_make_versions_with_devices_that_know_them() -> None:
    """The auditor computes each masked sum and each version again."""
    task, trained, auditor = a_secure_task(16), Trained(), Auditor()
    assert task.update_bytes == 2 * (30 + 2)
    cluster = Cluster(ClusterConfig(tasks=(task,), kinds=KINDS), 1, observers=[trained, auditor])
    cluster.run(600.0)
    assert len(trained.bits) > 10
    assert set(trained.bits) == {8, 16}
    assert auditor.books["bits"].steps > 2
    assert auditor.books["bits"].dropped == 0


def test_masked_words_have_16_bits_or_more() -> None:
    with pytest.raises(ConfigError, match=r"requirements.upload_bits = 8: .* 32 or 16 bits"):
        a_secure_task(8)


def test_noise_needs_words_of_32_bits() -> None:
    privacy = Privacy(clip=64.0, max_participations=1, delta=1e-6, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match=r"requirements.upload_bits = 16: .* no room for noise"):
        a_secure_task(16, privacy=privacy)


def test_too_many_clients_leave_too_few_levels() -> None:
    with pytest.raises(ConfigError, match=r"leaves 15 .* levels in 16 bits .* needs 16") as caught:
        a_secure_task(16, regime=AsyncFL(2000))
    assert "below 1928" in caught.value.hint
    assert "requirements.upload_bits=32" in caught.value.hint


def test_the_rounding_error_is_known_at_submission() -> None:
    task = a_secure_task(16, regime=AsyncFL(100), model_length=400_000)
    error = task.rounding_error
    assert error == pytest.approx(400_000**0.5 / 2 / 326 / 10)
    assert any("9.7 % of the clip" in warning for warning in task.warnings())
    assert a_secure_task(32).rounding_error is None


def test_the_error_grows_as_weights_by_examples_shrink() -> None:
    """At 5 % of the clip there is a warning: with so few examples, the error would be that."""
    task = a_secure_task(16, regime=AsyncFL(100), model_length=4_000, max_examples=1000)
    assert task.rounding_error == pytest.approx(0.0097, rel=0.01)
    assert "0.97 % of the clip" in task.rounding_error_in_words
    assert "with n on average, 1000/n times as much" in task.rounding_error_in_words
    [warning] = [found for found in task.warnings() if "upload_bits" in found]
    assert "fewer than 195 examples" in warning
    capped = structs.replace(task, weighting=Weighting("capped", 10))
    assert any("fewer than 2 examples" in found for found in capped.warnings())
    equal = structs.replace(task, weighting=Weighting("equal"))
    assert not any("upload_bits" in found for found in equal.warnings())
    assert "examples" not in equal.rounding_error_in_words
