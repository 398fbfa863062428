"""The check-ins that a selector holds until there is a task for them, or until it is too late."""

from __future__ import annotations

from collections import OrderedDict
from heapq import nlargest
from itertools import islice
from typing import TypeAlias

from papaya.errors import InvariantError
from papaya.machine import Handle
from papaya.messages.control import Held
from papaya.messages.selection import DeviceClass

_MAX_REPORTED_CLASSES = 256


class HeldCheckIn:
    """A device that waits for an assignment. `device` is empty without an identity."""

    __slots__ = ("deadline", "device", "device_class", "handle")

    def __init__(
        self, deadline: float, device_class: DeviceClass, handle: Handle, device: str
    ) -> None:
        self.deadline = deadline
        self.device_class = device_class
        self.handle = handle
        self.device = device


# Held check-ins by their handle, oldest first. Not a dict: finding the first entry of a dict takes
# time in proportion to the entries that were removed before it.
Queue: TypeAlias = OrderedDict[Handle, HeldCheckIn]


class HeldCheckIns:
    """Invariant: one per identity; all of them are in the queue of their device class."""

    def __init__(self) -> None:
        # All of them; by device class, those first whose turn in a report is next; and those of
        # devices with an identity.
        self.in_order: Queue = OrderedDict()
        self._by_class: dict[DeviceClass, Queue] = {}
        self._by_device: dict[str, HeldCheckIn] = {}

    def __len__(self) -> int:
        return len(self.in_order)

    def of_device(self, device: str) -> HeldCheckIn | None:
        return self._by_device.get(device)

    def oldest_of(self, device_class: DeviceClass) -> HeldCheckIn | None:
        queue = self._by_class.get(device_class)
        return None if queue is None else _oldest(queue)

    def next_deadline(self) -> float:
        """The deadline of the oldest one. Call it only if there is one."""
        return _oldest(self.in_order).deadline

    def add(self, waiting: HeldCheckIn) -> bool:
        """Returns whether it is the first one of its device class."""
        self.in_order[waiting.handle] = waiting
        if waiting.device:
            self._by_device[waiting.device] = waiting
        queue = self._by_class.get(waiting.device_class)
        if queue is not None:
            queue[waiting.handle] = waiting
            return False
        self._by_class[waiting.device_class] = OrderedDict(((waiting.handle, waiting),))
        return True

    def let_go(self, waiting: HeldCheckIn) -> None:
        """Stop holding a check-in that is being answered, or whose device has hung up."""
        del self.in_order[waiting.handle]
        queue = self._by_class[waiting.device_class]
        del queue[waiting.handle]
        if not queue:
            del self._by_class[waiting.device_class]
        if waiting.device:
            del self._by_device[waiting.device]

    def expired(self, now: float) -> list[HeldCheckIn]:
        """Let go of those whose deadline has passed."""
        found: list[HeldCheckIn] = []
        while self.in_order and (waiting := _oldest(self.in_order)).deadline <= now:
            self.let_go(waiting)
            found.append(waiting)
        return found

    @property
    def has_unreported(self) -> bool:
        """Are there more classes than fit into one report?"""
        return len(self._by_class) > _MAX_REPORTED_CLASSES

    def summary(self) -> tuple[Held, ...]:
        """Their number by class. If there are too many classes: the largest ones, and as many of
        the others, which take turns. So devices that make up classes hide no other for long.
        """
        by_class = self._by_class
        if not self.has_unreported:
            return tuple(Held(kind, len(queue)) for kind, queue in by_class.items())
        largest = dict.fromkeys(
            nlargest(_MAX_REPORTED_CLASSES // 2, by_class, key=lambda kind: len(by_class[kind]))
        )
        others = (kind for kind in by_class if kind not in largest)
        turn = list(islice(others, _MAX_REPORTED_CLASSES - len(largest)))
        for kind in turn:
            by_class[kind] = by_class.pop(kind)  # to the end
        return tuple(Held(kind, len(by_class[kind])) for kind in (*largest, *turn))

    def check(self) -> None:
        by_class = sum(len(queue) for queue in self._by_class.values())
        if len(self.in_order) != by_class:
            raise InvariantError(f"{len(self.in_order)} held check-ins, {by_class} by class")
        for device, waiting in self._by_device.items():
            if waiting.handle not in self.in_order:
                raise InvariantError(f"{device} is held and not in order")


def _oldest(queue: Queue) -> HeldCheckIn:
    return next(iter(queue.values()))
