"""The judge on transcripts that no scenario gives it."""

from __future__ import annotations

import pytest
from msgspec import structs

from papaya.conformance.gateway import Seen
from papaya.conformance.judge import RuleFinding, Transcript, judge
from papaya.conformance.scenarios import EvaluationVisit, SecureShortWords
from papaya.messages.base import Message
from papaya.messages.participation import (
    Alive,
    Complete,
    Completed,
    Heartbeat,
    Join,
    Leave,
    Left,
    Report,
    Retry,
)
from papaya.messages.selection import Accepted, Capabilities, CheckIn, Rejected
from tests.unit.device.fake_selector import GRANTED, joined

JOINED = joined()
RENEWED = b"renewed"
REPORT = Report(JOINED.ticket, 1)
RETRY = Retry("no offer yet", 0.0, 60.0, RENEWED)


def transcript(*exchanges: tuple[float, Message, Message | None]) -> Transcript:
    """Each request is answered half a second after it came."""
    seen = [
        Seen(at, type(asked).__name__, "POST", "/", {}, b"", asked, "", at + 0.5, 200, answer)
        for at, asked, answer in exchanges
    ]
    return Transcript(seen, heartbeat_s=1.0, ended_at=100.0)


def judged(rule: str, *exchanges: tuple[float, Message, Message | None]) -> RuleFinding:
    """After a check-in and a join."""
    check_in = (-2.0, CheckIn(2, Capabilities()), Accepted(b"assignment", "next-word", "ab12"))
    findings = judge(transcript(check_in, (0.0, Join(b"assignment"), JOINED), *exchanges))
    [found] = [finding for finding in findings if finding.rule == rule]
    return found


@pytest.mark.parametrize(
    ("is_kept", "exchanges"),
    [
        (True, [(2.0, REPORT, RETRY), (4.0, Report(RENEWED, 1), GRANTED)]),
        (True, [(2.0, REPORT, RETRY), (4.0, REPORT, GRANTED)]),
        (True, [(2.0, REPORT, RETRY), (4.0, Heartbeat(RENEWED), Alive())]),
        (True, [(2.0, REPORT, RETRY), (4.0, Heartbeat(JOINED.ticket), Alive())]),
        (False, [(1.0, Report(RENEWED, 1), None), (2.0, REPORT, RETRY)]),
        (False, [(1.0, Heartbeat(RENEWED), Alive()), (2.0, REPORT, RETRY)]),
        (
            False,
            [
                (2.0, REPORT, RETRY),
                (4.0, Report(RENEWED, 1), GRANTED),
                (6.0, Complete(RENEWED, "u-1"), None),
            ],
        ),
        (
            False,
            [
                (2.0, REPORT, RETRY),
                (4.0, Report(RENEWED, 1), GRANTED),
                (6.0, Heartbeat(RENEWED), Alive()),
            ],
        ),
    ],
)
def test_a_renewed_ticket_takes_the_place_of_the_one_that_it_renews(
    is_kept: bool, exchanges: list[tuple[float, Message, Message | None]]
) -> None:
    """It cannot be used before it was given, nor for requests that need another ticket."""
    ticket = judged("ticket", *exchanges)
    assert ticket.kept is is_kept, ticket


async def _no_restart() -> None:
    raise NotImplementedError


@pytest.mark.parametrize(("bits", "broken"), [(32, []), (16, ["sealed"]), (8, ["sealed"])])
def test_a_client_has_to_take_part_with_short_words_only_if_it_offers_them(
    bits: int, broken: list[str]
) -> None:
    rejected = Rejected("not for this device", 1.0, 2.0)
    seen = transcript((0.0, CheckIn(2, Capabilities(upload_bits=bits)), rejected))
    findings = SecureShortWords(1.0, _no_restart).judge(seen)
    assert [finding.rule for finding in findings if not finding.kept] == broken


REPORTED = (2.0, REPORT, GRANTED)
COUNTED = (4.0, Complete(GRANTED.ticket, "u-1"), Completed())
LEAVING = Leave(JOINED.ticket, "no_examples")


@pytest.mark.parametrize(
    ("is_evaluation", "exchanges", "kept"),
    [
        (True, [REPORTED, COUNTED], [True]),
        (True, [REPORTED], [False]),
        (True, [REPORTED, (5.0, LEAVING, Left())], [False]),
        (True, [(2.0, LEAVING, Left())], []),
        (True, [], [False]),
        (False, [REPORTED, COUNTED], []),
    ],
)
def test_an_evaluation_has_to_be_completed_unless_the_client_leaves_before_it_reports(
    is_evaluation: bool, exchanges: list[tuple[float, Message, Message | None]], kept: list[bool]
) -> None:
    """A visit for another task is not judged, also if it is counted."""
    check_in = (-2.0, CheckIn(2, Capabilities()), Accepted(b"assignment", "next-word", "ab12"))
    join = (0.0, Join(b"assignment"), structs.replace(JOINED, evaluates=is_evaluation))
    findings = EvaluationVisit(1.0, _no_restart).judge(transcript(check_in, join, *exchanges))
    assert [finding.kept for finding in findings] == kept


@pytest.mark.parametrize(
    ("is_kept", "again"),
    [(True, REPORT), (True, Report(RENEWED, 1)), (False, Report(RENEWED, 2))],
)
def test_a_request_that_was_answered_retry_may_come_again_with_the_renewed_ticket(
    is_kept: bool, again: Report
) -> None:
    """The visit has no end here: otherwise nobody has to repeat anything."""
    retry = judged("retry", (2.0, REPORT, RETRY), (4.0, again, GRANTED))
    assert retry.kept is is_kept, retry
