"""In how many bits clients upload a number of an update, and how many bytes an update then has.

    32   float32
    16   2 bytes for each number, and a float32 scale for every 256 numbers
     8   1 byte for each number, and a float32 scale for every 256 numbers

`papaya/learning/compression.py` encodes and decodes them.
"""

from __future__ import annotations

from typing import Final, Literal

UploadBits = Literal[8, 16, 32]

VALUES_PER_SCALE: Final = 256


def encoded_bytes(length: int, bits: UploadBits) -> int:
    """The size of an update with so many numbers."""
    scales = 0 if bits == 32 else -(-length // VALUES_PER_SCALE)
    return 4 * scales + bits // 8 * length
