"""The memory that a device declares: a power of two, so that similar devices form one class."""

from __future__ import annotations

from pathlib import Path


def memory_mb(root: Path = Path("/")) -> int:
    """Megabytes, rounded down to a power of two; 0 if unknown."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                megabytes = int(line.split()[1]) // 1024
                return 1 << (megabytes.bit_length() - 1) if megabytes else 0
    except (OSError, ValueError, IndexError):
        pass
    return 0
