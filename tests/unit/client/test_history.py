"""Participation history: the gap, the device's own floor, the maximum; it survives a restart."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from papaya.client.client import Stage
from papaya.client.history import History, Participated
from papaya.client.work import Finish, Remember, RememberDeclined, SendRequest
from papaya.messages.base import MAX_EXCLUDED
from papaya.messages.participation import Joined, Leave
from papaya.messages.selection import CheckIn
from tests.unit.client.builders import ASSIGNED, START, Phone, joined

FLOOR_S = 100.0
DAY_S = 86400.0


def after_one(gap_s: float, limit: int | None = None, floor_s: float = FLOOR_S) -> History:
    history = History(floor_s)
    history.record(1000.0, "a", gap_s, limit)
    return history


# --- The rule


def test_a_device_that_never_took_part_may() -> None:
    assert History(FLOOR_S).allows(0.0, "a", 1e9, 1)
    assert after_one(1e9).allows(1001.0, "another", 1e9, 1)


@pytest.mark.parametrize(("gap_s", "free_again"), [(500.0, 1500.0), (10.0, 1100.0), (0.0, 1100.0)])
def test_the_gap_is_the_tasks_and_never_below_the_floor(gap_s: float, free_again: float) -> None:
    history = after_one(gap_s)
    assert not history.allows(1000.0, "a", gap_s, None)
    assert not history.allows(free_again - 0.001, "a", gap_s, None)
    assert history.allows(free_again, "a", gap_s, None)


def test_no_gap_at_all_only_when_device_and_task_both_say_so() -> None:
    assert after_one(0.0, floor_s=0.0).allows(1000.0, "a", 0.0, None)
    assert not after_one(0.0, floor_s=0.0).allows(1000.0, "a", 1.0, None)
    assert not after_one(0.0, floor_s=1.0).allows(1000.0, "a", 0.0, None)


def test_a_clock_that_went_back_allows_nothing() -> None:
    assert not after_one(0.0).allows(0.0, "a", 0.0, None)


def test_the_maximum_counts_for_ever() -> None:
    history = History(FLOOR_S)
    for time in range(3):
        assert history.allows(1e6 * time, "a", 10.0, 3)
        assert history.record(1e6 * time, "a", 10.0, 3) == Participated(
            time + 1, 1e6 * time, 10.0, 3
        )
    assert not history.allows(1e12, "a", 10.0, 3)
    assert history.allows(1e12, "a", 10.0, 4)
    assert history.allows(1e12, "a", 10.0, None)
    assert history.allows(1e12, "b", 10.0, 1)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1000)), max_size=40),
    st.floats(0, 200),
    st.floats(0, 200),
    st.none() | st.integers(1, 4),
)
def test_whoever_asks_first_never_breaks_the_rule(
    tries: list[tuple[str, float]], gap_s: float, floor_s: float, limit: int | None
) -> None:
    history = History(floor_s)
    times: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    now = 0.0
    for task, waited in tries:
        now += waited
        if history.allows(now, task, gap_s, limit):
            history.record(now, task, gap_s, limit)
            times[task].append(now)
        else:
            is_soon = bool(times[task]) and now < times[task][-1] + max(gap_s, floor_s)
            assert is_soon or (limit is not None and len(times[task]) >= limit)
    for visits in times.values():
        assert limit is None or len(visits) <= limit
        for before, later in pairwise(visits):
            assert later >= before + max(gap_s, floor_s)


# --- Across restarts


def test_it_survives_being_reloaded_from_its_entries() -> None:
    history = History(FLOOR_S)
    entries = {"a": history.record(1000.0, "a", 500.0, 2), "b": history.record(0.0, "b", 10.0, 1)}
    again = History(FLOOR_S, entries)
    assert not again.allows(1499.0, "a", 500.0, 2)
    assert again.allows(1500.0, "a", 500.0, 2)
    assert not again.allows(1500.0, "b", 10.0, 1)
    assert again.excluded(1499.0) == ("a", "b")
    assert again.record(1500.0, "a", 500.0, 2).count == 2
    assert not again.allows(1e9, "a", 500.0, 2)


def test_a_history_does_not_change_the_entries_it_was_made_from() -> None:
    entries = {"a": Participated(1, 0.0, 0.0, None)}
    History(FLOOR_S, entries).record(500.0, "a", 0.0, None)
    assert entries == {"a": Participated(1, 0.0, 0.0, None)}


# --- What is said at check-in


def test_tasks_that_are_ruled_out_are_named_newest_first() -> None:
    history = History(FLOOR_S)
    history.record(900.0, "older", 500.0, None)
    history.record(1000.0, "newer", 500.0, None)
    history.record(100.0, "long ago", 500.0, None)
    history.record(50.0, "never again", 500.0, 1)
    assert history.excluded(1000.0) == ("newer", "older", "never again")
    assert history.excluded(1400.0) == ("newer", "never again")
    assert history.excluded(1500.0) == ("never again",)


def test_no_more_tasks_are_named_than_a_check_in_may_carry() -> None:
    history = History(FLOOR_S)
    for number in range(300):
        history.record(float(number), f"t{number}", 1e6, None)
    named = history.excluded(300.0)
    assert len(named) == MAX_EXCLUDED
    assert named == tuple(f"t{number}" for number in range(299, 299 - MAX_EXCLUDED, -1))


@pytest.mark.parametrize(("gap_s", "limit"), [(1e300, None), (0.0, 1)])
def test_no_server_bars_a_device_for_longer_than_its_own_ceiling(
    gap_s: float, limit: int | None
) -> None:
    """However late it checks in: many devices are online only at the same few hours of a day."""
    history = History(0.0, ceiling_s=30 * DAY_S)
    history.record(0.0, "next-word", gap_s, limit)
    assert history.excluded(30 * DAY_S - 1) == ("next-word",)
    for late_s in (0.0, 3600.0, 16 * 3600.0, 29.9 * DAY_S, 400 * DAY_S):
        assert history.excluded(30 * DAY_S + late_s) == ()


def test_a_task_that_still_refuses_the_device_is_asked_once_per_period() -> None:
    history = History(0.0, ceiling_s=30 * DAY_S)
    history.record(0.0, "next-word", 1e300, None)
    for declined_at in (37 * DAY_S, 67 * DAY_S, 200 * DAY_S):
        assert history.excluded(declined_at) == ()
        assert history.decline(declined_at, "next-word")
        assert history.excluded(declined_at) == ("next-word",)
        assert history.excluded(declined_at + 30 * DAY_S - 1) == ("next-word",)
    history.record(230 * DAY_S, "next-word", 0.0, None)
    assert history.entries["next-word"] == Participated(2, 230 * DAY_S, 0.0, None)


def test_a_task_that_is_excluded_anyway_is_not_excluded_for_longer() -> None:
    """A rogue server may assign the device to it all the same, every day."""
    history = History(0.0, ceiling_s=30 * DAY_S)
    history.record(0.0, "next-word", 1e300, None)
    assert not history.decline(29 * DAY_S, "next-word")
    assert history.excluded(30 * DAY_S) == ()
    assert history.decline(30 * DAY_S, "next-word")
    assert not history.decline(59 * DAY_S, "next-word")
    assert history.excluded(60 * DAY_S) == ()


def test_a_clock_that_was_ahead_when_the_device_declined_does_not_exclude_the_task() -> None:
    history = History(0.0, ceiling_s=30 * DAY_S)
    history.record(0.0, "next-word", 1e300, None)
    assert history.decline(4000 * DAY_S, "next-word")
    assert history.excluded(31 * DAY_S) == ()
    assert history.decline(31 * DAY_S, "next-word")
    assert history.excluded(31 * DAY_S) == ("next-word",)


def test_the_gap_and_the_limit_of_a_join_always_apply() -> None:
    """A gap is a privacy rule: a device must not shorten a gap of 90 days to its own 30."""
    history = History(0.0, ceiling_s=30 * DAY_S)
    history.record(0.0, "next-word", 90 * DAY_S, 1)
    assert not history.allows(31 * DAY_S, "next-word", 90 * DAY_S, None)
    assert not history.allows(31 * DAY_S, "next-word", 0.0, 1)
    assert history.allows(31 * DAY_S, "next-word", 0.0, None)


# --- In a session


def test_a_check_in_names_the_tasks_that_the_history_rules_out() -> None:
    history = History(FLOOR_S)
    history.record(START - 10, "next-word", 3600.0, None)
    phone = Phone(history=history)
    phone.start()
    assert isinstance(phone.asked.message, CheckIn)
    assert phone.asked.message.excluded == ("next-word",)


@pytest.mark.parametrize(
    ("entry", "changes"),
    [
        (Participated(1, START - 99, 0.0, None), {"participation_gap_s": 0.0}),
        (Participated(1, START - 200, 0.0, None), {"participation_gap_s": 201.0}),
        (Participated(5, 0.0, 0.0, None), {"participation_gap_s": 0.0, "max_participations": 5}),
    ],
)
def test_a_client_that_joined_against_the_rule_leaves_at_once(
    entry: Participated, changes: dict[str, float]
) -> None:
    """The task's rules are known only after joining, and the server may have them changed."""
    phone = Phone(history=History(FLOOR_S, {"next-word": entry}))
    phone.start()
    phone.answer(ASSIGNED)
    leave, finish = phone.answer(joined(**changes))
    assert isinstance(leave, SendRequest)
    assert isinstance(leave.message, Leave)
    assert leave.message.ticket == b"session"
    assert isinstance(finish, Finish)
    assert finish.ending == "gave_up"
    assert leave.message.reason == finish.reason == "declined"
    assert "taken part" in finish.detail
    assert phone.stage is Stage.OVER


@pytest.mark.parametrize("changes", [{"participation_gap_s": 1e300}, {"max_participations": 1}])
def test_a_client_that_asked_again_remembers_before_it_leaves_that_it_declined(
    changes: dict[str, float],
) -> None:
    """Otherwise it would take a slot of the task at each visit."""
    entry = Participated(1, START - 31 * DAY_S, 1e300, 1)
    history = History(FLOOR_S, {"next-word": entry}, ceiling_s=30 * DAY_S)
    phone = Phone(history=history)
    phone.start()
    assert isinstance(phone.asked.message, CheckIn)
    assert phone.asked.message.excluded == ()
    phone.answer(ASSIGNED)
    remember, leave, finish = phone.answer(joined(**changes))
    assert remember == RememberDeclined("next-word", START)
    assert isinstance(leave, SendRequest)
    assert isinstance(leave.message, Leave)
    assert isinstance(finish, Finish)
    assert finish.reason == "declined"
    assert history.excluded(START) == ("next-word",)


def test_a_client_whose_time_has_come_again_takes_part() -> None:
    entry = Participated(4, START - 100, 0.0, None)
    phone = Phone(history=History(FLOOR_S, {"next-word": entry}))
    phone.start()
    phone.answer(ASSIGNED)
    phone.answer(joined(participation_gap_s=0.0, max_participations=5))
    assert phone.stage is Stage.DOWNLOADING
    phone.until(Stage.UPLOADING)
    assert Remember("next-word", Participated(5, START, 0.0, 5)) in phone.effects


def test_a_client_that_sent_nothing_has_not_taken_part() -> None:
    """Aborted before its upload was granted: it may try again at once."""
    phone = Phone().until(Stage.REPORTING)
    phone.wait(1000.0)
    assert [finish.ending for finish in phone.endings] == ["gave_up"]
    assert phone.history.excluded(phone.now) == ()


def test_a_client_that_sent_something_has_taken_part_however_it_ended() -> None:
    phone = Phone().until(Stage.UPLOADING)
    phone.wait(1000.0)
    assert [finish.ending for finish in phone.endings] == ["gave_up"]
    assert phone.history.excluded(phone.now) == ("next-word",)


# --- Evaluations


def evaluates(number: int, program: str = "next-word") -> Joined:
    return joined(
        task=f"{program[:40]}-eval-{number}",
        parameters=f"{program}/1/version-{number}-{'0' * 32}",
        evaluates=True,
        participation_gap_s=0.0,
    )


def visit(history: History, now: float, offer: Joined) -> Phone:
    """As far as the first chunk, if the device lets it come to that."""
    phone = Phone(history=history)
    phone.now = now
    phone.until(Stage.JOINING).answer(offer)
    if phone.stage is not Stage.OVER:
        phone.until(Stage.UPLOADING)
    return phone


def test_the_floor_holds_for_all_evaluations_of_a_program_together() -> None:
    """Each is a task of its own, without a gap: a server could ask for one every few seconds."""
    history = History(FLOOR_S)
    first = visit(history, START, evaluates(1))
    assert [e.task for e in first.effects if isinstance(e, Remember)] == ["next-word/evaluate"]
    second = visit(history, START + 10, evaluates(2))
    assert [finish.ending for finish in second.endings] == ["gave_up"]
    assert isinstance(second.messages[-1], Leave)
    other = visit(history, START + 10, evaluates(2, "other-program"))
    assert other.stage is Stage.UPLOADING
    assert visit(history, START + FLOOR_S, evaluates(3)).stage is Stage.UPLOADING


def test_training_and_evaluation_of_a_program_do_not_rule_each_other_out() -> None:
    history = History(FLOOR_S)
    assert visit(history, START, joined()).stage is Stage.UPLOADING
    assert visit(history, START, evaluates(1)).stage is Stage.UPLOADING


def test_without_a_floor_every_evaluation_is_taken() -> None:
    history = History(0.0)
    for number in range(5):
        assert visit(history, START, evaluates(number)).stage is Stage.UPLOADING


def test_evaluations_that_a_device_met_are_named_while_they_are_ruled_out() -> None:
    """It would be assigned to them again and again otherwise."""
    history = History(FLOOR_S)
    long = "x" * 64
    for offer in (evaluates(1), evaluates(2), joined(), evaluates(7, long)):
        visit(history, START, offer)
    again = Phone(history=history)
    again.start()
    [check_in] = again.messages
    assert isinstance(check_in, CheckIn)
    assert sorted(check_in.excluded) == [
        "next-word",
        "next-word-eval-1",
        "next-word-eval-2",
        f"{long[:40]}-eval-7",
    ]
    assert history.excluded(START + FLOOR_S) == ("next-word",)


def test_a_declined_evaluation_excludes_those_that_the_device_met() -> None:
    history = History(FLOOR_S, ceiling_s=30 * DAY_S)
    history.record(START - 31 * DAY_S, "next-word/evaluate", 1e300, None)
    offer = structs.replace(evaluates(1), participation_gap_s=1e300)
    phone = visit(history, START, offer)
    assert RememberDeclined("next-word/evaluate", START) in phone.effects
    assert history.excluded(START) == ("next-word-eval-1",)


def test_no_more_evaluations_are_known_than_a_check_in_may_carry() -> None:
    history = History(FLOOR_S)
    for number in range(3 * MAX_EXCLUDED):
        visit(history, START, evaluates(number))
    assert len(history.excluded(START)) == MAX_EXCLUDED
    assert f"next-word-eval-{3 * MAX_EXCLUDED - 1}" in history.excluded(START)
