"""The errors of this package. It knows nothing about Papaya: its users translate them.

HttpError            the peer: a request or response that is refused, with its status
└── PeerUnavailable  another server cannot be reached, is busy, or did not answer in time
ListenError          the operator: this address cannot be listened on
MisuseError          the program that uses this package broke one of its rules
"""

from __future__ import annotations


class HttpError(Exception):
    """A request or response that is refused, with the status that says so."""

    def __init__(
        self, status: int, message: str, *, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class PeerUnavailable(HttpError):
    """Another server cannot be reached, is busy, or did not answer in time."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message)


class ListenError(Exception):
    """`host` and `port` cannot be listened on; `is_in_use` if another program has the port."""

    def __init__(self, host: str, port: int, reason: str, *, is_in_use: bool) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}")
        self.is_in_use = is_in_use


class MisuseError(Exception):
    """A bug in the program that uses this package, or in the package."""
