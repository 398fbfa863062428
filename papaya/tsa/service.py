"""One request in, one answer out: the TSA behind its wire format.

Refused with a reason: everything that is not exactly a request. A bug must not cost the open
groups, so an unexpected exception is answered INTERNAL; it is not described, because what it says
might hold a seed. Bytes in, bytes out: sockets are for `process`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from papaya.tsa import wire
from papaya.tsa.errors import RefusalReason, TsaRefused
from papaya.tsa.evidence import EvidenceError
from papaya.tsa.tsa import TSA
from papaya.tsa.wire import Operation

MakeEvidence: TypeAlias = Callable[[bytes], bytes]
"""64 bytes of report data → the quote over them, as `evidence.Platform.quote` gives it."""

ReplyParts: TypeAlias = list[bytes | memoryview]


class TsaService:
    """Holds the TSA, and what makes evidence if the platform has any."""

    def __init__(self, tsa: TSA, evidence: MakeEvidence | None = None) -> None:
        self.tsa = tsa
        self._evidence = evidence

    def answer(self, request: bytes, now: float) -> ReplyParts:
        """The parts of the whole answer, to be sent one after the other. Raises nothing."""
        try:
            operation = wire.read_operation(request)
            body = request[1:]
            if operation is Operation.RELEASE:
                return self._release(body)
            return [wire.frame(wire.DONE, self._small(operation, body, now))]
        except TsaRefused as refused:
            return [wire.encode_refusal(refused)]
        except Exception:
            failed = TsaRefused(RefusalReason.INTERNAL, "the TSA failed on this")
            return [wire.encode_refusal(failed)]

    def _release(self, body: bytes) -> ReplyParts:
        masks = self.tsa.release(*wire.read_release(body))
        return [wire.frame_head(wire.DONE, masks.nbytes), masks.data.cast("B")]

    def _small(self, operation: Operation, body: bytes, now: float) -> bytes:
        tsa = self.tsa
        match operation:
            case Operation.IDENTITY:
                if body:
                    raise TsaRefused(RefusalReason.MALFORMED, "this operation has no fields")
                return bytes((wire.VERSION,)) + tsa.identity_public_key
            case Operation.REGISTER:
                return tsa.register(body)
            case Operation.OFFERS:
                parameters_hash, count = wire.read_offers(body)
                return wire.encode_offers(tsa.offers(parameters_hash, count, now))
            case Operation.ACCEPT:
                tsa.accept(*wire.read_accept(body), now)
                return b""
            case Operation.DROP:
                return wire.encode_count(tsa.drop(*wire.read_group(body)))
            case Operation.FORGET:
                return wire.encode_count(tsa.forget(wire.read_task(body)))
            case Operation.STATUS:
                return wire.encode_status(tsa.status(wire.read_task(body)))
            case Operation.EVIDENCE:
                bound = tsa.report_data(wire.read_task(body))
                if self._evidence is None:
                    raise TsaRefused(RefusalReason.NO_EVIDENCE, "this platform makes no evidence")
                return self._quote(self._evidence, bound)
            case _:
                raise TsaRefused(RefusalReason.MALFORMED, "no such operation")

    def _quote(self, evidence: MakeEvidence, bound: bytes) -> bytes:
        try:
            return evidence(bound)
        except EvidenceError as error:
            raise TsaRefused(RefusalReason.NO_EVIDENCE, str(error)) from None
