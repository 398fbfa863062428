"""An authority of the test's own and certificates that it signs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from papaya.config import Deployment

_LIFE = timedelta(days=100)


class Certificates(NamedTuple):
    authority: Path
    certificate: Path
    key: Path

    def servers(self) -> dict[str, str]:
        """The settings of a server that shows this certificate to other servers."""
        return {
            "servers_authority": str(self.authority),
            "servers_certificate": str(self.certificate),
            "servers_key": str(self.key),
        }

    def listeners(self) -> dict[str, str]:
        """The settings of a server that shows this certificate to devices and operators."""
        return {
            "tls_authority": str(self.authority),
            "tls_certificate": str(self.certificate),
            "tls_key": str(self.key),
        }

    def deployment(self) -> Deployment:
        return Deployment(
            servers_authority=str(self.authority),
            servers_certificate=str(self.certificate),
            servers_key=str(self.key),
        )


class Authority:
    """Signs certificates into files of `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.file = folder / f"{name}.pem"
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = generate_private_key(SECP256R1())
        made = self._builder(self._name, self._key, timedelta(0)).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self._write(self.file, made)

    def issue(
        self,
        name: str,
        roles: Sequence[str] = (),
        hosts: Sequence[str] = ("127.0.0.1", "localhost"),
        age: timedelta = timedelta(0),
    ) -> Certificates:
        """A certificate and its key. One of more than `_LIFE` of age has expired."""
        key = generate_private_key(SECP256R1())
        made = Certificates(self.file, self.folder / f"{name}.pem", self.folder / f"{name}.key")
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [_host(host) for host in hosts]
        names += [x509.UniformResourceIdentifier(f"papaya:{role}") for role in roles]
        builder = self._builder(subject, key, age).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        made.key.write_bytes(private)
        self._write(made.certificate, builder)
        return made

    def _builder(
        self, subject: x509.Name, key: EllipticCurvePrivateKey, age: timedelta
    ) -> x509.CertificateBuilder:
        begins = datetime.now(UTC) - age - timedelta(hours=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(begins + _LIFE)
        )

    def _write(self, path: Path, builder: x509.CertificateBuilder) -> None:
        """At once: a server that looks at the file finds all of it."""
        fresh = path.with_suffix(".new")
        fresh.write_bytes(builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
        fresh.replace(path)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def make_certificates(folder: Path) -> Certificates:
    """A certificate for this machine that names no role."""
    return Authority(folder).issue("server")
