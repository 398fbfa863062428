"""Device classes: what a selector reports of held check-ins (paper: "summarizes current client
availability for the Coordinator").

A device may say much of itself. Only what some advertised task can tell apart is kept, so there are
no more classes than tasks can distinguish, however devices describe themselves, and reports stay
short whoever knocks.
"""

from __future__ import annotations

from bisect import bisect_right

from papaya.messages.control import Advertised
from papaya.messages.selection import Capabilities, CheckIn, DeviceClass

_KNOWN_DESCRIPTIONS = 64


class Distinctions:
    """The words and thresholds that requirements of advertised tasks use."""

    def __init__(self, advertised: tuple[Advertised, ...] = ()) -> None:
        wanted = [offer.requirements for offer in advertised]
        self._tasks = frozenset(offer.task for offer in advertised)
        self._engines = frozenset(need.engine for need in wanted)
        self._modules = frozenset(need.module for need in wanted)
        self._labels = frozenset(label for need in wanted for label in need.labels)
        self._memory_mb = sorted({0} | {need.min_memory_mb for need in wanted})
        self._known: dict[tuple[Capabilities, tuple[str, ...]], DeviceClass] = {}

    def class_of(self, check_in: CheckIn) -> DeviceClass:
        """Equal for devices that every advertised task treats alike."""
        description = (check_in.capabilities, check_in.excluded)
        found = self._known.get(description)
        if found is None:
            if len(self._known) >= _KNOWN_DESCRIPTIONS:
                self._known.clear()  # a cache, not a record of everyone who knocked
            found = self._known[description] = self._classify(check_in)
        return found

    def _classify(self, check_in: CheckIn) -> DeviceClass:
        device = check_in.capabilities
        enough = bisect_right(self._memory_mb, device.memory_mb) - 1
        capabilities = Capabilities(
            engine=device.engine if device.engine in self._engines else "",
            modules=tuple(sorted(m for m in device.modules if m in self._modules)),
            memory_mb=self._memory_mb[enough],
            labels=tuple(sorted(label for label in device.labels if label in self._labels)),
        )
        excluded = tuple(sorted(task for task in check_in.excluded if task in self._tasks))
        return DeviceClass(capabilities, excluded)
