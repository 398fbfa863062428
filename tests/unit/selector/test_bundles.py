"""Signed tasks at a selector: it tells devices where the bundle is, and keeps classes few."""

from __future__ import annotations

from papaya.machine import Reply
from papaya.messages.base import PROTOCOL_VERSION, SIGNED_TASKS_SINCE
from papaya.messages.selection import (
    Accepted,
    Capabilities,
    CheckIn,
    DeviceClass,
    Lack,
    Rejected,
    refused,
)
from papaya.messages.tickets import claim_of
from papaya.selector.device_classes import Distinctions
from tests.unit.selector.builders import BOOT, TASK, a_selector, advertised, assign, orders

OWNER, OTHER = "a" * 32, "b" * 32
BUNDLE = f"{TASK}/0/bundle-1-{'c' * 32}"
CLASS = DeviceClass(Capabilities("", owners=(OWNER,)))


def test_an_accepted_device_learns_where_the_bundle_is() -> None:
    selector = a_selector()
    selector.wake(BOOT)
    offer = advertised(owner=OWNER, bundle=BUNDLE, manifest="ab" * 32)
    selector.receive(BOOT, orders(0, advertised=(offer,)))
    owners = (OTHER, OWNER)  # of which no advertised task needs the first
    check_in = CheckIn(PROTOCOL_VERSION, Capabilities("", owners=owners), ("x", "y@00000000"))
    selector.receive(BOOT, check_in, "phone")
    found = selector.receive(
        BOOT, orders(1, advertised=(offer,), assignments=(assign("s1", to=CLASS),))
    )
    [answer] = [effect.message for effect in found if isinstance(effect, Reply)]
    assert isinstance(answer, Accepted)
    assert answer.bundle == BUNDLE
    assert claim_of(answer.ticket).manifest == bytes.fromhex("ab" * 32)


def test_a_device_that_refused_the_bundle_is_of_another_class() -> None:
    selector = a_selector()
    selector.wake(BOOT)
    selector.receive(BOOT, orders(0, advertised=(advertised(owner=OWNER, bundle=BUNDLE),)))
    capabilities = Capabilities("", owners=(OWNER,))
    check_in = CheckIn(PROTOCOL_VERSION, capabilities, (refused(TASK, BUNDLE),))
    [rejection] = selector.receive(BOOT, check_in, "phone")
    assert isinstance(rejection, Reply)
    assert type(rejection.message).__name__ == "Rejected"


def test_versions_that_no_task_distinguishes_are_of_one_class() -> None:
    needs = [advertised(engine="torch", engine_version=v) for v in ("2.6", "2.10")]
    found = {
        version: Distinctions(tuple(needs)).class_of(
            CheckIn(PROTOCOL_VERSION, Capabilities("torch", engine_version=version))
        )
        for version in ("2.5", "", "2.6", "2.9.1", "2.10.0", "2.13.0+cpu")
    }
    assert found["2.5"] == found[""]
    assert found["2.6"] == found["2.9.1"] != found["2.5"]
    assert found["2.10.0"] == found["2.13.0+cpu"] != found["2.6"]


def test_a_device_with_an_older_engine_is_told_which_it_needs() -> None:
    selector = a_selector()
    selector.wake(BOOT)
    offer = advertised(engine="torch", engine_version="2.6", owner=OWNER, bundle=BUNDLE)
    selector.receive(BOOT, orders(0, advertised=(offer,)))
    old = Capabilities("torch", owners=(OWNER,), engine_version="2.5")
    [answer] = selector.receive(BOOT, CheckIn(PROTOCOL_VERSION, old), "phone")
    assert isinstance(answer, Reply)
    assert isinstance(answer.message, Rejected)
    assert answer.message.lacks == (Lack(TASK, "engine_version", "torch ≥ 2.6"),)


def test_a_device_of_an_earlier_protocol_gets_only_tasks_that_nobody_signed() -> None:
    """Whatever it says about owners: it knows neither bundles nor their digests."""
    selector = a_selector()
    selector.wake(BOOT)
    selector.receive(BOOT, orders(0, advertised=(advertised(owner=OWNER, bundle=BUNDLE),)))
    before = CheckIn(SIGNED_TASKS_SINCE - 1, Capabilities("", owners=(OWNER,)))
    [rejection] = selector.receive(BOOT, before, "old phone")
    assert isinstance(rejection, Reply)
    assert type(rejection.message).__name__ == "Rejected"
    selector.receive(BOOT, orders(1, advertised=(advertised(),)))
    assert selector.receive(BOOT, before, "old phone") == [], "held for the other task"
    assert len(selector.held) == 1


def test_a_device_that_pinned_another_key_is_told_so_and_learns_no_name() -> None:
    selector = a_selector()
    selector.wake(BOOT)
    selector.receive(BOOT, orders(0, advertised=(advertised(owner=OWNER, bundle=BUNDLE),)))
    reasons = []
    for owners in ((OTHER,), (), (OWNER,)):
        check_in = CheckIn(PROTOCOL_VERSION, Capabilities("", owners=owners))
        if owners == (OWNER,):
            selector.receive(BOOT, orders(1, advertised=(advertised(owner=OWNER),), wanting=()))
        [reply] = [e for e in selector.receive(BOOT, check_in, owners) if isinstance(e, Reply)]
        assert isinstance(reply.message, Rejected)
        reasons.append(reply.message.reason)
    assert reasons[0].startswith("no task that needs clients is signed by an owner")
    assert reasons[1] == "all tasks that need clients are signed; this device has pinned no owners"
    assert reasons[2] == "no compatible task needs clients now"
    assert TASK not in "".join(reasons)
