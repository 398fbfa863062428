"""The limits of a listener and of connections between servers: on every size, number and wait.

They keep one slow, silent or greedy peer from costing the others anything that grows.
"""

from __future__ import annotations

import msgspec

MAX_HEADERS = 64
MAX_HEAD_BYTES = 16 << 10
MAX_TARGET_CHARS = 1024


class ListenerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one listener. Times are judged once per `sweep_s`, so they are late by up to that."""

    max_connections: int = 20_000  # one more is answered 503 and closed
    max_head_bytes: int = MAX_HEAD_BYTES
    head_timeout_s: float = 10.0  # from connecting, or from the first byte of a later head
    idle_timeout_s: float = 75.0  # between exchanges
    body_timeout_s: float = 10.0  # without a single byte of the body
    min_body_bytes_per_s: float = 1024.0  # on average, after the first `body_timeout_s`
    write_timeout_s: float = 20.0  # the peer takes nothing of an answer
    discard_bytes: int = 64 << 10  # a refused body up to this is read, to keep the connection
    linger_s: float = 2.0  # how long a peer may go on sending after a closing answer
    linger_bytes: int = 8 << 20
    sweep_s: float = 1.0
    retry_after_s: int = 5  # told to those who are turned away


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the connections to each single server."""

    max_peers: int = 4096  # servers that there are connections to
    max_connections: int = 64
    max_waiting: int = 256  # requests that wait for a connection; one more is refused at once
    connect_timeout_s: float = 5.0
    idle_s: float = 30.0  # a connection unused for longer is not used again
    max_response_bytes: int = 8 << 20
