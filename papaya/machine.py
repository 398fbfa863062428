"""The contract of a machine: messages in, effects out, no IO, clock or global randomness inside.

Every box of the paper's architecture figure is a machine. A driver (`server` and `device` with
sockets and disks, `sim` under virtual time) passes it `now` and messages, carries out the effects
that it returns, and delivers their results as messages. Raising leaves the state unchanged.

    effects = machine.receive(now, message, reply_to)
    effects = machine.wake(now)              when now >= machine.next_wake()
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from papaya.messages.base import Message, NodeId
from papaya.messages.events import ServerEvent
from papaya.messages.storage import Transaction

Handle: TypeAlias = Any
"""Where an answer goes. Made by the driver, opaque to machines, never stored in rows."""


class Effect(Struct, frozen=True, gc=False):
    """Something that the driver carries out for a machine."""


class Send(Effect, frozen=True):
    """A one-way message to another server; it may be lost."""

    to: NodeId
    message: Message


class Reply(Effect, frozen=True):
    """The answer to a device's request."""

    to: Handle
    message: Message


class Forward(Effect, frozen=True):
    """Pass a device's request on; the driver carries the answer back to the same handle."""

    request: Handle
    to: NodeId
    message: Message


class Transact(Effect, frozen=True):
    """Answered with Transacted(token, ...)."""

    token: int
    transaction: Transaction


class Read(Effect, frozen=True):
    """Read all rows under the prefixes in one snapshot; answered with Rows(token, ...).

    A read changes nothing, so the driver repeats one that fails until it succeeds.
    """

    token: int
    prefixes: tuple[str, ...]


class Log(Effect, frozen=True):
    """Tell the operator."""

    event: ServerEvent


Effects: TypeAlias = list[Effect]


def stopped_s(last: float, now: float, heartbeat_s: float) -> float:
    """For how long the process was stopped (SIGSTOP, a paused virtual machine); 0 if it was not.

    `last`: when the machine was last called. Every server asks to be woken each heartbeat, so after
    a much longer time without a call it could not run. What its peers sent meanwhile waits in its
    sockets, and timers may be called first. So the time that counts a peer's silence begins again
    (docs/adr/0098). Leadership, leases and tickets end by the clock: other servers rely on that.
    """
    return now - last if now - last > 1.5 * heartbeat_s else 0.0


class Machine(Protocol):
    """A server. `check` raises InvariantError if one of its invariants is broken."""

    node: NodeId
    boot: int

    def receive(self, now: float, message: Message, reply_to: Handle = None) -> Effects: ...

    def wake(self, now: float) -> Effects: ...

    def next_wake(self) -> float: ...

    def check(self) -> None: ...
