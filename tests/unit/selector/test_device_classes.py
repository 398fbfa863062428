"""Device classes: which devices are told apart, and what a device learns that it lacks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from papaya.config import Requirements
from papaya.messages import wire
from papaya.messages.control import Advertised
from papaya.messages.reasons import lacks_in_words
from papaya.messages.selection import MAX_LACKS, Capabilities, DeviceClass, Rejected
from papaya.selector.device_classes import Distinctions
from tests.unit.selector.builders import (
    BOOT,
    advertised,
    an_open_selector,
    answers,
    check_in,
    orders,
    report,
)

LABELS = st.lists(st.sampled_from("abc"), max_size=3, unique=True).map(tuple)
DEVICES = st.builds(
    DeviceClass,
    st.builds(Capabilities, memory_mb=st.integers(0, 9), labels=LABELS, trust_policy=st.booleans()),
    st.sampled_from([(), ("t",), ("u",)]),
)


@pytest.mark.parametrize(
    ("one", "other", "are_told_apart"),
    [
        (Capabilities(memory_mb=100), Capabilities(memory_mb=511), False),
        (Capabilities(memory_mb=511), Capabilities(memory_mb=512), True),
        (Capabilities(memory_mb=512), Capabilities(memory_mb=4095), False),
        (Capabilities(engine="torch"), Capabilities(engine="other"), True),
        (Capabilities(engine="this"), Capabilities(engine="that"), False),
        (Capabilities(labels=("eu", "x")), Capabilities(labels=("y", "eu")), False),
        (Capabilities(labels=("eu",)), Capabilities(labels=("us",)), True),
        (Capabilities(modules=("m1",)), Capabilities(modules=("m2",)), True),
        (Capabilities(modules=("m2",)), Capabilities(modules=("m3",)), False),
        (Capabilities(trust_policy=True), Capabilities(trust_policy=False), True),
    ],
)
def test_devices_are_told_apart_by_what_some_task_asks_for_and_by_nothing_else(
    one: Capabilities, other: Capabilities, are_told_apart: bool
) -> None:
    selector = an_open_selector(heartbeat_s=10.0)
    secure = Advertised("d", Requirements(), is_secure=True)
    tasks = (*orders(1).advertised, advertised("b", labels=("eu",)), advertised("c", module="m1"))
    tasks = (*tasks, secure)
    selector.receive(BOOT, orders(1, advertised=tasks))
    for number, capabilities in enumerate((one, other)):
        selector.receive(BOOT + 1, check_in(DeviceClass(capabilities, ("unknown",))), number)
    found = report(selector.wake(BOOT + 10))
    assert found is not None
    assert len(found.held) == (2 if are_told_apart else 1)


@given(
    st.builds(Requirements, min_memory_mb=st.integers(0, 9), labels=LABELS),
    st.booleans(),
    DEVICES,
    DEVICES,
)
def test_devices_of_one_class_fit_the_same_tasks(
    requirements: Requirements, is_secure: bool, one: DeviceClass, other: DeviceClass
) -> None:
    """What a class leaves out, no task can have asked for."""
    needs = ("t", requirements, is_secure)
    distinctions = Distinctions((Advertised(*needs),))
    for device in (one, other):
        kept = distinctions.class_of(check_in(device))
        assert kept.fits(*needs) == device.fits(*needs)
    if distinctions.class_of(check_in(one)) == distinctions.class_of(check_in(other)):
        assert one.fits(*needs) == other.fits(*needs)


FILE, OTHER_FILE = "sha256:" + 32 * "a", "sha256:" + 32 * "b"
NO_TASK = "no compatible task needs clients now"
FROZEN, UNTRUSTING, NOTHING = ["frozen"], ["trust_policy"], list[str]()


@pytest.mark.parametrize(
    ("required", "is_secure", "device", "lacks"),
    [
        (f"{FILE}.base1", False, Capabilities(modules=(f"{FILE}.base2",)), FROZEN),
        (f"{FILE}.base1", False, Capabilities(modules=(FILE,)), FROZEN),
        (FILE, False, Capabilities(modules=(f"{FILE}.base1",)), FROZEN),
        (f"{FILE}.base1", False, Capabilities(modules=(f"{OTHER_FILE}.base1",)), NOTHING),
        (f"{FILE}.base1", False, Capabilities(engine="x", modules=(f"{FILE}.base2",)), NOTHING),
        (None, True, Capabilities(trust_policy=False), UNTRUSTING),
        (FILE, True, Capabilities(modules=(FILE,), trust_policy=False), UNTRUSTING),
        (FILE, True, Capabilities(modules=(OTHER_FILE,), trust_policy=False), NOTHING),
        (FILE, False, Capabilities(), NOTHING),
    ],
)
def test_a_device_that_lacks_one_thing_only_is_told_which(
    required: str | None, is_secure: bool, device: Capabilities, lacks: list[str]
) -> None:
    task = "t" * 64
    needs = Advertised(task, Requirements(engine="torch", module=required), is_secure)
    selector = an_open_selector()
    selector.receive(BOOT, orders(1, advertised=(needs,), wanting=(task,)))
    [answer] = answers(selector.receive(BOOT + 1, check_in(DeviceClass(device)), "d")).values()
    assert isinstance(answer, Rejected)
    assert answer.reason == NO_TASK
    assert [lack.code for lack in answer.lacks] == lacks
    assert all(lack.task == task for lack in answer.lacks)


OWNER, BUNDLE = 32 * "a", "digits-0123456789ab/0/bundle-1-0123456789abcdef"
SIGNED = Requirements(engine="torch", owner=OWNER, bundle=BUNDLE, min_memory_mb=512, labels=("eu",))
ABLE = Capabilities(memory_mb=512, labels=("eu",), owners=(OWNER,))


@pytest.mark.parametrize(
    ("device", "excluded", "words"),
    [
        (ABLE, (), "digits: needs no more clients now"),
        (replace(ABLE, engine="executorch"), (), "digits: needs engine torch"),
        (
            replace(ABLE, memory_mb=1, labels=()),
            (),
            "digits: needs 512 MB of memory; digits: needs the label eu",
        ),
        (replace(ABLE, owners=()), (), ""),
        (replace(ABLE, owners=(32 * "b",), engine="executorch"), (), ""),
        (ABLE, ("digits-0123456789ab",), ""),
        (ABLE, ("digits-0123456789ab@89abcdef",), ""),
    ],
)
def test_a_device_learns_about_tasks_of_pinned_owners_and_no_others(
    device: Capabilities, excluded: tuple[str, ...], words: str
) -> None:
    signed = Advertised("digits-0123456789ab", SIGNED)
    selector = an_open_selector()
    selector.receive(BOOT, orders(1, advertised=(signed,), wanting=()))
    [answer] = answers(
        selector.receive(BOOT + 1, check_in(DeviceClass(device, excluded)), "d")
    ).values()
    assert isinstance(answer, Rejected)
    assert lacks_in_words(answer.lacks) == words


def test_a_rejection_names_no_more_than_the_wire_takes() -> None:
    tasks = tuple(Advertised(f"digits-{n:012x}", SIGNED) for n in range(20))
    selector = an_open_selector()
    selector.receive(BOOT, orders(1, advertised=tasks, wanting=()))
    [answer] = answers(selector.receive(BOOT + 1, check_in(DeviceClass(ABLE)), "d")).values()
    assert isinstance(answer, Rejected)
    assert len(answer.lacks) == MAX_LACKS
    assert wire.to_device.parse(wire.encode(answer)) == answer


def test_a_task_that_wants_nobody_is_no_reason() -> None:
    needs = Advertised("quiet", Requirements(), is_secure=True)
    selector = an_open_selector()
    selector.receive(BOOT, orders(1, advertised=(needs,), wanting=()))
    bare = DeviceClass(Capabilities(trust_policy=False))
    [answer] = answers(selector.receive(BOOT + 1, check_in(bare), "d")).values()
    assert isinstance(answer, Rejected)
    assert (answer.reason, answer.lacks) == (NO_TASK, ())
