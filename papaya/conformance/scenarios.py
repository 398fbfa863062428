"""The scenarios: each tests one visit of the client on one path or fault of the protocol.

A scenario perturbs what passes between the client and the real server. `expects` is how the visit
has to end; if it ends otherwise, the rules in `rules` count as broken. Rules that the judge finds
broken in the transcript are reported in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from papaya.attestation.software import make_quote, measurement_of
from papaya.attestation.verify import report_data
from papaya.conformance.gateway import HttpReply, NoAnswer, PassOn, Seen
from papaya.conformance.judge import RuleFinding, Transcript
from papaya.errors import ProtocolError
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import (
    Aborted,
    Chunk,
    ChunkReceived,
    Completed,
    Joined,
    Leave,
    Refused,
    Report,
    Retry,
    SecureOffer,
    UploadGranted,
)
from papaya.messages.selection import CheckIn, Rejected
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PublicParameters

ExpectedEnding = Literal["counted", "aborted", "refused", "left"]
_NOBODY = "http://127.0.0.1:1"
_HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


def reply(message: Message, status: int = 200) -> HttpReply:
    return HttpReply(status, wire.encode(message), {"Content-Type": "application/json"})


def parsed(found: HttpReply) -> Message | None:
    try:
        return wire.to_device.parse(found.body)
    except ProtocolError:
        return None


class Scenario:
    """Passes everything on unchanged: a plain participation."""

    name: ClassVar[str] = "plain"
    explains: ClassVar[str] = "a visit without faults"
    rules: ClassVar[tuple[str, ...]] = ()
    expects: ClassVar[ExpectedEnding] = "counted"
    is_secure: ClassVar[bool] = False
    upload_bits: ClassVar[Literal[16, 32]] = 32
    visits: ClassVar[int] = 1
    participation_gap_s: ClassVar[float] = 0.0
    evaluates: ClassVar[bool] = False  # the visit is for an evaluation of the task

    def __init__(self, heartbeat_s: float, restart: Callable[[], Awaitable[None]]) -> None:
        self.heartbeat_s = heartbeat_s
        self.restart = restart
        self._done: set[str] = set()

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        return await pass_on()

    def first(self, what: str) -> bool:
        """True the first time that it is asked about this."""
        is_first = what not in self._done
        self._done.add(what)
        return is_first

    def judge(self, t: Transcript) -> Iterator[RuleFinding]:
        """The scenario's own rules: kept if the visit ended as it has to."""
        if not t.of(CheckIn):
            return
        problem = "" if ended_as(t, self.expects) else f"the visit did not end as {self.expects}"
        for rule in self.rules:
            yield RuleFinding(rule, not problem, problem)


def ended_as(t: Transcript, ending: ExpectedEnding) -> bool:
    match ending:
        case "counted":
            return Completed() in [seen.answer for seen in t.answered(Completed)]
        case "aborted":
            return bool(t.answered(Aborted)) and not t.answered(Completed)
        case "refused":
            return bool(t.answered(Refused)) and not t.answered(Completed)
        case "left":
            return not t.answered(Completed) and bool(t.of(Leave))


class ChangedAnswer(Scenario):
    """Changes messages on their way to the client."""

    def changed(self, answer: Message) -> Message:
        """What the client gets instead; the same object if it stays as it is."""
        raise NotImplementedError

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        found = await pass_on()
        honest = parsed(found)
        if honest is None or (other := self.changed(honest)) is honest:
            return found
        return reply(other)


class LostAnswers(Scenario):
    name = "lost-answers"
    explains = "the answers to Join, Heartbeat, Report, a chunk and Complete are lost, once each"
    rules: ClassVar[tuple[str, ...]] = ("repeat",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        found = await pass_on()
        lost = ("Join", "Heartbeat", "Report", "Chunk", "Complete")
        if seen.kind in lost and self.first(seen.kind):
            raise NoAnswer
        return found


class LostRequests(Scenario):
    name = "lost-requests"
    explains = "the connection breaks before the server has the request"
    rules = ("repeat",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.kind in ("Join", "Report", "Chunk", "Complete") and self.first(seen.kind):
            raise NoAnswer
        return await pass_on()


class ProxyPages(Scenario):
    name = "proxy-pages"
    explains = "a proxy answers with a page of its own, with status 502 and with 200"
    rules = ("garbage", "repeat")

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.kind == "Join" and self.first("Join"):
            return HttpReply(502, _HTML, {"Content-Type": "text/html"})
        if seen.kind == "Report" and self.first("Report"):
            return HttpReply(200, _HTML, {"Content-Type": "text/html"})
        if seen.kind == "Complete" and self.first("Complete"):
            return HttpReply(200, b"", {})
        return await pass_on()


class RetryLater(Scenario):
    name = "retry"
    explains = "Retry with a delay: as 503, and with the status 200"
    rules = ("retry", "status")

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.kind in ("Join", "Report", "Chunk", "Complete") and self.first(seen.kind):
            status = 200 if seen.kind == "Report" else 503
            return reply(Retry("conformance: try again", 1.0), status)
        return await pass_on()


class OtherStatus(Scenario):
    name = "other-status"
    explains = "valid answers arrive with the statuses 201, 404 and 500"
    rules = ("status",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        found = await pass_on()
        status = {"Join": 404, "Report": 500, "Complete": 201}.get(seen.kind, found.status)
        return structs.replace(found, status=status)


class UnknownFields(Scenario):
    name = "unknown-fields"
    explains = "every answer has a field that the client does not know"
    rules = ("unknown-fields",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        found = await pass_on()
        if parsed(found) is None:
            return found
        fields = msgspec.json.decode(found.body)
        fields["introduced_later"] = {"nested": [1, "two", None]}
        return structs.replace(found, body=msgspec.json.encode(fields))


class Redirect(Scenario):
    name = "redirect"
    explains = "a request is answered with a redirect; then the client is served"
    rules = ("redirect",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.path.startswith("/v1/elsewhere"):
            seen.problem = ""
            return reply(Refused("conformance: a redirect was followed"), 403)
        if seen.kind == "Join" and self.first("Join"):
            return HttpReply(307, b"", {"Location": "/v1/elsewhere"})
        return await pass_on()


class RejectedFirst(Scenario):
    name = "rejected"
    explains = "the first check-in is rejected for one to two seconds"
    rules = ()
    retry_from_s = 1.0

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.kind == "CheckIn" and self.first("CheckIn"):
            after_s = self.retry_from_s
            return reply(Rejected("conformance: come back", after_s, 2.0 * after_s))
        return await pass_on()


class AbortedWhileTraining(Scenario):
    name = "abort"
    explains = "the server ends the session before the report"
    rules = ("aborted",)
    expects = "aborted"

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.kind in ("Heartbeat", "Report", "Chunk", "Complete"):
            return reply(Aborted("stale"))
        return await pass_on()


class AbortedWhileUploading(Scenario):
    name = "abort-upload"
    explains = "the server ends the session during the upload"
    rules = ("aborted",)
    expects = "aborted"

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.kind in ("Chunk", "Complete") or "Chunk" in self._done:
            self.first("Chunk")
            return reply(Aborted("timed_out"))
        return await pass_on()


class RefusedReport(Scenario):
    name = "refused"
    explains = "the report is refused"
    rules = ("refused",)
    expects = "refused"

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.kind in ("Report", "Chunk", "Complete"):
            return reply(Refused("conformance: refused"), 403)
        return await pass_on()


class ChunkLost(Scenario):
    name = "incomplete"
    explains = "the server lost a chunk that it had acknowledged, and asks for it"
    rules = ("incomplete",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        chunk = seen.message
        if isinstance(chunk, Chunk) and chunk.index == 1 and self.first("Chunk"):
            return reply(ChunkReceived(chunk.upload, chunk.index))
        return await pass_on()


class DamagedChunk(Scenario):
    name = "damaged-chunk"
    explains = "a chunk is damaged on its way; the server answers Retry"
    rules = ("retry",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.kind != "Chunk" or not self.first("Chunk"):
            return await pass_on()
        whole = seen.body
        seen.body = bytes([whole[0] ^ 1]) + whole[1:]
        try:
            return await pass_on()
        finally:
            seen.body = whole


class ServerCrash(Scenario):
    name = "crash"
    explains = "the server restarts in the middle of the upload and has lost its chunks"
    rules = ("incomplete",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        found = await pass_on()
        if isinstance(parsed(found), ChunkReceived) and self.first("Chunk"):
            await self.restart()
            raise NoAnswer
        return found


class TaskHasMoved(Scenario):
    name = "moved"
    explains = "the task has moved: requests are answered Retry at once, for a while"
    rules = ("retry",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.kind in ("Heartbeat", "Report", "Chunk", "Complete") and (
            self.first(seen.kind) or self.first(f"{seen.kind} again")
        ):
            return reply(Retry("the task has moved", 0.0), 503)
        return await pass_on()


class NobodyAtUploadUrl(ChangedAnswer):
    name = "upload-url"
    explains = "the grant names an address for a direct upload, and nobody listens there"
    rules = ("upload-url",)

    def changed(self, answer: Message) -> Message:
        if isinstance(answer, UploadGranted):
            return structs.replace(answer, upload_url=_NOBODY)
        return answer


class SlowCommit(Scenario):
    name = "slow-commit"
    explains = "Complete is answered late; without heartbeats the server ends the session"
    rules = ("heartbeat",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        if seen.kind == "Complete" and self.first("Complete"):
            await asyncio.sleep(4 * self.heartbeat_s)  # three without a request end a session
        return await pass_on()


class WrongParameters(Scenario):
    name = "wrong-parameters"
    explains = "the parameters do not match the hash in their key"
    rules = ("hash",)
    expects = "left"

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        found = await pass_on()
        if seen.kind == "Parameters" and found.body:
            found.body = found.body[:-1] + bytes([found.body[-1] ^ 1])
        return found

    def judge(self, t: Transcript) -> Iterator[RuleFinding]:
        if any(seen.kind == "Parameters" for seen in t.seen):
            used = "the client reported after it got parameters with a wrong hash"
            yield RuleFinding("hash", not t.of(Report), used if t.of(Report) else "")


class BrokenDownload(Scenario):
    name = "broken-download"
    explains = "the download breaks half-way"
    rules = ("download",)

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        found = await pass_on()
        if seen.kind == "Parameters" and self.first("Parameters"):
            return structs.replace(found, cut_at=len(found.body) // 2)
        return found

    def judge(self, t: Transcript) -> Iterator[RuleFinding]:
        yield from super().judge(t)
        for seen in t.seen:
            asked = seen.headers.get("range")
            if seen.kind == "Parameters" and asked is not None:
                tag = seen.reply.headers.get("ETag") if seen.reply is not None else None
                problem = ""
                if seen.status != 206:
                    problem = f"Range: {asked} was answered {seen.status}"
                elif seen.headers.get("if-range") != tag:
                    problem = "a range was requested without the If-Range of the first part"
                yield RuleFinding("range", not problem, problem)


class TooSoon(Scenario):
    name = "history"
    explains = "a second visit, although the task requires an hour between visits"
    visits = 2
    participation_gap_s = 3600.0

    def judge(self, t: Transcript) -> Iterator[RuleFinding]:
        done = [seen.answered_at for seen in t.answered(Completed)]
        if not done:
            return
        again = t.after(done[0], CheckIn)
        joined = [s for s in t.answered(Joined) if s.at > done[0]]
        task = t.answered(Joined)[0].answer
        assert isinstance(task, Joined)
        problems = [
            "a check-in did not list the task under excluded"
            for s in again
            if isinstance(s.message, CheckIn) and task.task not in s.message.excluded
        ]
        problems += ["the client took part again"] * bool(t.after(done[0], Report))
        if again or joined:
            yield RuleFinding("history", not problems, problems[0] if problems else "")


class EvaluationVisit(Scenario):
    """A client that leaves before it reports is not judged, because no client has to evaluate. A
    client that was assigned to another task is not judged either.
    """

    name = "evaluation"
    explains = "an evaluation: the client uploads how good the model is on its data"
    rules = ("evaluation",)
    evaluates = True

    def judge(self, t: Transcript) -> Iterator[RuleFinding]:
        joined = [seen.answer for seen in t.answered(Joined)]
        evaluates = any(isinstance(answer, Joined) and answer.evaluates for answer in joined)
        has_declined = bool(t.of(Leave)) and not t.of(Report)
        if evaluates and not has_declined:
            yield from super().judge(t)


class SecureVisit(Scenario):
    name = "secure"
    explains = "a secure task, with the software TSA"
    is_secure = True
    rules = ("sealed",)


class SecureFaults(LostAnswers):
    name = "secure-faults"
    explains = "a secure task whose answers are lost and whose chunks are asked for again"
    is_secure = True
    rules = ("sealed", "repeat")

    async def answer(self, seen: Seen, pass_on: PassOn) -> HttpReply:
        chunk = seen.message
        if isinstance(chunk, Chunk) and chunk.index == 1 and self.first("lost chunk"):
            return reply(ChunkReceived(chunk.upload, chunk.index))
        return await super().answer(seen, pass_on)


class SecureShortWords(Scenario):
    """A client whose check-ins do not offer 16 bits is not assigned to the task, nor judged."""

    name = "secure-16-bit"
    explains = "a secure task with masked words of 16 bits, for clients that offer them"
    is_secure = True
    upload_bits = 16
    rules = ("sealed",)

    def judge(self, t: Transcript) -> Iterator[RuleFinding]:
        asked = (seen.message for seen in t.of(CheckIn))
        offers = (m.capabilities.upload_bits for m in asked if isinstance(m, CheckIn))
        if min(offers, default=32) <= self.upload_bits:
            yield from super().judge(t)


class Forgery(ChangedAnswer):
    """A grant whose offer the device's checks must refuse.

    A forgery that contains an offer fails exactly one check: a client that skips this check is
    found, even if it does all the others.
    """

    is_secure = True
    expects = "left"
    rules = ("evidence",)

    def forge(self, offer: SecureOffer) -> SecureOffer | None:
        """Must be deterministic: a repeated report gets the same answer."""
        raise NotImplementedError

    def changed(self, answer: Message) -> Message:
        if isinstance(answer, UploadGranted) and answer.secure is not None:
            return structs.replace(answer, secure=self.forge(answer.secure))
        return answer

    def judge(self, t: Transcript) -> Iterator[RuleFinding]:
        if t.answered(UploadGranted):
            sent = "the client uploaded an update under forged evidence"
            problem = sent if t.of(Chunk) else ""
            if not problem and not t.of(Leave):
                problem = "the client did not leave"
            yield RuleFinding("evidence", not problem, problem)


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


# Not a key of the TSA. If a client accepts it, the server can read every seed of the client.
_OTHER_IDENTITY = Ed25519PrivateKey.from_private_bytes(bytes(32))
_OTHER_IDENTITY_KEY = _OTHER_IDENTITY.public_key().public_bytes_raw()


def _signed_by_other(offer: bytes, parameters: PublicParameters) -> bytes:
    """The offer, signed by `_OTHER_IDENTITY` for these parameters."""
    honest = Offer.decode(offer)
    return Offer.signed(
        _OTHER_IDENTITY, parameters.digest(), honest.index, honest.key, honest.expires
    ).encode()


class ForgedQuote(Forgery):
    name = "forged-quote"
    explains = "the signature of the quote is not valid"

    def forge(self, offer: SecureOffer) -> SecureOffer:
        return structs.replace(offer, evidence=_flipped(offer.evidence, 450))


class NoSuchRecord(Forgery):
    name = "forged-leaf"
    explains = "the record in the log does not exist"

    def forge(self, offer: SecureOffer) -> SecureOffer:
        return structs.replace(offer, leaf=offer.leaf + 1)


class OtherRecord(Forgery):
    """The kit's log has the record of another binary before that of the TSA."""

    name = "forged-record"
    explains = "the record in the log is for a different binary than the quote"

    def forge(self, offer: SecureOffer) -> SecureOffer:
        return structs.replace(offer, leaf=offer.leaf - 1)


class OtherIdentity(Forgery):
    """The signature of the offer is valid: only the quote shows that the key is not the TSA's."""

    name = "forged-identity"
    explains = "the identity key that signed the offer is not the one in the quote"

    def forge(self, offer: SecureOffer) -> SecureOffer:
        parameters = PublicParameters.decode(offer.parameters)
        signed = _signed_by_other(offer.offer, parameters)
        return structs.replace(offer, offer=signed, identity=_OTHER_IDENTITY_KEY)


class ForgedOffer(Forgery):
    name = "forged-offer"
    explains = "the offer has another key than the TSA signed"

    def forge(self, offer: SecureOffer) -> SecureOffer:
        return structs.replace(offer, offer=_flipped(offer.offer, 20))


class OtherParameters(Forgery):
    """Changes the aggregation goal, which the terms of an unsigned task do not fix. The offer has
    to be signed for the forged parameters, so `_OTHER_IDENTITY` signs it, and a new quote contains
    this identity and the honest parameters; anyone can make software quotes.
    """

    name = "forged-parameters"
    explains = "the offer is signed for public parameters that are not those in the quote"

    def forge(self, offer: SecureOffer) -> SecureOffer:
        honest = PublicParameters.decode(offer.parameters)
        other = replace(honest, aggregation_goal=honest.aggregation_goal + 1)
        bound = report_data(_OTHER_IDENTITY_KEY, honest.digest())
        return structs.replace(
            offer,
            parameters=other.encode(),
            offer=_signed_by_other(offer.offer, other),
            identity=_OTHER_IDENTITY_KEY,
            evidence=make_quote(measurement_of(offer.evidence), bound),
        )


class NoOffer(Forgery):
    name = "no-offer"
    explains = "the grant of a secure task has no offer"

    def forge(self, offer: SecureOffer) -> SecureOffer | None:
        return None


class ClearInstead(ChangedAnswer):
    name = "clear-instead"
    explains = "the server says that a secure task is in the clear"
    is_secure = True
    expects = "left"
    rules = ("decides",)

    def changed(self, answer: Message) -> Message:
        return structs.replace(answer, secure=False) if isinstance(answer, Joined) else answer

    def judge(self, t: Transcript) -> Iterator[RuleFinding]:
        if t.answered(Joined):
            problem = "the client took part in the clear" if t.of(Report) else ""
            yield RuleFinding("decides", not problem, problem)


SCENARIOS: tuple[type[Scenario], ...] = (
    Scenario,
    UnknownFields,
    OtherStatus,
    LostAnswers,
    LostRequests,
    ProxyPages,
    RetryLater,
    TaskHasMoved,
    Redirect,
    RejectedFirst,
    WrongParameters,
    BrokenDownload,
    AbortedWhileTraining,
    AbortedWhileUploading,
    RefusedReport,
    ChunkLost,
    DamagedChunk,
    NobodyAtUploadUrl,
    SlowCommit,
    ServerCrash,
    TooSoon,
    EvaluationVisit,
    SecureVisit,
    SecureFaults,
    SecureShortWords,
    ForgedQuote,
    NoSuchRecord,
    OtherRecord,
    OtherIdentity,
    ForgedOffer,
    OtherParameters,
    NoOffer,
    ClearInstead,
)
