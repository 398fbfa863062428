"""How many connections this process can have: each is an open file, and so is much else.

A server that runs out of open files stops committing, which needs files too, while those who took
them stay connected. So the limit is raised as far as the system allows, and listeners are kept
below what is left after stores, peers and threads have theirs.
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
    """Raises the soft limit on open files to the hard one. The limit that now holds."""
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
    """Connections for each listener. A further share is for files that are being downloaded."""
    if limit < LEAST:
        raise OperatorError(
            f"this process may open {limit} files, a server needs {LEAST}",
            hint="ulimit -n 65536, or LimitNOFILE=65536 in its systemd unit",
        )
    return min(wanted, (limit - RESERVED) // (listeners + 1))
