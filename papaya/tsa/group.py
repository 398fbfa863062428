"""One group: the seeds that one sum may be made of, and the sum of their masks so far.

Paper, "Protocol Detail", step 6: "the trusted party re-generates m_i with s_i and aggregates
it to a running sum". Seeds are summed eight at a time, or when there is nothing else to do, because
eight masks cost little more memory traffic than one. Seeds are kept until the release: the masks of
clients that the server leaves out (step 3 of the ideal functionality) are subtracted again. If
summing fails, for example out of memory, the sum is rebuilt from the seeds; it is never partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from papaya.secagg.mask import add_masks, subtract_masks, sum_masks
from papaya.secagg.words import Words

BATCH: Final = 8


class Group:
    """Invariant: the running sum, if there is one, is that of all seeds except the waiting ones."""

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
        return len(self._seeds if self._sum is None else self._waiting)

    def add(self, index: int, seed: bytes) -> None:
        self._seeds[index] = seed
        self._waiting.append(index)
        if self.waiting >= BATCH:
            with suppress(MemoryError):  # the seed is kept and summed later
                self.sum_waiting()

    def sum_waiting(self) -> None:
        """Brings the running sum up to date."""
        total, self._sum = self._sum, None
        waiting = [self._seeds[i] for i in (self._seeds if total is None else self._waiting)]
        if total is None:
            total = sum_masks([], self._words)
        add_masks(total, waiting)
        self._waiting.clear()
        self._sum = total

    def masks_of(self, members: Sequence[int]) -> Words:
        """The sum of exactly these members' masks. The running sum is given away with it."""
        wanted = dict.fromkeys(members)
        waiting = dict.fromkeys(self._waiting)
        missing = [self._seeds[i] for i in members if i in waiting]
        surplus = [s for i, s in self._seeds.items() if i not in wanted and i not in waiting]
        total, self._sum = self._sum, None
        if total is None or len(missing) + len(surplus) > len(members):
            return sum_masks([self._seeds[index] for index in members], self._words)
        add_masks(total, missing)
        subtract_masks(total, surplus)
        return total
