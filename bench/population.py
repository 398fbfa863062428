"""Claim: a visit of a device, with everything about it, costs 50 x three bare normals, unstored.

Cases: visits one at a time as the simulator consumes them, blocks of columns, single devices, and
eligibility. Each is compared with bare numpy making as many normals as the case needs, in the same
run. The target of the first case is 1.5 µs, an earlier target, at 10 ns for a bare normal. The
results are asserted; a slow one is only reported. Run as
`python bench/population.py`; prints one JSON line per case.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from itertools import islice

import numpy as np

from papaya.sim.population import BLOCK, DEFAULT, Arrivals, Block, Population, Visit

SEED = 1
VISITS = 50 * BLOCK
NORMALS_PER_VISIT = 3  # volume, slowness, latency
BARE_NORMALS = 50.0  # times what the normals of a visit cost
REPEATS = 7


def best_s(work: Callable[[], object]) -> float:
    def once_s() -> float:
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s

    return min(once_s() for _ in range(REPEATS))


def bare_normals_s(per_item: int) -> float:
    """Seconds per item of numpy's own generator, in blocks of the same size."""
    generator = np.random.default_rng(SEED)
    blocks = VISITS // BLOCK

    def draw() -> None:
        for _ in range(blocks):
            generator.standard_normal(per_item * BLOCK)

    return best_s(draw) / VISITS


def report(
    case: str, item_s: float, normals: int, target: float | None = None, **more: float
) -> None:
    bare_s = bare_normals_s(normals)
    line: dict[str, object] = {
        "bench": "population",
        "case": case,
        "ns_each": round(item_s * 1e9, 1),
        "each_per_s": round(1 / item_s),
        "numpy_normals_ns": round(bare_s * 1e9, 1),
        "ratio_to_numpy_normals": round(item_s / bare_s, 1),
    }
    if target is not None:
        line |= {"target": target, "passed": item_s / bare_s <= target}
    print(json.dumps(line | more))


def check(examples: np.ndarray, latency_s: np.ndarray, drops_at: np.ndarray) -> None:
    """The default population: median 20, at most 1500, mean latency 50 s, a tenth drops."""
    assert 19 <= np.median(examples) <= 21, np.median(examples)
    assert 1 <= examples.min() <= examples.max() <= 1500
    assert abs(latency_s.mean() - 50) < 0.5, latency_s.mean()
    assert abs(np.isfinite(drops_at).mean() - 0.1) < 0.005


def bench_visits(population: Population) -> None:
    def consume() -> tuple[int, float]:
        examples, seconds = 0, 0.0
        for visit in islice(Arrivals(population), VISITS):
            examples += visit.examples
            seconds += visit.latency_s
        return examples, seconds

    item_s = best_s(consume) / VISITS
    block = Arrivals(population).draw(VISITS)
    check(block.examples, block.latency_s, block.drops_at)
    assert consume() == (block.examples.sum(), sum(block.latency_s.tolist()))
    peak_bytes = peak_of_two_blocks_bytes(population)
    assert peak_bytes < 10_000_000, peak_bytes
    visits = "visits, one at a time"
    report(visits, item_s, NORMALS_PER_VISIT, BARE_NORMALS, peak_bytes=peak_bytes)


def peak_of_two_blocks_bytes(population: Population) -> int:
    tracemalloc.start()
    for _ in islice(Arrivals(population), 2 * BLOCK):
        pass
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak_bytes


def bench_blocks(population: Population) -> None:
    blocks: list[Block] = []

    def draw() -> None:
        arrivals = Arrivals(population)
        blocks[:] = [arrivals.draw(BLOCK) for _ in range(VISITS // BLOCK)]

    item_s = best_s(draw) / VISITS
    names = ("examples", "latency_s", "drops_at")
    check(*(np.concatenate([getattr(block, name) for block in blocks]) for name in names))
    report("visits, in blocks of columns", item_s, NORMALS_PER_VISIT)


def bench_one_device(population: Population) -> None:
    expected = list(Arrivals(population).draw(200))
    seen: list[Visit] = []

    def ask() -> None:
        seen[:] = [population.visit(visit.device, visit.participation) for visit in expected]

    item_s = best_s(ask) / len(expected)
    assert seen == expected
    report("one visit, alone", item_s, NORMALS_PER_VISIT)


def bench_eligibility(population: Population) -> None:
    devices, now = np.arange(20_000), 12345.0
    together = population.is_available(devices, now)
    alone: list[bool] = []

    def ask_each() -> None:
        alone[:] = [population.is_available(device, now) for device in range(len(devices))]

    each_s = best_s(ask_each) / len(devices)
    block_s = best_s(lambda: population.is_available(devices, now)) / len(devices)
    assert alone == together.tolist()
    assert abs(together.mean() - DEFAULT.availability) < 0.02
    report("eligibility, one at a time", each_s, 1)
    report("eligibility, in one array", block_s, 1)


def main() -> None:
    population = Population(DEFAULT, SEED)
    bench_visits(population)
    bench_blocks(population)
    bench_one_device(population)
    bench_eligibility(population)


if __name__ == "__main__":
    main()
