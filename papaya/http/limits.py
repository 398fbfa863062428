"""Limits on every size, count and wait, for listeners and for connections between servers.

They bound what a slow, silent or greedy peer can take from the others.
"""

from __future__ import annotations

import random

import msgspec

MAX_HEADERS = 64
MAX_HEAD_BYTES = 16 << 10
MAX_TARGET_CHARS = 1024


class ListenerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one listener. Timeouts are checked once per `sweep_s`, so up to that much late."""

    max_connections: int = 20_000  # a further one is answered 503 and closed
    max_connections_per_address: int = 20_000  # IPv6: per /64
    # Places to keep free: if fewer are free, connections that have been idle for a few sweeps are
    # closed, the longest idle first.
    spare: int = 0
    max_head_bytes: int = MAX_HEAD_BYTES
    head_timeout_s: float = 10.0  # from connecting, or from the first byte of a later head
    idle_timeout_s: float = 75.0  # between exchanges
    body_timeout_s: float = 10.0  # without any byte of the body
    min_body_bytes_per_s: float = 1024.0  # on average, after the first `body_timeout_s`
    write_timeout_s: float = 20.0  # the peer reads nothing of an answer
    # It reads no more of it. Longer: a receive buffer of 6 MB takes nothing until 1/16 is free.
    answer_pause_s: float = 60.0
    min_answer_bytes_per_s: float = 1024.0  # on average, after the first `write_timeout_s`
    discard_bytes: int = 64 << 10  # a refused body up to this size is read, to keep the connection
    linger_s: float = 2.0  # how long a peer may keep sending after the last answer
    linger_bytes: int = 8 << 20
    sweep_s: float = 1.0
    # The Retry-After of a 503 is random, between one and three times these values.
    retry_after_s: int = 5  # of connections over a limit, and of relayed chunks over a limit
    retry_soon_s: float = 1.0  # of requests, mostly because another server cannot be reached


def spread(least_s: float) -> float:
    """A random delay: peers that all came back at once would be refused again."""
    return random.uniform(least_s, 3 * least_s)


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the connections to other servers, each server by itself."""

    max_peers: int = 4096  # servers with a connection
    max_connections: int = 64
    max_idle: int = 64  # connections kept for later requests; further ones are closed after use
    max_waiting: int = 256  # requests waiting for a connection; a further one fails at once
    connect_timeout_s: float = 5.0
    idle_s: float = 30.0  # a connection idle for longer is not reused
    max_response_bytes: int = 8 << 20
