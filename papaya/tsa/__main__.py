"""The entry point of an enclave: `python -m papaya.tsa sgx tcp:127.0.0.1:8760`.

Runs the TSA on hardware, with the evidence of its platform. It imports nothing of Papaya except
`papaya/secagg` and `papaya/tsa`; every file is listed in `papaya/tsa/enclave.toml`. The software
platform, which proves nothing, is outside: `papaya/attestation/software.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from papaya.tsa.evidence import Gramine, Platform, Tdx
from papaya.tsa.process import serve_until_signal

_USAGE = "usage: python -m papaya.tsa sgx|tdx ADDRESS (unix:/path or tcp:127.0.0.1:8760)\n"
_PLATFORMS: dict[str, Callable[[], Platform]] = {"sgx": Gramine, "tdx": Tdx}


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in _PLATFORMS:
        sys.stderr.write(_USAGE)
        return 2
    platform, address = _PLATFORMS[arguments[0]](), arguments[1]
    try:
        serve_until_signal(address, _say, platform.quote)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: cannot listen on {address}: {error}\n")
        return 2
    return 0


def _say(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
