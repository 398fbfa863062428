"""Which devices fit a task that its owner has signed."""

from __future__ import annotations

import pytest
from msgspec import structs

from papaya.config import Requirements
from papaya.messages.selection import Capabilities, DeviceClass, refused

OWNER, BUNDLE = "a" * 32, f"digits-0123456789ab/0/bundle-1-{'c' * 32}"
SIGNED = Requirements(engine="torch", owner=OWNER, bundle=BUNDLE)


@pytest.mark.parametrize(
    ("device", "fits"),
    [
        (DeviceClass(Capabilities(owners=(OWNER,))), True),
        (DeviceClass(Capabilities(owners=("b" * 32, OWNER))), True),
        (DeviceClass(Capabilities()), False),
        (DeviceClass(Capabilities(modules=("sha256:ab",))), False),
        (DeviceClass(Capabilities(engine="other", owners=(OWNER,))), False),
        (DeviceClass(Capabilities(owners=(OWNER,)), ("digits",)), False),
        (DeviceClass(Capabilities(owners=(OWNER,)), (refused("digits", BUNDLE),)), False),
        (DeviceClass(Capabilities(owners=(OWNER,)), (refused("digits", BUNDLE[:-1] + "d"),)), True),
    ],
)
def test_a_signed_task_is_for_devices_that_have_pinned_its_owner(
    device: DeviceClass, fits: bool
) -> None:
    """A refused bundle is excluded until it changes."""
    assert device.fits("digits", SIGNED, False) is fits


@pytest.mark.parametrize(
    ("version", "fits"), [("2.6.0", True), ("2.13.0", True), ("2.5", False), ("", False)]
)
def test_a_device_needs_the_version_of_the_engine(version: str, fits: bool) -> None:
    needs = structs.replace(SIGNED, engine_version="2.6")
    device = DeviceClass(Capabilities(owners=(OWNER,), engine_version=version))
    assert device.fits("digits", needs, False) is fits


def test_the_name_of_a_refused_bundle_fits_into_a_check_in() -> None:
    assert len(refused("d" * 53, BUNDLE)) <= 64
