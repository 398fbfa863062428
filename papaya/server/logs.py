"""Writes the log of a server process: events and other messages, as text or as JSON lines.

    machine ── Log(event) ──▶ host ──▶ log(event, node)  ─┐
    parts of the server ─────────────▶ log(event)         ├─▶ logging ─▶ LogHandler ─▶ stderr
    http, store, … ── logger.warning("…") ────────────────┘

An event has a name and fields (papaya/messages/events.py). Anything else is the event `message`
with a `text`. Repetitions are summarised: of equal events the first ten within a minute are
written, the others are counted, and their number is written when the minute is over.

Text is escaped, so that a name or a reason cannot forge a line. A traceback is one field.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec

from papaya.messages.base import TaskId
from papaya.messages.events import (
    Level,
    ServerEvent,
    StorageFailed,
    StorageRecovered,
    ThreadsRefused,
    ThreadsStarted,
)

LogFormat = Literal["text", "json"]
Fields = dict[str, object]

WINDOW_S = 60.0
BURST = 10
_MAX_KEYS = 1000
_FLUSH_EVERY_S = 5.0
_PLAIN = "message"
_MAX_TEXT = 16_384

logger = logging.getLogger("papaya")


# Told of every event, whatever the level of the log: webhooks, and the rows of the timeline.
listeners: list[Callable[[ServerEvent, str], None]] = []


class FewOfEach:
    """Passes the first few of equal events within a minute. Not for several threads at once."""

    def __init__(self) -> None:
        # By what makes events equal: the end of their window, and how many there were.
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}

    def passes(self, event: ServerEvent, now: float) -> bool:
        key = event.repeats
        if len(self._seen) >= _MAX_KEYS:
            self._seen = {k: seen for k, seen in self._seen.items() if now < seen[0]}
        until, count = self._seen.get(key, (0.0, 0))
        if now >= until:
            until, count = now + WINDOW_S, 0
        if len(self._seen) < _MAX_KEYS or key in self._seen:
            self._seen[key] = (until, count + 1)
        return count < BURST


def log(event: ServerEvent, node: str = "") -> None:
    """Write an event. `node`: the machine that tells it, if it is one."""
    for tell in listeners:
        tell(event, node)
    level = logging.getLevelNamesMapping()[event.level.upper()]
    if logger.isEnabledFor(level):
        logger.log(level, "%s", _in_words(event), extra={"event": event, "node": node})


class Trouble:
    """Something that may fail: one event when that begins, and one when it works again.

    `part`: the state store, a task's blobs, or the threads of a secure task.
    """

    def __init__(
        self,
        part: Literal["state", "blobs", "threads"],
        task: TaskId = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._part = part
        self._task = task
        self._now = now
        self._since: float | None = None

    def begins(self, why: str) -> None:
        if self._since is None:
            self._since = self._now()
            if self._part == "threads":
                log(ThreadsRefused(self._task, why))
            else:
                log(StorageFailed(self._part, self._task, why))

    def ends(self) -> None:
        if self._since is not None:
            after_s = round(self._now() - self._since, 1)
            self._since = None
            if self._part == "threads":
                log(ThreadsStarted(self._task, after_s))
            else:
                log(StorageRecovered(self._part, self._task, after_s))


class LogHandler(logging.Handler):
    """Formats records, and counts repetitions instead of writing them."""

    def __init__(
        self,
        form: LogFormat = "text",
        stream: TextIO | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._form = form
        self._stream = stream  # None: stderr, whatever that is when something is written
        self._now = now
        # By key of a record: the end of its window, how many were seen, and the last one.
        self._seen: dict[tuple[object, ...], tuple[float, int, logging.LogRecord]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held, by any thread."""
        try:
            now = self._now()
            self.tell_repetitions(now)
            key = _key(record)
            until, count, _ = self._seen.get(key, (now + WINDOW_S, 0, record))
            if len(self._seen) < _MAX_KEYS or key in self._seen:
                self._seen[key] = (until, count + 1, record)
            if count < BURST:
                self._write(record, {})
        except Exception:
            self.handleError(record)

    def tell_repetitions(self, now: float, *, is_over: bool = False) -> None:
        """Summarise the windows that have ended; all of them if the log is over."""
        self.acquire()
        try:
            over = [key for key, (until, _, _) in self._seen.items() if is_over or now >= until]
            for key in over:
                until, count, record = self._seen.pop(key)
                if count > BURST:
                    lasted_s = round(WINDOW_S - max(0.0, until - now))
                    more = f"{count - BURST} more in {lasted_s} s, this is the last"
                    self._write(record, {"repeated": more})
        finally:
            self.release()

    def close(self) -> None:
        self.tell_repetitions(self._now(), is_over=True)
        super().close()

    def _write(self, record: logging.LogRecord, more: Fields) -> None:
        level = record.levelname.lower()
        fields = {**_fields(record), **more}
        line = _as_json if self._form == "json" else _as_text
        stream = self._stream or sys.stderr
        stream.write(line(record.created, level, fields) + "\n")
        stream.flush()


def _key(record: logging.LogRecord) -> tuple[object, ...]:
    event = getattr(record, "event", None)
    if isinstance(event, ServerEvent):
        return event.repeats
    return (record.name, record.levelno, record.getMessage())


def _fields(record: logging.LogRecord) -> Fields:
    """The name of the event and its fields, in the order in which they are written."""
    event = getattr(record, "event", None)
    if isinstance(event, ServerEvent):
        node = getattr(record, "node", "")
        return {"event": event.name(), **({"node": node} if node else {}), **event.fields}
    fields: Fields = {"event": _PLAIN, "source": record.name, "text": record.getMessage()}
    if record.exc_info and record.exc_info[1] is not None:
        fields["error"] = logging.Formatter().formatException(record.exc_info)
    return fields


def _as_json(created: float, level: str, fields: Fields) -> str:
    line = {"time": _time(created), "level": level, **fields}
    text = msgspec.json.encode(line).decode()
    # Like U+2028: legal in JSON, but it breaks lines in some terminals and tools.
    return text if text.isprintable() else json.dumps(json.loads(text), separators=(",", ":"))


def _as_text(created: float, level: str, fields: Fields) -> str:
    rest = dict(fields)
    name = rest.pop("event")
    if name == _PLAIN and set(rest) == {"source", "text"}:
        return f"{_time(created)} {level} {_escaped(str(rest['text']))}"
    return f"{_time(created)} {level} {name} {_shown(rest)}".rstrip()


def _in_words(event: ServerEvent) -> str:
    return f"{event.name()} {_shown(event.fields)}".rstrip()


def _shown(fields: Fields) -> str:
    return " ".join(f"{field}={_value(value)}" for field, value in fields.items())


def _value(value: object) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, tuple):
        text = ",".join(map(str, value))
    else:
        text = msgspec.json.encode(value).decode()
    is_plain = text and text.isprintable() and not any(c in ' "=' for c in text)
    return text if is_plain else json.dumps(text[:_MAX_TEXT], ensure_ascii=not text.isprintable())


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:_MAX_TEXT])


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def start_logging(level: Level, form: LogFormat, stream: TextIO | None = None) -> LogHandler:
    """Log everything of this process from `level` on; replaces what an earlier call set up."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, LogHandler)]:
        root.removeHandler(handler)
    handler = LogHandler(form, stream)
    root.addHandler(handler)
    root.setLevel(level.upper())
    return handler


async def keep_telling() -> None:
    """Write the numbers of repetitions when they are due, also if nothing else is logged."""
    while True:
        await asyncio.sleep(_FLUSH_EVERY_S)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, LogHandler):
                handler.tell_repetitions(time.time())
