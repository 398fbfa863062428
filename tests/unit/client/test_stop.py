"""A device that wants its visit to end: the slot is given back, and no stage is waited for long."""

from __future__ import annotations

import pytest

from papaya.client.client import Stage
from papaya.client.work import Finish, SendRequest, Stop
from papaya.messages.participation import Aborted, Join, Leave, Refused, Retry
from papaya.messages.selection import Rejected
from tests.unit.client.builders import ASSIGNED, Phone, joined

STOP = Stop()
STOPPED = Finish("stopped", "stopped")


@pytest.mark.parametrize(
    ("stage", "ticket"),
    [
        (Stage.DOWNLOADING, b"session"),
        (Stage.TRAINING, b"session"),
        (Stage.REPORTING, b"session"),
        (Stage.UPLOADING, b"upload"),
        (Stage.COMPLETING, b"upload"),
    ],
)
def test_a_stop_gives_the_slot_back_at_any_stage(stage: Stage, ticket: bytes) -> None:
    leave, finish = Phone().until(stage).receive(STOP)
    assert isinstance(leave, SendRequest)
    assert leave.message == Leave(ticket, "stopped")
    assert finish == STOPPED


def test_before_there_is_a_task_there_is_nothing_to_give_back() -> None:
    phone = Phone().until(Stage.CHECKING_IN)
    assert phone.receive(STOP) == [STOPPED]
    assert phone.client.task is None


def test_a_join_that_is_on_its_way_is_waited_for_and_left() -> None:
    """The server may have taken it; only its answer has the ticket that gives the slot back."""
    phone = Phone().until(Stage.JOINING)
    assert phone.receive(STOP) == []
    leave, finish = phone.answer(joined())
    assert isinstance(leave, SendRequest)
    assert leave.message == Leave(b"session", "stopped")
    assert finish == STOPPED
    assert phone.history.excluded(phone.now) == ()


@pytest.mark.parametrize("answer", [Aborted("task_over"), Refused("no"), Retry("busy", 3.0)])
def test_a_join_that_took_no_slot_ends_the_visit(answer: Aborted | Refused | Retry) -> None:
    phone = Phone().until(Stage.JOINING)
    phone.receive(STOP)
    [finish] = phone.answer(answer)
    assert isinstance(finish, Finish)
    assert phone.stage is Stage.OVER


def test_a_stopping_device_does_not_join_again() -> None:
    phone = Phone().until(Stage.JOINING)
    phone.receive(STOP)
    assert phone.unanswered() == [STOPPED]
    assert phone.wait(3600.0) == []
    assert sum(isinstance(message, Join) for message in phone.messages) == 1


def test_a_second_stop_waits_for_nothing() -> None:
    phone = Phone().until(Stage.JOINING)
    phone.receive(STOP)
    assert phone.receive(STOP) == [STOPPED]


def test_a_stop_between_two_attempts_to_join_ends_at_once() -> None:
    phone = Phone().until(Stage.JOINING)
    phone.unanswered()
    assert phone.receive(STOP) == [STOPPED]


def test_the_task_is_known_from_the_moment_it_is_assigned() -> None:
    phone = Phone().until(Stage.CHECKING_IN)
    phone.answer(ASSIGNED)
    phone.answer(Aborted("task_over"))
    assert (phone.client.task, phone.client.joined) == ("next-word", None)
    other = Phone().until(Stage.CHECKING_IN)
    other.answer(Rejected("no compatible task needs clients now", 1.0, 2.0))
    assert other.client.task is None
