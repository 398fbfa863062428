"""Claim: the control plane of one client update costs 100 bare events, whatever the fleet.

AsyncFL with the real machines under virtual time: no faults, no learning, about one heartbeat per
session. Cases: C = 1300 and K = 100; a fleet of 10⁸ against one of 10⁴; C = 26,000 against C = 130;
peak memory. Two systems that are compared are kept alive together and advanced in turn; the best of
several stretches of steady state counts, because machines are noisy.

A bare event (`_calibration.py`) is timed in turns with the stretches. The target is 4,000 updates
per CPU-second, an earlier target, at the speed of bare events that had been published before (2.4
µs: 0.75 million events/s in a heap, 0.4 to 0.7 µs to encode or decode a message). Run as
`python bench/control_plane.py`; prints one JSON line per case with value, target and whether it
passed. A wrong result exits with 1; a slow one is only reported.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc

from _calibration import bare_event_s

from papaya.aggregator.aggregator import Aggregator
from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.messages.storage import ConsumedRow, Row, Transaction, VersionRow
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.population import PopulationConfig

SEED = 1
HEARTBEAT_S = 45.0
FILLED_S = 300.0  # the ramp-up, then two or three generations of sessions
STRETCHES = 10
UPDATES_PER_STRETCH = 2_000
BARE_EVENTS, POPULATION_RATIO, CONCURRENCY_GROWTH = 100, 1.2, 2.0
MEMORY_SLACK = 1.25


class System:
    """One cluster in steady state; `advance` runs a stretch of it and times the stretch."""

    def __init__(self, concurrency: int, goal: int, population: int) -> None:
        task = TaskConfig(
            task="bench",
            concurrency=concurrency,
            model_length=4,
            regime=AsyncFL(goal),
            participation_gap_s=0.0,
        )
        self.concurrency, self.goal = concurrency, goal
        self.cluster = Cluster(
            ClusterConfig(
                tasks=(task,),
                server=ServerConfig(heartbeat_s=HEARTBEAT_S),
                population=PopulationConfig(size=population, dropout=0.0),
            ),
            SEED,
        )
        self.cluster.state.observers.append(self._on_transaction)
        self.commits: list[tuple[float, int]] = []
        self.best_s = float("inf")
        self._active_sum = self._samples = 0

    def fill(self) -> None:
        self.cluster.run(FILLED_S)

    def advance(self) -> None:
        """Timed from version to version, so that every timed second belongs to whole buffers."""
        first = len(self.commits)
        versions = max(2, UPDATES_PER_STRETCH // self.goal) + 1
        while len(self.commits) < first + versions:
            self.cluster.run(self.cluster.engine.now + 1.0)
            self._active_sum += self._active()
            self._samples += 1
        (start_s, _), (end_s, _) = self.commits[first], self.commits[-1]
        updates = sum(count for _, count in self.commits[first + 1 :])
        self.best_s = min(self.best_s, (end_s - start_s) / updates)

    @property
    def utilization(self) -> float:
        return self._active_sum / self._samples / self.concurrency

    def check(self) -> None:
        """A benchmark that computes the wrong thing is not fast."""
        newest = max(r.version for r in self.cluster.state.rows.values() if type(r) is VersionRow)
        require(newest == len(self.commits), f"{len(self.commits)} commits made version {newest}")
        counted = sum(count for _, count in self.commits)
        require(counted == newest * self.goal, f"{newest} versions of {counted} updates")
        require(
            self.utilization >= 0.98, f"C = {self.concurrency}: {self.utilization:.4f} utilized"
        )

    def _active(self) -> int:
        machine = self.cluster.hosts["aggregator-0"].machine
        assert isinstance(machine, Aggregator)
        return len(machine.tasks["bench"].sessions.active)

    def _on_transaction(
        self, writer: object, transaction: Transaction, before: dict[str, Row]
    ) -> None:
        for _, row in transaction.put:
            if isinstance(row, ConsumedRow):
                self.commits.append((time.process_time(), len(row.members)))


def require(holds: bool, problem: str) -> None:
    if not holds:
        print(f"wrong result: {problem}", file=sys.stderr)
        sys.exit(1)


def report(case: str, value: float, target: float, passed: bool, **more: float) -> None:
    line = {"bench": "control_plane", "case": case, "value": round(value, 3), "target": target}
    print(json.dumps(line | {"passed": passed} | more, ensure_ascii=False), flush=True)


def bench_speed() -> None:
    system = System(1300, 100, 10**8)
    system.fill()
    bare_s = float("inf")
    for _ in range(2 * STRETCHES):
        system.advance()
        bare_s = min(bare_s, bare_event_s())
    system.check()
    ratio = system.best_s / bare_s
    more = {
        "updates_per_cpu_s": round(1 / system.best_s),
        "bare_event_us": round(bare_s * 1e6, 2),
        "utilization": round(system.utilization, 4),
    }
    case = "time per client update ÷ a bare event, C = 1300, K = 100"
    report(case, ratio, BARE_EVENTS, ratio <= BARE_EVENTS, **more)


def bench_ratio(case: str, small: System, large: System, target: float, bare: float = 1.0) -> None:
    """Time per update of the large system ÷ that of the small one, ÷ `bare`."""
    for system in (small, large):
        system.fill()
    for _ in range(STRETCHES):
        small.advance()
        large.advance()
    for system in (small, large):
        system.check()
    ratio = large.best_s / small.best_s / bare
    microseconds = {
        "small_us": round(small.best_s * 1e6, 1),
        "large_us": round(large.best_s * 1e6, 1),
        "bare": round(bare, 2),
    }
    report(f"time per update, {case}", ratio, target, ratio <= target, **microseconds)


def peak_bytes(concurrency: int, population: int) -> int:
    """Of everything allocated, from building the system to steady state."""
    tracemalloc.start()
    system = System(concurrency, concurrency // 13, population)
    system.fill()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    system.advance()
    system.check()
    return peak


def bench_memory() -> None:
    base = peak_bytes(1300, 10**8)
    few = peak_bytes(1300, 10**4)
    passed = base <= MEMORY_SLACK * few
    case = "peak memory, fleet of 10^8 ÷ fleet of 10^4, C = 1300"
    report(case, base / few, MEMORY_SLACK, passed, small_bytes=few, large_bytes=base)
    large, factor = peak_bytes(5200, 10**8), 4
    target = factor * MEMORY_SLACK
    case = "peak memory, C = 5200 ÷ C = 1300"
    report(case, large / base, target, large <= target * base, small_bytes=base, large_bytes=large)


def main() -> None:
    bench_speed()
    fleets = System(1300, 100, 10**4), System(1300, 100, 10**8)
    bench_ratio("fleet of 10^8 ÷ fleet of 10^4", *fleets, POPULATION_RATIO)
    tasks = System(130, 10, 10**8), System(26_000, 2_000, 10**8)
    # More clients at a time make larger heaps and tables, which no code makes free: the growth may
    # be at most twice that of bare events with as many waiting.
    few, many = (
        min(bare_event_s(system.concurrency) for _ in range(STRETCHES)) for system in tasks
    )
    bench_ratio("C = 26,000 ÷ C = 130, ÷ bare", *tasks, CONCURRENCY_GROWTH, many / few)
    bench_memory()


if __name__ == "__main__":
    main()
