"""Reads what a client did in one scenario and says which rules it kept and broke.

A rule is judged only where the scenario gave it an occasion: a client that was never answered Retry
has neither kept nor broken the rule about Retry. Each check below looks at the whole transcript, in
every scenario, so a client that breaks a rule anywhere is caught there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, get_args

from msgspec import Struct, structs

from papaya.conformance.gateway import Seen, has_right_checksum
from papaya.conformance.rules import BY_ID
from papaya.messages.participation import (
    Aborted,
    Chunk,
    Complete,
    Completed,
    Heartbeat,
    Incomplete,
    Join,
    Joined,
    Leave,
    LeaveReason,
    Left,
    Refused,
    Report,
    Retry,
    UploadGranted,
)
from papaya.messages.selection import Accepted, CheckIn, Rejected

_EXTRA_WORDS = 2  # of a masked update
_SEALED_BYTES = 64
_UPLOAD_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SILENT_HEARTBEATS = 3
_CLOCK_S = 0.05  # clocks of two processes differ
_REPEATED = (Join, Report, Chunk, Complete)
_OF_SESSION = (Join, Heartbeat, Report, Chunk, Complete, Leave)
_TICKET_OF: dict[type, str] = {
    Join: "Accepted",
    Report: "Joined",
    Chunk: "UploadGranted",
    Complete: "UploadGranted",
}
"""The answer whose ticket a request has to carry."""
_ENDS = (Completed, Aborted, Refused, Left)


class RuleFinding(Struct, frozen=True):
    """`detail` says what the client did, if it broke the rule."""

    rule: str
    kept: bool
    detail: str = ""


class Transcript(Struct):
    """The exchanges of one scenario, in the order in which they arrived."""

    seen: list[Seen]
    heartbeat_s: float
    ended_at: float

    def of(self, kind: type) -> list[Seen]:
        return [seen for seen in self.seen if isinstance(seen.message, kind)]

    def answered(self, kind: type) -> list[Seen]:
        return [seen for seen in self.seen if isinstance(seen.answer, kind)]

    def after(self, moment: float, kinds: Any = _OF_SESSION) -> list[Seen]:
        return [s for s in self.seen if s.at > moment and isinstance(s.message, kinds)]

    @property
    def grace_s(self) -> float:
        """A request that was on its way when an answer came is not a reaction to it."""
        return min(1.0, self.heartbeat_s / 2)


def judge(transcript: Transcript) -> list[RuleFinding]:
    """One finding for each rule that was exercised: broken if it was broken once."""
    found: dict[str, RuleFinding] = {}
    for check in _CHECKS:
        for finding in check(transcript):
            assert finding.rule in BY_ID, finding.rule
            if finding.rule not in found or found[finding.rule].kept:
                found[finding.rule] = finding
    return list(found.values())


def _verdict(rule: str, problems: list[str]) -> RuleFinding:
    return RuleFinding(rule, not problems, problems[0] if problems else "")


# -- requests -------------------------------------------------------------------------------


def _messages(t: Transcript) -> Iterator[RuleFinding]:
    if t.seen:
        wrong = [f"{s.method} {s.path}: {s.problem}" for s in t.seen if s.problem]
        yield _verdict("message", wrong)
    if bodies := [s for s in t.seen if s.body]:
        chunked = [f"{s.method} {s.path}" for s in bodies if "transfer-encoding" in s.headers]
        yield _verdict("framing", [f"{what} has a Transfer-Encoding" for what in chunked])
    if check_ins := t.of(CheckIn):
        bare = [s for s in check_ins if not s.headers.get("authorization", "").startswith("Bearer")]
        yield _verdict("token", ["a check-in had no Authorization: Bearer"] * len(bare))


class _Given(NamedTuple):
    """A ticket, when the client got it, and the answer whose ticket it is or renews."""

    at: float
    source: str
    ticket: bytes
    is_renewed: bool


def _given(t: Transcript) -> Iterator[_Given]:
    for seen in t.seen:
        match seen.answer:
            case Accepted(ticket=ticket) | Joined(ticket=ticket) | UploadGranted(ticket=ticket):
                yield _Given(seen.answered_at, type(seen.answer).__name__, ticket, False)
            case Retry(ticket=ticket) if ticket:
                source = _TICKET_OF.get(type(seen.message), "")
                yield _Given(seen.answered_at, source, ticket, True)


def _tickets(t: Transcript) -> Iterator[RuleFinding]:
    """Which ticket a request needs depends on its type; a heartbeat needs the newest.

    A client may also use the renewed ticket of a `Retry` in place of the one that it renews.
    """
    given = sorted(_given(t))
    asked = [s for s in t.seen if isinstance(s.message, _OF_SESSION)]
    problems = []
    for seen in asked:
        message: Any = seen.message
        before = [entry for entry in given if entry.at <= seen.at + _CLOCK_S]
        source = _TICKET_OF.get(type(message))
        if source is None:
            since = seen.at - t.grace_s
            first = [entry for entry in before if not entry.is_renewed]
            right = [*_newest(first, since), *_newest(before, since)]
        else:
            right = [entry.ticket for entry in before if entry.source == source]
        if message.ticket not in right:
            problems.append(f"{seen.kind} did not have the newest ticket that it may use")
    if asked:
        yield _verdict("ticket", problems)


def _newest(given: list[_Given], since: float) -> list[bytes]:
    """Every ticket that was the newest at some time since then."""
    settled = [entry.ticket for entry in given if entry.at <= since]
    late = [entry.ticket for entry in given if entry.at > since]
    return [*settled[-1:], *late]


def _repeats(t: Transcript) -> Iterator[RuleFinding]:
    """A stage's request that got no message back has to come again, and be the same."""
    lost = [s for s in t.of(object) if isinstance(s.message, _REPEATED) and s.answer is None]
    if lost:
        problems = [
            f"{s.kind} had no answer and was not sent again unchanged"
            for s in lost
            if not any(_is_same(a, s) for a in t.after(s.at)) and not _over(t, s.at)
        ]
        yield _verdict("repeat", problems)


def _is_same(again: Seen, first: Seen) -> bool:
    """But for the ticket, which a `Retry` may have renewed: `_tickets` judges it."""
    one, other = again.message, first.message
    if not isinstance(one, _REPEATED) or not isinstance(other, _REPEATED):
        return False
    return structs.replace(one, ticket=b"") == structs.replace(other, ticket=b"")


def _over(t: Transcript, moment: float) -> bool:
    """Another answer told meanwhile that the visit is over."""
    return any(s.answered_at > moment for kind in _ENDS[:3] for s in t.answered(kind))


def _retries(t: Transcript) -> Iterator[RuleFinding]:
    told = [s for s in t.answered(Retry) if isinstance(s.message, _REPEATED)]
    problems = []
    for seen in told:
        assert isinstance(seen.answer, Retry)
        again = [s for s in t.after(seen.answered_at) if s.kind == seen.kind]
        if not any(_is_same(s, seen) for s in again):
            if not _over(t, seen.at):
                problems.append(f"{seen.kind} was answered Retry and not sent again unchanged")
            continue
        waited_s = again[0].at - seen.answered_at
        if _is_same(again[0], seen) and waited_s < seen.answer.after_s - _CLOCK_S:
            problems.append(
                f"{seen.kind} was sent again after {waited_s:.2f} s, not {seen.answer.after_s:g} s"
            )
    if told:
        yield _verdict("retry", problems)


# -- endings --------------------------------------------------------------------------------


def _endings(t: Transcript) -> Iterator[RuleFinding]:
    for rule, kind in (("aborted", Aborted), ("refused", Refused), ("completed", Completed)):
        problems = []
        for seen in t.answered(kind):
            fresh = [s.at for s in t.of(CheckIn) if s.at > seen.answered_at]
            until = min(fresh, default=float("inf"))
            late = t.after(seen.answered_at + t.grace_s)
            problems += [f"{s.kind} was sent after {kind.__name__}" for s in late if s.at < until]
        if t.answered(kind):
            yield _verdict(rule, problems)


def _leaves(t: Transcript) -> Iterator[RuleFinding]:
    if joins := t.answered(Joined):
        since = joins[-1].answered_at
        is_over = any(s.answered_at > since for kind in _ENDS for s in t.answered(kind))
        has_left = bool(t.after(since, Leave))
        problem = "the client joined, and then neither completed the visit nor sent Leave"
        yield _verdict("leave", [] if is_over or has_left else [problem])


def _reasons(t: Transcript) -> Iterator[RuleFinding]:
    given = [s.message.reason for s in t.of(Leave) if isinstance(s.message, Leave)]
    texts = [reason for reason in given if reason not in get_args(LeaveReason)]
    if given:
        yield _verdict("reason", [f"Leave has the reason {text!r}" for text in texts])


def _rejections(t: Transcript) -> Iterator[RuleFinding]:
    for seen in t.answered(Rejected):
        assert isinstance(seen.answer, Rejected)
        if later := t.after(seen.answered_at, CheckIn):
            waited_s, least_s = later[0].at - seen.answered_at, seen.answer.retry_from_s
            early = f"the client came back after {waited_s:.2f} s, not {least_s:g} s"
            yield _verdict("rejected", [early] if waited_s < least_s - _CLOCK_S else [])


def _heartbeats(t: Transcript) -> Iterator[RuleFinding]:
    """No pause of three heartbeats between two requests, from Joined until the end."""
    for joined in t.answered(Joined):
        ends = [s.answered_at for kind in _ENDS for s in t.answered(kind)]
        ends = [at for at in ends if at > joined.answered_at]
        leaves = [s.at for s in t.after(joined.answered_at, Leave)]
        end = min([*ends, *leaves, t.ended_at])
        signs = [s.at for s in t.after(joined.answered_at) if s.at < end]
        times = [joined.answered_at, *signs, end]
        pause_s = max(b - a for a, b in pairwise(times))
        if end - joined.answered_at > t.heartbeat_s:
            most_s = _SILENT_HEARTBEATS * t.heartbeat_s
            silence = f"no request for {pause_s:.1f} s; a heartbeat is {t.heartbeat_s:g} s"
            yield _verdict("heartbeat", [silence] if pause_s > most_s else [])


# -- the upload -----------------------------------------------------------------------------


def _chunks(t: Transcript) -> Iterator[RuleFinding]:
    chunks = t.of(Chunk)
    grants = t.answered(UploadGranted)
    joins = t.answered(Joined)
    if not chunks or not grants or not joins:
        return
    joined, granted = joins[-1].answer, grants[-1].answer
    assert isinstance(joined, Joined)
    assert isinstance(granted, UploadGranted)
    words = joined.update_length + (_EXTRA_WORDS if joined.secure else 0)
    size = words * (joined.upload_bits // 8) if joined.secure else 4 * words
    problems: list[str] = []
    contents: dict[tuple[str, int], bytes] = {}
    is_changed = False
    for seen in chunks:
        chunk = seen.message
        assert isinstance(chunk, Chunk)
        expected = min(granted.chunk_bytes, size - chunk.index * granted.chunk_bytes)
        if len(chunk.data) != expected:
            problems.append(f"chunk {chunk.index} has {len(chunk.data)} bytes, not {expected}")
        if not has_right_checksum(chunk):
            problems.append(f"chunk {chunk.index} has a wrong checksum")
        if not re.fullmatch("[0-9a-f]{8}", seen.headers["papaya-crc32"]):
            problems.append("Papaya-Crc32 is not 8 lower-case hexadecimal digits")
        if not _UPLOAD_ID.fullmatch(chunk.upload):
            problems.append(f"{chunk.upload!r} is not an upload id")
        kept = contents.setdefault((chunk.upload, chunk.index), chunk.data)
        is_changed |= kept != chunk.data
    yield _verdict("chunks", problems)
    if len(contents) < len(chunks):
        changed = "an upload id was used again for different bytes"
        yield _verdict("same-bytes", [changed] if is_changed else [])


def _incomplete(t: Transcript) -> Iterator[RuleFinding]:
    told = [s for s in t.answered(Incomplete) if isinstance(s.message, Complete)]
    problems = []
    for seen in told:
        assert isinstance(seen.answer, Incomplete)
        assert isinstance(seen.message, Complete)
        again = [s for s in t.of(Complete) if s.at > seen.answered_at]
        if not again:
            problems.append("Complete was answered Incomplete and not sent again")
            continue
        until = again[0].at
        sent = [s.message for s in t.after(seen.answered_at, Chunk) if s.at < until]
        chunks = [message for message in sent if isinstance(message, Chunk)]
        wanted = set(seen.answer.missing)
        if {chunk.index for chunk in chunks} != wanted:
            found = sorted({chunk.index for chunk in chunks})
            problems.append(f"chunks {found} were sent, but {sorted(wanted)} were missing")
        if any(chunk.upload != seen.message.upload for chunk in chunks):
            problems.append("the missing chunks were sent under another upload id")
    if told:
        yield _verdict("incomplete", problems)


def _outcome(t: Transcript) -> Iterator[RuleFinding]:
    for seen in t.answered(Completed):
        assert isinstance(seen.answer, Completed)
        why = seen.answer.discarded
        yield _verdict("counted", [] if why is None else [f"the update was discarded: {why}"])


def _evaluation(t: Transcript) -> Iterator[RuleFinding]:
    if not any(isinstance(s.answer, Joined) and s.answer.evaluates for s in t.seen):
        return
    reports = [s.message for s in t.of(Report)]
    told = [m.examples for m in reports if isinstance(m, Report)]
    if told:
        yield _verdict("evaluation", [f"Report.examples is {n}" for n in told if n != 1])


# -- secure tasks ---------------------------------------------------------------------------


def _secure(t: Transcript) -> Iterator[RuleFinding]:
    if not any(isinstance(s.answer, Joined) and s.answer.secure for s in t.seen):
        return
    reports = [s.message for s in t.of(Report)]
    told = [m.examples for m in reports if isinstance(m, Report)]
    if told:
        wrong = [f"Report.examples is {n}" for n in told if n != 1]
        yield _verdict("examples", wrong)
    completions = [s.message for s in t.of(Complete)]
    seeds = {m.sealed for m in completions if isinstance(m, Complete)}
    if seeds:
        problems = [f"the sealed seed has {len(s)} bytes" for s in seeds if len(s) != _SEALED_BYTES]
        uploads = {c.message.upload for c in t.of(Chunk) if isinstance(c.message, Chunk)}
        if len(seeds) > 1 or len(uploads) > 1:
            problems.append("an update was sealed more than once")
        yield _verdict("sealed", problems)


_CHECKS: tuple[Callable[[Transcript], Iterator[RuleFinding]], ...] = (
    _messages,
    _tickets,
    _repeats,
    _retries,
    _endings,
    _leaves,
    _reasons,
    _rejections,
    _heartbeats,
    _chunks,
    _incomplete,
    _outcome,
    _evaluation,
    _secure,
)
