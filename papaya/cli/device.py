"""`papaya-device`: the command of the package for devices alone, which has no torch and no servers.

It is `papaya client --engine executorch` (`tools/device_wheel.py` makes the package).
"""

from __future__ import annotations

import sys

from papaya.cli.main import main as papaya


def main() -> int:
    return papaya(["client", "--engine", "executorch", *sys.argv[1:]])
