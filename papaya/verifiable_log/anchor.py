"""A record that anchors the head of an audit trail: its number and its digest.

The log and its witnesses then prove when this head existed: rows of the trail up to it cannot be
changed later without contradicting the log. An anchor names no TSA binary, so no device accepts
anything because of it. It is canonical JSON, like a release.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.record import Record

FORMAT = "papaya-audit-head/v1"
_ENCODED = re.compile(
    rb'\{"digest":"([0-9a-f]{64})","format":"papaya-audit-head/v1","number":([1-9][0-9]{0,15})\}'
)


@dataclass(frozen=True)
class AuditAnchor:
    """`digest` is lower-case hex."""

    number: int
    digest: str

    def __post_init__(self) -> None:
        if _ENCODED.fullmatch(self.encode()) is None:
            raise LogError("an anchor needs a number of 1 or more and a digest of 32 bytes in hex")

    def encode(self) -> bytes:
        fields = {"digest": self.digest, "format": FORMAT, "number": self.number}
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> AuditAnchor:
        found = _ENCODED.fullmatch(raw)
        if found is None:
            raise LogError(f"not an anchor of the format {FORMAT}")
        return cls(int(found[2]), found[1].decode())


def decode_entry(raw: bytes) -> Record | AuditAnchor:
    """What an entry of a log says."""
    return AuditAnchor.decode(raw) if _ENCODED.fullmatch(raw) else Record.decode(raw)
