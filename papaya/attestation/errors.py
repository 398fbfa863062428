"""The one error of this package: a TSA that the device does not believe."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from papaya.errors import ProtocolError

AttestationReason: TypeAlias = Literal[
    "platform", "quote", "debug", "log", "measurement", "report_data"
]


class AttestationError(ProtocolError):
    """The first check that failed, in `reason`; nothing was masked.

    platform       this device does not take evidence of that kind
    quote          malformed, not under the vendor's root, expired, revoked, or a bad TCB status
    debug          the host can read the enclave
    log            the log cannot be read, was rolled back, forked, or lacks witnesses
    measurement    another binary than the record of the log says
    report_data    another identity key, or other parameters, than the server says
    """

    default_hint: ClassVar[str] = (
        "the device does not take part; the operator of the server must provide valid evidence"
    )

    def __init__(self, reason: AttestationReason, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
