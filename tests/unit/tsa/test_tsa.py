"""The TSA's own rules: offers, seeds, groups, releases, limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from papaya.secagg.mask import subtract_masks, sum_masks
from papaya.secagg.words import Words
from papaya.tsa import group as group_module
from papaya.tsa import wire
from papaya.tsa.errors import RefusalReason, TsaRefused
from papaya.tsa.group import BATCH, Group
from papaya.tsa.tsa import TSA, TsaLimits, TsaStatus, report_data
from tests.unit.secagg.builders import NOW, Deployment, a_task, entropy


@contextmanager
def refused(reason: RefusalReason) -> Iterator[None]:
    with pytest.raises(TsaRefused) as caught:
        yield
    assert caught.value.reason is reason


def test_indices_rise_across_tasks_and_requests() -> None:
    deployment = Deployment()
    tsa = deployment.tsa
    other = tsa.register(a_task(task="other").encode())
    offers = tsa.offers(deployment.hash, 2, NOW) + tsa.offers(other, 1, NOW)
    offers += tsa.offers(deployment.hash, 2, NOW)
    assert [offer.index for offer in offers] == [0, 1, 2, 3, 4]
    assert len({offer.key for offer in offers}) == 5


def test_registering_twice_is_registering_once() -> None:
    deployment = Deployment()
    offer = deployment.offer()
    assert deployment.tsa.register(deployment.parameters.encode()) == deployment.hash
    assert deployment.offer().index == offer.index + 1


def test_offers_that_nobody_used_make_way_for_new_ones() -> None:
    """Whoever takes offers and leaves keeps nobody from taking part, not for a second."""
    deployment = Deployment(limits=TsaLimits(outstanding_offers=3))
    updates = [deployment.any_sealed() for _ in range(5)]
    deployment.tsa.check()
    assert deployment.tsa.status(deployment.hash).outstanding_offers == 3
    for update in updates[:2]:
        with refused(RefusalReason.INDEX_USED):
            deployment.accept(update)
    for update in updates[2:]:
        deployment.accept(update)


def test_offers_that_expired_go_first() -> None:
    deployment = Deployment(limits=TsaLimits(outstanding_offers=3, offer_lifetime_s=10))
    deployment.tsa.offers(deployment.hash, 2, NOW)
    deployment.tsa.offers(deployment.hash, 1, NOW + 10)
    assert deployment.tsa.status(deployment.hash).outstanding_offers == 1


@pytest.mark.parametrize("count", [0, -1, 4])
def test_none_and_more_than_are_kept_are_no_request(count: int) -> None:
    deployment = Deployment(limits=TsaLimits(outstanding_offers=3))
    with refused(RefusalReason.TOO_MANY_OFFERS):
        deployment.tsa.offers(deployment.hash, count, NOW)


def test_a_used_offer_makes_room() -> None:
    deployment = Deployment(limits=TsaLimits(outstanding_offers=1))
    for group in range(3):
        deployment.accept(deployment.any_sealed(), group)
    assert deployment.tsa.status(deployment.hash).groups == ((0, 1), (1, 1), (2, 1))


def test_tasks_are_bounded() -> None:
    tsa = TSA(entropy(1), TsaLimits(tasks=2))
    first = tsa.register(a_task(task="a").encode())
    tsa.register(a_task(task="b").encode())
    with refused(RefusalReason.TOO_MANY_TASKS):
        tsa.register(a_task(task="c").encode())
    tsa.forget(first)
    tsa.register(a_task(task="c").encode())


def test_memory_is_reserved_before_a_seed_can_come() -> None:
    """Seven words of four bytes, for four open groups and the last unmask: 140 bytes."""
    tsa = TSA(entropy(1), TsaLimits(memory_bytes=279))
    tsa.register(a_task(task="a").encode())
    with refused(RefusalReason.TOO_MUCH_MEMORY):
        tsa.register(a_task(task="b").encode())


def test_groups_are_bounded() -> None:
    deployment = Deployment(limits=TsaLimits(open_groups=2, left_over_seeds=1))
    deployment.accepted(1, group=5)
    deployment.accepted(1, group=9)
    with refused(RefusalReason.TOO_MANY_GROUPS):
        deployment.accepted(1, group=7)
    assert deployment.tsa.drop(deployment.hash, 9) == 1
    deployment.accepted(5, group=7)  # the goal, and one left over
    with refused(RefusalReason.GROUP_FULL):
        deployment.accepted(1, group=7)


@pytest.mark.parametrize("group", [-1, 2**63])
def test_a_group_that_has_no_number(group: int) -> None:
    with refused(RefusalReason.MALFORMED):
        Deployment().accepted(1, group)


def test_a_refused_seed_leaves_its_offer_open() -> None:
    deployment = Deployment(limits=TsaLimits(open_groups=1))
    deployment.accepted(1, group=0)
    update = deployment.any_sealed()
    with refused(RefusalReason.TOO_MANY_GROUPS):
        deployment.accept(update, group=1)
    deployment.accept(update, group=0)


def test_an_offer_that_ended_takes_no_seed() -> None:
    deployment = Deployment(limits=TsaLimits(offer_lifetime_s=10))
    update = deployment.any_sealed()
    with refused(RefusalReason.OFFER_EXPIRED):
        deployment.tsa.accept(update.index, 0, update.sealed, NOW + 10)
    deployment.tsa.offers(deployment.hash, 1, NOW + 10)
    with refused(RefusalReason.INDEX_USED):
        deployment.tsa.accept(update.index, 0, update.sealed, NOW)


def test_the_same_release_gives_the_same_bytes_until_the_next() -> None:
    deployment = Deployment()
    first = [update.index for update in deployment.accepted(3, group=1)]
    second = [update.index for update in deployment.accepted(2, group=2)]
    masks = deployment.tsa.release(deployment.hash, 1, first)
    before = masks.tobytes()
    assert deployment.tsa.release(deployment.hash, 1, first).tobytes() == before
    deployment.tsa.release(deployment.hash, 2, second)
    assert masks.tobytes() == before
    with refused(RefusalReason.GROUP_CLOSED):
        deployment.tsa.release(deployment.hash, 1, first)
    deployment.tsa.check()


def test_nobody_can_write_to_a_released_sum() -> None:
    deployment = Deployment()
    members = [update.index for update in deployment.accepted(2)]
    masks = deployment.tsa.release(deployment.hash, 0, members)
    assert not masks.flags.writeable


def test_groups_below_a_release_are_over() -> None:
    deployment = Deployment()
    deployment.accepted(2, group=3)
    later = [update.index for update in deployment.accepted(2, group=4)]
    deployment.tsa.release(deployment.hash, 4, later)
    status = deployment.tsa.status(deployment.hash)
    assert status == TsaStatus(0, 0, released_group=4, groups=())
    for group in (3, 4):
        with refused(RefusalReason.GROUP_CLOSED):
            deployment.accepted(1, group)


def test_a_group_without_seeds() -> None:
    deployment = Deployment()
    with refused(RefusalReason.UNKNOWN_GROUP):
        deployment.tsa.release(deployment.hash, 0, [])
    with refused(RefusalReason.UNKNOWN_GROUP):
        deployment.tsa.drop(deployment.hash, 0)


def test_more_members_than_the_goal_could_wrap_around() -> None:
    deployment = Deployment()
    members = [update.index for update in deployment.accepted(5)]
    with refused(RefusalReason.ABOVE_GOAL):
        deployment.tsa.release(deployment.hash, 0, members)
    deployment.tsa.release(deployment.hash, 0, members[:4])


def test_a_forgotten_task_leaves_nothing() -> None:
    deployment = Deployment()
    update = deployment.any_sealed()
    deployment.accepted(2)
    assert deployment.tsa.forget(deployment.hash) == 2
    deployment.tsa.check()
    with refused(RefusalReason.UNKNOWN_PARAMETERS):
        deployment.tsa.offers(deployment.hash, 1, NOW)
    with refused(RefusalReason.INDEX_USED):
        deployment.accept(update)
    deployment.tsa.register(deployment.parameters.encode())
    with refused(RefusalReason.INDEX_USED):
        deployment.accept(update)


def test_a_quote_binds_key_and_parameters() -> None:
    deployment = Deployment()
    bound = deployment.tsa.report_data(deployment.hash)
    assert bound == report_data(deployment.tsa.identity_public_key, deployment.hash)
    assert bound == deployment.tsa.identity_public_key + deployment.hash
    with refused(RefusalReason.UNKNOWN_PARAMETERS):
        deployment.tsa.report_data(bytes(32))


def test_seeds_are_summed_in_batches_or_when_nothing_else_is_to_do() -> None:
    deployment = Deployment(a_task(aggregation_goal=20))
    deployment.accepted(BATCH - 1)
    assert deployment.tsa.status(deployment.hash).waiting_seeds == BATCH - 1
    deployment.accepted(1)
    assert deployment.tsa.status(deployment.hash).waiting_seeds == 0
    assert not deployment.tsa.sum_waiting()
    deployment.accepted(3)
    assert deployment.tsa.sum_waiting()
    assert deployment.tsa.status(deployment.hash).waiting_seeds == 0


@pytest.mark.parametrize("members", [[0], [0, 1], [19], list(range(20)), list(range(0, 20, 2))])
@pytest.mark.parametrize("summed", [False, True])
def test_a_groups_sum_is_that_of_its_members(members: list[int], summed: bool) -> None:
    """Whatever was summed ahead, waiting, or left out."""
    draw, group = entropy("seeds"), Group(a_task(length=7))
    seeds = {index: draw(16) for index in range(20)}
    for index, seed in seeds.items():
        group.add(index, seed)
    if summed:
        assert group.work_ahead()
    expected = sum_masks([seeds[index] for index in members], 9)
    assert np.array_equal(group.masks_of(members), expected)


def test_a_seed_in_another_open_group_is_told_with_its_group_and_another_seed_is_not() -> None:
    deployment = Deployment()
    update = deployment.accept(deployment.any_sealed(), group=5)
    with pytest.raises(TsaRefused) as caught:
        deployment.accept(update, group=4)
    assert (caught.value.reason, caught.value.group) == (RefusalReason.OTHER_GROUP, 5)
    decoded = wire.decode_refusal(RefusalReason.OTHER_GROUP, wire.encode_refusal(caught.value)[5:])
    assert (decoded.reason, decoded.group, str(decoded)) == (
        RefusalReason.OTHER_GROUP,
        5,
        str(caught.value),
    )
    with pytest.raises(TsaRefused) as caught:
        deployment.accept(replace(update, sealed=bytes(len(update.sealed))), group=4)
    assert (caught.value.reason, caught.value.group) == (RefusalReason.INDEX_USED, None)


class NoMemory:
    """Stands for one function of the masks: it fails once, after so many calls that went well."""

    def __init__(self, function: Callable[[Words, Sequence[bytes]], None], good: int) -> None:
        self._function = function
        self._good = good

    def __call__(self, total: Words, seeds: Sequence[bytes]) -> None:
        self._good -= 1
        if self._good == -1:
            self._function(total, seeds[:1])  # it may have been at it already
            raise MemoryError
        self._function(total, seeds)


@pytest.mark.parametrize("name", ["add_masks", "subtract_masks"])
@pytest.mark.parametrize("good", [0, 1])
def test_a_sum_that_failed_for_want_of_memory_is_right_when_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, name: str, good: int
) -> None:
    draw, group = entropy("seeds"), Group(a_task(length=7))
    monkeypatch.setattr(group_module, name, NoMemory(getattr(group_module, name), good))
    seeds = {index: draw(16) for index in range(2 * BATCH + 3)}
    for index, seed in seeds.items():
        group.add(index, seed)  # a seed is taken, whether or not there is memory to sum it
    members = [*range(1, 2 * BATCH), 2 * BATCH + 1]
    expected = sum_masks([seeds[index] for index in members], 9)
    found = None
    while found is None:
        with suppress(MemoryError):
            found = group.masks_of(members)
    assert np.array_equal(found, expected)
    assert np.array_equal(group.masks_of(members), expected)


def test_a_release_that_fails_leaves_the_group_to_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = Deployment(a_task(aggregation_goal=20, threshold=2))
    updates = deployment.accepted(BATCH) + deployment.accepted(3)
    members = [update.index for update in updates[1:]]
    failing = NoMemory(subtract_masks, 0)
    monkeypatch.setattr(group_module, "subtract_masks", failing)
    with pytest.raises(MemoryError):
        deployment.tsa.release(deployment.hash, 0, members)
    deployment.tsa.check()
    words = deployment.unmasked(updates[1:])
    assert words[-1] == len(members)  # each client adds the constant 1
