"""The audit trail: one row for each change that a person made or tried to make.

    attempt ──▶ AuditRow(number, previous digest, …) ──▶ AuditHeadRow(number, digest)

The row of a change is written in the transaction of the change, so neither exists without the
other. A refused attempt has a row of its own. Each row contains the digest of the one before it,
and the head the digest of the last one: whoever knows a digest notices every later change to the
rows up to it. `verify` checks a chain; it raises AuditError at the first row that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import msgspec
from msgspec import Struct, structs

from papaya.errors import OperatorError
from papaya.messages.storage import Row, Transaction

AUDIT_HEAD_KEY = "audit-head"
AUDIT_START_KEY = "audit-start"
DONE = "done"
FIRST_DIGEST = bytes(32)  # the `previous` of row 1
ROWS_PER_PAGE = 1000
_LABEL = b"papaya audit trail 1\n"
_MAX_TEXT = 1000


class AuditError(OperatorError):
    """The audit trail was changed: a row is missing, was added or differs."""


class Attempt(Struct, frozen=True, gc=False):
    """What somebody asked for: who, what, and why.

    `actor` is the name of the token. `target` is the task, device or key that it is about.
    `details` is JSON, with digests in place of long values. No field contains a secret.
    """

    actor: str
    action: str
    target: str = ""
    details: str = "{}"
    why: str = ""


class AuditRow(Row, frozen=True):
    """An attempt and its result: `done`, or the reason for which it was refused."""

    number: int
    at: float
    attempt: Attempt
    result: str
    previous: bytes

    @property
    def digest(self) -> bytes:
        """Over one encoding: the fields in this order as JSON."""
        by = self.attempt
        attempt = (by.actor, by.action, by.target, by.details, by.why)
        fields = (self.number, self.at, *attempt, self.result, self.previous.hex())
        return sha256(_LABEL + msgspec.json.encode(fields)).digest()


class AuditHeadRow(Row, frozen=True):
    """The number and the digest of the newest row."""

    number: int = 0
    digest: bytes = FIRST_DIGEST


class AuditStartRow(Row, frozen=True):
    """The number and the digest of the last row that was exported and deleted."""

    number: int = 0
    digest: bytes = FIRST_DIGEST


def audit_key(number: int) -> str:
    return f"audit/{number:012d}"


def page_prefix(number: int) -> str:
    """The rows of a whole page of numbers, among them this one."""
    return audit_key(number)[:-3]


def recorded(
    change: Transaction, head: AuditHeadRow | None, attempt: Attempt, now: float, result: str
) -> Transaction:
    """The change with its row in the trail. Refused if `head` is not the newest row any more."""
    last = AuditHeadRow() if head is None else head
    texts = {name: _on_one_line(text) for name, text in structs.asdict(attempt).items()}
    attempt = structs.replace(attempt, **texts)
    row = AuditRow(last.number + 1, float(now), attempt, _on_one_line(result), last.digest)
    return Transaction(
        require=(*change.require, (AUDIT_HEAD_KEY, head)),
        put=(
            *change.put,
            (audit_key(row.number), row),
            (AUDIT_HEAD_KEY, AuditHeadRow(row.number, row.digest)),
        ),
        delete=change.delete,
    )


def _on_one_line(text: str) -> str:
    """Bounded, and printable as it is: a reader must not change what was hashed."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_TEXT])


def verify(rows: Iterable[AuditRow], number: int, digest: bytes) -> tuple[int, bytes]:
    """Check that these rows follow row `number` with this digest; return those of the last."""
    for row in rows:
        if row.number != number + 1:
            raise AuditError(
                f"row {number + 1} of the audit trail is missing: row {row.number} follows",
                hint="compare with an earlier export: papaya audit-trail check FILE",
            )
        if row.previous != digest:
            raise AuditError(
                f"the audit trail was changed at row {number} or before: row {row.number} does "
                "not follow from it",
                hint="compare with an earlier export: papaya audit-trail check FILE",
            )
        number, digest = row.number, row.digest
    return number, digest
