"""Simulated sums in 16 bits are those of devices that mask, and of an aggregator that unmasks."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from papaya.config import AsyncFL, Requirements, SecureAggregation, TaskConfig
from papaya.learning.definition import ClientSGD
from papaya.secagg.mask import sum_masks
from papaya.secagg.participant import _masked, weight_and_damping
from papaya.secagg.unmask import unmask
from papaya.secagg.words import RING_16
from papaya.study.masked_words import (
    MaskedClient,
    masked_rounding,
    mean_in_16_bits,
    parameters_in_16_bits,
)
from papaya.study.replay import Rates

TASK = TaskConfig(
    task="words",
    concurrency=40,
    model_length=1,
    regime=AsyncFL(4),
    requirements=Requirements(upload_bits=16),
    secure_aggregation=SecureAggregation(),
    clip=1.0,
)
LENGTH = 50


def clients(count: int = 4) -> list[MaskedClient]:
    rng = np.random.default_rng(2)
    updates = rng.standard_normal((count, LENGTH)).astype(np.float32) / 10
    return [
        MaskedClient(update, 100 * (number + 1), number, 1000 + number)
        for number, update in enumerate(updates)
    ]


def test_the_mean_is_what_masking_and_unmasking_give() -> None:
    agreed, members = parameters_in_16_bits(TASK, LENGTH), clients()
    seeds = [member.seed.to_bytes(16, "big") for member in members]
    total = np.zeros(agreed.vector_words, RING_16.word)
    for member, seed in zip(members, seeds, strict=True):
        weights = weight_and_damping(agreed, member.examples, member.staleness)
        total += _masked(member.update, *weights, agreed, seed)
    masks = sum_masks(seeds, agreed.vector_words, RING_16)
    expected = unmask(total, masks, len(members), agreed).mean()
    assert mean_in_16_bits(agreed, members).tolist() == expected.tolist()


def test_the_error_is_measured_at_the_clip_of_the_task_or_at_a_suggested_one() -> None:
    found = masked_rounding(TASK, clients(), [0.7] * 4)
    assert found is not None
    assert (found.clip, found.levels) == (1.0, 8190)
    assert 0 < found.mean < found.update < 0.1
    clear = structs.replace(
        TASK, clip=None, secure_aggregation=None, requirements=Requirements(upload_bits=32)
    )
    suggested = masked_rounding(clear, clients(), [0.7] * 4)
    assert suggested is not None
    assert suggested.clip == 0.7


def test_a_task_that_has_too_few_levels_has_no_error() -> None:
    many = structs.replace(TASK, requirements=Requirements(), regime=AsyncFL(2000))
    assert masked_rounding(many, clients(), [0.7] * 4) is None


@pytest.mark.parametrize(("bits", "is_masked"), [(32, False), (16, True)])
def test_only_words_of_fewer_bits_are_simulated_as_secure(bits: int, is_masked: bool) -> None:
    clear = structs.replace(TASK, secure_aggregation=None, requirements=Requirements())
    rates = Rates(ClientSGD(rate=1.0), clip=1.0, upload_bits=bits, masked=True)  # type: ignore[arg-type]
    assert rates.task(clear).is_secure == is_masked
