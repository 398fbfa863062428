"""The `software` platform: SGX quotes in Intel's format, under a root that is named INSECURE.

A laptop can run the whole protocol with it, through the same code that verifies hardware. It proves
nothing: every private key below is derived from a public text, so anyone can make any quote. A
secret key would not help, because whoever runs the software could sign anything. A device accepts
these quotes only if its owner sets `DevicePolicy.allow_insecure_software`.

It makes a root, PCK authority, TCB signer, PCK certificate with Intel's SGX extension, revocation
lists, TCB info, QE identity, and quotes of version 3. Quotes and certificates are the same bytes
every time; collateral is issued for the 30 days after `now`, as Intel's is.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

MEASUREMENT_BYTES = 32
REPORT_DATA_BYTES = 64
_MEASUREMENT_AT = 48 + 64  # behind the header, and the first fields of the report

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_SIGNING = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
_LIFETIME = datetime.timedelta(days=30)
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(2049, 12, 31, tzinfo=datetime.UTC)
_SGX_EXTENSION = "1.2.840.113741.1.13.1"
_FMSPC = bytes.fromhex("5ec0de000000")
_QE_SIGNER = hashlib.sha256(b"papaya INSECURE quoting enclave").digest()
_QE_AUTH_DATA = bytes(range(32))
_INTEL_QE_VENDOR = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
# INIT, 64 bit; a debug enclave has bit 1 as well.
_ATTRIBUTES, _DEBUG = 0x05, 0x02


class SoftwarePlatform:
    """Quotes for one measurement: the SHA-256 of the artifact."""

    name = "software"

    def __init__(self, measurement: bytes) -> None:
        if len(measurement) != MEASUREMENT_BYTES:
            raise ValueError(f"invalid measurement: expected {MEASUREMENT_BYTES} bytes")
        self._measurement = measurement

    def quote(self, report_data: bytes) -> bytes:
        return make_quote(self._measurement, report_data)

    def collateral(self, now: float) -> bytes:
        return make_collateral(now)


def make_quote(measurement: bytes, report_data: bytes, *, debug: bool = False) -> bytes:
    """An SGX quote, version 3, with ECDSA on P-256 and the PCK certificate chain inside."""
    if len(report_data) != REPORT_DATA_BYTES:
        raise ValueError(f"invalid report data: expected {REPORT_DATA_BYTES} bytes")
    header = b"".join(
        [
            (3).to_bytes(2, "little"),
            (2).to_bytes(2, "little"),
            bytes(4),
            (1).to_bytes(2, "little"),
            (1).to_bytes(2, "little"),
            _INTEL_QE_VENDOR,
            bytes(20),
        ]
    )
    attributes = _ATTRIBUTES | (_DEBUG if debug else 0)
    signed = header + _report(measurement, bytes(32), attributes, report_data)
    public = _point(_key("attestation"))
    bound = hashlib.sha256(public + _QE_AUTH_DATA).digest() + bytes(32)
    qe_report = _report(bytes(32), _QE_SIGNER, _ATTRIBUTES, bound)
    chain = _pem(_pck(), _pck_authority(), root_certificate())
    signature = b"".join(
        [
            _sign(_key("attestation"), signed),
            public,
            qe_report,
            _sign(_key("pck"), qe_report),
            len(_QE_AUTH_DATA).to_bytes(2, "little"),
            _QE_AUTH_DATA,
            (5).to_bytes(2, "little"),
            len(chain).to_bytes(4, "little"),
            chain,
        ]
    )
    return signed + len(signature).to_bytes(4, "little") + signature


def measurement_of(quote: bytes) -> bytes:
    """The measurement in a quote of `make_quote`, which is not verified."""
    return quote[_MEASUREMENT_AT : _MEASUREMENT_AT + MEASUREMENT_BYTES]


def make_collateral(now: float, *, tcb_status: str = "UpToDate", revoked: bool = False) -> bytes:
    """What Intel's provisioning service would say about this platform at `now`, as JSON."""
    issued = datetime.datetime.fromtimestamp(int(now), datetime.UTC)
    chain = _pem(_tcb_signer(), root_certificate()).decode()
    tcb_info = _tcb_info(issued, tcb_status)
    qe_identity = _qe_identity(issued)
    revoked_pck = [_pck().serial_number] if revoked else []
    signer = _key("tcb signer")
    fields = {
        "pck_crl_issuer_chain": _pem(_pck_authority(), root_certificate()).decode(),
        "root_ca_crl": _revocations("root", root_certificate(), issued, []).hex(),
        "pck_crl": _revocations("pck authority", _pck_authority(), issued, revoked_pck).hex(),
        "tcb_info_issuer_chain": chain,
        "tcb_info": tcb_info,
        "tcb_info_signature": _sign(signer, tcb_info.encode()).hex(),
        "qe_identity_issuer_chain": chain,
        "qe_identity": qe_identity,
        "qe_identity_signature": _sign(signer, qe_identity.encode()).hex(),
    }
    return json.dumps(fields).encode()


@cache
def root_certificate() -> x509.Certificate:
    """The root that a device trusts when its owner allows insecure software evidence."""
    return _certificate("root", "root", authority=True)


# --- Certificates


@cache
def _pck_authority() -> x509.Certificate:
    return _certificate("pck authority", "root", authority=True)


@cache
def _tcb_signer() -> x509.Certificate:
    return _certificate("tcb signer", "root", authority=False)


@cache
def _pck() -> x509.Certificate:
    return _certificate("pck", "pck authority", authority=False, extension=_sgx_extension())


@cache
def _key(role: str) -> ec.EllipticCurvePrivateKey:
    digest = hashlib.sha256(f"papaya INSECURE software platform: {role}".encode()).digest()
    return ec.derive_private_key(int.from_bytes(digest) % (_ORDER - 1) + 1, ec.SECP256R1())


def _name(role: str) -> x509.Name:
    common = x509.NameAttribute(x509.NameOID.COMMON_NAME, f"Papaya INSECURE software {role}")
    return x509.Name([common])


def _certificate(
    role: str, issuer: str, *, authority: bool, extension: bytes | None = None
) -> x509.Certificate:
    key, issuer_key = _key(role).public_key(), _key(issuer)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key)
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    usage = x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(role))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(int.from_bytes(identifier.digest[:16]) | 1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(issued_by, critical=False)
    )
    if extension is not None:
        oid = x509.ObjectIdentifier(_SGX_EXTENSION)
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, extension), critical=False)
    return builder.sign(issuer_key, hashes.SHA256(), ecdsa_deterministic=True)


def _revocations(
    role: str, issuer: x509.Certificate, issued: datetime.datetime, serials: Sequence[int]
) -> bytes:
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(issuer.subject)
        .last_update(issued)
        .next_update(issued + _LIFETIME)
        .add_extension(x509.CRLNumber(1), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(_key(role).public_key()),
            critical=False,
        )
    )
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(issued)
        builder = builder.add_revoked_certificate(entry.build())
    signed = builder.sign(_key(role), hashes.SHA256(), ecdsa_deterministic=True)
    return signed.public_bytes(serialization.Encoding.DER)


def _pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


# --- Intel's structures


def _report(measurement: bytes, signer: bytes, attributes: int, report_data: bytes) -> bytes:
    """An enclave report of 384 bytes; security version 1."""
    return b"".join(
        [
            bytes([1] * 16),
            bytes(32),
            attributes.to_bytes(8, "little"),
            (3).to_bytes(8, "little"),
            measurement,
            bytes(32),
            signer,
            bytes(96),
            (1).to_bytes(2, "little"),
            (1).to_bytes(2, "little"),
            bytes(60),
            report_data,
        ]
    )


def _tcb_info(issued: datetime.datetime, status: str) -> str:
    level = {
        "tcb": {"sgxtcbcomponents": [{"svn": 1}] * 16, "pcesvn": 1},
        "tcbDate": _time(_NOT_BEFORE),
        "tcbStatus": status,
    }
    fields = {
        "id": "SGX",
        "version": 3,
        "issueDate": _time(issued),
        "nextUpdate": _time(issued + _LIFETIME),
        "fmspc": _FMSPC.hex().upper(),
        "pceId": "0000",
        "tcbType": 0,
        "tcbEvaluationDataNumber": 1,
        "tcbLevels": [level],
    }
    return json.dumps(fields, separators=(",", ":"))


def _qe_identity(issued: datetime.datetime) -> str:
    level = {"tcb": {"isvsvn": 1}, "tcbDate": _time(_NOT_BEFORE), "tcbStatus": "UpToDate"}
    fields = {
        "id": "QE",
        "version": 2,
        "issueDate": _time(issued),
        "nextUpdate": _time(issued + _LIFETIME),
        "tcbEvaluationDataNumber": 1,
        "miscselect": "00000000",
        "miscselectMask": "FFFFFFFF",
        "attributes": "05000000000000000000000000000000",
        "attributesMask": "FFFFFFFFFFFFFFFF0000000000000000",
        "mrsigner": _QE_SIGNER.hex().upper(),
        "isvprodid": 1,
        "tcbLevels": [level],
    }
    return json.dumps(fields, separators=(",", ":"))


def _sgx_extension() -> bytes:
    """Intel's extension of a PCK certificate: which platform, at which security versions."""
    versions = [_pair(f"2.{i}", _integer(1)) for i in range(1, 17)]
    versions += [_pair("2.17", _integer(1)), _pair("2.18", _der(0x04, bytes([1] * 16)))]
    return _sequence(
        _pair("1", _der(0x04, bytes(16))),
        _pair("2", _sequence(*versions)),
        _pair("3", _der(0x04, bytes(2))),
        _pair("4", _der(0x04, _FMSPC)),
        _pair("5", _der(0x0A, b"\x00")),
    )


def _pair(suffix: str, value: bytes) -> bytes:
    numbers = [int(part) for part in f"{_SGX_EXTENSION}.{suffix}".split(".")]
    body = bytes([40 * numbers[0] + numbers[1]]) + b"".join(_base128(n) for n in numbers[2:])
    return _sequence(_der(0x06, body), value)


def _base128(number: int) -> bytes:
    groups = [number & 0x7F]
    while number := number >> 7:
        groups.append(0x80 | number & 0x7F)
    return bytes(reversed(groups))


def _sequence(*items: bytes) -> bytes:
    return _der(0x30, b"".join(items))


def _integer(value: int) -> bytes:
    return _der(0x02, bytes([value]))


def _der(tag: int, body: bytes) -> bytes:
    if len(body) < 0x80:
        return bytes([tag, len(body)]) + body
    length = len(body).to_bytes(2)
    return bytes([tag, 0x82]) + length + body


def _point(key: ec.EllipticCurvePrivateKey) -> bytes:
    raw = key.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )
    return raw[1:]


def _sign(key: ec.EllipticCurvePrivateKey, message: bytes) -> bytes:
    r, s = decode_dss_signature(key.sign(message, _SIGNING))
    return r.to_bytes(32) + s.to_bytes(32)


def _time(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
