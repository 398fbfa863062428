"""One group: the seeds that one sum may be made of, and the sum of their masks so far.

Paper, "Protocol Detail", step 6: "the trusted party re-generates m_i with s_i and aggregates
it to a running sum". Seeds are summed eight at a time, or when there is nothing else to do, because
eight masks cost little more memory traffic than one. Seeds are kept until the release: the masks of
clients that the server leaves out (step 3 of the ideal functionality) are subtracted again. If
summing fails, for example out of memory, the sum is rebuilt from the seeds; it is never partial.

A private group has a key for its noise, which is added to the running sum in pieces when there is
nothing else to do. It follows from the key, so a sum that is rebuilt has the same noise. A tag is
taken once: one device is in one sum at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from papaya.secagg.mask import add_masks, subtract_masks, sum_masks
from papaya.secagg.noise import NOISE_BLOCK, Noise
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.words import Words

BATCH: Final = 8
NOISE_PIECE: Final = 4 * NOISE_BLOCK  # words: about 5 ms


class Group:
    """Invariant: the running sum, if there is one, is that of all seeds except the waiting ones,
    and the first `_noised` words of it have noise.
    """

    def __init__(self, parameters: PublicParameters, noise_key: bytes = b"") -> None:
        """`noise_key`: drawn for this group, if the parameters are private."""
        self._words, self._ring = parameters.vector_words, parameters.ring
        self._noise = Noise(noise_key, parameters.sigma) if parameters.is_private else None
        # All words but the constant.
        self._to_noise = parameters.length if parameters.is_private else 0
        self._noised = 0
        self._sum: Words | None = None
        self._seeds: dict[int, bytes] = {}
        self._waiting: list[int] = []
        self._tags: dict[bytes, None] = {}

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

    def has_tag(self, tag: bytes) -> bool:
        """Is the device with this tag in the group?"""
        return tag in self._tags

    def add(self, index: int, seed: bytes, tag: bytes = b"") -> None:
        self._seeds[index] = seed
        if tag:
            self._tags[tag] = None
        self._waiting.append(index)
        if self.waiting >= BATCH:
            with suppress(MemoryError):  # the seed is kept and summed later
                self._sum_waiting()

    def work_ahead(self) -> bool:
        """Bring the running sum up to date, or add a piece of noise. False if all is done."""
        if self.waiting:
            self._sum_waiting()
        elif self._noised < self._to_noise:
            self._add_noise()
        else:
            return False
        return True

    def _sum_waiting(self) -> None:
        total = self._taken()
        waiting = [self._seeds[i] for i in (self._seeds if total is None else self._waiting)]
        noised = 0 if total is None else self._noised
        if total is None:
            total = sum_masks([], self._words, self._ring)
        add_masks(total, waiting)
        self._waiting.clear()
        self._sum, self._noised = total, noised

    def _add_noise(self) -> None:
        total, start = self._taken(), self._noised
        assert total is not None
        assert self._noise is not None
        end = min(start + NOISE_PIECE, self._to_noise)
        self._noise.add_to(total, start, end)
        self._sum, self._noised = total, end

    def _taken(self) -> Words | None:
        """The running sum, which is lost unless it is set again."""
        total, self._sum = self._sum, None
        return total

    def masks_of(self, members: Sequence[int]) -> Words:
        """The sum of exactly these members' masks, with all noise. The running sum is given away
        with it.
        """
        wanted = dict.fromkeys(members)
        waiting = dict.fromkeys(self._waiting)
        missing = [self._seeds[i] for i in members if i in waiting]
        surplus = [s for i, s in self._seeds.items() if i not in wanted and i not in waiting]
        total, noised = self._taken(), self._noised
        if total is None or len(missing) + len(surplus) > len(members):
            seeds = [self._seeds[index] for index in members]
            total, noised = sum_masks(seeds, self._words, self._ring), 0
        else:
            add_masks(total, missing)
            subtract_masks(total, surplus)
        if self._noise is not None:
            self._noise.add_to(total, noised, self._to_noise)
        return total
