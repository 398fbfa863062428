"""`papaya serve tsa`: the trusted party of secure aggregation, as its own process.

It prints the address that it listens on and nothing else, ever. On `software` its quotes prove
nothing, and it says so.
"""

from __future__ import annotations

import argparse

from papaya.attestation.software import SoftwarePlatform
from papaya.cli.output import note, print_data
from papaya.errors import OperatorError
from papaya.tsa.evidence import Gramine, Platform, Tdx
from papaya.tsa.measurement import measure
from papaya.tsa.process import serve_until_signal


def run(options: argparse.Namespace) -> int:
    platform = _platform(options.platform)
    if platform.name == "software":
        note("INSECURE: software evidence proves nothing; use it to try things out")
    try:
        serve_until_signal(options.listen, print_data, platform.quote)
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"the trusted party cannot listen on {options.listen}: {error}",
            hint="use unix:/path/to/socket or tcp:127.0.0.1:PORT",
        ) from error
    return 0


def _platform(name: str) -> Platform:
    match name:
        case "sgx":
            return Gramine()
        case "tdx":
            return Tdx()
    return SoftwarePlatform(measure())
