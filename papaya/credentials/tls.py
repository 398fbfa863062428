"""TLS 1.2 or later, configured by `tls_certificate` and `tls_key`.

Without them connections are not encrypted, which is meant for one machine, or behind a proxy that
terminates TLS. Servers and the command line verify the certificates of servers that they call,
against `tls_authority` or the system's roots. Keys with a passphrase are refused, because a server
cannot ask for it. Certificates are read at the start only.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import stat
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

from papaya.config.deployment import Deployment
from papaya.errors import OperatorError

logger = logging.getLogger("papaya.server")

_SOON = timedelta(days=14)
_PROTOCOLS = ("http/1.1",)
# How OpenSSL calls an answer that is not TLS.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


def server_context(deployment: Deployment) -> ssl.SSLContext | None:
    """The context of every listener; None without TLS."""
    certificate, key = deployment.tls_certificate, deployment.tls_key
    if certificate is None or key is None:
        return None
    _require_readable("tls_certificate", certificate)
    _require_readable("tls_key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_PROTOCOLS)
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise OperatorError(
            f"tls_certificate {certificate} and tls_key {key} do not work: {_reason(error)}",
            hint="check that both files are PEM, that the key matches the first certificate, "
            f"and that the key has no passphrase: openssl pkey -in {key} -noout",
        ) from error
    _check_dates(certificate)
    return context


def certificate_ends(path: str) -> datetime:
    """When the first certificate in a PEM file expires."""
    from cryptography.x509 import load_pem_x509_certificates  # servers only: commands start faster

    with open(path, "rb") as file:
        return load_pem_x509_certificates(file.read())[0].not_valid_after_utc


def _check_dates(path: str) -> None:
    """Refuse an expired certificate: otherwise devices only see failed handshakes."""
    ends, now = certificate_ends(path), datetime.now(UTC)
    if ends <= now:
        raise OperatorError(
            f"tls_certificate {path} expired at {ends:%Y-%m-%d %H:%M} UTC",
            hint="renew it, then start the server again",
        )
    if ends - now < _SOON:
        logger.warning("tls_certificate %s expires at %s UTC: renew it", path, f"{ends:%Y-%m-%d}")


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
    if deployment.tls_certificate is None:
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
        case 62 | 64:
            return (
                f"its certificate is for another name: {error.verify_message}",
                "use one of the names that the certificate has, or another certificate",
            )
    return (
        f"its certificate is not trusted: {error.verify_message}",
        "pass the PEM file of the certificate authority: --ca FILE",
    )


def _with_scheme(url: str, scheme: str) -> str:
    return f"{scheme}://{url.partition('://')[2]}"
