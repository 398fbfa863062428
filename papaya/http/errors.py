"""The errors of this package, which does not depend on Papaya: its users translate them.

HttpError            peer at fault: a refused request or response, with a status
└── PeerUnavailable  another server is unreachable, busy, or did not answer in time
ListenError          operator at fault: cannot listen on this address
MisuseError          the program that uses this package, or the package, has a bug
"""

from __future__ import annotations


class HttpError(Exception):
    """A refused request or response, with the HTTP status that tells the reason."""

    def __init__(
        self, status: int, message: str, *, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class PeerUnavailable(HttpError):
    """Another server is unreachable, busy, or did not answer in time."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message)


class ListenError(Exception):
    """Cannot listen on `host` and `port`. `is_in_use`: another program uses the port."""

    def __init__(self, host: str, port: int, reason: str, *, is_in_use: bool) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}")
        self.is_in_use = is_in_use


class MisuseError(Exception):
    """A bug in the program that uses this package, or in the package."""
