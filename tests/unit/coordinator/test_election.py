"""The lease of the leader, its epoch, and the recovery period of who comes after."""

from __future__ import annotations

import pytest

from papaya.coordinator.recovery import Leadership
from papaya.machine import Read, Transact
from papaya.messages.control import AggregatorOrders, SelectorOrders
from papaya.messages.storage import (
    EPOCH_KEY,
    LEADER_KEY,
    EpochRow,
    FenceRow,
    LeaderRow,
    fence_key,
)
from tests.unit.aggregator.store import Store
from tests.unit.coordinator.builders import (
    A_MOMENT_S,
    SERVER,
    H,
    Office,
    a_served_office,
    a_task,
    an_office,
    on,
    orders_in,
    sessions_in,
)

LEASE_S, RECOVERY_S = SERVER.leader_lease_s, SERVER.recovery_s


def the_leader(store: Store) -> LeaderRow:
    row = store.rows[LEADER_KEY]
    assert isinstance(row, LeaderRow)
    return row


def a_second_leader(*, now: float = 0.0) -> Office:
    """Another candidate over the store of a leader that has died, just elected."""
    first = a_served_office(a_task())
    second = Office(node="c-2", store=first.store, now=now)
    second.wake()
    second.pass_s(LEASE_S)
    assert second.leads
    return second


# -- the first leader -------------------------------------------------------------------------


def test_the_first_leader_acts_at_once() -> None:
    office = an_office(a_task())
    row = the_leader(office.store)
    assert (row.holder, row.boot, row.epoch) == ("c-1", 0, 1)
    assert office.store.rows[EPOCH_KEY] == EpochRow(1)
    assert not office.machine.leadership.recovers(office.now)
    office.aggregator("agg-1")
    office.aggregator("agg-1", on("words", 1, demand=2))
    assert len(sessions_in(office.selector("sel-1", 5))) == 2


def test_of_two_candidates_that_claim_at_once_one_leads() -> None:
    one = Office(a_task(), node="c-1")
    other = Office(node="c-2", store=one.store)
    one.hold(Transact)
    other.hold(Transact)
    one.wake()
    other.wake()
    other.settle("committed")
    one.settle("committed")
    other.release()
    one.release()
    assert (one.leads, other.leads) == (False, True)
    assert the_leader(one.store).holder == "c-2"


def test_a_candidate_says_nothing_and_writes_nothing() -> None:
    first = a_served_office(a_task())
    second = Office(node="c-2", store=first.store)
    second.wake()
    before = dict(first.store.rows)
    second.aggregator("agg-1", on("words", 1, demand=4))
    second.aggregator("agg-2")
    second.selector("sel-1", 5)
    second.pass_s(LEASE_S - A_MOMENT_S)
    assert second.sent == []
    assert first.store.rows == before


# -- the lease --------------------------------------------------------------------------------


def test_a_leader_that_renews_is_left_alone() -> None:
    first = a_served_office(a_task())
    second = Office(node="c-2", store=first.store)
    for _ in range(30):
        first.pass_s(H)
        second.pass_s(H)
    assert first.leads
    assert not second.leads
    assert the_leader(first.store).epoch == 1


def test_a_new_leader_does_not_believe_reports_of_servers_that_died_long_ago() -> None:
    first = a_served_office(a_task())
    second = Office(node="c-2", store=first.store)
    second.selector("sel-dead", 5)
    second.aggregator("agg-dead")
    for _ in range(30):
        first.pass_s(H)
        second.pass_s(H)
    assert second.machine.unanswered == {}
    second.selector("sel-1", 5)
    second.pass_s(LEASE_S - H)
    second.selector("sel-1", 5)
    second.pass_s(H)
    assert second.leads
    assert list(second.machine.fleet.selectors) == ["sel-1"]
    assert list(second.machine.fleet.clocks(second.now)) == ["sel-1"]


def test_a_candidate_waits_the_lease_by_its_own_clock_however_wrong_that_is() -> None:
    first = a_served_office(a_task())
    second = Office(node="c-2", store=first.store, now=1e6)
    second.wake()
    second.pass_s(LEASE_S - A_MOMENT_S)
    assert the_leader(first.store).holder == "c-1"
    second.pass_s(A_MOMENT_S)
    assert second.leads
    row = the_leader(first.store)
    assert (row.holder, row.boot, row.epoch) == ("c-2", 0, 2)
    assert first.store.rows[EPOCH_KEY] == EpochRow(2)


def test_a_candidate_reads_the_leader_row_alone_four_times_per_heartbeat() -> None:
    first = a_served_office(a_task())
    second = Office(node="c-2", store=first.store)
    second.wake()
    second.log.clear()
    second.pass_s(H)
    reads = [effect.prefixes for effect in second.log if isinstance(effect, Read)]
    assert reads == 4 * [(LEADER_KEY,)]


def test_only_time_in_which_reads_succeed_counts() -> None:
    """While the store is away, the leader cannot renew. It has time to when the store is back."""
    first = a_served_office(a_task())
    second = Office(node="c-2", store=first.store)
    second.wake()
    second.pass_s(H)
    second.hold(Read)
    second.pass_s(10 * LEASE_S)
    second.release()
    assert not second.leads
    second.pass_s(LEASE_S - 2 * H)
    assert the_leader(first.store).holder == "c-1"
    second.pass_s(H)
    assert second.leads, "slow reads delay an election, they do not prevent it"


def test_a_change_of_the_row_starts_the_wait_again() -> None:
    first = a_served_office(a_task())
    second = Office(node="c-2", store=first.store)
    second.wake()
    second.pass_s(2 * H)
    first.pass_s(2 * H)  # renews
    second.pass_s(2 * H)
    assert the_leader(first.store).holder == "c-1"
    second.pass_s(2 * H)
    assert the_leader(first.store).holder == "c-2"


def test_the_same_node_claims_again_at_once_after_a_restart_but_recovers() -> None:
    first = a_served_office(a_task())
    again = Office(node="c-1", store=first.store, boot=5, now=5.0)
    again.wake()
    assert again.leads
    assert the_leader(first.store).epoch == 2
    assert again.machine.leadership.recovers(5.0 + RECOVERY_S - A_MOMENT_S)


# -- how long a leader may act ----------------------------------------------------------------


def acting(office: Office) -> bool:
    return office.aggregator("agg-1", on("words", 1, demand=4)) != []


def test_a_leader_acts_for_one_lease_after_the_sending_of_its_last_renewal() -> None:
    """Not after its confirmation: the row may be as old as the sending."""
    office = a_served_office(a_task())
    office.hold(Transact)
    office.pass_s(H)
    sent_at = office.now
    office.now += H / 2
    office.settle("committed")
    office.now = sent_at + LEASE_S - A_MOMENT_S
    assert acting(office)
    office.now = sent_at + LEASE_S
    assert not acting(office)


@pytest.mark.parametrize("held", [Read, Transact])
def test_a_leader_stops_when_the_store_does_not_answer(held: type[Read] | type[Transact]) -> None:
    office = a_served_office(a_task())
    office.hold(held)
    office.pass_s(LEASE_S + H)
    told = len(office.sent)
    assert not acting(office)
    office.selector("sel-1", 5)
    office.pass_s(H)
    assert office.sent[told:] == []


def test_renewals_that_fail_do_not_count() -> None:
    office = a_served_office(a_task())
    last_sent_at = office.now
    office.hold(Transact)
    for _ in range(3):
        office.pass_s(H)
        office.settle("lost")
    office.now = last_sent_at + LEASE_S
    assert not acting(office)


def test_a_renewal_that_was_applied_unseen_counts_from_its_sending() -> None:
    office = a_served_office(a_task())
    office.hold(Transact)
    office.pass_s(H)
    sent_at = office.now
    office.now += H / 2
    office.settle("applied")  # read back at once, and found
    office.now = sent_at + LEASE_S - A_MOMENT_S
    assert acting(office)
    office.now = sent_at + LEASE_S
    assert not acting(office)


def test_a_renewal_applied_late_counts_from_the_sending_of_the_attempt_that_made_it() -> None:
    """The first attempt is lost, read back, and sent again; then the first one is applied after
    all. A candidate may have seen the row from that moment on, so the second must not count.
    """
    office = a_served_office(a_task())
    office.hold(Read, Transact)
    office.pass_s(H)
    office.release_reads()
    first_sent_at = office.now
    late = office.settle("lost", LeaderRow)
    [read] = office.held_back
    assert isinstance(read, Read)
    rows = office.store.snapshot(read.prefixes)
    assert office.store.apply(late) == "committed"
    office.held_back.clear()
    office.now += 2 * H  # the process was paused: the rows of the read are old by now
    office.hold(Transact)
    office.receive_rows(read, rows)
    office.settle("committed", LeaderRow)  # refused, read back: the row is there
    assert the_leader(office.store) == late.put[0][1]
    office.now = first_sent_at + LEASE_S
    assert not acting(office)


def test_a_leader_whose_lease_ran_out_leads_on_if_nobody_took_over() -> None:
    office = a_served_office(a_task())
    office.hold(Transact)
    office.pass_s(2 * LEASE_S)
    assert not office.leads
    office.release()
    office.pass_s(H)
    assert office.leads
    assert the_leader(office.store).epoch == 1


def test_silence_that_the_leader_did_not_listen_to_is_no_reason_to_move_a_task() -> None:
    """While its lease had run out it heard nobody; agg-1 reported all the time."""
    office = a_served_office(a_task())
    office.aggregator("agg-2")
    office.hold(Transact)
    for _ in range(6):
        office.pass_s(H)
        office.aggregator("agg-1", on("words", 1, demand=4))
        office.aggregator("agg-2")
    assert not office.leads
    office.release()
    office.pass_s(H)
    assert office.leads
    office.aggregator("agg-2")
    office.aggregator("agg-1", on("words", 1, demand=4))
    assert office.fence() == FenceRow(1, "agg-1", 0)


# Fails: for dead_after_s after a lapse every aggregator ever heard of counts as live.
def test_a_leader_that_leads_again_gives_no_task_to_an_aggregator_not_heard_since() -> None:
    """Its silence proves nothing against it, but nothing for it either."""
    office = a_served_office(a_task())
    office.aggregator("agg-0")
    office.hold(Transact)
    office.pass_s(2 * LEASE_S)
    office.release()
    office.pass_s(H)
    assert office.leads
    office.aggregator("agg-1", boot=1)
    assert office.fence().aggregator == "agg-1"


def test_who_was_deposed_says_nothing_more() -> None:
    first = a_served_office(a_task())
    second = Office(node="c-2", store=first.store)
    second.wake()
    second.pass_s(LEASE_S)
    assert second.leads
    told = len(first.sent)
    first.pass_s(H)
    assert not acting(first)
    first.selector("sel-1", 3)
    first.pass_s(2 * H)
    assert first.sent[told:] == []
    assert second.leads


# -- doubtful claims --------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["applied", "lost"])
def test_a_claim_with_unknown_outcome_is_settled_by_reading_back(fate: str) -> None:
    office = Office(a_task())
    office.hold(Transact)
    office.wake()
    office.settle("applied" if fate == "applied" else "lost")
    office.release()
    assert office.leads
    assert the_leader(office.store).epoch == 1
    office.pass_s(H)
    office.aggregator("agg-1")
    assert office.fence().aggregator == "agg-1"


def test_a_lost_claim_that_comes_after_another_leader_changes_nothing() -> None:
    one = Office(a_task(), node="c-1")
    one.hold(Transact)
    one.wake()
    late = one.settle("lost")
    one.held_back.clear()
    two = Office(node="c-2", store=one.store)
    two.wake()
    assert two.leads
    assert one.store.apply(late) == "refused"


def test_a_claim_is_a_compare_and_set_on_the_row_that_was_watched() -> None:
    leadership = Leadership("c-2", 7, SERVER)
    row = LeaderRow("c-1", 0, epoch=4, renewal=9)
    leadership.observe(100.0, row)
    assert leadership.next_attempt(100.0 + LEASE_S - A_MOMENT_S) is None
    claim = leadership.next_attempt(100.0 + LEASE_S)
    assert claim is not None
    assert claim.require == ((LEADER_KEY, row),)
    mine = dict(claim.put)[LEADER_KEY]
    assert isinstance(mine, LeaderRow)
    assert (mine.holder, mine.boot, mine.epoch) == ("c-2", 7, 5)
    assert dict(claim.put)[EPOCH_KEY] == EpochRow(5)


# -- recovery ---------------------------------------------------------------------------------


def test_a_new_leader_tells_the_holders_at_once() -> None:
    """Fences name them, so it need not wait for their reports."""
    office = a_second_leader()
    [orders] = orders_in(office.sent, AggregatorOrders, "agg-1")
    assert (orders.epoch, orders.boot) == (2, 0)
    assert [(p.task, p.seq) for p in orders.tasks] == [("words", 1)]
    assert orders.acked < 1, "no report was heard"


def test_a_new_leader_assigns_when_the_holder_has_reported_under_its_epoch() -> None:
    """Until then the holder keeps slots for clients that the leader before has assigned."""
    office = a_second_leader()
    report = on("words", 1, demand=4)
    said = office.selector("sel-1", 5) + office.aggregator("agg-1", report, epoch=1)
    assert sessions_in(said) == []
    [orders] = orders_in(
        office.aggregator("agg-1", report, epoch=1, heartbeat=False), AggregatorOrders
    )
    assert orders.epoch == 2, "whoever does not know the leader is told"
    assert len(sessions_in(office.aggregator("agg-1", report, epoch=2))) == 4


def test_a_leader_assigns_nobody_to_a_holder_that_follows_a_later_one() -> None:
    office = a_served_office(a_task())
    office.aggregator("agg-1", on("words", 1, demand=4), epoch=2)
    assert sessions_in(office.selector("sel-1", 5)) == []


def test_devices_are_sent_away_for_a_recovery_only_until_a_holder_reports() -> None:
    office = a_second_leader()
    [before] = orders_in(office.selector("sel-1"), SelectorOrders)
    assert 0 < before.assigns_in_s <= RECOVERY_S
    assert office.machine.recovers(office.now)
    [after] = orders_in(office.aggregator("agg-1", on("words", 1, demand=4)), SelectorOrders)
    assert after.assigns_in_s == 0.0
    assert not office.machine.recovers(office.now)


def test_what_a_selector_acknowledges_to_another_leader_acknowledges_nothing_here() -> None:
    """Each leader numbers its orders from 1. Clients that were assigned are not there twice."""
    office = a_second_leader()
    office.selector("sel-1", 2)
    office.aggregator("agg-1", on("words", 1, demand=4))
    assert len(sessions_in(office.sent)) == 2
    assert sessions_in(office.selector("sel-1", 2, acked=1000, epoch=1)) == []


def test_a_recovering_leader_answers_with_the_map_that_it_read() -> None:
    office = a_second_leader()
    [orders] = orders_in(office.aggregator("agg-1"), AggregatorOrders)
    assert [(p.task, p.seq) for p in orders.tasks] == [("words", 1)]
    [to_selector] = orders_in(office.selector("sel-1"), SelectorOrders)
    assert [(r.task, r.aggregator, r.seq) for r in to_selector.routes] == [("words", "agg-1", 1)]


def test_no_task_is_moved_on_silence_while_the_leader_recovers() -> None:
    office = a_second_leader()
    elected_at = office.now
    while office.now < elected_at + RECOVERY_S:
        office.aggregator("agg-2")
        assert office.fence() == FenceRow(1, "agg-1", 0)
        office.pass_s(H)
    office.aggregator("agg-2")
    assert office.fence() == FenceRow(2, "agg-2", 0), "then silence means what it always means"


def test_an_aggregator_that_reports_during_recovery_keeps_its_task() -> None:
    office = a_second_leader()
    for _ in range(8):
        office.aggregator("agg-1", on("words", 1, demand=0))
        office.aggregator("agg-2")
        office.pass_s(H)
    assert office.fence() == FenceRow(1, "agg-1", 0)


def test_a_restarted_aggregator_is_known_to_be_gone_even_during_recovery() -> None:
    office = a_second_leader()
    office.pass_s(H)
    office.aggregator("agg-1", boot=1)
    assert office.fence() == FenceRow(2, "agg-1", 1)


def test_orders_carry_the_epoch() -> None:
    office = a_second_leader()
    office.aggregator("agg-1", on("words", 1, demand=4))
    office.selector("sel-1", 5)
    office.pass_s(RECOVERY_S)
    office.aggregator("agg-1", on("words", 1, demand=4))
    office.aggregator("agg-1", boot=9)
    messages = [send.message for send in office.sent]
    assert {type(m) for m in messages} == {AggregatorOrders, SelectorOrders}
    assert {m.epoch for m in messages if isinstance(m, AggregatorOrders | SelectorOrders)} == {2}
    assert office.store.rows[fence_key("words")] == FenceRow(2, "agg-1", 9)
