"""Which devices fit which task: every requirement counts, and only requirements count."""

from __future__ import annotations

import pytest

from papaya.config import Requirements
from papaya.messages.selection import Capabilities, DeviceClass

PHONE = Capabilities(engine="torch", modules=("ab12", "cd34"), memory_mb=512, labels=("eu", "beta"))


@pytest.mark.parametrize(
    ("requirements", "fits"),
    [
        (Requirements(), True),
        (Requirements(engine="torch"), True),
        (Requirements(engine="executorch"), False),
        (Requirements(module="cd34"), True),
        (Requirements(module="ef56"), False),
        (Requirements(module="ab"), False),
        (Requirements(min_memory_mb=512), True),
        (Requirements(min_memory_mb=513), False),
        (Requirements(labels=("beta",)), True),
        (Requirements(labels=("beta", "eu")), True),
        (Requirements(labels=("beta", "us")), False),
        (Requirements("torch", "ab12", 512, ("eu",)), True),
        (Requirements("torch", "ab12", 512, ("us",)), False),
    ],
)
def test_a_device_fits_when_it_meets_every_requirement(
    requirements: Requirements, fits: bool
) -> None:
    assert DeviceClass(PHONE).fits("next-word", requirements, False) is fits


def test_a_bare_device_fits_only_what_asks_for_nothing() -> None:
    bare = DeviceClass(Capabilities())
    assert bare.fits("next-word", Requirements(), False)
    assert not bare.fits("next-word", Requirements(min_memory_mb=1), False)
    assert not bare.fits("next-word", Requirements(labels=("eu",)), False)
    assert not bare.fits("next-word", Requirements(module="ab12"), False)


def test_a_task_that_the_history_rules_out_does_not_fit() -> None:
    device = DeviceClass(PHONE, excluded=("next-word", "emoji"))
    assert not device.fits("next-word", Requirements(), False)
    assert not device.fits("emoji", Requirements(), False)
    assert device.fits("next-word-2", Requirements(), False)


def test_equal_devices_are_counted_together() -> None:
    same = Capabilities("torch", ("ab12", "cd34"), 512, ("eu", "beta"))
    counts = {DeviceClass(PHONE): 2}
    assert counts[DeviceClass(same)] == 2
    assert DeviceClass(same, excluded=("emoji",)) not in counts


def test_a_device_without_a_trust_policy_fits_no_secure_task() -> None:
    trusting = DeviceClass(Capabilities(trust_policy=True))
    bare = DeviceClass(Capabilities(trust_policy=False))
    assert trusting.fits("next-word", Requirements(), True)
    assert bare.fits("next-word", Requirements(), False)
    assert not bare.fits("next-word", Requirements(), True)
