"""One group: the seeds that one sum may be made of, and the sum of their masks so far.

Paper, "Protocol Detail", step 6: "the trusted party re-generates m_i with s_i and aggregates it to
a running sum". Seeds wait until eight are there, or until nothing else is to do, because eight
masks cost little more memory traffic than one. Seeds are kept until the release: what the server
leaves out (step 3 of the ideal functionality) is taken off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from papaya.secagg.mask import add_masks, subtract_masks, sum_masks
from papaya.secagg.words import Words

BATCH: Final = 8


class Group:
    """Invariant: the running sum is that of all seeds except the waiting ones."""

    def __init__(self, words: int) -> None:
        self._words = words
        self._sum: Words | None = None
        self._seeds: dict[int, bytes] = {}
        self._waiting: list[int] = []

    def __len__(self) -> int:
        return len(self._seeds)

    def __contains__(self, index: int) -> bool:
        return index in self._seeds

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(self._seeds)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, index: int, seed: bytes) -> None:
        self._seeds[index] = seed
        self._waiting.append(index)
        if len(self._waiting) >= BATCH:
            self.sum_waiting()

    def sum_waiting(self) -> None:
        """Brings the running sum up to date."""
        if self._sum is None:
            self._sum = sum_masks([], self._words)
        add_masks(self._sum, [self._seeds[index] for index in self._waiting])
        self._waiting.clear()

    def masks_of(self, members: Sequence[int]) -> Words:
        """The sum of exactly these members' masks. The group is of no use afterwards."""
        wanted = dict.fromkeys(members)
        waiting = dict.fromkeys(self._waiting)
        missing = [self._seeds[i] for i in members if i in waiting]
        surplus = [s for i, s in self._seeds.items() if i not in wanted and i not in waiting]
        if self._sum is None or len(missing) + len(surplus) > len(members):
            return sum_masks([self._seeds[index] for index in members], self._words)
        add_masks(self._sum, missing)
        subtract_masks(self._sum, surplus)
        return self._sum
