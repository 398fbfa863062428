"""The stock of initial messages: never given twice, never given too late, asked for in time."""

from __future__ import annotations

from papaya.aggregator.offers import Offers
from papaya.aggregator.work import GetOffers, Offer, Offered
from papaya.messages.base import NodeId
from papaya.messages.participation import SecureOffer
from tests.unit.aggregator.builders import TASK
from tests.unit.aggregator.secure_builders import a_secure_task

CONFIG = a_secure_task(concurrency=40, upload_timeout_s=100.0)
WANTED = 20
NEVER = float("inf")


def terms(identity: NodeId) -> SecureOffer:
    return SecureOffer(b"parameters", b"", identity.encode(), "software", b"", b"", -1)


def made(first: int, count: int = WANTED, expires: float = 3600.0, by: str = "one") -> Offered:
    offers = tuple(Offer(i, expires, f"offer {i}".encode()) for i in range(first, first + count))
    return Offered(TASK, 1, offers, terms(by))


def stocked(**changes: float) -> Offers:
    offers = Offers(CONFIG, seq=1)
    assert offers.refill(0.0) == [GetOffers(CONFIG, 1, WANTED)]
    offers.on_offered(0.0, made(0, **changes))  # type: ignore[arg-type]
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
    assert (offers.refill(1.0), offers.next_wake()) == ([], NEVER)
    offers.take(1.0)
    assert offers.next_wake() <= 1.0
    assert offers.refill(1.0) == [GetOffers(CONFIG, 1, WANTED)]
    assert (offers.refill(1.0), offers.next_wake()) == ([], NEVER)
    offers.on_offered(2.0, made(WANTED))
    assert indices(offers, 2 * WANTED) == list(range(WANTED // 2, 2 * WANTED))


def test_a_small_task_keeps_a_few_and_a_large_one_not_too_many() -> None:
    small = Offers(a_secure_task(concurrency=3), 1).refill(0.0)
    large = Offers(a_secure_task(concurrency=5000), 1).refill(0.0)
    assert [effect.count for effect in (*small, *large) if isinstance(effect, GetOffers)] == [
        8,
        512,
    ]


def test_an_offer_that_ends_before_the_upload_has_to_is_not_given() -> None:
    offers = stocked(expires=200.0)
    assert offers.take(99.0) is not None
    assert offers.take(100.0) is None
    assert offers.refill(100.0) == [GetOffers(CONFIG, 1, WANTED)]


def test_without_a_trusted_party_it_asks_again_and_says_why() -> None:
    offers = Offers(CONFIG, 1)
    offers.refill(0.0)
    offers.on_offered(5.0, Offered(TASK, 1, problem="it starts"))
    assert offers.problem == "it starts"
    assert offers.take(5.0) is None
    assert offers.refill(5.0) == []
    assert offers.next_wake() == 6.0
    assert offers.refill(6.0) == [GetOffers(CONFIG, 1, WANTED)]
    offers.on_offered(6.0, made(0))
    assert offers.problem == ""


def test_offers_of_a_trusted_party_that_is_gone_are_thrown_away() -> None:
    offers = stocked()
    indices(offers, WANTED // 2)
    offers.refill(1.0)
    offers.on_offered(2.0, made(0, by="another"))
    found = [offers.take(2.0) for _ in range(2 * WANTED)]
    told = [item[1].identity for item in found if item is not None]
    assert told == [b"another"] * WANTED


def test_one_offer_that_is_not_known_any_more_condemns_those_made_beside_it() -> None:
    offers = stocked()
    offers.on_lost(terms("the one before"))
    assert offers.take(0.0) is not None
    offers.on_lost(terms("one"))
    assert offers.take(0.0) is None
    assert offers.refill(0.0) == [GetOffers(CONFIG, 1, WANTED)]
