"""Every error Papaya raises on purpose; the class says whose fault it is. Any other is a bug.

    PapayaError
    ├── OperatorError            the person who configured or started us; exit code 2
    │   ├── ConfigError          an impossible value: names the field, the value and the remedy
    │   ├── Diverged             numbers of a model are no longer finite: the rates are too high
    │   └── MissingBlob          the blob store lost something, or a successor deleted it
    ├── ProtocolError            the peer; the peer is answered, the server lives on; exit code 3
    │   ├── TicketError          missing, foreign, expired or forged ticket
    │   ├── HttpError            in papaya/http: a request or answer refused, with its status
    │   └── UpdateRefused        wrong size, not finite, over norm: refused and counted
    └── InvariantError           us; a checker or `check()` found a broken promise; exit code 70

`hint` is the next thing to do, ready to be pasted where that is possible. Nothing here carries a
secret: messages name ids and sizes, never keys, tickets or tokens.
"""

from __future__ import annotations

from typing import ClassVar, Literal


class PapayaError(Exception):
    """An error with help: what is wrong, with the value, and what to do next."""

    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = self.default_hint if hint is None else hint


class OperatorError(PapayaError):
    """The person who configured or started Papaya can mend this."""

    exit_code = 2


class ConfigError(OperatorError):
    """A value that cannot work."""

    @classmethod
    def of(cls, field: str, value: object, problem: str, remedy: str) -> ConfigError:
        return cls(f"{field} = {value!r}: {problem}", hint=remedy)


class Diverged(OperatorError):
    """What is learnt has left the numbers that a model can have."""

    default_hint = "lower the clients' learning rate or optimizer.rate"


class ProtocolError(PapayaError):
    """A peer sent something that the protocol does not allow."""

    exit_code = 3


class TicketError(ProtocolError):
    """A ticket that is missing, foreign, expired or forged."""

    default_hint = "check in again: this session is over"


class UpdateRefused(ProtocolError):
    """An update that must not enter the sum."""

    def __init__(
        self,
        reason: Literal[
            "wrong_size", "not_finite", "over_norm", "seed_refused", "trusted_party_lost"
        ],
        message: str,
    ) -> None:
        super().__init__(message)
        self.reason = reason


class MissingBlob(OperatorError):
    """A blob that a row named is not there."""

    default_hint = "restore the blob store from its backup, or roll the task back"


class InvariantError(PapayaError):
    """A promise of the protocol is broken: a bug in Papaya, never the peer's fault."""

    exit_code = 70
    default_hint = "this is a bug in Papaya: please report it with the seed or the log around it"
