"""`papaya serve tsa`: the TSA of secure aggregation, as its own process.

It prints the address that it listens on and nothing else, ever. On `software` its quotes prove
nothing, and it says so.
"""

from __future__ import annotations

import argparse

from papaya.attestation.software import SoftwarePlatform
from papaya.cli.output import note, print_data
from papaya.errors import OperatorError
from papaya.tsa.evidence import REPORT_DATA_BYTES, EvidenceError, Gramine, Platform, Tdx
from papaya.tsa.measurement import measure
from papaya.tsa.process import serve_until_signal


def run(options: argparse.Namespace) -> int:
    platform = _platform(options.platform)
    if platform.name == "software":
        note("INSECURE: software evidence proves nothing; use it to try things out")
    else:
        _prove_once(platform)
    try:
        serve_until_signal(options.listen, print_data, platform.quote)
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"the TSA cannot listen on {options.listen}: {error}",
            hint="use unix:/path/to/socket or tcp:127.0.0.1:PORT",
        ) from error
    return 0


def _prove_once(platform: Platform) -> None:
    """Devices would refuse what cannot be proven: better to hear of it now."""
    try:
        platform.quote(bytes(REPORT_DATA_BYTES))
    except EvidenceError as error:
        raise OperatorError(
            f"no {platform.name} evidence here: {error}",
            hint="see docs/deploy-tsa.md; to try things out: --platform software",
        ) from error


def _platform(name: str) -> Platform:
    match name:
        case "sgx":
            return Gramine()
        case "tdx":
            return Tdx()
    return SoftwarePlatform(measure())
