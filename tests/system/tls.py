"""An authority of the test's own and a certificate for this machine, by `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Certificates(NamedTuple):
    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the test's certificates, is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificates(*(folder / name for name in ("authority.pem", "server.pem", "server.key")))
    authority_key, request = folder / "authority.key", folder / "server.csr"
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName = IP:127.0.0.1, DNS:localhost\n", encoding="ascii")
    _openssl(
        *("req", "-x509", *_KEY, "-days", "2", "-subj", "/CN=authority"),
        *("-keyout", authority_key, "-out", made.authority),
    )
    _openssl("req", *_KEY, "-subj", "/CN=papaya", "-keyout", made.key, "-out", request)
    _openssl(
        *("x509", "-req", "-in", request, "-CA", made.authority, "-CAkey", authority_key),
        *("-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", made.certificate),
    )
    return made


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
