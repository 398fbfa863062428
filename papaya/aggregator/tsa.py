"""Adapts the interface of the TSA (papaya/tsa) to what an aggregator needs.

If the TSA does not know an index, a group or parameters that it should know, it was restarted, and
the seeds that it had accepted before are lost. If it does not answer, it is unreachable: it may
have the seeds, and a call may have reached it, so the same call is made again later. If it already
has a seed, that is not an error. Any other refusal is the client's fault and is passed on to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from papaya.aggregator.masked_sum import LOST, TsaError
from papaya.aggregator.work import FAILED, UNREACHABLE, StockedOffer
from papaya.messages.participation import SecureOffer
from papaya.secagg import offer as secagg
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.unmask import TakeBlock
from papaya.tsa.errors import RefusalReason, TsaRefused, Unavailable

_UNKNOWN = (
    RefusalReason.UNKNOWN_INDEX,
    RefusalReason.UNKNOWN_PARAMETERS,
    RefusalReason.UNKNOWN_GROUP,
    RefusalReason.NOT_A_MEMBER,
)


class TsaCalls(Protocol):
    """The TSA's own interface: `TsaClient` in a server, the TSA object itself in a simulation."""

    @property
    def identity_public_key(self) -> bytes: ...

    def register(self, parameters: PublicParameters) -> bytes: ...

    def offers(self, parameters_hash: bytes, count: int) -> list[secagg.Offer]: ...

    def accept(self, index: int, group: int, sealed: bytes) -> None: ...

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None: ...

    def open_groups(self, parameters_hash: bytes) -> Sequence[int]: ...

    def drop(self, parameters_hash: bytes, group: int) -> int: ...

    def forget(self, parameters_hash: bytes) -> object: ...


class TsaEvidence(NamedTuple):
    """What convinces a device that the TSA is genuine."""

    platform: str
    quote: bytes
    collateral: bytes
    leaf: int


Prove = Callable[[bytes], TsaEvidence]
"""Returns the evidence for a task's parameters, given their hash."""


class TsaAdapter:
    """Registers parameters when they are first used, and turns refusals into TsaError."""

    def __init__(self, tsa: TsaCalls, prove: Prove) -> None:
        self._tsa = tsa
        self._prove = prove

    def offers(
        self, parameters: PublicParameters, count: int
    ) -> tuple[tuple[StockedOffer, ...], SecureOffer]:
        with _translated():
            identity = self._tsa.identity_public_key
            digest = self._tsa.register(parameters)
            made = self._tsa.offers(digest, count)
            evidence = self._prove(digest)
            if self._tsa.identity_public_key != identity:
                raise TsaError(LOST, "the TSA was restarted during the request")
        offers = tuple(StockedOffer(o.index, float(o.expires), o.encode()) for o in made)
        return offers, SecureOffer(
            parameters=parameters.encode(),
            offer=b"",
            identity=identity,
            platform=evidence.platform,
            evidence=evidence.quote,
            collateral=evidence.collateral,
            leaf=evidence.leaf,
        )

    def accept(self, parameters: PublicParameters, index: int, group: int, sealed: bytes) -> None:
        with _translated():
            try:
                self._tsa.accept(index, group, sealed)
            except TsaRefused as refused:
                if refused.reason is RefusalReason.TOO_MANY_GROUPS:
                    self._drop_abandoned(parameters.digest(), group)
                    self._tsa.accept(index, group, sealed)
                elif refused.reason is not RefusalReason.REPLAYED:
                    raise

    def _drop_abandoned(self, parameters_hash: bytes, group: int) -> None:
        """Groups stay open when their buffers are given up, as in a roll-back.

        A group is the version that its buffer becomes, and at most two buffers are open.
        """
        for number in self._tsa.open_groups(parameters_hash):
            if number < group - 1:
                self._tsa.drop(parameters_hash, number)

    def reach(self, parameters: PublicParameters) -> None:
        with _translated():
            _ = self._tsa.identity_public_key  # connects if there is no connection

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        with _translated(FAILED):  # it may still have the seeds: try again
            self._tsa.release(parameters, group, members, take)

    def forget(self, parameters: PublicParameters) -> None:
        with suppress(TsaRefused, Unavailable, TsaError):  # a restarted TSA does not know the task
            self._tsa.forget(parameters.digest())


class _translated:
    """Translates errors of the TSA into TsaError. `failed` is the reason for an internal error."""

    def __init__(self, failed: str = "refused_internal") -> None:
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Unavailable):
            raise TsaError(UNREACHABLE, str(error)) from error
        if isinstance(error, TsaRefused):
            reason = f"refused_{error.reason.name.lower()}"
            if error.reason in _UNKNOWN:
                reason = LOST
            elif error.reason is RefusalReason.INTERNAL:
                reason = self._failed
            message = str(error)
            if error.reason is RefusalReason.PARAMETERS:
                message = (
                    f"the TSA refuses the parameters of this task: {message}; if it runs an "
                    "earlier version, upgrade it"
                )
            raise TsaError(reason, message, error.group) from error
