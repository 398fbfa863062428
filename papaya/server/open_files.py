"""The number of connections that fit into this process's limit on open files.

A server without free file descriptors cannot commit, while its connections stay open. So the limit
is raised as far as the system allows, and a part of it is reserved for stores, peers and threads.
"""

from __future__ import annotations

import logging
import resource

from papaya.errors import OperatorError

logger = logging.getLogger("papaya.server")

RESERVED = 256
LEAST = 512
PLENTY = 1 << 20


def raise_limit() -> int:
    """Raise the soft limit on open files to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return PLENTY
    possible = PLENTY if hard == resource.RLIM_INFINITY else hard
    if soft < possible:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
            soft = possible
        except (OSError, ValueError) as error:
            logger.info("the limit on open files stays at %d: %s", soft, error)
    return soft


def connections_within(limit: int, wanted: int, listeners: int) -> int:
    """Connections for each listener. One more share is for files that are being downloaded."""
    if limit < LEAST:
        raise OperatorError(
            f"this process may open {limit} files, a server needs {LEAST}",
            hint="set ulimit -n 65536, or LimitNOFILE=65536 in its systemd unit",
        )
    return min(wanted, (limit - RESERVED) // (listeners + 1))
