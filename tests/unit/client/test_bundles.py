"""A client that is accepted for a signed task: fetch first, count as the owner has signed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from papaya.client.client import Client, CountedAs
from papaya.client.history import History
from papaya.client.work import Answered, Downloaded, Finish, Remember, SendRequest
from papaya.config import DeviceConfig
from papaya.messages.base import BlobKey
from papaya.messages.participation import Join, Joined, Leave
from papaya.messages.selection import Accepted, CheckIn
from tests.unit.client.builders import CAPABILITIES, GRANTED, SELECTORS, START, TRAINED, joined

BUNDLE = "next-word-0123456789ab/0/bundle-1-0"


class Accepting:
    def __init__(self, ready: Sequence[BlobKey] = ()) -> None:
        self._ready = ready

    def refused(self) -> Sequence[str]:
        return ("mail@00000001",)

    def lacks(self, bundle: BlobKey) -> bool:
        return bundle not in self._ready

    def counted(self, joined: Joined) -> tuple[CountedAs, ...]:
        return (CountedAs("owner/next-word", 60.0, 2),)


def a_client(bundles: Accepting, history: History | None = None) -> Client:
    known = history or History(floor_s=0.0)
    return Client(SELECTORS, CAPABILITIES, known, DeviceConfig(), Random(1), bundles)


def accepted(client: Client) -> list[Any]:
    [ask] = client.start(START)
    assert isinstance(ask, SendRequest)
    answer = Accepted(b"assignment", "next-word", "s1", BUNDLE)
    return list(client.receive(START, Answered(ask.attempt, answer)))


def test_a_bundle_that_is_not_here_ends_the_visit_before_the_join() -> None:
    """The slot is for clients that can train now; fetching may take long."""
    effects = accepted(a_client(Accepting()))
    leave = Leave(b"assignment", "no_program")  # the slot is free at once
    assert effects == [SendRequest(effects[0].to, 2, leave), Finish("unprepared", BUNDLE)]


def test_a_bundle_that_is_here_lets_the_client_join() -> None:
    [ask] = accepted(a_client(Accepting([BUNDLE])))
    assert isinstance(ask, SendRequest)
    assert ask.message == Join(b"assignment")


def test_refused_bundles_are_excluded_at_check_in() -> None:
    [ask] = a_client(Accepting()).start(START)
    assert isinstance(ask, SendRequest)
    assert isinstance(ask.message, CheckIn)
    assert ask.message.excluded == ("mail@00000001",)


def test_a_participation_counts_under_the_signed_name_and_limits() -> None:
    client = a_client(Accepting([BUNDLE]))
    [ask] = accepted(client)
    assert isinstance(ask, SendRequest)
    client.receive(START, Answered(ask.attempt, joined(participation_gap_s=0.0)))
    client.receive(START, Downloaded())
    [report] = client.receive(START, TRAINED)
    assert isinstance(report, SendRequest)
    effects = client.receive(START, Answered(report.attempt, GRANTED))
    [remembered] = [effect for effect in effects if isinstance(effect, Remember)]
    assert remembered.task == "owner/next-word"
    assert (remembered.participated.gap_s, remembered.participated.limit) == (60.0, 2)
    # Other runs of the task are excluded with it, and the owner's name is not sent.
    assert client.history.excluded(START + 1) == ("next-word",)
