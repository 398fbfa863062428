"""A selector during a rollout: a share of the devices gets the candidate, always the same ones."""

from __future__ import annotations

from msgspec import structs

from papaya.config import Requirements
from papaya.machine import Reply
from papaya.messages.control import Advertised, CandidateOffer
from papaya.messages.selection import Accepted, DeviceClass, IdentifiedCheckIn, refused
from papaya.messages.tickets import claim_of
from papaya.selector.selector import Selector
from tests.unit.selector.builders import (
    BOOT,
    PHONE,
    TASK,
    a_selector,
    assign,
    check_in,
    orders,
)

CURRENT = Requirements(bundle=f"{TASK}/0/bundle-1-{'c' * 32}", manifest="ab" * 32)
NEXT = Requirements(bundle=f"{TASK}/0/bundle-2-{'d' * 32}", manifest="cd" * 32)


def offer(share: float) -> Advertised:
    return Advertised(TASK, CURRENT, candidate=CandidateOffer(NEXT, share))


def given(selector: Selector, number: int, device: str, offered: Advertised) -> Accepted:
    """What a device is given when it checks in."""
    plain = DeviceClass(structs.replace(PHONE.capabilities, engine="", memory_mb=0))
    message = IdentifiedCheckIn(device, check_in(plain)) if device else check_in(plain)
    selector.receive(BOOT, message, device or "handle")
    told = orders(number, advertised=(offered,), assignments=(assign(f"s{number}", to=plain),))
    [answer] = [e.message for e in selector.receive(BOOT, told) if isinstance(e, Reply)]
    assert isinstance(answer, Accepted)
    return answer


def test_the_bundle_and_the_ticket_name_the_same_revision() -> None:
    selector = a_selector()
    selector.wake(BOOT)
    selector.receive(BOOT, orders(0, advertised=(offer(1.0),)))
    candidate = given(selector, 1, "tablet-1", offer(1.0))
    assert candidate.bundle == NEXT.bundle
    assert claim_of(candidate.ticket).manifest == bytes.fromhex("cd" * 32)
    unknown = given(selector, 2, "", offer(1.0))
    assert unknown.bundle == CURRENT.bundle, "without an identity a device could not keep it"
    assert claim_of(unknown.ticket).manifest == bytes.fromhex("ab" * 32)


def test_a_larger_share_contains_the_smaller_one() -> None:
    devices = [f"device-{number}" for number in range(4000)]
    taken = {
        share: [d for d in devices if offer(share).needs_of(d, PHONE) is NEXT]
        for share in (0.1, 0.5, 1.0)
    }
    assert 320 < len(taken[0.1]) < 480, "within four standard deviations"
    assert set(taken[0.1]) < set(taken[0.5]) < set(taken[1.0]) == set(devices)
    other = CandidateOffer(structs.replace(NEXT, manifest="ef" * 32), 0.1)
    again = [d for d in devices if other.takes(d)]
    assert len(set(again) & set(taken[0.1])) < 100, "each rollout begins with other devices"


def test_a_device_that_refused_the_candidate_keeps_the_current_revision() -> None:
    refusing = structs.replace(PHONE, excluded=(refused(TASK, NEXT.bundle or ""),))
    assert offer(1.0).needs_of("tablet-1", refusing) is CURRENT


def test_a_device_that_cannot_go_back_gets_the_candidate_outside_the_share() -> None:
    """Devices of one process share what they have accepted: if one accepts the candidate, the
    others refuse the revision before it.
    """
    refusing = structs.replace(PHONE, excluded=(refused(TASK, CURRENT.bundle or ""),))
    rolled_out = offer(1e-9)
    assert rolled_out.fits(refusing)
    assert rolled_out.needs_of("tablet-1", refusing) is NEXT
    assert not Advertised(TASK, CURRENT).fits(refusing)
