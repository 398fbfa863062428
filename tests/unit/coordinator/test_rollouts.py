"""The leader tells selectors of a candidate: for the task, and for evaluations that know it."""

from __future__ import annotations

from msgspec import structs

from papaya.config import Evaluated, StopRule
from papaya.messages.control import CandidateOffer, SelectorOrders
from papaya.messages.storage import (
    Candidate,
    Changed,
    TaskRow,
    Transaction,
    fence_key,
    task_key,
)
from papaya.sim.revisions import signed
from tests.unit.coordinator.builders import Office, a_served_office, a_task, orders_in


def offers(office: Office) -> dict[str, CandidateOffer | None]:
    office.receive(Changed())
    [order] = orders_in(office.selector("sel-1", 0), SelectorOrders)
    return {offer.task: offer.candidate for offer in order.advertised}


def test_a_candidate_is_offered_with_its_share_until_it_is_gone() -> None:
    config = signed(a_task(), 1)
    office = a_served_office(config)
    row = office.store.rows[task_key("words")]
    assert isinstance(row, TaskRow)
    assert offers(office) == {"words": None}
    following = signed(config, 2)
    for share in (0.1, 0.5):
        changed = structs.replace(row, candidate=Candidate(following, share))
        office.store.apply(Transaction(put=((task_key("words"), changed),)))
        assert offers(office) == {"words": CandidateOffer(following.requirements, share)}
    office.store.apply(Transaction(put=((task_key("words"), row),)))
    assert offers(office) == {"words": None}


def test_an_evaluation_is_offered_under_both_revisions_with_the_tasks_share() -> None:
    config = signed(a_task(), 1)
    office = a_served_office(config)
    row = office.store.rows[task_key("words")]
    assert isinstance(row, TaskRow)
    following = signed(config, 2)
    rolled = structs.replace(row, candidate=Candidate(following, 0.5))
    pinned = structs.replace(
        config,
        task="words-eval-3",
        evaluates=Evaluated("words", 3, "words/1/x", 4, 10),
        stop=StopRule(versions=1),
    )
    begun = TaskRow(pinned, candidate=Candidate(pinned, 0.1))
    fence = office.store.rows[fence_key("words")]
    office.store.apply(
        Transaction(
            put=(
                (task_key("words"), rolled),
                (task_key("words-eval-3"), begun),
                (fence_key("words-eval-3"), fence),
            )
        )
    )
    expected = CandidateOffer(following.requirements, 0.5)
    assert offers(office) == {"words": expected, "words-eval-3": expected}
    early = structs.replace(begun, candidate=None)
    office.store.apply(Transaction(put=((task_key("words-eval-3"), early),)))
    found = offers(office)
    assert found["words-eval-3"] is None, "its holder knows only the revision that it began with"
