"""Small builders for selector tests: one selector, devices that knock, orders from a leader."""

from __future__ import annotations

from typing import Any

from papaya.config import Requirements, ServerConfig
from papaya.machine import Effects, Reply, Send
from papaya.messages.base import PROTOCOL_VERSION, Message
from papaya.messages.control import Advertised, Assignment, Route, SelectorOrders, SelectorReport
from papaya.messages.selection import Accepted, Capabilities, CheckIn, DeviceClass, Rejected
from papaya.messages.tickets import Keyring
from papaya.selector.selector import Selector

NODE, BOOT, EPOCH = "selector-1", 100, 5
COORDINATORS = ("coordinator-1", "coordinator-2")
KEYRING = Keyring({1: b"a key of thirty-two bytes or so."})
TASK, SEQ, VERSION = "next-word", 3, 12
PHONE = DeviceClass(Capabilities(memory_mb=512))
TABLET = DeviceClass(Capabilities(memory_mb=4096))
CONFIRM_BY = BOOT + 1000.0


def a_selector(**config: Any) -> Selector:
    return Selector(NODE, BOOT, BOOT, ServerConfig(**config), KEYRING, COORDINATORS)


def an_open_selector(**config: Any) -> Selector:
    """It has reported once and knows a task that wants clients and fits everyone."""
    selector = a_selector(**config)
    selector.wake(BOOT)
    selector.receive(BOOT, orders(0))
    return selector


def advertised(task: str = TASK, **requirements: Any) -> Advertised:
    return Advertised(task, Requirements(**requirements))


# Tasks that want nobody, but by which phones and tablets can be told apart.
OTHERS = (
    advertised("for-phones", engine="torch", min_memory_mb=512),
    advertised("for-tablets", min_memory_mb=4096),
)


def orders(number: int = 1, **changes: Any) -> SelectorOrders:
    whole: dict[str, Any] = {
        "epoch": EPOCH,
        "leader": COORDINATORS[0],
        "boot": BOOT,
        "number": number,
        "acked": 0,
        "advertised": (advertised(), *OTHERS),
        "wanting": (TASK,),
        "routes": (Route(TASK, "aggregator-1", SEQ),),
        "check_ins_per_s": 1.0,
        "assignments": (),
    }
    return SelectorOrders(**{**whole, **changes})


def assign(*sessions: str, to: DeviceClass = PHONE, task: str = TASK) -> Assignment:
    return Assignment(task, SEQ, to, sessions, CONFIRM_BY, VERSION)


def check_in(device: DeviceClass = PHONE) -> CheckIn:
    return CheckIn(PROTOCOL_VERSION, device.capabilities, device.excluded)


def answers(effects: Effects) -> dict[object, Message]:
    """Handle → answer; a handle that is answered twice is a failure."""
    replies = [effect for effect in effects if isinstance(effect, Reply)]
    found = {reply.to: reply.message for reply in replies}
    assert len(found) == len(replies)
    return found


def accepted(effects: Effects) -> dict[object, str]:
    """Handle → session, of the devices that were accepted."""
    return {
        handle: message.session
        for handle, message in answers(effects).items()
        if isinstance(message, Accepted)
    }


def rejected(effects: Effects) -> list[object]:
    return [handle for handle, m in answers(effects).items() if isinstance(m, Rejected)]


def report(effects: Effects) -> SelectorReport | None:
    """The report among the effects; the same one must go to every coordinator."""
    sent = [effect for effect in effects if isinstance(effect, Send)]
    if not sent:
        return None
    assert [effect.to for effect in sent] == list(COORDINATORS)
    message = sent[0].message
    assert isinstance(message, SelectorReport)
    assert all(effect.message == message for effect in sent)
    return message
