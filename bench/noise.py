"""Claim: noise for 5 million coordinates costs at most twice the masks of 50 clients.

    python bench/noise.py

It is made in pieces of at most 20 ms, between requests.
"""

import json
import os
import sys
import time
from fractions import Fraction

import numpy as np

from papaya.secagg.mask import add_masks
from papaya.secagg.noise import NOISE_BLOCK, Noise
from papaya.secagg.words import SIGNED, WORD

LENGTH = 5_000_000
CLIENTS = 50
SIGMA = Fraction(3_000_000)
PIECE = 8 * NOISE_BLOCK
REPEATS = 5


def main() -> int:
    ratios, longest_ms, deviation = [], [], 0.0
    for _ in range(REPEATS):
        words, noise = np.zeros(LENGTH, WORD), Noise(os.urandom(16), SIGMA)
        pieces = []
        for start in range(0, LENGTH, PIECE):
            began = time.perf_counter()
            noise.add_to(words, start, min(LENGTH, start + PIECE))
            pieces.append(time.perf_counter() - began)
        deviation = float(words.view(SIGNED).std() / float(SIGMA))
        assert abs(deviation - 1) < 0.005, deviation
        began = time.perf_counter()
        for first in range(0, CLIENTS, 8):
            add_masks(words, [os.urandom(16) for _ in range(min(8, CLIENTS - first))])
        masks_s = time.perf_counter() - began
        ratios.append(sum(pieces) / masks_s)
        longest_ms.append(1000 * sorted(pieces)[len(pieces) * 9 // 10])
    result = {
        "case": "noise",
        "coordinates": LENGTH,
        "noise_by_masks_of_50": round(sorted(ratios)[REPEATS // 2], 2),
        "piece_p90_ms": round(sorted(longest_ms)[REPEATS // 2], 1),
        "deviation": round(deviation, 4),
    }
    print(json.dumps(result))
    return 0 if result["noise_by_masks_of_50"] <= 2 and result["piece_p90_ms"] <= 20 else 1


if __name__ == "__main__":
    sys.exit(main())
