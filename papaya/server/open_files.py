"""How many connections this process can have. Each one is a file descriptor.

A server without free descriptors cannot write its state or blobs. So the limit is raised as far as
the system allows, and listeners get what is left after a reserve for stores, peers and threads.
Each listener has its own share, so devices cannot take the descriptors of the admin listener.
"""

from __future__ import annotations

import logging
import resource

from papaya.config import Deployment
from papaya.config.deployment import Role
from papaya.errors import OperatorError
from papaya.http.acceptor import MAX_REFUSED
from papaya.server.node_names import is_alone

logger = logging.getLogger("papaya.server")

RESERVED = 256  # for stores, connections to other servers, threads
LEAST = 512  # fewer are not enough for any server
LEAST_EACH = 32  # connections to each listener
PLENTY = 1 << 20  # instead of "unlimited"
PER_ADDRESS = 1_000


def raise_limit() -> int:
    """Raises the soft limit on open files to the hard one, and returns the limit now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return PLENTY
    possible = PLENTY if hard == resource.RLIM_INFINITY else hard
    if soft < possible:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
            soft = possible
        except (OSError, ValueError) as error:
            logger.info("cannot raise the limit on open files above %d: %s", soft, error)
    return soft


def listeners_of(roles: tuple[Role, ...], deployment: Deployment) -> tuple[str, ...]:
    """The listeners of a process with these roles, by the settings of their addresses.

    A selector serves devices, and so does an aggregator to which devices may upload directly.
    """
    takes_uploads = "aggregator" in roles and bool(deployment.upload_url)
    devices = ("devices",) if "selector" in roles or takes_uploads else ()
    servers = () if is_alone(roles, deployment) else ("servers",)
    return (*devices, *servers, "admin")


def shares_of(roles: tuple[Role, ...], deployment: Deployment) -> int:
    """The number of equal shares of the open files: one for each listener, and one more if a
    device's connection may need another one to an aggregator, to relay chunks or pass TLS through.
    """
    calls = not is_alone(roles, deployment) or bool(deployment.upload_routes)
    return len(listeners_of(roles, deployment)) + ("selector" in roles and calls)


def connections_within(limit: int, wanted: int, shares: int) -> int:
    """Connections for each listener. One more share is for files that are being downloaded.

    `shares`: see `shares_of`. A listener has up to MAX_REFUSED further connections, which it
    answers with 503.
    """
    if limit < (least := least_files(shares)):
        raise OperatorError(
            f"this process may open {limit} files, but it needs {least}",
            hint="ulimit -n 65536, or LimitNOFILE=65536 in its systemd unit",
        )
    return min(wanted, (limit - RESERVED - shares * MAX_REFUSED) // (shares + 1))


def least_files(shares: int) -> int:
    """The lowest limit on open files with which a process starts."""
    return max(LEAST, RESERVED + shares * MAX_REFUSED + (shares + 1) * LEAST_EACH)


def connections_of_one_address(places: int) -> int:
    """Unless an operator says how many: with those being refused, at most half of all places.

    An address at this limit takes at most a third of the other places with connections that are
    being refused (`papaya/http/acceptor.py`).
    """
    return max(1, min(PER_ADDRESS, places // 4))
