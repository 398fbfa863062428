"""TLS of a listener, or of the connections to other servers.

Certificates are renewed while a server runs, so the context is looked up for each new connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ssl import SSLContext
from types import MappingProxyType
from typing import Any

PeerCertificate = Mapping[str, Any]
"""What `ssl.SSLSocket.getpeercert` returns; empty if the peer has shown none."""

NO_CERTIFICATE: PeerCertificate = MappingProxyType({})


def accept_any(certificate: PeerCertificate) -> str:
    """For peers whose certificate says nothing beyond what the context checks."""
    return ""


class Tls:
    """Replace `context` to use other certificates for connections that begin later."""

    def __init__(
        self, context: SSLContext, refusal: Callable[[PeerCertificate], str] = accept_any
    ) -> None:
        """`refusal` says why a peer with this certificate is refused; empty if it is not."""
        self.context = context
        self.refusal = refusal
