"""How much memory a device declares: a power of two, so that equal devices are counted together."""

from __future__ import annotations

from pathlib import Path


def memory_mb(root: Path = Path("/")) -> int:
    """Rounded down; 0, which asks for the smallest tasks, where nobody knows."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                megabytes = int(line.split()[1]) // 1024
                return 1 << (megabytes.bit_length() - 1) if megabytes else 0
    except (OSError, ValueError, IndexError):
        pass
    return 0
