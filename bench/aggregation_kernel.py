"""Claim: kernels reach 90 % of a bare numpy loop (numpy), 60 % of reading memory (numba).

Eight updates of 20 MiB, each in chunks of 1 MiB as they are received, are added to one sum in one
pass. numba is compared with a loop that reads the same eight streams and does nothing else with
them. numpy cannot fuse a multiplication with an addition, so how far it stays behind reading is a
property of numpy and of the machine; it is compared with the same two numpy calls on the same
pieces, without a kernel around them, and may cost a tenth more. Check and fold of one update and of
eight, as an aggregator's thread does it, may take as long as reading an update seven times: 10 ms,
an earlier target, at the speed of reading published before (15 GB/s).

Things that are compared take turns, and the best of several turns counts, because machines are
noisy. Run as `python bench/aggregation_kernel.py`; prints one JSON line per case with value, target
and whether it passed. A wrong result exits with 1; a slow one is only reported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from papaya.aggregator.shards import Shards, UploadChunks
from papaya.aggregator.work import Fold, Snapshot
from papaya.config import AsyncFL, TaskConfig
from papaya.learning.kernels import NUMPY, Kernel, compiled
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.weighting import WeightedSum

MODEL_BYTES = 20 << 20
CHUNK_BYTES = 1 << 20
LENGTH = MODEL_BYTES // 4
STREAMS = 8
TURNS = 25
TARGETS = {"numpy": 0.9, "numba": 0.6}
FOLD_READS = 7.0
CONFIG = TaskConfig(
    task="bench", concurrency=100, model_length=LENGTH, regime=AsyncFL(100), clip=1e6
)


@njit(nogil=True, fastmath=True)
def read_eight(
    a: Vector, b: Vector, c: Vector, d: Vector, e: Vector, f: Vector, g: Vector, h: Vector
) -> Any:
    """The least that can be done with every coordinate."""
    total = np.float32(0)
    for i in range(a.size):
        total += (a[i] + b[i] + c[i] + d[i]) + (e[i] + f[i] + g[i] + h[i])
    return total


def require(holds: bool, problem: str) -> None:
    if not holds:
        print(f"wrong result: {problem}", file=sys.stderr)
        sys.exit(1)


def report(case: str, value: float, target: float, passed: bool, **more: float) -> None:
    line = {"bench": "aggregation_kernel", "case": case, "value": round(value, 3), "target": target}
    rounded = {name: round(number, 3) for name, number in more.items()}
    print(json.dumps(line | {"passed": passed} | rounded, ensure_ascii=False), flush=True)


def best_s(*works: Callable[[], object]) -> list[float]:
    """The shortest time of each; they take turns."""
    found = [float("inf")] * len(works)
    for work in works:
        work()
    for _ in range(TURNS):
        for index, work in enumerate(works):
            start_s = time.perf_counter()
            work()
            found[index] = min(found[index], time.perf_counter() - start_s)
    return found


def integers(seed: int) -> Vector:
    return np.random.default_rng(seed).integers(-9, 10, LENGTH).astype(FLOAT32)


def chunks(update: Vector) -> UploadChunks:
    data = update.tobytes()
    return {
        start: memoryview(bytearray(data[start : start + CHUNK_BYTES]))
        for start in range(0, len(data), CHUNK_BYTES)
    }


def bench_kernels(updates: list[Vector], uploads: list[UploadChunks]) -> None:
    pieces = [[np.frombuffer(chunk, FLOAT32) for chunk in upload.values()] for upload in uploads]
    factors = [float(1 + number) for number in range(STREAMS)]
    expected = np.zeros(LENGTH, FLOAT32)
    for update, factor in zip(updates, factors, strict=True):
        expected += update * np.float32(factor)
    total = np.zeros(LENGTH, FLOAT32)

    def read() -> None:
        for together in zip(*pieces, strict=True):
            read_eight(*together)

    scratch = np.empty(CHUNK_BYTES // 4, FLOAT32)

    def add_bare() -> None:
        for start, together in enumerate(zip(*pieces, strict=True)):
            part = total[start * scratch.size :][: scratch.size]
            for piece, factor in zip(together, factors, strict=True):
                np.multiply(piece, np.float32(factor), out=scratch)
                np.add(part, scratch, out=part)

    total[:] = 0
    add_bare()
    require(np.array_equal(total, expected), "the sum of the bare loop")
    kernels = (NUMPY, compiled())
    for kernel in kernels:
        total[:] = 0
        kernel.add_all(total, pieces, factors)
        require(np.array_equal(total, expected), f"the sum of {kernel.name}")

    def adding(kernel: Kernel) -> Callable[[], None]:
        return lambda: kernel.add_all(total, pieces, factors)

    read_s, bare_s, *added_s = best_s(read, add_bare, *map(adding, kernels))
    payload_gb = STREAMS * MODEL_BYTES / 1e9
    for kernel, each_s in zip(kernels, added_s, strict=True):
        target, is_numpy = TARGETS[kernel.name], kernel is NUMPY
        speed = (bare_s if is_numpy else read_s) / each_s
        peer = "bare numpy" if is_numpy else "reading them"
        report(
            f"adding 8 updates ÷ {peer}, {kernel.name}",
            speed,
            target,
            speed >= target,
            read_gb_per_s=payload_gb / read_s,
            add_gb_per_s=payload_gb / each_s,
        )


def bench_fold(uploads: list[UploadChunks], updates: list[Vector], kernel: Kernel) -> None:
    """Time per update of check and fold ÷ reading an update."""
    works = [Fold(CONFIG, 1, 1, f"s{i}", 1, 0) for i in range(STREAMS)]
    given = list(zip(works, uploads, strict=True))
    shards = Shards(kernel=kernel)
    require(
        all(folded.refused is None for folded in shards.fold_all(given, 0)),
        "an update was refused",
    )
    snapshotted, [(_, blob)] = shards.snapshot(Snapshot("bench", 1, (1,)))
    found = WeightedSum.decode(blob, LENGTH)
    require(np.array_equal(found.vector, sum(updates)), f"the folded sum of {kernel.name}")
    require(snapshotted.sums[0].weight == STREAMS, "the folded weight")
    streams = [[np.frombuffer(chunk, FLOAT32) for chunk in upload.values()] for upload in uploads]

    def read() -> None:
        for together in zip(*streams, strict=True):
            read_eight(*together)

    read_s, one_s, eight_s = best_s(
        read, lambda: shards.fold_all(given[:1], 0), lambda: shards.fold_all(given, 0)
    )
    for name, each_s in (("alone", one_s), ("eight together", eight_s / STREAMS)):
        ratio = each_s / (read_s / STREAMS)
        case = f"check and fold per update ÷ reading it, {name}, {kernel.name}"
        report(case, ratio, FOLD_READS, ratio <= FOLD_READS, ms=each_s * 1e3)


def main() -> None:
    updates = [integers(seed) for seed in range(STREAMS)]
    uploads = [chunks(update) for update in updates]
    bench_kernels(updates, uploads)
    for kernel in (NUMPY, compiled()):
        bench_fold(uploads, updates, kernel)


if __name__ == "__main__":
    main()
