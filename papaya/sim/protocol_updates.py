"""What simulated devices upload when no model is trained: small integers that name their session,
as an update or as the vector of an evaluation.

Sums of small integers in float32 are exact in any order, so an oracle can recompute a buffer from
its members and tell which update is missing or doubled.
"""

from __future__ import annotations

from array import array

from papaya.learning.evaluation import BUCKETS, EVALUATION_LENGTH, LOSS_UNIT, evaluation_vector
from papaya.learning.parameters import Vector
from papaya.messages.base import SessionId

SHORT_EVALUATION_LENGTH = 2 * EVALUATION_LENGTH // len(BUCKETS)
"""The first two buckets, which hold all that simulated devices upload. The vector is short because
a swarm sends some uploads in chunks of two numbers."""
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


def protocol_evaluation(session: SessionId, length: int) -> Vector:
    """An evaluation of 1 to 8 examples drawn from the session id, in one of the first buckets."""
    code = int(session[:24], 16)
    code, volume = divmod(code, 4)
    code, examples = divmod(code, 8)
    # Below 2^24 units per example, so that the mean loss is below 1.
    return evaluation_vector(volume, code % 2**24 * LOSS_UNIT, 1 + examples)[:length]
