"""The certificates of one process, read again when a file changes.

    devices, admin      tls_certificate; peers show none
    servers             servers_certificate, if there is one: peers must name a role that may call
    calls               the same, and the called server must name the role that was meant

Connections that begin after a change use the new certificates. Files that do not work are reported
and not used: the server continues with the old ones.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterable

from papaya.config import Deployment
from papaya.config.deployment import TLS_SCHEME, address
from papaya.credentials.tls import (
    between_servers,
    expires_at,
    explain_peer,
    mutual_contexts,
    roles_of,
    server_context,
)
from papaya.errors import OperatorError
from papaya.http.tls import PeerCertificate, Tls
from papaya.messages.events import CertificatesRead, CertificatesRefused
from papaya.server.logs import log
from papaya.tsa import endpoint

# Who calls whom; see papaya/messages/control.py and docs/spec/protocol.md.
CALLERS: dict[str, tuple[str, ...]] = {
    "coordinator": ("selector", "aggregator"),
    "selector": ("coordinator",),
    "aggregator": ("coordinator", "selector"),
    "tsa": ("aggregator",),
}


def must_be_one_of(roles: Iterable[str]) -> Callable[[PeerCertificate], str]:
    """Why a peer is refused whose certificate names none of these roles."""
    wanted = tuple(dict.fromkeys(roles))

    def refusal(certificate: PeerCertificate) -> str:
        found = roles_of(certificate)
        if not found.isdisjoint(wanted):
            return ""
        named = ", ".join(sorted(found)) or "no role"
        needed = f"{' or '.join(wanted)} is needed (URI:papaya:{wanted[0]})"
        return f"the certificate names {named}; {needed}"

    return refusal


class Certificates:
    """Of a process with these roles. `refresh` reads files that have changed."""

    def __init__(
        self, deployment: Deployment, roles: tuple[str, ...], host: str | None = None
    ) -> None:
        """`host`: at which other servers call this process; None if it is not known."""
        self._deployment = deployment
        self._host = host
        self._roles = roles
        self.doors: Tls | None = None  # of the listeners for devices and owners
        self.servers: Tls | None = None  # of the listener for other servers
        self._calls: dict[str, Tls] = {}  # by the role that is called
        self.expiry: dict[str, float] = {}  # by setting, when the certificate in use expires
        self._seen = self._look()
        self._read()

    def calls(self, role: str) -> Tls | None:
        """For calls to servers of this role."""
        return self._calls.get(role)

    def refresh(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._read()
        except OperatorError as error:
            log(CertificatesRefused(f"{error} (hint: {error.hint})"))
        except (OSError, ValueError) as error:  # a file changed while it was read
            log(CertificatesRefused(f"{error}; they are read at the next change"))
        else:
            log(CertificatesRead())

    def _read(self) -> None:
        """Nothing is changed if any of the files does not work."""
        doors = server_context(self._deployment)
        mutual = mutual_contexts(self._deployment, self._roles, self._host)
        calling = between_servers(self._deployment) if mutual is None else mutual.calling
        self.expiry = {
            name: expires_at(path)
            for name in ("tls_certificate", "servers_certificate")
            if (path := getattr(self._deployment, name)) is not None
        }
        self.doors = _renewed(self.doors, doors)
        if mutual is None:
            self.servers = self.doors if self._deployment.servers_tls else None
        else:
            callers = must_be_one_of(caller for role in self._roles for caller in CALLERS[role])
            self.servers = _renewed(self.servers, mutual.listening, callers)
        for role in CALLERS:
            named = {} if mutual is None else {"refusal": must_be_one_of((role,))}
            tls = _renewed(self._calls.get(role), calling, **named)
            if tls is not None:
                self._calls[role] = tls

    def _look(self) -> tuple[object, ...]:
        """Changes when a file does, also when a link to it is replaced."""
        found = self._deployment
        paths = (
            *(found.tls_certificate, found.tls_key, found.tls_authority),
            *(found.servers_certificate, found.servers_key, found.servers_authority),
        )
        return tuple(_stamp(path) for path in paths if path is not None)

    def dial_tsa(self, where: str, timeout_s: float) -> socket.socket:
        """A connection to a TSA, with certificates if it is on another machine."""
        if not where.startswith(TLS_SCHEME):
            return endpoint.connect(where, timeout_s)
        host, port = address("tsa", where.removeprefix(TLS_SCHEME))
        plain = socket.create_connection((host, port), timeout_s)
        tls = self._calls["tsa"]
        try:
            endpoint.tune(plain)
            stream = tls.context.wrap_socket(plain, server_hostname=host)
        except ssl.SSLError as error:
            plain.close()
            raise PermissionError(explain_peer(error)) from error
        except BaseException:
            plain.close()
            raise
        if why := tls.refusal(stream.getpeercert() or {}):
            stream.close()
            raise PermissionError(why)
        return stream


def _renewed(
    tls: Tls | None,
    context: ssl.SSLContext | None,
    refusal: Callable[[PeerCertificate], str] | None = None,
) -> Tls | None:
    """The same object, because listeners and pools keep it."""
    if context is None:
        return None
    if tls is None:
        return Tls(context) if refusal is None else Tls(context, refusal)
    tls.context = context
    return tls


def _stamp(path: str) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
