"""TLS: for devices and owners by `tls_certificate`, between roles by `servers_certificate`.

Without `tls_certificate` connections are not encrypted, which is meant for one machine, or behind a
proxy that terminates TLS. Servers and the command line verify the certificates of servers that they
call, against `tls_authority` or the system's roots. Keys with a passphrase are refused, because a
server cannot ask for it.

With `servers_certificate` both sides of a connection between roles show a certificate, signed by
an authority of the operator's own. A certificate names the roles that its holder may have, by URIs
such as `papaya:aggregator` among its alternative names, and the host names or addresses at which
others call it.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from papaya.config.deployment import Deployment
from papaya.errors import OperatorError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

logger = logging.getLogger("papaya.server")

_SOON = timedelta(days=14)
_PROTOCOLS = ("http/1.1",)
_ROLE_SCHEME = "papaya:"
_WRONG_NAME = (62, 64)  # OpenSSL's codes for names and addresses
_EXPLAINED = (9, 10, *_WRONG_NAME)  # and for dates
# How OpenSSL calls an answer that is not TLS.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")

CLOSED_HINT = (
    "check that the server runs; if a load balancer is in front of it, or a selector with "
    "upload_routes, check its log: the server must list it in proxies if and only if it sends the "
    "PROXY protocol"
)
AUTHORITY_HINT = "pass the PEM file of the certificate authority: --ca FILE"


def server_context(deployment: Deployment) -> ssl.SSLContext | None:
    """The context of the listeners for devices and owners; None without TLS."""
    if deployment.tls_certificate is None or deployment.tls_key is None:
        return None
    own = _OwnFiles("tls", deployment.tls_certificate, deployment.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # In TLS 1.2 a peer could make us repeat the expensive part of the handshake.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(_PROTOCOLS)
    own.load(context)
    own.check_dates()
    return context


class MutualContexts(NamedTuple):
    """Both sides of the connections between roles."""

    listening: ssl.SSLContext
    calling: ssl.SSLContext


def mutual_contexts(
    deployment: Deployment, roles: Sequence[str], host: str | None = None
) -> MutualContexts | None:
    """Contexts that show our certificate and require one of `servers_authority`; None without.

    `host`: at which others call this server; None if it is not known here.
    Refused: a certificate that is not valid now, that does not name all of `roles` and `host`, or
    that other servers with the same settings would refuse.
    """
    if not deployment.has_mutual_tls:
        return None
    certificate, key = str(deployment.servers_certificate), str(deployment.servers_key)
    authority = str(deployment.servers_authority)
    _require_readable("servers_authority", authority)
    own = _OwnFiles("servers", certificate, key)
    made = MutualContexts(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    )
    for context in made:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(_PROTOCOLS)
        own.load(context)
        _load_authority(context, authority)
    own.check_dates()
    own.check_roles(roles)
    _check_together(made, certificate, authority, host)
    return made


def roles_of(certificate: Mapping[str, Any]) -> frozenset[str]:
    """The roles that a peer's certificate names, each by a URI `papaya:ROLE`."""
    names = certificate.get("subjectAltName", ())
    return _roles(value for kind, value in names if kind == "URI")


def _roles(uris: Iterable[str]) -> frozenset[str]:
    found = (uri for uri in uris if uri.startswith(_ROLE_SCHEME))
    return frozenset(uri.removeprefix(_ROLE_SCHEME) for uri in found)


def expires_at(path: str) -> float:
    """Unix time at which the first certificate of a PEM file expires."""
    return _first_of(path).not_valid_after_utc.timestamp()


def unnamed_host(deployment: Deployment, host: str | None) -> str:
    """Why other servers cannot call this one at `host`; empty if its certificate names the host.

    Without certificates between roles, servers show each other their `tls_certificate`.
    """
    path = deployment.tls_certificate
    is_shown = path is not None and deployment.servers_tls and not deployment.has_mutual_tls
    if host is None or path is None or not is_shown or _names(path, host):
        return ""
    return f"tls_certificate {path} does not name {host}, where other servers call this one"


UNNAMED_HINT = (
    "issue it with that host too, or set servers_certificate, servers_key and servers_authority"
)


def _names(path: str, host: str) -> bool:
    from cryptography.x509 import DNSName, ExtensionNotFound, IPAddress, SubjectAlternativeName

    try:
        found = _first_of(path).extensions.get_extension_for_class(SubjectAlternativeName).value
    except ExtensionNotFound:
        return False
    try:
        return ip_address(host) in found.get_values_for_type(IPAddress)
    except ValueError:
        names = {name.lower() for name in found.get_values_for_type(DNSName)}
        return not names.isdisjoint((host.lower(), f"*.{host.lower().partition('.')[2]}"))


def _first_of(path: str) -> Certificate:
    from cryptography.x509 import load_pem_x509_certificates  # commands start faster without

    with open(path, "rb") as file:
        return load_pem_x509_certificates(file.read())[0]


class _OwnFiles:
    """A certificate chain and its key, by the names of their settings."""

    def __init__(self, prefix: str, certificate: str, key: str) -> None:
        self._prefix = prefix
        self._certificate = certificate
        self._key = key
        _require_readable(f"{prefix}_certificate", certificate)
        _require_readable(f"{prefix}_key", key)

    def load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_passphrase)
        except (ssl.SSLError, ValueError) as error:
            raise OperatorError(
                f"{self._prefix}_certificate {self._certificate} and "
                f"{self._prefix}_key {self._key} do not work: {_reason(error)}",
                hint="check that both files are PEM, that the key matches the first certificate, "
                f"and that the key has no passphrase: openssl pkey -in {self._key} -noout",
            ) from error

    def check_dates(self) -> None:
        """An expired certificate would only show as failed handshakes on every peer."""
        name = f"{self._prefix}_certificate {self._certificate}"
        found, now = _first_of(self._certificate), datetime.now(UTC)
        begins, ends = found.not_valid_before_utc, found.not_valid_after_utc
        if ends <= now:
            raise OperatorError(
                f"{name} expired at {ends:%Y-%m-%d %H:%M} UTC",
                hint="renew it, then start the server again",
            )
        if begins > now:
            raise OperatorError(
                f"{name} is not valid before {begins:%Y-%m-%d %H:%M} UTC",
                hint="check the clock of this machine: date",
            )
        if ends - now < _SOON:
            logger.warning("%s expires at %s UTC: renew it", name, f"{ends:%Y-%m-%d}")

    def check_roles(self, roles: Sequence[str]) -> None:
        from cryptography.x509 import (
            ExtensionNotFound,
            SubjectAlternativeName,
            UniformResourceIdentifier,
        )

        try:
            found = _first_of(self._certificate).extensions
            names = found.get_extension_for_class(SubjectAlternativeName).value
            named = _roles(names.get_values_for_type(UniformResourceIdentifier))
        except ExtensionNotFound:
            named = frozenset()
        if missing := [role for role in roles if role not in named]:
            raise OperatorError(
                f"{self._prefix}_certificate {self._certificate} does not name the role "
                f"{' and '.join(missing)}; it names {', '.join(sorted(named)) or 'none'}",
                hint=f"issue it with the subjectAltName URI:{_ROLE_SCHEME}{missing[0]}",
            )


def _load_authority(context: ssl.SSLContext, authority: str) -> None:
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        raise OperatorError(
            f"servers_authority {authority} does not work: {_reason(error)}",
            hint="use a PEM file with the certificates that signed servers_certificate",
        ) from error


def _check_together(
    made: MutualContexts, certificate: str, authority: str, host: str | None
) -> None:
    """A handshake with ourselves: other servers check the same."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    made.calling.check_hostname = host is not None
    sides = (
        made.calling.wrap_bio(to_client, to_server, server_hostname=host),
        made.listening.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for side in 2 * sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        if getattr(error, "verify_code", 0) in _WRONG_NAME:
            raise OperatorError(
                f"servers_certificate {certificate} is not for {host}, where others call this "
                f"server: {getattr(error, 'verify_message', '')}",
                hint="issue it with that host in its subjectAltName (DNS:name or IP:address), or "
                "set announce to a host that it has",
            ) from error
        raise OperatorError(
            f"servers_certificate {certificate} is refused by servers_authority {authority}: "
            f"{getattr(error, 'verify_message', '') or _reason(error)}",
            hint="let that authority sign it, for servers and for clients (extendedKeyUsage "
            "serverAuth and clientAuth, or none)",
        ) from error
    finally:
        made.calling.check_hostname = True


def client_context(authority: str | None = None) -> ssl.SSLContext:
    """The context for calls to servers; it always checks name and certificate."""
    if authority is not None:
        _require_readable("tls_authority", authority)
    try:
        context = ssl.create_default_context(cafile=authority)
    except ssl.SSLError as error:
        raise OperatorError(
            f"tls_authority {authority} does not work: {_reason(error)}",
            hint="use a PEM file with the certificates that signed tls_certificate",
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_PROTOCOLS)
    return context


def between_servers(deployment: Deployment) -> ssl.SSLContext | None:
    """The context for calls to servers of the same installation; None without TLS."""
    if deployment.tls_certificate is None or not deployment.servers_tls:
        return None
    return client_context(deployment.tls_authority)


def _require_readable(field: str, path: str) -> None:
    """Check a file here, because OpenSSL does not say which file is missing."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise IsADirectoryError(errno.EISDIR, "it is not a file")
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        raise OperatorError(
            f"{field}: cannot read {path}: {error.strerror}",
            hint="paths are relative to the configuration file; check that the user who "
            "runs papaya can read the file",
        ) from error


def _no_passphrase() -> str:
    raise ValueError("the key needs a passphrase")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


def explain(error: Exception, url: str) -> tuple[str, str]:
    """Why a connection to `url` failed, and a hint; the hint is empty if there is none to give."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_certificate(error)
    if isinstance(error, ssl.SSLError):
        if error.reason in _NOT_TLS:
            return "the server does not use TLS there", f"use http: {_with_scheme(url, 'http')}"
        return _reason(error), ""
    if isinstance(error, socket.gaierror):
        return f"unknown host {urlsplit(url).hostname}", "check the host name in the address"
    problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if url.startswith("http://") and _is_broken_answer(error):
        return problem, f"if the server uses TLS: {_with_scheme(url, 'https')}"
    return problem, ""


def _is_broken_answer(error: Exception) -> bool:
    """What plain HTTP gets from a TLS listener: an alert instead of an answer, or a close."""
    if isinstance(error, OSError):
        return isinstance(error, ConnectionResetError) or error.errno == errno.ECONNRESET
    return True


def _explain_certificate(error: ssl.SSLCertVerificationError) -> tuple[str, str]:
    match error.verify_code:
        case 9:
            return "its certificate is not valid yet", "check the clock of this machine: date"
        case 10:
            return (
                "its certificate has expired",
                "renew the certificate of the server; or check the clock of this machine: date",
            )
        case code if code in _WRONG_NAME:
            return (
                f"its certificate is for another name: {error.verify_message.rstrip('.')}",
                "use one of the names in it; load balancers and upload_routes must know it",
            )
    return (
        f"its certificate is not trusted: {error.verify_message}",
        AUTHORITY_HINT,
    )


def explain_connecting(error: Exception, url: str) -> tuple[str, str]:
    """Like `explain`, for an error from before the first request."""
    is_closed = isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError)
    if is_closed and url.startswith("https://"):
        return "it closed the connection during the TLS handshake", CLOSED_HINT
    return explain(error, url)


def is_of_another_name(error: BaseException | None) -> bool:
    """Was a certificate refused only because it does not name the host?"""
    return isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _WRONG_NAME


def explain_peer(error: ssl.SSLError) -> str:
    """Why a connection to another server of this installation failed, with a hint."""
    if isinstance(error, ssl.SSLCertVerificationError):
        problem, hint = _explain_certificate(error)
        if error.verify_code not in _EXPLAINED:
            hint = "both servers need the same servers_authority"
        elif error.verify_code in _WRONG_NAME:
            hint = "the certificate of that server must name the host of its announce or servers"
        return f"{problem} (hint: {hint})"
    if error.reason in _NOT_TLS:
        return "it does not use TLS (hint: give it a servers_certificate too)"
    if "ALERT" in (error.reason or ""):
        return (
            f"it refuses our certificate: {error.reason} (hint: check its dates, and that both "
            "servers have the same servers_authority)"
        )
    return _reason(error)


def _with_scheme(url: str, scheme: str) -> str:
    return f"{scheme}://{url.partition('://')[2]}"
