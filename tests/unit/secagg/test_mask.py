"""Masks: sums of any number of seeds over any length are those of the slow reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.secagg.errors import ChannelError
from papaya.secagg.mask import Mask, add_masks, subtract_masks, sum_masks
from papaya.secagg.words import BLOCK, WORD
from tests.unit.secagg import reference

seeds = st.binary(min_size=16, max_size=16)


@given(st.lists(seeds, max_size=4), st.integers(1, 23))
def test_sums_are_the_reference(drawn: list[bytes], length: int) -> None:
    masks = [reference.mask(seed, length) for seed in drawn]
    expected = [sum(words) % 2**32 for words in zip(*masks, strict=True)] or [0] * length
    assert sum_masks(drawn, length).tolist() == expected


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_blocks_do_not_show(length: int) -> None:
    seed = bytes(range(16))
    whole = sum_masks([seed], length)
    assert whole[:5].tolist() == reference.mask(seed, 5)[:length]
    mask, pieces = Mask(seed), []
    for start in range(0, length, 1000):  # 4000 bytes: no whole number of blocks of BLOCK words
        piece = np.empty(min(1000, length - start), WORD)
        mask.next_into(piece)
        pieces.append(piece)
    assert np.array_equal(np.concatenate(pieces), whole)


@given(st.lists(seeds, max_size=10), st.lists(seeds, max_size=10))
def test_what_is_subtracted_is_gone(kept: list[bytes], dropped: list[bytes]) -> None:
    total = sum_masks([*kept, *dropped], 11)
    subtract_masks(total, dropped)
    assert np.array_equal(total, sum_masks(kept, 11))


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_a_seed_of_another_size_changes_nothing(size: int) -> None:
    total = np.zeros(3, WORD)
    with pytest.raises(ChannelError):
        add_masks(total, [bytes(16), bytes(size)])
    assert not total.any()
