"""The stock of initial messages: never given twice, never given too late, asked for in time."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

from papaya.aggregator.offers import Offers
from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.work import GetOffers, Offered, StockedOffer
from papaya.machine import Effects
from papaya.messages.base import NodeId
from papaya.messages.participation import MAX_EXTRA_S, SecureOffer
from tests.unit.aggregator.builders import TASK
from tests.unit.aggregator.secure_builders import a_secure_task

CONFIG = a_secure_task(concurrency=40, upload_timeout_s=100.0)
WANTED = 20
NEVER = float("inf")


def terms(identity: NodeId) -> SecureOffer:
    return SecureOffer(b"parameters", b"", identity.encode(), "software", b"", b"", -1)


def made(first: int, count: int = WANTED, expires: float = 3600.0, by: str = "one") -> Offered:
    offers = tuple(
        StockedOffer(i, expires, f"offer {i}".encode()) for i in range(first, first + count)
    )
    return Offered(TASK, 1, offers, terms(by))


class Buffers:
    """What a pipeline has of seeds, by target; and which of them are lost."""

    def __init__(self, **seeds: int) -> None:
        self.ledger = SimpleNamespace(version=0)
        self.seeds = {int(name[1:]): index for name, index in seeds.items()}
        self.lost: list[int] = []

    def newest_seeds(self, manifest: bytes) -> dict[int, int]:
        return dict(self.seeds)

    def lose(self, now: float, targets: Iterable[int]) -> None:
        self.lost = list(targets)


def asked(offers: Offers, now: float = 0.0, buffers: Buffers | None = None) -> Effects:
    return offers.refill(now, cast(Pipeline, buffers or Buffers()))


def given(offers: Offers, now: float, offered: Offered, buffers: Buffers | None = None) -> None:
    offers.on_offered(now, offered, cast(Pipeline, buffers or Buffers()))


def stocked(**changes: float) -> Offers:
    offers = Offers(CONFIG, seq=1)
    assert asked(offers) == [GetOffers(CONFIG, 1, WANTED)]
    given(offers, 0.0, made(0, **changes))  # type: ignore[arg-type]
    return offers


def indices(offers: Offers, count: int, now: float = 0.0) -> list[int]:
    taken = [offers.take(now) for _ in range(count)]
    return [found[0].index for found in taken if found is not None]


def test_each_offer_is_given_once_with_what_makes_it_believable() -> None:
    offers = stocked()
    found = offers.take(0.0)
    assert found is not None
    offer, told = found
    assert told.offer == offer.message == b"offer 0"
    assert (told.identity, told.parameters) == (b"one", b"parameters")
    assert indices(offers, WANTED) == list(range(1, WANTED))
    assert offers.take(0.0) is None


def test_more_are_asked_for_at_half_and_only_once_at_a_time() -> None:
    offers = stocked()
    indices(offers, WANTED // 2 - 1)
    assert (asked(offers, 1.0), offers.next_wake()) == ([], NEVER)
    offers.take(1.0)
    assert offers.next_wake() <= 1.0
    assert asked(offers, 1.0) == [GetOffers(CONFIG, 1, WANTED)]
    assert (asked(offers, 1.0), offers.next_wake()) == ([], NEVER)
    given(offers, 2.0, made(WANTED))
    assert indices(offers, 2 * WANTED) == list(range(WANTED // 2, 2 * WANTED))


def test_a_small_task_keeps_a_few_and_a_large_one_not_too_many() -> None:
    small = asked(Offers(a_secure_task(concurrency=3), 1))
    large = asked(Offers(a_secure_task(concurrency=5000), 1))
    assert [effect.count for effect in (*small, *large) if isinstance(effect, GetOffers)] == [
        8,
        512,
    ]


def test_an_offer_that_ends_before_the_upload_has_to_is_not_given() -> None:
    """And neither is one that would end while the client waits for a TSA that is away."""
    offers = stocked(expires=2000.0)
    last = 2000.0 - CONFIG.upload_timeout_s - MAX_EXTRA_S
    assert offers.take(last - 1) is not None
    assert offers.take(last) is None
    assert asked(offers, last) == [GetOffers(CONFIG, 1, WANTED)]


def test_offers_with_a_short_life_are_given_for_half_of_what_it_leaves() -> None:
    offers = stocked(expires=200.0)
    assert offers.take(49.0) is not None
    assert offers.take(50.0) is None


def test_new_offers_that_are_over_already_are_a_problem_and_are_not_burnt_in_heaps() -> None:
    """The clock of the TSA is behind: no client could use what it makes."""
    offers = Offers(CONFIG, 1)
    asked(offers, 0.0)
    given(offers, 5000.0, made(0, expires=3600.0))
    assert "expire in -1400 s" in offers.problem
    assert "clock" in offers.problem
    assert (offers.take(5000.0), asked(offers, 5000.0), offers.next_wake()) == (None, [], 5001.0)
    assert asked(offers, 5001.0) == [GetOffers(CONFIG, 1, 1)]
    given(offers, 5001.0, made(WANTED, count=1, expires=9000.0))
    assert offers.problem == ""
    assert asked(offers, 5001.0) == [GetOffers(CONFIG, 1, WANTED)]


def test_without_a_tsa_it_asks_again_and_says_why() -> None:
    offers = Offers(CONFIG, 1)
    asked(offers, 0.0)
    given(offers, 5.0, Offered(TASK, 1, problem="it starts"))
    assert offers.problem == "it starts"
    assert offers.take(5.0) is None
    assert asked(offers, 5.0) == []
    assert offers.next_wake() == 6.0
    assert asked(offers, 6.0) == [GetOffers(CONFIG, 1, WANTED)]
    given(offers, 6.0, made(0))
    assert offers.problem == ""


def test_offers_of_a_tsa_that_is_gone_are_thrown_away() -> None:
    offers = stocked()
    indices(offers, WANTED // 2)
    asked(offers, 1.0)
    given(offers, 2.0, made(0, by="another"))
    found = [offers.take(2.0) for _ in range(2 * WANTED)]
    told = [item[1].identity for item in found if item is not None]
    assert told == [b"another"] * WANTED


def test_one_offer_that_is_not_known_any_more_condemns_those_made_beside_it() -> None:
    offers = stocked()
    offers.on_refused("trusted_party_lost", terms("the one before"))
    assert offers.take(0.0) is not None
    offers.on_refused("trusted_party_lost", terms("one"))
    assert offers.take(0.0) is None
    assert asked(offers, 0.0) == [GetOffers(CONFIG, 1, WANTED)]


def test_a_refused_seed_is_a_reason_to_look_who_answers_and_no_more() -> None:
    """A client that lies costs one offer; the stock is kept unless another TSA answers."""
    offers = stocked()
    offers.on_refused("wrong_size", None)
    assert (asked(offers, 1.0), offers.next_wake()) == ([], NEVER)
    offers.on_refused("seed_refused", terms("one"))
    assert offers.next_wake() <= 1.0
    assert asked(offers, 1.0) == [GetOffers(CONFIG, 1, 1)]
    given(offers, 1.0, made(WANTED, count=1))
    assert offers.next_wake() == NEVER
    assert indices(offers, 2 * WANTED) == list(range(WANTED + 1))


# -- whose seeds are in the open buffers -----------------------------------------------------------


def test_seeds_that_are_newer_than_new_offers_were_taken_by_another_party() -> None:
    """One TSA counts up. The seeds were there when the offers were asked for."""
    offers, buffers = Offers(CONFIG, 1), Buffers(v4=7, v5=99)
    asked(offers, 0.0, buffers)
    buffers.seeds = {4: 7, 5: 99, 6: 500}  # came meanwhile: nothing follows for it
    given(offers, 0.0, made(50), buffers)
    assert buffers.lost == [5]


def test_the_same_party_s_seeds_are_older_than_its_new_offers() -> None:
    offers, buffers = stocked(), Buffers(v4=WANTED - 1)
    indices(offers, WANTED)
    asked(offers, 1.0, buffers)
    given(offers, 1.0, made(WANTED), buffers)
    assert buffers.lost == []


def test_another_identity_has_none_of_the_seeds_that_were_there_before_it() -> None:
    """Also when it counts further than they do."""
    offers, buffers = Offers(CONFIG, 1), Buffers(v4=7)
    asked(offers, 0.0, buffers)
    given(offers, 0.0, made(50), buffers)
    indices(offers, WANTED)
    buffers.seeds = {4: 7, 5: 51}  # 5 may be of either TSA
    asked(offers, 1.0, buffers)
    given(offers, 1.0, made(1000, by="another"), buffers)
    assert buffers.lost == [4]


def test_lost_is_lost_until_its_version_is_over() -> None:
    offers, buffers = Offers(CONFIG, 1), Buffers(v4=7, v5=8)
    asked(offers, 0.0, buffers)
    given(offers, 0.0, made(0), buffers)
    assert buffers.lost == [4, 5]
    again = Buffers(v5=8)
    again.ledger.version = 4
    offers.mark_lost(1.0, cast(Pipeline, again))
    assert again.lost == [5]


def test_no_answer_says_nothing_about_seeds() -> None:
    offers, buffers = Offers(CONFIG, 1), Buffers(v4=7)
    asked(offers, 0.0, buffers)
    given(offers, 0.0, Offered(TASK, 1, problem="it starts"), buffers)
    assert buffers.lost == []
