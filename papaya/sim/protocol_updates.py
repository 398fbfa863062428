"""What simulated devices upload when no model is trained: small integers that name their session.

Sums of small integers in float32 are exact in any order, so an oracle can recompute a buffer from
its members and tell which update is missing or doubled.
"""

from __future__ import annotations

from array import array

from papaya.messages.base import SessionId

_SPAN = 17


def protocol_update(session: SessionId, length: int) -> bytes:
    """A vector of integers in −8..8 drawn from the session id, as little-endian float32."""
    return array("f", protocol_vector(session, length)).tobytes()


def protocol_vector(session: SessionId, length: int) -> list[float]:
    code = int(session[:24], 16)
    vector = []
    for _ in range(length):
        code = (code * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        vector.append(float((code >> 33) % _SPAN - _SPAN // 2))
    return vector
