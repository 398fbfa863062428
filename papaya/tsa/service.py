"""One request in, one answer out: the TSA behind its wire format.

A connection has a session, which first proves that it holds the private key of a cluster. Otherwise
any local user who reaches the port could make the TSA forget a task, and destroy updates that were
acknowledged. Refused with a reason: everything that is not exactly a request, and every request
about tasks before the proof. A bug must not cost the open groups, so an unexpected exception is
answered INTERNAL; it is not described, because it might quote a seed. Bytes in, bytes out: sockets
are for `process`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from papaya.secagg.words import Entropy
from papaya.tsa import wire
from papaya.tsa.errors import RefusalReason, TsaRefused
from papaya.tsa.evidence import EvidenceError
from papaya.tsa.tsa import TSA
from papaya.tsa.wire import Operation

MakeEvidence: TypeAlias = Callable[[bytes], bytes]
"""64 bytes of report data → the quote over them, as `evidence.Platform.quote` gives it."""

ReplyParts: TypeAlias = list[bytes | memoryview]

NOT_PROVED: Final = "the signature does not prove that you hold this key"


class TsaService:
    """Holds the TSA, and what makes evidence if the platform has any."""

    def __init__(
        self, tsa: TSA, evidence: MakeEvidence | None = None, entropy: Entropy = os.urandom
    ) -> None:
        self.tsa = tsa
        self.evidence = evidence
        self.owners: dict[bytes, bytes] = {}  # hash of the parameters -> key of the cluster
        self._entropy = entropy

    def session(self) -> TsaSession:
        """For one connection."""
        return TsaSession(self, self._entropy(wire.CHALLENGE_BYTES))


class TsaSession:
    """What one connection may ask: nothing about tasks until it has proved its cluster's key."""

    def __init__(self, service: TsaService, challenge: bytes) -> None:
        self._service = service
        self._tsa = service.tsa
        self._challenge = challenge
        self._cluster: bytes | None = None  # the public key that was proved

    @property
    def is_authenticated(self) -> bool:
        return self._cluster is not None

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
            failed = TsaRefused(RefusalReason.INTERNAL, "internal error of the TSA")
            return [wire.encode_refusal(failed)]

    def _release(self, body: bytes) -> ReplyParts:
        parameters_hash, group, members = wire.read_release(body)
        masks = self._tsa.release(self._own(parameters_hash), group, members)
        return [wire.frame_head(wire.DONE, masks.nbytes), masks.data.cast("B")]

    def _small(self, operation: Operation, body: bytes, now: float) -> bytes:
        tsa = self._tsa
        match operation:
            case Operation.IDENTITY:
                if body:
                    raise TsaRefused(RefusalReason.MALFORMED, "this operation has no fields")
                return bytes((wire.VERSION,)) + tsa.identity_public_key + self._challenge
            case Operation.AUTHENTICATE:
                return self._authenticate(*wire.read_authenticate(body))
            case Operation.REGISTER:
                return self._register(body)
            case Operation.OFFERS:
                parameters_hash, count = wire.read_offers(body)
                return wire.encode_offers(tsa.offers(self._own(parameters_hash), count, now))
            case Operation.ACCEPT:
                index, group, sealed = wire.read_accept(body)
                self._own_index(index)
                tsa.accept(index, group, sealed, now)
                return b""
            case Operation.DROP:
                parameters_hash, group = wire.read_group(body)
                return wire.encode_count(tsa.drop(self._own(parameters_hash), group))
            case Operation.FORGET:
                return wire.encode_count(self._forget(wire.read_task(body)))
            case Operation.STATUS:
                return wire.encode_status(tsa.status(self._own(wire.read_task(body))))
            case Operation.EVIDENCE:
                return self._quote(tsa.report_data(self._own(wire.read_task(body))))
            case _:
                raise TsaRefused(RefusalReason.MALFORMED, "no such operation")

    # --- Whose task it is ----------------------------------------------------------------------

    def _authenticate(self, cluster: bytes, signature: bytes) -> bytes:
        proof = wire.proof_of(self._tsa.identity_public_key, self._challenge)
        try:
            Ed25519PublicKey.from_public_bytes(cluster).verify(signature, proof)
        except (InvalidSignature, ValueError):
            raise TsaRefused(RefusalReason.NOT_AUTHENTICATED, NOT_PROVED) from None
        self._cluster = cluster
        return b""

    def _proved(self) -> bytes:
        if self._cluster is None:
            message = "authenticate first: this connection has not proved a cluster's key"
            raise TsaRefused(RefusalReason.NOT_AUTHENTICATED, message)
        return self._cluster

    def _register(self, encoded_parameters: bytes) -> bytes:
        cluster, owners = self._proved(), self._service.owners
        parameters_hash = hashlib.sha256(encoded_parameters).digest()
        if owners.get(parameters_hash, cluster) != cluster:
            message = "another cluster registered these public parameters"
            raise TsaRefused(RefusalReason.OTHER_CLUSTER, message)
        parameters_hash = self._tsa.register(encoded_parameters)
        owners[parameters_hash] = cluster
        return parameters_hash

    def _forget(self, parameters_hash: bytes) -> int:
        lost = self._tsa.forget(self._own(parameters_hash))
        del self._service.owners[parameters_hash]
        return lost

    def _own(self, parameters_hash: bytes) -> bytes:
        """These parameters, if this cluster registered them; others are as good as unknown."""
        if self._service.owners.get(parameters_hash) != self._proved():
            message = "no task of this cluster has these public parameters"
            raise TsaRefused(RefusalReason.UNKNOWN_PARAMETERS, message)
        return parameters_hash

    def _own_index(self, index: int) -> None:
        cluster, parameters_hash = self._proved(), self._tsa.task_of(index)
        if parameters_hash is not None and self._service.owners[parameters_hash] != cluster:
            message = f"offer {index} was not made for this cluster"
            raise TsaRefused(RefusalReason.UNKNOWN_INDEX, message)

    def _quote(self, bound: bytes) -> bytes:
        if self._service.evidence is None:
            raise TsaRefused(RefusalReason.NO_EVIDENCE, "this platform makes no evidence")
        try:
            return self._service.evidence(bound)
        except EvidenceError as error:
            raise TsaRefused(RefusalReason.NO_EVIDENCE, str(error)) from None
