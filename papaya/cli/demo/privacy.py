"""What the server of `papaya demo` could see: looked at where it keeps it, in its own files.

Under secure aggregation (paper, "Asynchronous Secure Aggregation") a server holds masked sums until
the TSA takes the masks off a whole one. The smallest masked sum that was found on its
disk, often of a single client, is compared with what it should be: bytes that are all equally
likely. Nothing is unmasked here, and nothing is proven: the TSA of a
demonstration runs in software, whose evidence is INSECURE.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct

from papaya.aggregator.masked_sum import MaskedSum
from papaya.secagg.words import Words

SOFTWARE = (
    "INSECURE: the TSA runs in software, here, and its evidence proves nothing. "
    "This shows the machinery."
)


class MaskedSample(Struct, frozen=True):
    """The smallest masked sum that was seen: of how many clients, and how random its bytes are."""

    clients: int
    size_bytes: int
    bits_per_byte: float


class Onlooker:
    """Reads the masked sums of one task from the data folder, now and then, while it trains."""

    def __init__(self, blobs: Path, task: str) -> None:
        self._folder = blobs / task
        self._smallest: tuple[int, bytes] | None = None

    def look(self) -> None:
        for clients, path in self._sums():
            if self._smallest is None or clients < self._smallest[0]:
                try:
                    self._smallest = clients, path.read_bytes()
                except OSError:
                    continue  # it became a version meanwhile, and is gone

    def _sums(self) -> Iterator[tuple[int, Path]]:
        for path in self._folder.glob("*/sum-*"):
            _, _, clients, _ = path.name.split("-")
            yield int(clients), path

    def sample(self, words: int) -> MaskedSample | None:
        """None when no sum was seen."""
        if self._smallest is None:
            return None
        clients, data = self._smallest
        masked = MaskedSum.decode(data, words).vector
        return MaskedSample(clients, masked.nbytes, bits_per_byte(masked))


def bits_per_byte(words: Words) -> float:
    """Shannon's entropy of the bytes: 8 when every byte is equally likely, as under a mask."""
    counts = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())
