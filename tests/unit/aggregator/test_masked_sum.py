"""Sums of masked words, and what takes the masks off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.aggregator.masked_sum import (
    LOST,
    MaskedSum,
    TsaError,
    masked_update,
    unmasked,
)
from papaya.aggregator.work import StockedOffer
from papaya.errors import PapayaError, UpdateRefused
from papaya.learning.kernels import NUMPY
from papaya.messages.participation import SecureOffer
from papaya.messages.storage import Member, RecordRow
from papaya.secagg.errors import Implausible
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.unmask import TakeBlock, give_in_blocks
from papaya.secagg.words import WORD, Words
from tests.unit.aggregator.secure_builders import CLIP, a_secure_task

CONFIG = a_secure_task(goal=3)
WORDS = CONFIG.update_bytes // 4
PARAMETERS = CONFIG.public_parameters
assert PARAMETERS is not None
LEVELS = PARAMETERS.levels

words = st.lists(st.integers(0, 2**32 - 1), min_size=WORDS, max_size=WORDS)


def in_pieces(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Chunks of whole words, as they came."""
    pieces, start = [], 0
    for size in (*sizes, WORDS):
        pieces.append(data[start : start + 4 * size])
        start += 4 * size
    return [piece for piece in pieces if piece]


@given(st.lists(words, min_size=1, max_size=6), st.lists(st.integers(1, 3), max_size=3))
def test_words_add_up_in_the_group_whatever_pieces_they_come_in(
    uploads: list[list[int]], sizes: list[int]
) -> None:
    total = MaskedSum.zero(WORDS)
    members = [in_pieces(np.array(upload, WORD).tobytes(), sizes) for upload in uploads]
    total.add_all(members[:2], NUMPY)
    other = MaskedSum.zero(WORDS)
    other.add_all(members[2:], NUMPY)
    total += other
    expected = [sum(column) % 2**32 for column in zip(*uploads, strict=True)]
    assert total.vector.tolist() == expected
    assert total.weight == len(uploads)
    again = MaskedSum.decode(total.encode(), WORDS)
    assert again.vector.tolist() == expected
    assert again.weight == len(uploads)
    again.add_all(members[:1], NUMPY)  # what was read back can be added to


def test_a_blob_of_another_length_or_kind_is_no_masked_sum() -> None:
    encoded = MaskedSum.zero(WORDS).encode()
    for data, length in ((encoded, WORDS + 1), (encoded[:-1], WORDS), (b"", WORDS)):
        with pytest.raises(PapayaError):
            MaskedSum.decode(data, length)


@pytest.mark.parametrize("size", [0, 4, 4 * WORDS - 1, 4 * WORDS + 4, 4 * (WORDS - 2)])
def test_an_upload_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(UpdateRefused) as caught:
        masked_update(CONFIG, [bytes(size)])
    assert caught.value.reason == "wrong_size"


def test_a_masked_upload_is_taken_as_it_is() -> None:
    pieces = [bytes(8), bytes(4 * WORDS - 8)]
    assert masked_update(CONFIG, pieces) is pieces


class Masks:
    """A TSA that gives away one sum, or refuses to."""

    def __init__(self, masks: Words, refusal: TsaError | None = None) -> None:
        self.masks = masks
        self.refusal = refusal
        self.asked: list[tuple[int, list[int]]] = []

    def offers(
        self, parameters: PublicParameters, count: int
    ) -> tuple[tuple[StockedOffer, ...], SecureOffer]:
        raise AssertionError

    def accept(self, parameters: PublicParameters, index: int, group: int, sealed: bytes) -> None:
        raise AssertionError

    def reach(self, parameters: PublicParameters) -> None:
        raise AssertionError

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        assert parameters == PARAMETERS
        self.asked.append((group, list(members)))
        if self.refusal is not None:
            raise self.refusal
        give_in_blocks(self.masks, take)

    def forget(self, parameters: PublicParameters) -> None:
        raise AssertionError


def a_record(*indices: int) -> RecordRow:
    members = tuple(Member(f"s{index}", 4, 0, 1, 0.0, index) for index in indices)
    return RecordRow(5, "task/1/sum", members, float(len(members)))


def masked(*plain: int) -> tuple[MaskedSum, Masks]:
    masks = np.arange(WORDS, dtype=WORD) * np.uint32(0x9E3779B9)
    return MaskedSum(np.array(plain, np.int64).astype(WORD) + masks, 3.0), Masks(masks)


def test_the_mean_is_that_of_exactly_the_record_s_members() -> None:
    half, quarter = LEVELS // 2, LEVELS // 4
    total, tsa = masked(half, -half, 0, quarter, 2 * LEVELS, 3)
    mean = unmasked(CONFIG, a_record(9, 2, 5), total, tsa).result().mean()
    assert tsa.asked == [(5, [2, 5, 9])]
    assert mean == pytest.approx([CLIP / 4, -CLIP / 4, 0.0, CLIP / 8], rel=1e-6)


@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        ((0, 0, 0, 0, LEVELS, 2), "constant"),
        ((0, 0, 0, 0, 0, 3), "weight"),
        ((0, 0, 0, 0, 3 * LEVELS + 1, 3), "weight"),
        ((0, 3 * LEVELS + 1, 0, 0, LEVELS, 3), "coordinate"),
        ((0, -3 * LEVELS - 1, 0, 0, LEVELS, 3), "coordinate"),
    ],
)
def test_a_sum_that_no_honest_clients_can_have_made(plain: tuple[int, ...], reason: str) -> None:
    total, tsa = masked(*plain)
    with pytest.raises(Implausible) as caught:
        unmasked(CONFIG, a_record(1, 2, 3), total, tsa).result()
    assert caught.value.reason == reason


def test_masks_of_another_length_are_not_believed() -> None:
    total, tsa = masked(0, 0, 0, 0, LEVELS, 3)
    tsa.masks = tsa.masks[:-1]
    with pytest.raises(Implausible, match="words"):
        unmasked(CONFIG, a_record(1, 2, 3), total, tsa).result()


def test_what_the_tsa_refuses_is_passed_on() -> None:
    total, tsa = masked(0, 0, 0, 0, LEVELS, 3)
    tsa.refusal = TsaError(LOST, "gone")
    with pytest.raises(TsaError, match="gone"):
        unmasked(CONFIG, a_record(1, 2, 3), total, tsa)


def test_two_members_of_one_index_are_of_two_lives_of_the_tsa() -> None:
    total, tsa = masked(0, 0, 0, 0, LEVELS, 3)
    with pytest.raises(TsaError) as caught:
        unmasked(CONFIG, a_record(1, 2, 1), total, tsa)
    assert caught.value.reason == LOST
    assert tsa.asked == []
