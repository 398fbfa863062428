"""Every error that Papaya raises on purpose; the class says who is at fault.

    PapayaError
    ├── OperatorError            whoever configured or started Papaya; exit code 2
    │   ├── CannotCompile        training steps of this model or machine cannot be compiled
    │   ├── ConfigError          an invalid value, with its field, the problem and a remedy
    │   ├── Diverged             the model is no longer finite: the learning rates are too high
    │   ├── LostHistory          rows that were committed are gone: nothing may go on
    │   ├── MissingBlob          a blob was lost, or deleted by the next holder of its task
    │   └── StateUnreachable     no connection to the state store; nothing was sent to it
    ├── ProtocolError            the peer; it gets an answer and the server goes on; exit code 3
    │   ├── TicketError          a missing, foreign, expired or forged ticket
    │   └── UpdateRefused        an update of the wrong size, not finite, or over the norm bound
    └── InvariantError           Papaya itself: an invariant is broken; exit code 70

Any other exception is a bug. `hint` says what to do next, as a command where possible. Messages
name ids and sizes, never keys, tickets or tokens.
"""

from __future__ import annotations

from typing import ClassVar, Literal


class PapayaError(Exception):
    """What is wrong, with the value, and a hint on what to do next."""

    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = self.default_hint if hint is None else hint
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # tracebacks show it, as in a notebook


class OperatorError(PapayaError):
    """Whoever configured or started Papaya can fix this."""

    exit_code = 2


class ConfigError(OperatorError):
    """A value that cannot work."""

    @classmethod
    def of(cls, field: str, value: object, problem: str, remedy: str) -> ConfigError:
        return cls(f"{field} = {value!r}: {problem}", hint=remedy)


class Diverged(OperatorError):
    """Training produced numbers that are not finite."""

    default_hint = "lower the clients' learning rate or optimizer.rate"


class CannotCompile(OperatorError):
    """A loss, a machine or a compiler with which training steps cannot be compiled."""

    default_hint = "use --steps eager, which trains with PyTorch's own operators"


class LostHistory(OperatorError):
    """Rows that were committed are gone, so what was acknowledged may be lost."""

    default_hint = (
        "a backup was restored, or a replica that lacked the last commits was promoted; see "
        "docs/run-on-many-machines.md, lost history"
    )


class StateUnreachable(OperatorError):
    """There is no connection to the state store. Nothing was sent, so it may be tried again."""


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
    """An invariant is broken: a bug in Papaya, never the peer's fault."""

    exit_code = 70
    default_hint = "this is a bug in Papaya: please report it with the seed or the log around it"
