"""The log: one line per event, nothing forged, repetitions counted."""

from __future__ import annotations

import json
import logging
from io import StringIO

import pytest

from papaya.messages.events import (
    CredentialsRejected,
    ServerEvent,
    ServerStarted,
    TaskHalted,
    TaskMoved,
    VersionPublished,
)
from papaya.server.logs import BURST, WINDOW_S, LogFormat, LogHandler, Trouble, log

MOVED = TaskMoved("digits", 0, 7, "aggregator@b", "aggregator@a", "its holder is silent")


class Logged:
    """A handler with a clock of its own, on a logger of its own."""

    def __init__(self, form: LogFormat) -> None:
        self.time = 1_700_000_000.25
        self.stream = StringIO()
        self.handler = LogHandler(form, self.stream, lambda: self.time)

    def tell(self, event: ServerEvent, node: str = "") -> None:
        self.handle("", level=event.level, extra={"event": event, "node": node})

    def handle(
        self, text: str, level: str = "warning", extra: dict[str, object] | None = None
    ) -> None:
        number = logging.getLevelNamesMapping()[level.upper()]
        record = logging.getLogger("papaya.test").makeRecord(
            "papaya.test", number, "file", 1, text, (), None, extra=extra
        )
        record.created = self.time
        self.handler.handle(record)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_an_event_as_text_and_as_json() -> None:
    text, as_json = Logged("text"), Logged("json")
    for logged in (text, as_json):
        logged.tell(MOVED, "coordinator@c")
    [line] = text.lines
    assert line == (
        "2023-11-14T22:13:20.250Z warning task_moved node=coordinator@c task=digits seq=7 "
        'holder=aggregator@b before=aggregator@a why="its holder is silent"'
    )
    assert json.loads(as_json.lines[0]) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "event": "task_moved",
        "node": "coordinator@c",
        "task": "digits",
        "seq": 7,
        "holder": "aggregator@b",
        "before": "aggregator@a",
        "why": "its holder is silent",
    }


def test_other_messages_are_events_too() -> None:
    text, as_json = Logged("text"), Logged("json")
    for logged in (text, as_json):
        logged.handle("cannot accept connections")
    assert text.lines == ["2023-11-14T22:13:20.250Z warning cannot accept connections"]
    found = json.loads(as_json.lines[0])
    assert (found["event"], found["source"]) == ("message", "papaya.test")


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_text_can_forge_a_line(form: LogFormat) -> None:
    logged = Logged(form)
    forged = "x\n2023-11-14T22:13:20.250Z info leadership_gained\r\x1b[2J\u2028 \u202e"
    logged.tell(TaskHalted("digits", 1, forged))
    logged.handle(forged)
    assert len(logged.stream.getvalue().splitlines()) == 2
    assert all(line.isprintable() for line in logged.stream.getvalue().split("\n"))


def test_repetitions_are_counted_and_told_when_the_minute_is_over() -> None:
    logged = Logged("json")
    for version in range(BURST + 312):
        logged.tell(VersionPublished("digits", 0, version, 10))
        logged.time += 0.1
    logged.tell(VersionPublished("letters", 0, 1, 10))  # of another task: not a repetition
    assert len(logged.lines) == BURST + 1
    logged.time += WINDOW_S
    logged.handler.tell_repetitions(logged.time)
    last = json.loads(logged.lines[-1])
    assert last["repeated"] == "312 more in 60 s, this is the last"
    assert last["version"] == BURST + 311
    logged.tell(VersionPublished("digits", 0, 999, 10))
    assert json.loads(logged.lines[-1])["version"] == 999


def test_repetitions_are_told_when_the_log_ends() -> None:
    logged = Logged("text")
    for number in range(BURST + 5):
        logged.tell(CredentialsRejected("admin", f"10.0.0.{number}"))
    logged.time += 3
    logged.handler.close()
    assert 'repeated="5 more in 3 s, this is the last"' in logged.lines[-1]
    assert len(logged.lines) == BURST + 1


def test_an_attacker_cannot_fill_the_memory() -> None:
    logged = Logged("text")
    for number in range(3000):
        logged.handle(f"10.0.{number} is refused")
    assert len(logged.handler._seen) <= 1000


def test_trouble_is_told_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with caplog.at_level(logging.INFO):
        trouble = Trouble("blobs", "digits", lambda: now[0])
        trouble.ends()
        for _ in range(3):
            trouble.begins("the disk is full")
        now[0] = 7.0
        trouble.ends()
        trouble.ends()
    assert [record.getMessage() for record in caplog.records] == [
        'storage_failed part=blobs task=digits why="the disk is full"',
        "storage_recovered part=blobs task=digits after_s=7.0",
    ]


def test_an_event_below_the_level_is_not_even_formatted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        log(ServerStarted("1.0", ("coordinator",), "{}"))
    assert caplog.records == []
